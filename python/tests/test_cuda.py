# SPDX-License-Identifier: Apache-2.0
"""cpx.torch on GPUs against the same operators on the host: results, gradients, streams, graphs, errors.

In one process of one rank, or in several: torchrun --nproc-per-node N -m pytest python/tests/test_cuda.py
Ranks may share a GPU.
"""

import contextlib
import gc
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("cpx._cuda", reason="this cpx was built for the host alone", exc_type=ImportError)

import torch.distributed as dist  # noqa: E402
import torch.utils.checkpoint  # noqa: E402

import cpx  # noqa: E402
import cpx.torch as ct  # noqa: E402
from cpx.dropin import fla, megatron, miles, twinkle  # noqa: E402
from cpx.torch import _group  # noqa: E402
from products import FixedProduct  # noqa: E402

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
if world > torch.cuda.device_count():  # NCCL takes ranks of one GPU if they seem to be on several hosts
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
batches = [
    cpx.thd([0, 5, 5, 6, 70, 147]), cpx.thd([0, 3]), cpx.thd([0, 211, 300, 301, 309]), cpx.thd.uniform(4, 96),
    cpx.thd([0, 1, 2, 1100, 1103, 1500]),
]
window = 256 << 20  # bytes, for results of exchanges
within = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.2e-2}
floats = list(within)


@pytest.fixture(scope="module")
def comm(tmp_path_factory):
    torch.cuda.set_device(device)
    if world == 1:
        store = tmp_path_factory.mktemp("group") / "store"
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1, device_id=device)
    else:
        dist.init_process_group("nccl")
    made = ct.communicator(deadline=60.0, window=window)
    assert ct.communicator() is made and (made.rank, made.ranks, made.device) == (rank, world, device)
    yield made
    made.of.leave()
    dist.destroy_process_group()


def numbers(*shape, seed=0):
    """Returns the same random numbers on every rank, on the host."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rounded(x, dtype):
    """Returns numbers of float64 that the dtype holds."""
    return x.to(dtype).double()


def share(sharding, x, dtype=None):
    """Returns the rank's rows of x on its device, which want a gradient."""
    rows = x[torch.from_numpy(sharding.global_rows(rank))].to(device, dtype or x.dtype)
    return rows.requires_grad_(rows.is_floating_point())


def near(name, got, expected, most, whole=None):
    """Asserts that an error is small beside what is expected; whole: of all ranks, where a rank's share may be 0."""
    got, expected = got.detach().double().cpu(), expected.detach().double()
    assert got.shape == expected.shape, name
    size = (expected if whole is None else whole.detach().double()).norm().clamp_min(1e-30)
    error = ((got - expected).norm() / size).item() if expected.numel() else 0.0
    assert error <= most, f"{name}: {error}"


def summed(x):
    """Returns the sum over the ranks of what each has a share of."""
    whole = x.detach().float()
    dist.all_reduce(whole)
    return whole


@contextlib.contextmanager
def poisoned():
    """Fills new memory before it is written, NaN or the largest integer: what a test finds right there has arrived."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1, device=device).isnan().item()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def on_one_rank(program):
    """Runs a program on the host, of one rank that holds the whole batch."""
    return cpx.run(1, lambda of: program(ct.communicator(of)))[0]


def layouts():
    last = world - 1
    return [
        cpx.zigzag(world), cpx.sequential(world), cpx.striped(world), cpx.table(world, [last, 0, last, 0, last // 2]),
        cpx.by_length(cpx.zigzag(world), cpx.sequential(world), 2 * world),
    ]


# exchange


@pytest.mark.parametrize("dtype", [*floats, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool])
@poisoned()
def test_an_exchange_moves_the_bits_of_any_type(comm, dtype):
    for batch in batches:
        source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.striped(world), scope="batch")
        x = (numbers(batch.tokens, 3, 2) * 100).to(dtype)
        mine = share(source, x)
        there, back = ct.relayout(source, target, comm), ct.relayout(target, source, comm)
        for _ in range(2):
            y = ct.exchange(mine, there, comm)
            assert y.dtype == dtype and torch.equal(y, share(target, x))
            assert torch.equal(ct.exchange(y, back, comm), mine)
            assert torch.equal(ct.exchange(y, there.transposed(), comm), mine)
    comm.wait()


@poisoned()
def test_every_layout_reaches_every_other_and_gradients_come_back(comm):
    for n, batch in enumerate(batches):
        x, by = numbers(batch.tokens, 5), numbers(batch.tokens, 5, seed=1)
        shardings = [cpx.shard(batch, layout, scope=s) for layout in layouts() for s in ("sequence", "batch")]
        for source in shardings[n % 2::2]:
            for target in shardings[(n + 1) % 2::2]:
                mine = share(source, x, torch.float32)
                y = ct.exchange(mine, ct.relayout(source, target, comm), comm)
                assert torch.equal(y, share(target, x, torch.float32))
                (y * share(target, by, torch.float32)).sum().backward()
                assert torch.equal(mine.grad, share(source, by, torch.float32))
    comm.wait()


@pytest.mark.parametrize("dtype", floats)
@poisoned()
def test_gradients_of_copies_are_added(comm, dtype):
    for batch in batches:
        source, every = cpx.shard(batch, cpx.zigzag(world)), cpx.replicated(world, batch)
        mine = share(source, numbers(batch.tokens, 4), dtype)
        y = ct.exchange(mine, ct.relayout(source, every, comm), comm)
        (y * (rank + 1)).sum().backward()
        assert torch.equal(mine.grad, torch.full_like(mine, sum(range(1, world + 1))))


@poisoned()
def test_an_exchange_from_tokens_to_heads_has_rows_of_another_width(comm):
    sections = [(4 * world, 3), (2 * world, 5)]
    for batch in batches:
        source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.head_sharded(world, batch, sections)
        x = numbers(batch.tokens, 22 * world).float()
        mine = share(source, x)
        y = ct.exchange(mine, ct.relayout(source, target, comm), comm)
        first, second = (x[:, :12 * world], x[:, 12 * world:])
        right = torch.cat([first[:, 12 * rank:12 * (rank + 1)], second[:, 10 * rank:10 * (rank + 1)]], 1)
        assert torch.equal(y.cpu(), right)
        (y * y).sum().backward()
        assert torch.equal(mine.grad, 2 * mine.detach())


@poisoned()
def test_rows_that_are_apart_or_not_aligned_are_copied_first(comm):
    batch = batches[0]
    source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world))
    plan = ct.relayout(source, target, comm)
    wide = share(source, numbers(batch.tokens, 7).float()).detach()
    y = ct.exchange(wide[:, 1:4], plan, comm)
    assert torch.equal(y, share(target, numbers(batch.tokens, 7).float())[:, 1:4])
    odd = torch.cat([wide.new_zeros(1), wide.flatten()])[1:].view_as(wide)
    assert torch.equal(ct.exchange(odd, plan, comm), share(target, numbers(batch.tokens, 7).float()))


def write_to_each_other():
    """Whether the ranks have GPUs of their own, which write to each other's memory."""
    if world < 2 or world > torch.cuda.device_count():
        return False
    return all(torch.cuda.can_device_access_peer(device.index, r) for r in range(world) if r != device.index)


def by_messages():
    """Returns a communicator of all ranks that exchanges by NCCL's messages alone. Collective."""
    made = ct.communicator(dist.new_group(list(range(world))), deadline=60.0, window=0)
    assert made.exchange_path == "undecided"
    return made


def test_all_ranks_move_rows_by_the_path_that_their_gpus_have(comm):
    assert right_exchange(comm, world, rank)
    paths = [None] * world
    dist.all_gather_object(paths, comm.exchange_path)
    wanted = "window" if write_to_each_other() else "messages"
    about = f"NCCL {torch.cuda.nccl.version()}, {torch.cuda.get_device_name()}, {world} ranks"
    assert world == 1 or paths == [wanted] * world, f"{paths}, {about}"
    assert cpx.run(1, lambda of: ct.communicator(of).exchange_path) == ["host"]
    messages = by_messages()
    assert right_exchange(messages, world, rank) and messages.exchange_path != "window"
    messages.of.leave()


@poisoned()
def test_both_paths_bring_the_same_bits(comm):
    messages = by_messages()
    for n, batch in enumerate(batches):
        shardings = [cpx.shard(batch, layout, scope=s) for layout in layouts() for s in ("sequence", "batch")]
        shardings.append(cpx.replicated(world, batch))
        kinds = [(torch.float32, 1024), (torch.bfloat16, 3), (torch.uint8, 1), (torch.float64, 9000)]
        for dtype, width in kinds[n % 2::2]:
            x = (numbers(batch.tokens, width, seed=n) * 100).to(dtype)
            for source in shardings[n % 3:-1:3]:
                for target in shardings[(n + 1) % 2::2]:
                    results = []
                    for by in (comm, messages):
                        mine = share(source, x)
                        y = ct.exchange(mine, ct.relayout(source, target, by), by)
                        if mine.requires_grad:
                            (y * (rank + 1)).sum().backward()
                        results.append((y, mine.grad))
                    about = f"{source} to {target}, {dtype}, width {width}"
                    assert torch.equal(results[0][0], results[1][0]), about
                    assert torch.equal(results[0][0], share(target, x)), about
                    if results[1][1] is not None:
                        assert torch.equal(results[0][1], results[1][1]), about
    comm.wait()
    messages.wait()
    messages.of.leave()


@poisoned()
def test_results_stay_while_later_calls_bring_others(comm):
    batch = cpx.thd([0, 3000, 3000, 12001, 12002, 30011])
    whole = torch.arange(batch.tokens, dtype=torch.int32)[:, None] * 2053 + torch.arange(1024, dtype=torch.int32)
    source = cpx.shard(batch, cpx.zigzag(world))
    mine = share(source, whole)
    kept = []
    for layout, scope in ((cpx.sequential(world), "batch"), (cpx.striped(world), "sequence")):
        target = cpx.shard(batch, layout, scope=scope)
        plan = ct.relayout(source, target, comm)
        for n in range(4):  # without a wait between them: what came before is not to be written again
            y = ct.exchange(mine + n, plan, comm)
            kept.append((y, share(target, whole) + n))
            z = ct.exchange(y, plan.transposed(), comm)
            kept.append((z, mine + n))
    comm.wait()
    for n, (got, expected) in enumerate(kept):
        wrong = (got != expected).any(1).nonzero().flatten()
        assert wrong.numel() == 0, f"exchange {n}: {wrong.numel()} rows are wrong, the first {wrong[:8].tolist()}"


def by_window(size, deadline=60.0):
    """Returns a communicator of all ranks with a window of so many bytes, or skips the test. Collective."""
    made = ct.communicator(dist.new_group(list(range(world))), deadline, window=size)
    assert right_exchange(made, world, rank)
    if made.exchange_path != "window":
        made.of.leave()
        pytest.skip("ranks do not write to each other's memory")
    return made


@poisoned()
def test_results_that_end_in_another_order_on_each_rank_and_some_without_room_are_right(comm):
    small = by_window(48 << 20)
    batch = cpx.thd([0, 1000, 1001, 8000])
    source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world), scope="batch")
    plan = ct.relayout(source, target, small)
    x = share(source, numbers(batch.tokens, 256).float()).detach()
    right = share(target, numbers(batch.tokens, 256).float()).detach()
    kept = []
    for n in range(60):
        kept.append((n, ct.exchange(x + n, plan, small)))
        if n % 3 == 2:  # a window holds some of those that are kept, and not all
            kept.pop((7 * n if rank else n) % len(kept))
    small.wait()
    places = [small.of.holds(y.data_ptr()) for _, y in kept]
    assert any(places) and not all(places), places
    for n, y in kept:
        assert torch.equal(y, right + n), f"exchange {n}"
    small.of.leave()
    for n, y in kept:  # results outlive the communicator
        assert torch.equal(y, right + n), f"exchange {n}, later"


@poisoned()
def test_results_in_other_streams_and_of_graphs_are_right(comm):
    own = by_window(64 << 20)
    batch = cpx.thd([0, 1000, 1001, 8000])
    source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.striped(world))
    plan = ct.relayout(source, target, own)
    x = share(source, numbers(batch.tokens, 64).float()).detach()
    right = share(target, numbers(batch.tokens, 64).float()).detach()
    first = ct.exchange(x, plan, own)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for n in range(4):
            assert torch.equal(ct.exchange(x + n, plan, own), right + n)
        late = first * 2
        first.record_stream(side)
    del first
    for n in range(8):
        assert torch.equal(ct.exchange(x - n, plan, own), right - n)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(late, 2 * right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ct.exchange(x, plan, own)
    for n in range(3):
        x.add_(1)
        right.add_(1)
        graph.replay()
        z = ct.exchange(x, plan, own)
        assert torch.equal(y, right) and torch.equal(z, y), f"replay {n}"
    own.wait()
    own.of.leave()


@poisoned()
def test_what_is_larger_than_its_part_of_a_window_goes_by_messages(comm):
    small = by_window(1 << 20)
    for tokens in (100, 20000, 101, 30000):
        batch = cpx.thd([0, 7, tokens])
        source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world))
        whole = numbers(tokens, 64).float()
        y = ct.exchange(share(source, whole), ct.relayout(source, target, small), small)
        assert torch.equal(y, share(target, whole))
    small.wait()
    small.of.leave()


@poisoned()
def test_a_window_grows_with_results_and_those_before_stay(comm):
    grown = by_window(None)
    kept, rooms = [], []
    for n, tokens in enumerate((100, 4000, 40000, 4000, 90000)):
        batch = cpx.thd([0, 7, tokens])
        source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world))
        plan, whole = ct.relayout(source, target, grown), (numbers(tokens, 1024, seed=n) * 100).float()
        mine, right = share(source, whole).detach(), share(target, whole).detach()
        kept += [(ct.exchange(mine, plan, grown), right), (ct.exchange(mine, plan, grown), right)]
        assert grown.exchange_path == "window" and 1024 * 4 * source.rows(rank) <= grown.of.room
        assert grown.of.holds(kept[-1][0].data_ptr()), f"{tokens} tokens are not in the window"
        rooms.append(grown.of.room)
    assert rooms == sorted(rooms) and rooms[0] < rooms[2] < rooms[4] and rooms[0] == rooms[1] and rooms[2] == rooms[3]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ct.exchange(mine, plan, grown)
    batch = cpx.thd([0, 300000])  # grows beyond what the graph has
    source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world))
    whole = torch.arange(batch.tokens, dtype=torch.int32)[:, None] + torch.arange(1024, dtype=torch.int32)
    y = ct.exchange(share(source, whole), ct.relayout(source, target, grown), grown)
    assert grown.of.room > rooms[-1]
    graph.replay()
    grown.wait()
    assert torch.equal(y, share(target, whole)) and torch.equal(captured, right)
    for n, (got, expected) in enumerate(kept):
        assert torch.equal(got, expected), f"exchange {n}"
    grown.of.leave()
    for n, (got, expected) in enumerate(kept):
        assert torch.equal(got, expected), f"exchange {n}, later"


@pytest.mark.skipif(world != 2, reason="wants two ranks")
def test_windows_of_other_sizes_are_named(comm):
    made = ct.communicator(dist.new_group([0, 1]), 60.0, window=(1 + rank) << 20)
    with pytest.raises(cpx.Error, match="communicator: window, bytes, on all ranks: expected"):
        right_exchange(made, world, rank)
    made.of.leave()


# convolution


@pytest.mark.parametrize("dtype", floats)
@pytest.mark.parametrize(
    "taps,channels,activation,bias", [(4, 24, "silu", True), (3, 7, None, False), (4, 6, None, True)]
)
def test_a_convolution_is_the_hosts_with_its_gradients(comm, dtype, taps, channels, activation, bias):
    for batch in batches:
        x, upstream = (rounded(numbers(batch.tokens, channels, seed=s), dtype) for s in (1, 2))
        w, b = rounded(numbers(channels, taps, seed=3), dtype), rounded(numbers(channels, seed=4), dtype)

        def call(of, sharding, x, w, b, upstream):
            w, b = w.clone().requires_grad_(), b.clone().requires_grad_()
            y = ct.causal_conv1d(x, w, ct.halo(sharding, of, taps - 1), of, b if bias else None, activation)
            y.backward(upstream)
            return y, x.grad, w.grad, b.grad

        right = on_one_rank(
            lambda one: call(one, cpx.shard(batch, cpx.sequential(1)), x.clone().requires_grad_(), w, b, upstream)
        )
        for layout in layouts():
            sharding = cpx.shard(batch, layout)
            own = torch.from_numpy(sharding.global_rows(rank))
            y, dx, dw, db = call(
                comm, sharding, share(sharding, x, dtype), w.to(device, dtype), b.to(device, dtype),
                share(sharding, upstream, dtype).detach()
            )
            assert y.dtype == dx.dtype == dw.dtype == dtype
            near("y", y, right[0][own], within[dtype])
            near("dx", dx, right[1][own], within[dtype])
            near("dweight", summed(dw), right[2], within[dtype])
            if bias:
                near("dbias", summed(db), right[3], within[dtype])
    comm.wait()


# shifted rows and sums


@pytest.mark.parametrize("dtype", [*floats, torch.float64, torch.int64, torch.int32])
@pytest.mark.parametrize("side,reach", [("after", 1), ("before", 1), ("after", 3), ("before", 0)])
@poisoned()
def test_shifted_rows_are_bitwise_the_hosts_with_their_gradients(comm, dtype, side, reach):
    for batch in [*batches, cpx.thd([0, 5, 12, 80], valid=[3, 7, 61])]:
        for shape in ((), (1,), (7,), (4, 2)):  # rows of 2 bytes and of some times 8
            x, upstream = ((numbers(batch.tokens, *shape, seed=s) * 100).to(dtype) for s in (1, 2))

            def call(of, sharding, x, upstream):
                y = ct.shift_rows(x, ct.halo(sharding, of, reach, side), of, fill=-3)
                return y, *(torch.autograd.grad(y, x, upstream) if x.requires_grad else ())

            def alone(one):
                sharding = cpx.shard(batch, cpx.sequential(1))
                return call(one, sharding, x.clone().requires_grad_(dtype.is_floating_point), upstream)

            right = on_one_rank(alone)
            for layout in layouts():
                sharding = cpx.shard(batch, layout)
                own = torch.from_numpy(sharding.global_rows(rank))
                made = call(comm, sharding, share(sharding, x), share(sharding, upstream).detach())
                assert len(made) == len(right)
                for got, expected in zip(made, right):
                    assert got.dtype == dtype and torch.equal(got.cpu(), expected[own])
    comm.wait()


def test_shifts_take_rows_that_are_not_aligned_and_every_row_on_every_rank(comm):
    batch = batches[2]
    for sharding in (cpx.shard(batch, cpx.zigzag(world)), cpx.replicated(world, batch)):
        whole = numbers(batch.tokens, 8).float()
        right = on_one_rank(
            lambda one: ct.shift_rows(whole, ct.halo(cpx.replicated(1, batch), one, 2, "after"), one, fill=9)
        )
        own = right[torch.from_numpy(sharding.global_rows(rank))]
        x, plan = share(sharding, whole).detach(), ct.halo(sharding, comm, 2, "after")
        assert torch.equal(ct.shift_rows(x, plan, comm, fill=9).cpu(), own)
        apart = torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x)
        assert torch.equal(ct.shift_rows(apart, plan, comm, fill=9).cpu(), own)
        assert torch.equal(ct.shift_rows(torch.cat([x, x], 1)[:, :8], plan, comm, fill=9).cpu(), own)
        assert torch.equal(cpx.shift_rows(plan.of, x, comm.of, fill=9).cpu(), own)


def test_labels_are_the_next_tokens(comm):
    batch = cpx.thd([0, 5, 12, 80], valid=[3, 7, 61])
    ids = torch.arange(batch.tokens) + 1000
    for layout in layouts():
        sharding = cpx.shard(batch, layout)
        labels = ct.shift_rows(share(sharding, ids), ct.halo(sharding, comm, 1, "after"), comm, fill=-100)
        rows = sharding.global_rows(rank)
        ends = {0: 3, 5: 12, 12: 73}  # behind the valid tokens of a sequence
        for row, label in zip(rows, labels.tolist()):
            first = max(b for b in ends if b <= row)
            assert label == (row + 1001 if row + 1 < ends[first] else -100)


@pytest.mark.parametrize("dtype", [*floats, torch.float64])
@poisoned()
def test_sums_over_ranks_are_bitwise_the_hosts_with_their_gradients(comm, dtype):
    for shape in ((1,), (7,), (0,), (), (3, 5), (4099,), (2, 300, 7), (12,), (120001,)):  # larger ones and smaller
        parts = [numbers(*shape, seed=r).to(dtype) for r in range(world)]
        upstream = [numbers(*shape, seed=50 + r).to(dtype) for r in range(world)]

        def call(of, x, upstream):
            x = x.clone().requires_grad_()
            y = ct.sum_over_ranks(x, of)
            return y, *torch.autograd.grad(y, x, upstream)

        right = cpx.run(world, lambda of: call(ct.communicator(of), parts[of.rank], upstream[of.rank]))[rank]
        got = call(comm, parts[rank].to(device), upstream[rank].to(device))
        for a, b in zip(got, right):
            assert a.dtype == dtype and a.shape == b.shape and torch.equal(a.cpu(), b)
        in_place = parts[rank].to(device)
        assert cpx.sum_over_ranks(in_place, comm.of) is in_place and torch.equal(in_place, got[0])
    comm.wait()


@pytest.mark.skipif(world != 2, reason="wants two ranks")
def test_ranks_that_sum_or_fill_otherwise_are_named(comm):
    sharding = cpx.shard(batches[2], cpx.zigzag(world))
    x = share(sharding, numbers(batches[2].tokens, 2)).detach()

    def shift(other):
        return ct.shift_rows(x, ct.halo(sharding, other, 1, "after"), other, fill=rank)

    def add(other):
        return ct.sum_over_ranks(torch.zeros(8 + rank, device=device), other)

    for call, field in (add, "number of values"), (shift, "fill"):
        other = ct.Communicator(_group._over_store(dist.group.WORLD, device.index, 60.0, 0, 64))
        with pytest.raises(cpx.Error, match=f"ranks disagree on .*{field}"):
            call(other)
        other.of.leave()


# recurrences


def delta_inputs(batch, heads, dtype):
    tokens, (key_heads, value_heads, key_dim, value_dim) = batch.tokens, heads
    return [
        rounded(numbers(tokens, key_heads, key_dim, seed=1), dtype),
        rounded(numbers(tokens, key_heads, key_dim, seed=2), dtype),
        rounded(numbers(tokens, value_heads, value_dim, seed=3), dtype),
        rounded(-numbers(tokens, value_heads, seed=4).abs(), torch.float32),
        rounded(numbers(tokens, value_heads, seed=5).sigmoid(), torch.float32),
    ]


@pytest.mark.parametrize("recurrence,names", [
    (ct.gated_delta_rule, ["dq", "dk", "dv", "dg", "dbeta"]), (ct.head_decay_attention, ["dq", "dk", "dv", "dg"]),
])
@pytest.mark.parametrize("how", ["scan", "serial"])
@pytest.mark.parametrize("dtype,heads", [
    (torch.float32, cpx.Heads(2, 4, 40, 24)), (torch.bfloat16, cpx.Heads(2, 4, 128, 128)),
    (torch.float16, cpx.Heads(1, 1, 64, 64)),
])
def test_a_recurrence_is_the_hosts_with_its_gradients(comm, recurrence, names, how, dtype, heads):
    for batch in batches:
        whole = delta_inputs(batch, heads, dtype)[:len(names)]
        upstream = rounded(numbers(batch.tokens, *heads[1::2], seed=6), dtype)
        state = heads.value_heads * heads.key_dim * heads.value_dim
        initial, of_final = (rounded(numbers(batch.sequences, state, seed=s), torch.float32) for s in (7, 8))

        def call(of, sharding, x, initial, upstream, of_final):
            initial = initial.clone().requires_grad_()
            o, final = recurrence(*x, ct.carry(sharding, of, how), of, initial=initial, final=True)
            torch.autograd.backward([o, final], [upstream, of_final])
            return o, final, *(t.grad for t in x), initial.grad

        right = on_one_rank(
            lambda one: call(
                one, cpx.shard(batch, cpx.sequential(1)), [t.clone().requires_grad_() for t in whole], initial,
                upstream, of_final
            )
        )
        for layout in layouts():
            sharding = cpx.shard(batch, layout)
            own = torch.from_numpy(sharding.global_rows(rank))
            x = [share(sharding, t, dtype if i < 3 else torch.float32) for i, t in enumerate(whole)]
            o, final, *gradients, dinitial = call(
                comm, sharding, x, initial.float().to(device), share(sharding, upstream, dtype).detach(),
                of_final.float().to(device)
            )
            near("o", o, right[0][own], within[dtype])
            for name, got, expected in zip(names, gradients, right[2:-1]):
                near(name, got, expected[own], 2 * within[dtype])
            near("final", summed(final), right[1], within[dtype])
            near("dinitial", summed(dinitial), right[-1], 2 * within[dtype])
    comm.wait()


def test_the_gated_delta_rule_of_the_heads_that_a_rank_holds(comm):
    batch, heads = batches[2], cpx.Heads(world, 2 * world, 16, 16)
    sections = [(heads[0], 16), (heads[0], 16), (heads[1], 16), (heads[1], 1), (heads[1], 1)]
    of = cpx.head_sharded(world, batch, sections)
    whole = delta_inputs(batch, heads, torch.float32)
    mine = [
        t.chunk(world, 1)[rank].to(device, torch.float32).clone().requires_grad_() for t in whole
    ]
    o = ct.gated_delta_rule(*mine, ct.carry(of, comm, "serial", heads=heads), comm)
    (o * o).sum().backward()

    def alone(one):
        x = [t.clone().requires_grad_() for t in whole]
        o = ct.gated_delta_rule(*x, ct.carry(cpx.shard(batch, cpx.sequential(1)), one), one)
        (o * o).sum().backward()
        return o, *(t.grad for t in x)

    right = on_one_rank(alone)
    for got, expected in zip([o, *(t.grad for t in mine)], right):
        near("a result", got, expected.chunk(world, 1)[rank], 4e-5)


def test_the_gated_delta_rule_of_heads_whose_norms_lanes_share_otherwise(comm):
    """Heads of 5 columns, of 48 and of 256, in rows that are aligned and in rows that are not: norms of q and k."""
    batch = batches[2]
    sharding = cpx.shard(batch, cpx.sequential(world))
    own = torch.from_numpy(sharding.global_rows(rank))
    for dim in (5, 48, 256):
        heads = cpx.Heads(3, 3, dim, 8)
        whole = delta_inputs(batch, heads, torch.bfloat16)
        upstream = rounded(numbers(batch.tokens, 3, 8, seed=6), torch.bfloat16)

        def call(of, sharding, x, upstream):
            o = ct.gated_delta_rule(*x, ct.carry(sharding, of), of)
            return o, *torch.autograd.grad(o, x, upstream)

        right = on_one_rank(
            lambda one: call(
                one, cpx.shard(batch, cpx.sequential(1)), [t.clone().requires_grad_() for t in whole], upstream
            )
        )
        x = [share(sharding, t, torch.bfloat16 if i < 3 else torch.float32) for i, t in enumerate(whole)]
        apart = [torch.cat([t.flatten()[:1], t.flatten()]).detach()[1:].view_as(t).requires_grad_() for t in x]
        results = [call(comm, sharding, t, share(sharding, upstream, torch.bfloat16).detach()) for t in (x, apart)]
        for name, got, of_apart, expected in zip(["o", "dq", "dk", "dv", "dg", "dbeta"], *results, right):
            near(f"{name}, {dim}", got, expected[own], 2 * within[torch.bfloat16])
            near(f"{name}, {dim}, apart", of_apart, expected[own], 2 * within[torch.bfloat16])


def on_odd_places(x):
    """Returns a copy of x that begins an element behind a multiple of 256 bytes: no copy engine can read its rows."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[1:]
    return room.copy_(x.flatten()).view(x.shape)


@pytest.mark.parametrize("how", ["scan", "serial"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_the_gated_delta_rule_keeps_has_the_same_bits_wherever_its_tensors_are(comm, how, norm, dtype):
    for batch in batches:
        whole = delta_inputs(batch, cpx.Heads(2, 4, 128, 128), dtype)
        if not norm:  # of keys that are longer than one the state has no end
            whole[:2] = [rounded(torch.nn.functional.normalize(x, dim=-1), dtype) for x in whole[:2]]
        for layout in layouts()[:2]:
            sharding = cpx.shard(batch, layout)
            plan = ct.carry(sharding, comm, how)
            given = [share(sharding, t, dtype if i < 3 else torch.float32) for i, t in enumerate(whole)]
            upstream = torch.ones_like(given[2])

            def call(x, upstream):
                o = ct.gated_delta_rule(*x, plan, comm, qk_l2norm=norm)
                return o, *torch.autograd.grad(o, x, upstream)

            def moved(x):
                return on_odd_places(x).detach().requires_grad_()

            right = call(given, upstream)
            assert given[0].shape[0] == 0 or comm.kept_chunk > 0 or torch.cuda.get_device_capability() != (9, 0)
            odd = call([moved(x) if i < 3 else x for i, x in enumerate(given)], on_odd_places(upstream))
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.cpu(), lambda x: x.to(device)):
                elsewhere = call(given, upstream)
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, on_odd_places):
                apart = call(given, upstream)
            compiled = torch.compile(lambda *x: ct.gated_delta_rule(*x, plan, comm, qk_l2norm=norm),
                                     backend="aot_eager", fullgraph=True)
            o = compiled(*given)
            others = {"odd": odd, "elsewhere": elsewhere, "apart": apart,
                      "compiled": (o, *torch.autograd.grad(o, given, upstream))}
            assert all(x.isfinite().all() for x in right)
            for way, made in others.items():
                unlike = [i for i, (a, b) in enumerate(zip(right, made, strict=True)) if not torch.equal(a, b)]
                assert not unlike, f"{way}: {unlike} of o, dq, dk, dv, dg, dbeta"
    comm.wait()


def test_a_checkpoint_keeps_nothing_of_a_recurrence(comm):
    sharding = cpx.shard(cpx.thd.uniform(2, 512 * world), cpx.zigzag(world))
    plan, rows = ct.carry(sharding, comm), sharding.rows(rank)
    x = torch.ones(rows, 4, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    gates = -torch.ones(rows, 4, device=device)

    def f(x):
        return ct.gated_delta_rule(x, x, x, gates, -gates, plan, comm)

    def held(call):
        before = torch.cuda.memory_allocated()
        y = call(x)
        return torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()

    f(x).sum().backward()
    states = 4 * 4 * 128 * 128 * plan.segments
    assert held(f) >= states
    assert held(lambda x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)) < states
    comm.wait()


def test_recurrences_of_the_same_heads_have_states_of_their_own(comm):
    batch, heads = batches[2], cpx.Heads(2, 2, 16, 16)
    sharding = cpx.shard(batch, cpx.zigzag(world))
    own = torch.from_numpy(sharding.global_rows(rank))
    whole = delta_inputs(batch, heads, torch.float32)

    def call(of, sharding, x):
        carry = ct.carry(sharding, of)
        for _ in range(2):
            yield ct.gated_delta_rule(*x, carry, of)
            yield ct.head_decay_attention(*x[:4], carry, of)

    right = on_one_rank(lambda one: list(call(one, cpx.shard(batch, cpx.sequential(1)), whole)))
    for got, expected in zip(call(comm, sharding, [share(sharding, t, torch.float32) for t in whole]), right):
        near("o", got, expected[own], within[torch.float32])


# the gated delta net layer


def layer_weights(heads, hidden, dtype):
    """Returns the weights of a layer, on the host, in which numbers of the dtype stand."""
    key_heads, value_heads, key_dim, value_dim = heads
    qkv, v = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
    shapes = [
        (qkv, hidden), (v, hidden), (value_heads, hidden), (value_heads, hidden), (qkv, 4), (value_heads,),
        (value_heads,), (value_dim,), (hidden, v),
    ]
    return {
        name: rounded(numbers(*shape, seed=n) / max(shape[-1], 4)**0.5 + (n == 7), dtype)
        for n, (name, shape) in enumerate(zip(cpx.gated_delta_net.parameters, shapes))
    }


def run_layer(of, sharding, x, upstream, weights, heads, how, linear=torch.nn.functional.linear):
    """Returns y, dx and the gradients of the weights, a rank's share."""
    weights = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    x = x.detach().clone().requires_grad_()
    y = ct.gated_delta_net(x, weights, ct.gated_delta_net_plan(sharding, heads, of, how), of, linear=linear)
    y.backward(upstream)
    return y.detach(), x.grad, *(w.grad for w in weights.values())


@pytest.mark.parametrize("how", ["scan", "serial", "heads"])
@pytest.mark.parametrize("dtype,heads", [
    (torch.float32, cpx.Heads(2, 4, 24, 40)), (torch.bfloat16, cpx.Heads(2, 4, 128, 128)),
    (torch.float16, cpx.Heads(2, 2, 64, 64)),
])
def test_a_gated_delta_net_is_the_hosts_with_its_gradients(comm, how, dtype, heads):
    most = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}[dtype]
    hidden = 48
    weights = layer_weights(heads, hidden, dtype)
    for batch in batches:
        x, upstream = (rounded(numbers(batch.tokens, hidden, seed=s), dtype) for s in (20, 21))

        def alone(of):
            net = cpx.gated_delta_net(cpx.shard(batch, cpx.sequential(1)), 0, hidden, heads, "serial")
            saved = net.new_saved()
            y = net(weights, x, of, saved=saved)
            dx, dweights = net.backward(weights, x, saved, upstream, of)
            return y, dx, *dweights.values()

        right = cpx.run(1, alone)[0]
        for layout in layouts():
            sharding = cpx.shard(batch, layout)
            own = torch.from_numpy(sharding.global_rows(rank))
            there = {name: w.to(device, dtype) for name, w in weights.items()}
            for gate in ("A_log", "dt_bias"):  # trainers keep them in float32
                there[gate] = there[gate].float()
            y, dx, *dweights = run_layer(
                comm, sharding, share(sharding, x, dtype), share(sharding, upstream, dtype).detach(), there, heads, how
            )
            assert y.dtype == dx.dtype == dtype
            near("y", y, right[0][own], most, right[0])
            near("dx", dx, right[1][own], most, right[1])
            for (name, w), got, expected in zip(there.items(), dweights, right[2:]):
                assert got.dtype == w.dtype
                near("d" + name, summed(got), expected, most)
    comm.wait()


@pytest.mark.parametrize("how", ["scan", "heads"])
def test_a_gated_delta_net_of_float32_weights_under_autocast_is_that_of_bfloat16(comm, how):
    heads, hidden, batch = cpx.Heads(2, 4, 128, 128), 48, batches[0]
    sharding = cpx.shard(batch, cpx.zigzag(world))
    x, upstream = (share(sharding, numbers(batch.tokens, hidden, seed=s), torch.float32).detach() for s in (20, 21))
    weights = {name: w.to(device, torch.float32) for name, w in layer_weights(heads, hidden, torch.float32).items()}
    half = {name: w if name in ("A_log", "dt_bias") else w.bfloat16() for name, w in weights.items()}
    right = run_layer(comm, sharding, x.bfloat16(), upstream.bfloat16(), half, heads, how)
    with torch.autocast("cuda", torch.bfloat16):
        got = run_layer(comm, sharding, x, upstream.bfloat16(), weights, heads, how)
    assert torch.equal(got[0], right[0])
    for name, a, b in zip(("x", *weights), got[1:], right[1:]):
        assert a.dtype is torch.float32
        near("d" + name, a, b.cpu(), 1e-2)
    comm.wait()


@pytest.mark.parametrize("how", ["serial", "heads"])
@pytest.mark.parametrize("dtype,heads", [
    (torch.float32, cpx.Heads(2, 4, 24, 40)), (torch.bfloat16, cpx.Heads(2, 2, 128, 128)),
])
def test_a_gated_delta_net_is_bitwise_that_of_one_rank(comm, how, dtype, heads):
    groups = [dist.new_group([r]) for r in range(world)]
    alone, hidden = ct.communicator(groups[rank], deadline=60.0), 24
    weights = {name: w.to(device, dtype) for name, w in layer_weights(heads, hidden, dtype).items()}
    batch = batches[2]
    x, upstream = (rounded(numbers(batch.tokens, hidden, seed=s), dtype).to(dtype) for s in (20, 21))
    right = run_layer(
        alone, cpx.shard(batch, cpx.sequential(1)), x.to(device), upstream.to(device), weights, heads, "serial",
        FixedProduct.apply
    )
    for layout in (cpx.zigzag(world), cpx.striped(world)):
        sharding = cpx.shard(batch, layout, cut=cpx.aligned(64))
        got = run_layer(
            comm, sharding, share(sharding, x), share(sharding, upstream).detach(), weights, heads, how,
            FixedProduct.apply
        )
        own = torch.from_numpy(sharding.global_rows(rank)).to(device)
        assert torch.equal(got[0], right[0][own]) and torch.equal(got[1], right[1][own])
    comm.wait()
    alone.of.leave()


@pytest.mark.parametrize("how", ["scan", "heads"])
def test_a_gated_delta_net_is_compiled_checkpointed_and_captured(comm, how):
    batch, heads, hidden = batches[2], cpx.Heads(2, 4, 24, 40), 48
    sharding = cpx.shard(batch, cpx.zigzag(world))
    weights = {name: w.float().to(device) for name, w in layer_weights(heads, hidden, torch.float32).items()}
    weights = {name: w.requires_grad_() for name, w in weights.items()}
    plan, shift = ct.gated_delta_net_plan(sharding, heads, comm, how), ct.halo(sharding, comm, 1, "after")

    def f(x, weights, plan, shift, comm):
        y = ct.gated_delta_net(x, weights, plan, comm)
        return ct.sum_over_ranks((ct.shift_rows(y, shift, comm) * y).sum(0), comm)

    def gradients(call, x):
        tensors = [x, *weights.values()]
        y = call(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), tensors)

    x = share(sharding, numbers(batch.tokens, hidden).float())
    right = gradients(lambda x: f(x, weights, plan, shift, comm), x)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for call in (
        lambda x: compiled(x, weights, plan, shift, comm),
        lambda x: torch.utils.checkpoint.checkpoint(f, x, weights, plan, shift, comm, use_reentrant=False),
    ):
        for got, expected in zip(gradients(call, x), right):
            near("a result", got, expected.cpu(), 1e-6)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients(lambda x: f(x, weights, plan, shift, comm), x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = gradients(lambda x: f(x, weights, plan, shift, comm), x)
    for seed in (5, 6):
        with torch.no_grad():
            x.copy_(share(sharding, numbers(batch.tokens, hidden, seed=seed).float()))
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(made, gradients(lambda x: f(x, weights, plan, shift, comm), x)):
            near("a result", got, expected.cpu(), 1e-6)  # weights' gradients are added in cuBLAS's order
        torch.cuda.synchronize()
    del graph


# attention


def attend(of, sharding, q, k, v, heads, scale, upstream):
    """Returns attention of rows that are on their ranks, keys and values gathered, and its gradients."""
    keys = cpx.replicated(of.ranks, sharding.batch)
    gather, plan = ct.relayout(sharding, keys, of), ct.attention_plan(sharding, keys, heads, of)
    o = ct.attention(q, ct.exchange(k, gather, of), ct.exchange(v, gather, of), plan, of, scale=scale)
    return o, *torch.autograd.grad(o, (q, k, v), upstream)


@pytest.mark.parametrize("dtype,heads,scale", [
    (torch.float32, cpx.AttentionHeads(4, 2, 40), None), (torch.bfloat16, cpx.AttentionHeads(4, 2, 128), None),
    (torch.float16, cpx.AttentionHeads(2, 2, 64), 0.2), (torch.bfloat16, cpx.AttentionHeads(2, 1, 256), None),
    (torch.float16, cpx.AttentionHeads(3, 1, 7), None),
])
def test_attention_is_the_hosts_with_its_gradients(comm, dtype, heads, scale):
    for batch in batches:
        whole = [
            rounded(numbers(batch.tokens, n, heads.dim, seed=seed), dtype)
            for seed, n in enumerate((heads.query_heads, heads.key_heads, heads.key_heads, heads.query_heads))
        ]
        right = on_one_rank(
            lambda one: attend(
                one, cpx.shard(batch, cpx.sequential(1)), *(t.clone().requires_grad_() for t in whole[:3]), heads,
                scale, whole[3]
            )
        )
        for layout in layouts():
            sharding = cpx.shard(batch, layout)
            own = torch.from_numpy(sharding.global_rows(rank))
            mine = [share(sharding, t, dtype) for t in whole]
            results = attend(comm, sharding, *mine[:3], heads, scale, mine[3].detach())
            again = attend(comm, sharding, *mine[:3], heads, scale, mine[3].detach())
            for name, got, same, expected in zip(("o", "dq", "dk", "dv"), results, again, right):
                assert got.dtype == dtype and torch.equal(got, same), name
                # a query that sees one key alone has no gradient, nor has that key of it: a rank may hold no other
                near(name, got, expected[own], within[dtype], expected if name in ("dq", "dk") else None)
    comm.wait()


def test_attention_of_the_heads_that_a_rank_holds(comm):
    batch, heads = batches[2], cpx.AttentionHeads(4 * world, 2 * world, 16)
    sharding = cpx.head_sharded(world, batch, [(4 * world, 16), (2 * world, 16)])
    whole = [numbers(batch.tokens, n, 16, seed=seed) for seed, n in enumerate((4 * world, 2 * world, 2 * world))]
    mine = [t.chunk(world, 1)[rank].to(device, torch.float32).requires_grad_() for t in whole]
    o = ct.attention(*mine, ct.attention_plan(sharding, sharding, heads, comm), comm)
    (o * o).sum().backward()

    def alone(one):
        x, every = [t.clone().requires_grad_() for t in whole], cpx.replicated(1, batch)
        o = ct.attention(*x, ct.attention_plan(every, every, heads, one), one)
        (o * o).sum().backward()
        return o, *(t.grad for t in x)

    for got, expected in zip([o, *(t.grad for t in mine)], on_one_rank(alone)):
        near("a result", got, expected.chunk(world, 1)[rank], 4e-5)


def test_attention_is_compiled_checkpointed_and_captured(comm):
    batch, heads = batches[2], cpx.AttentionHeads(2, 1, 16)
    sharding, keys = cpx.shard(batch, cpx.zigzag(world)), cpx.replicated(world, batch)
    plans = ct.relayout(sharding, keys, comm), ct.attention_plan(sharding, keys, heads, comm)

    def f(x, gather, plan, comm):
        q, k, v = x.split((2, 1, 1), 1)
        return ct.attention(q, *(ct.exchange(t, gather, comm) for t in (k, v)), plan, comm).square()

    x = share(sharding, numbers(batch.tokens, 4, 16).float())
    right = f(x, *plans, comm)
    right.sum().backward()
    dx, x.grad = x.grad, None
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for call in (
        lambda: compiled(x, *plans, comm), lambda: torch.utils.checkpoint.checkpoint(f, x, *plans, comm,
                                                                                     use_reentrant=False)
    ):
        y = call()
        y.sum().backward()
        near("y", y, right.cpu(), 1e-6)
        near("dx", x.grad, dx.cpu(), 1e-6)
        x.grad = None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            y = f(x, *plans, comm)
        x.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, f(x, *plans, comm))


# experts


def mix(of, sharding, chosen, experts, x, scale, upstream):
    """Returns rows at their experts, what comes back of them, each by its expert's number, and gradients."""
    own = torch.from_numpy(sharding.global_rows(of.rank)).to(chosen.device)
    at = ct.ExpertExchange(chosen[own], experts, sharding.global_rows(of.rank), of)
    rows = at.to_experts(x)
    first, last = at.own
    of_row = scale[first:last].repeat_interleave(torch.from_numpy(at.begins).diff().to(scale.device))
    y = at.to_tokens(rows * of_row[:, None].to(rows.dtype))
    (dx,) = torch.autograd.grad(y, x, upstream)
    again = at.to_experts(y.detach(), x.shape[1])
    return at, rows, y, dx, again


@pytest.mark.parametrize("dtype", floats)
def test_experts_see_the_rows_of_the_host_and_give_them_back_with_their_gradients(comm, dtype):
    experts, choices = 6 * world, 3
    for batch in batches:
        chosen = numbers(batch.tokens, experts, seed=1).argsort(1)[:, :choices].contiguous()
        x, upstream = numbers(batch.tokens, 10), numbers(batch.tokens, choices, 10, seed=2)
        x, upstream = rounded(x, dtype), rounded(upstream, dtype)
        scale = 2.0 ** (torch.arange(experts) % 3)  # by which every product is exact
        at, *right = on_one_rank(
            lambda one: mix(
                one, cpx.shard(batch, cpx.sequential(1)), chosen, experts, x.clone().requires_grad_(), scale, upstream
            )
        )
        begins = at.begins
        for layout in layouts():
            sharding = cpx.shard(batch, layout)
            own = torch.from_numpy(sharding.global_rows(rank))
            mine, rows, y, dx, again = mix(
                comm, sharding, chosen.to(device), experts, share(sharding, x, dtype), scale.to(device),
                share(sharding, upstream, dtype).detach()
            )
            first, last = mine.own
            assert (first, last) == (6 * rank, 6 * rank + 6)
            assert (mine.begins == begins[first:last + 1] - begins[first]).all()
            here = slice(begins[first], begins[last])
            assert (mine.places == at.places[here]).all()
            assert torch.equal(rows.cpu().double(), right[0][here]) and torch.equal(y.cpu().double(), right[1][own])
            assert torch.equal(again.cpu().double(), right[3][here])
            near("dx", dx, right[2][own], within[dtype])
    comm.wait()


def test_experts_are_compiled_and_checkpointed(comm):
    batch, experts = batches[2], 2 * world
    sharding = cpx.shard(batch, cpx.zigzag(world))
    x = share(sharding, numbers(batch.tokens, 8).float())

    def f(x, at):
        return at.to_tokens(at.to_experts(x).square()).sum(1)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for seed in range(2):
        chosen = share(sharding, numbers(batch.tokens, experts, seed=seed).argsort(1)[:, :2])
        at = ct.ExpertExchange(chosen, experts, sharding.global_rows(rank), comm)
        right = f(x, at)
        (dx,) = torch.autograd.grad(right.sum(), x)
        assert torch.equal(right, 2 * x.square()) and torch.equal(dx, 4 * x)
        for y in (compiled(x, at), torch.utils.checkpoint.checkpoint(f, x, at, use_reentrant=False)):
            assert torch.equal(y, right) and torch.equal(torch.autograd.grad(y.sum(), x)[0], dx)


# images and videos

image, video = 100, 101


def pictured(sides=(12, 16)):
    """Returns a batch with images and videos: itself, its media and the ids of its tokens. sides: of one image."""
    lengths, parts = [9, 0, 70, 1, 130, 40], []
    images, videos = [(1, 4, 6), (1, 2, 2), (1, *sides), (1, 2, 8)], [(2, 4, 4), (3, 6, 8)]
    for text, kind, count in (
        (2, image, 6), (1, None, 0), (20, image, 1), (0, image, 48), (1, None, 0),  # sequences of 9 and 70
        (1, None, 0), (50, video, 4), (3, video, 4), (9, image, 4), (56, None, 0),  # of 1 and 130
        (0, video, 12), (0, video, 12), (0, video, 12), (4, None, 0)  # of 40
    ):
        parts += [torch.randint(1, 50, (text,), generator=torch.Generator().manual_seed(len(parts)))]
        parts += [torch.full((count,), kind or 0)]
    ids = torch.cat(parts)
    assert len(ids) == sum(lengths)
    return cpx.thd.from_lengths(lengths), cpx.media(images, videos), ids


def overrun():
    """The same of a video whose positions are greater than those of the text behind it begin with."""
    ids = torch.ones(32, dtype=torch.int64)
    ids[2:18] = video
    return cpx.thd([0, 20, 32]), cpx.media(videos=[(4, 4, 4)], rule="qwen2_5_vl_spatial_advance"), ids


def places(of, sharding, ids, media):
    return ct.mrope_positions(media, sharding, share(sharding, ids) if of.device == device else ids, of, image, video)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_positions_of_images_and_videos_are_the_hosts(comm, dtype):
    for batch, media, ids in pictured(), overrun():
        ids = ids.to(dtype)
        axes, deltas = cpx.batch_mrope_positions(media, batch, ids.long().numpy(), image, video)
        shardings = [cpx.shard(batch, layout, scope=s) for layout in layouts() for s in ("sequence", "batch")]
        for sharding in [*shardings, cpx.replicated(world, batch)]:
            own = torch.from_numpy(sharding.global_rows(rank))
            for _ in range(2):
                at = places(comm, sharding, ids, media)
            assert (at.axes.device, at.axes.dtype) == (device, torch.int64)
            assert torch.equal(at.axes.cpu(), torch.from_numpy(axes)[:, own])
            for kind, token in ("image", image), ("video", video):
                held = at.placeholders(kind)
                assert held.device == device and torch.equal(held.cpu(), (ids[own] == token).nonzero()[:, 0])
                assert at.features(kind).rows(rank) == len(held)
            assert torch.equal(at.deltas(comm), torch.from_numpy(deltas).to(device))
    comm.wait()


def with_features(of, sharding, at, kind, x, made, upstream):
    """Returns x with features put and with features added, which each rank's tower has made, and all gradients."""
    plan = ct.relayout(cpx.features_by_item(pictured()[1], kind, of.ranks), at.features(kind), of)
    results = []
    for run in (ct.put_features, ct.add_features):
        y = run(x, ct.exchange(made, plan, of), at, kind)
        results += y, *torch.autograd.grad(y, (x, made), upstream)
    return results


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("dtype", floats)
def test_features_and_their_gradients_are_bitwise_the_hosts(comm, dtype, kind):
    batch, media, ids = pictured()
    whole = [numbers(n, 12, seed=s).to(dtype) for s, n in enumerate((batch.tokens, media.rows(kind), batch.tokens))]

    def alone(one):
        sharding, x = cpx.shard(batch, cpx.sequential(1)), [t.clone().requires_grad_() for t in whole[:2]]
        return with_features(one, sharding, places(one, sharding, ids, media), kind, *x, whole[2])

    right = on_one_rank(alone)
    tower = cpx.features_by_item(media, kind, world)
    made_by = torch.from_numpy(tower.global_rows(rank))
    shardings = [cpx.shard(batch, layout, scope=s) for layout in layouts() for s in ("sequence", "batch")]
    for sharding in shardings:
        at, own = places(comm, sharding, ids, media), torch.from_numpy(sharding.global_rows(rank))
        x, made, upstream = share(sharding, whole[0]), share(tower, whole[1]), share(sharding, whole[2]).detach()
        results = with_features(comm, sharding, at, kind, x, made, upstream)
        odd = with_features(comm, sharding, at, kind, on_odd_places(x.detach()).requires_grad_(), made, upstream)
        for i, (got, apart, expected) in enumerate(zip(results, odd, right, strict=True)):
            assert got.dtype == dtype and got.device == device
            assert torch.equal(got.cpu(), expected[made_by if i % 3 == 2 else own]), i
            assert torch.equal(got, apart), i
        assert torch.equal(x, share(sharding, whole[0]))
    comm.wait()


def test_features_where_every_rank_holds_every_row(comm):
    batch, media, ids = pictured()
    sharding = cpx.replicated(world, batch)
    at = places(comm, sharding, ids, media)
    x, features = (share(cpx.replicated(world, cpx.thd([0, n])), numbers(n, 5).float()) for n in
                   (batch.tokens, media.rows("image")))
    y = ct.put_features(x, features, at, "image")
    held = (ids == image)[:, None].to(device)
    assert torch.equal(y, x.detach().masked_scatter(held, features.detach()))
    dx, dfeatures = torch.autograd.grad(y, (x, features), x.detach())
    assert torch.equal(dx, x.masked_fill(held, 0)) and torch.equal(dfeatures, x[held[:, 0]])


def test_positions_on_devices_turn_rows_as_on_the_host(comm):
    batch, media, ids = pictured()
    sharding = cpx.shard(batch, cpx.zigzag(world))
    at, frequencies = places(comm, sharding, ids, media), torch.from_numpy(cpx.rotary_frequencies(1e4, 8))
    x, axes = share(sharding, numbers(batch.tokens, 2, 8).float()), cpx.rotary_axes([2, 1, 1], "interleaved")
    y = ct.rotary(x, at.axes, frequencies, axes=axes)
    near("y", y, ct.rotary(x.detach().cpu(), at.axes.cpu(), frequencies, axes=axes).double(), within[torch.float32])


def test_features_are_put_in_any_stream_compiled_checkpointed_and_captured(comm):
    batch, media, ids = pictured()
    sharding = cpx.shard(batch, cpx.zigzag(world))
    x = share(sharding, numbers(batch.tokens, 8).float())

    def f(x, features, at):
        y = ct.put_features(torch.sin(x), features, at, "image")
        return ct.add_features(y, 2 * features, at, "image").square()

    def gradients(call, *args):
        y = call(*args)
        return y, *torch.autograd.grad(y.sum(), args[:2])

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for _ in range(2):
        at = places(comm, sharding, ids, media)
        features = share(at.features("image"), numbers(media.rows("image"), 8, seed=1).float())
        right = gradients(f, x, features, at)
        torch.cuda.synchronize()
        for call in compiled, lambda *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False):
            for got, expected in zip(gradients(call, x, features, at), right):
                near("a result", got, expected.cpu(), 1e-6)
    torch.cuda.synchronize()
    side, late = torch.cuda.Stream(), torch.full_like(x, float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000)
        late = late.copy_(x.detach()).requires_grad_()
        results = gradients(f, late, features, at)
    side.synchronize()
    assert all(torch.equal(got, expected) for got, expected in zip(results, right))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = f(x, features, at)
        x.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, f(x, features, at))
    with pytest.raises(cpx.Error, match="mrope_positions: call for which ranks wait: expected before the capture"):
        own = share(sharding, ids)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ct.mrope_positions(media, sharding, own, comm, image, video)
    torch.cuda.synchronize()
    comm.wait()


def test_lists_of_placeholders_stay_until_every_stream_has_read_them(comm):
    batch, media, ids = pictured()
    sharding = cpx.shard(batch, cpx.zigzag(world))
    x, side = share(sharding, numbers(batch.tokens, 8).float()).detach(), torch.cuda.Stream()
    at = places(comm, sharding, ids, media)
    features = share(at.features("image"), numbers(media.rows("image"), 8, seed=1).float()).detach()
    right = ct.put_features(x, features, at, "image")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        y = ct.put_features(x, features, at, "image")
    del at
    gc.collect()
    taken = [torch.full((n,), -1, dtype=torch.int64, device=device) for n in range(1, 65)]
    side.synchronize()
    assert torch.equal(y, right) and len(taken) == 64


def test_positions_are_freed(comm):
    batch, media, ids = pictured()
    sharding = cpx.shard(batch, cpx.zigzag(world))
    x, own = share(sharding, numbers(batch.tokens, 8).float()), share(sharding, ids)

    def train(times):
        for _ in range(times):
            at = ct.mrope_positions(media, sharding, own, comm, image, video)
            features = torch.ones(at.features("video").rows(rank), 8, device=device, requires_grad=True)
            y = ct.add_features(ct.put_features(x, features, at, "video"), features, at, "video")
            torch.autograd.grad(y.sum(), (x, features))
        del at, features, y
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], sys.getrefcount(comm)

    train(20)
    allocated, free, references = train(20)
    later = train(1000 if world == 1 else 50)
    assert later[0] == allocated and later[2] == references
    assert world > 1 or later[1] == free


# what needs no other rank


@pytest.mark.parametrize("rounding", ["fp32_inside", "round_each_op"])
@pytest.mark.parametrize("dtype", floats)
def test_rotary_is_the_hosts(comm, dtype, rounding):
    batch = batches[0]
    sharding = cpx.shard(batch, cpx.zigzag(world))
    frequencies = torch.from_numpy(cpx.rotary_frequencies(10000.0, 8))
    x = share(sharding, numbers(batch.tokens, 3, 10), dtype)
    for axes, positions in (
        (None, torch.from_numpy(sharding.positions(rank))),
        ([0, 1, 2, 0], torch.arange(3 * len(x)).reshape(3, -1) % 97),
    ):
        y = ct.rotary(x, positions.to(device), frequencies, axes=axes, rounding=rounding)
        right = ct.rotary(x.detach().cpu(), positions, frequencies, axes=axes, rounding=rounding)
        near("y", y, right.double(), within[dtype])
        x.grad = None
        y.backward(x.detach())
        turned = x.detach().cpu().requires_grad_()
        ct.rotary(turned, positions, frequencies, axes=axes, rounding=rounding).backward(x.detach().cpu())
        near("dx", x.grad, turned.grad.double(), within[dtype])


# streams, graphs, memory


def step(comm, sharding, target):
    """Returns a function of a tensor that exchanges, convolves and runs the delta rule, and its weights."""
    plans = ct.relayout(sharding, target, comm), ct.halo(target, comm, 3), ct.carry(target, comm)
    weight = numbers(48, 4, seed=9).float().to(device)
    gates = -numbers(target.rows(rank), 2, seed=4).abs().float().to(device)

    def run(x):
        y = ct.causal_conv1d(ct.exchange(x, plans[0], comm), weight, plans[1], comm, None, "silu")
        q, k, v = (part.unflatten(1, (-1, 8)) for part in y.split((16, 16, 16), 1))
        return ct.gated_delta_rule(q, k, v, gates, gates.exp(), plans[2], comm)

    return run


def test_calls_are_in_the_current_stream_and_behind_those_of_another(comm):
    batch = batches[4]
    run = step(comm, cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world)))
    x = share(cpx.shard(batch, cpx.zigzag(world)), numbers(batch.tokens, 48).float()).detach()
    right = run(x)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for n in range(6):
        late = torch.full_like(x, float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[n % 2]):
            torch.cuda._sleep(2_000_000)
            late.copy_(x)
            y = run(late)
        streams[n % 2].synchronize()
        assert torch.equal(y, right)


def test_a_captured_step_runs_with_other_numbers_whatever_batches_come_between(comm):
    first, other = (
        (cpx.shard(b, cpx.zigzag(world)), cpx.shard(b, cpx.sequential(world))) for b in (batches[2], batches[0])
    )
    x = share(first[0], numbers(batches[2].tokens, 48).float())
    call, between = step(comm, *first), step(comm, *other)

    def both():
        x.grad = None
        y = call(x)
        y.square().sum().backward()
        return y, x.grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            both()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = both()
    for seed in range(3):
        numbers_now = share(first[0], numbers(batches[2].tokens, 48, seed=seed).float()).detach()
        a = share(other[0], numbers(batches[0].tokens, 48, seed=seed).float())
        between(a).sum().backward()
        with torch.no_grad():
            x.copy_(numbers_now)
        graph.replay()
        torch.cuda.synchronize()
        again = numbers_now.clone().requires_grad_()
        right = call(again)
        right.square().sum().backward()
        torch.cuda.synchronize()
        assert torch.equal(y, right) and torch.equal(dx, again.grad)
    del graph


def test_what_was_not_called_before_is_refused_in_a_capture(comm):
    batch = cpx.thd([0, 77])
    source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.striped(world))
    x = share(source, numbers(77, 11).float()).detach()
    plan = ct.relayout(source, target, comm)
    torch.cuda.synchronize()
    with pytest.raises(cpx.Error, match="exchange: first call of a batch: expected before the capture of a graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ct.exchange(x, plan, comm)
    torch.cuda.synchronize()
    assert torch.equal(ct.exchange(x, plan, comm), share(target, numbers(77, 11).float()))


def test_memory_does_not_grow_and_comes_from_torch(comm):
    batch = batches[2]
    run = step(comm, cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world)))
    x = share(cpx.shard(batch, cpx.zigzag(world)), numbers(batch.tokens, 48).float())

    def train(times):
        for _ in range(times):
            x.grad = None
            run(x).sum().backward()
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], sys.getrefcount(comm)

    train(20)
    allocated, free, references = train(20)
    later = train(2500 if world == 1 else 100)  # of four operators each
    assert later[0] == allocated and later[2] == references
    assert world > 1 or later[1] == free


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_function_sees_through_the_operators(comm, backend):
    weight, frequencies = numbers(24, 4).float().to(device), torch.from_numpy(cpx.rotary_frequencies(1e4, 8))

    def f(x, there, halo, carry, positions, gates, comm):
        y = ct.causal_conv1d(ct.exchange(x, there, comm) * 2, weight, halo, comm, None, "silu")
        q, k, v = (part.unflatten(1, (1, 8)) for part in y.split(8, 1))
        return ct.gated_delta_rule(ct.rotary(q, positions, frequencies), k, v, gates, -gates, carry, comm).square()

    compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=True)
    for batch in (batches[0], batches[2]):
        source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world))
        more = (
            ct.relayout(source, target, comm), ct.halo(target, comm, 3), ct.carry(target, comm),
            torch.from_numpy(target.positions(rank)).to(device), -numbers(target.rows(rank), 1).abs().float().to(device)
        )
        x = share(source, numbers(batch.tokens, 24).float())
        y = compiled(x, *more, comm)
        y.sum().backward()
        got, x.grad = x.grad, None
        right = f(x, *more, comm)
        right.sum().backward()
        near("y", y, right.cpu(), 1e-5)
        near("dx", got, x.grad.cpu(), 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_the_same_bits_again(comm, reentrant):
    batch = batches[2]
    run = step(comm, cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world)))
    x = share(cpx.shard(batch, cpx.zigzag(world)), numbers(batch.tokens, 48).float())
    run(x).square().sum().backward()
    right, x.grad = x.grad, None
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, right)


# groups


@poisoned()
def right_exchange(comm, ranks, own, width=5):
    """Returns whether a communicator of its own moves rows as it should."""
    batch = cpx.thd([0, 9, 40])
    source, target = cpx.shard(batch, cpx.zigzag(ranks)), cpx.shard(batch, cpx.striped(ranks))
    whole = numbers(batch.tokens, width).float().to(device)
    rows = (whole[torch.from_numpy(s.global_rows(own)).to(device)] for s in (source, target))
    x, y = rows
    got = ct.exchange(x, ct.relayout(source, target, comm), comm)
    comm.wait()
    return torch.equal(got, y)


def test_a_communicator_over_the_store_of_a_group_beside_that_of_the_group(comm):
    other = ct.Communicator(_group._over_store(dist.group.WORLD, device.index, 60.0, None, 64))
    assert (other.rank, other.ranks, other.device) == (rank, world, device)
    assert right_exchange(other, world, rank) and right_exchange(comm, world, rank)
    other.of.leave()
    assert right_exchange(comm, world, rank)


def test_a_group_of_some_ranks_has_its_own(comm):
    groups = [dist.new_group([r]) for r in range(world)]
    alone = ct.communicator(groups[rank], deadline=60.0)
    assert alone is ct.communicator(groups[rank]) and (alone.rank, alone.ranks) == (0, 1)
    assert right_exchange(alone, 1, 0) and right_exchange(comm, world, rank)
    alone.of.leave()
    assert right_exchange(comm, world, rank)


@pytest.mark.skipif(world > 1, reason="ranks would wait for each other")
@poisoned()
def test_threads_that_call_at_once_are_named(comm):
    batch = batches[0]
    s = cpx.shard(batch, cpx.zigzag(1))
    x, plan = share(s, numbers(batch.tokens, 8).float()).detach(), ct.relayout(s, s, comm)
    problems = []

    def calls():
        try:
            for _ in range(300):
                assert torch.equal(ct.exchange(x, plan, comm), x)
        except Exception as e:
            problems.append(e)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(isinstance(e, cpx.Error) and "one thread at a time" in str(e) for e in problems), problems
    assert right_exchange(comm, 1, 0)


# the example


@pytest.mark.skipif(world > 4, reason="it has 4 heads")
def test_the_hybrid_language_model_has_the_losses_of_the_host(comm):
    path = Path(__file__).parents[1] / "examples" / "train_hybrid.py"
    spec = importlib.util.spec_from_file_location("train_hybrid", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model, text = example.Hybrid(40), torch.randint(40, (2000,))
    right = cpx.run(1, example.train, model, text, 3)[0]
    for loss, expected in zip(example.train(comm, model, text, 3), right, strict=True):
        assert abs(loss - expected) < 1e-3, (loss, expected)


# drop-ins


def test_drop_ins_take_tensors_on_devices(comm):
    tokens = 16 * world
    cu = torch.tensor([0, 4 * world, 16 * world], dtype=torch.int32, device=device)
    zigzag = cpx.shard(cpx.thd(cu.tolist()), cpx.zigzag(world))
    packed = cpx.shard(cpx.thd(cu.tolist()), cpx.sequential(world), "batch")
    x = numbers(tokens, 1, 24).to(torch.bfloat16)
    mine = share(zigzag, x)
    rows = miles.zigzag_to_packed_shard(mine, cu, dist.group.WORLD, rank, world)
    assert torch.equal(rows, share(packed, x))
    assert torch.equal(miles.packed_shard_to_zigzag(rows, cu, dist.group.WORLD, rank, world), mine)

    context = fla.build_cp_context(cu, dist.group.WORLD, conv1d_kernel_size=4)
    weight = numbers(24, 4).to(device, torch.bfloat16)
    y, _ = fla.causal_conv1d(rows.transpose(0, 1), weight, activation="silu", cp_context=context)
    right = on_one_rank(
        lambda one: ct.causal_conv1d(
            x[:, 0].double(), weight.cpu().double(), ct.halo(cpx.shard(packed.batch, cpx.sequential(1)), one, 3), one,
            None, "silu"
        )
    )
    own = torch.from_numpy(packed.global_rows(rank))
    near("y", y[0], right[own], 1e-2)

    heads = cpx.Heads(2, 2, 16, 16)
    whole = delta_inputs(packed.batch, heads, torch.bfloat16)
    part = [share(packed, t, torch.bfloat16 if i < 3 else torch.float32)[None] for i, t in enumerate(whole)]
    o, _ = fla.chunk_gated_delta_rule(*part, use_qk_l2norm_in_kernel=True, cp_context=context)
    for size in 16, 32:  # the kernels take 64
        same, _ = fla.chunk_gated_delta_rule(
            *part, use_qk_l2norm_in_kernel=True, chunk_size=size, cp_context=context
        )
        assert torch.equal(same, o)
    right = on_one_rank(
        lambda one: ct.gated_delta_rule(*whole, ct.carry(cpx.shard(packed.batch, cpx.sequential(1)), one), one)
    )
    assert o.dtype == torch.bfloat16
    near("o", o[0], right[own], 1e-2)


def test_exchanges_around_a_layer_take_tensors_on_devices(comm):
    tokens = 8 * world
    own = torch.from_numpy(cpx.shard(cpx.thd([0, tokens]), cpx.zigzag(world)).global_rows(rank))
    for widths in ([4, 2], [6, 6, 8, 8, 2, 2]):  # of a batch of two: more sections than one kernel takes
        sections = [n * world for n in widths]
        whole = numbers(tokens, 2, sum(sections)).to(device, torch.bfloat16)
        mine = whole[own.to(device)]
        y = megatron.tensor_a2a_cp2hp(mine, 0, -1, dist.group.WORLD, split_sections=sections)
        assert torch.equal(y, torch.cat([part.chunk(world, -1)[rank] for part in whole.split(sections, -1)], -1))
        back = megatron.tensor_a2a_hp2cp(y, 0, -1, dist.group.WORLD, split_sections=widths)
        assert torch.equal(back, mine)

    of = types.SimpleNamespace(sp_world_size=world, rp_world_size=1, _sp_group=dist.group.WORLD)
    whole = numbers(2, tokens, 2 * world, 4).to(device, torch.bfloat16)
    mine = whole.chunk(world, 1)[rank].contiguous()
    heads = twinkle.seq_to_head_shard(mine, of)
    assert torch.equal(heads, whole.chunk(world, 2)[rank])
    assert torch.equal(twinkle.head_to_seq_shard(heads, of), mine)


@pytest.mark.parametrize("linear", ["sequential", "in_place"])
@pytest.mark.parametrize("name", ["tiny_qwen3_5", "tiny_qwen3_5_moe", "tiny_qwen3_5_vl", "tiny_qwen3_vl"])
def test_checkpoints_of_transformers_have_its_own_log_probabilities_and_gradients(comm, name, linear):
    pytest.importorskip("transformers")
    golden = pytest.importorskip("test_dropin_transformers")
    model, reference = golden.load(name)
    on_device = {n: x.to(device) for n, x in reference.items()}
    rows, logp, gradients = golden.train_step(comm, model.to(device), on_device, {"linear": linear})
    delta = (logp.double().cpu() - reference["logprobs"][rows.cpu()]).abs()
    assert delta.max() < 1e-3 and delta.mean() < 5e-5
    errors = {}
    for n in sorted(n for n in reference if n.startswith("grad.")):
        wanted, own = reference[n].double(), gradients.get(n[5:])
        got = summed(torch.zeros(wanted.shape, device=device) if own is None else own).double().cpu()
        errors[n] = ((got.flatten() - wanted.flatten()).norm() / wanted.norm().clamp(min=1e-30)).item()
    worst = max(errors, key=errors.get)
    print(f"max {delta.max():.2e} mean {delta.mean():.2e} gradient {errors[worst]:.2e} of {worst}")
    assert errors[worst] < 5e-3
    comm.wait()


# errors


def wrong_calls(comm):
    batch = batches[0]
    s, t = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world))
    rows, plan, halo, carry = s.rows(rank), ct.relayout(s, t, comm), ct.halo(s, comm, 3), ct.carry(s, comm)
    x = torch.zeros(rows, 4, device=device)
    weight = torch.zeros(4, 4, device=device)
    q, g = torch.zeros(rows, 2, 8, device=device), torch.zeros(rows, 2, device=device)
    out = torch.zeros(t.rows(rank), 4, device=device)
    positions, frequencies = torch.zeros(rows, dtype=torch.int64, device=device), torch.ones(2)
    yield f"exchange: device of x: expected {device}.*got cpu", lambda: ct.exchange(x.cpu(), plan, comm)
    yield f"exchange: device of x: expected {device}.*got cpu", lambda: cpx.exchange(plan.of, x.cpu(), comm.of, out)
    yield f"exchange: device of out: expected {device}.*got cpu", (
        lambda: cpx.exchange(plan.of, x, comm.of, out.cpu())
    )
    yield "exchange: x: expected a tensor of torch.*got ndarray", (
        lambda: cpx.exchange(plan.of, x.cpu().numpy(), comm.of, out)
    )
    yield "exchange: dtype of x.*complex64", lambda: ct.exchange(x.to(torch.complex64), plan, comm)
    yield "exchange: dtype of out: expected float32, got float64", (
        lambda: cpx.exchange(plan.of, x, comm.of, out.double())
    )
    yield "exchange: memory of x: .*copy it first", (
        lambda: cpx.exchange(plan.of, torch.zeros(rows, 8, device=device)[:, :4], comm.of, out)
    )
    yield "exchange, source: rows of the buffer", lambda: ct.exchange(x[1:], plan, comm)
    yield "causal_conv1d: dtype of x: expected float32, bfloat16, float16, got float64", (
        lambda: ct.causal_conv1d(x.double(), weight.double(), halo, comm)
    )
    yield "causal_conv1d: device of weight", lambda: ct.causal_conv1d(x, weight.cpu(), halo, comm)
    yield "gated_delta_rule: dtype of g: expected torch.float32, on devices", (
        lambda: ct.gated_delta_rule(q.half(), q.half(), q.half(), g.half(), g, carry, comm)
    )
    yield "gated_delta_rule: chunk: expected 64", lambda: ct.gated_delta_rule(q, q, q, g, g, carry, comm, chunk=32)
    yield "channel_decay_attention: recurrence on devices: expected gated_delta_rule or head_decay_attention", (
        lambda: ct.channel_decay_attention(q, q, q, g[..., None].expand_as(q), carry, comm)
    )
    yield "kimi_delta_attention: dtype of g|kimi_delta_attention: recurrence on devices", (
        lambda: ct.kimi_delta_attention(q, q, q, q, g, carry, comm)
    )
    keys = cpx.replicated(world, batch)
    plan_of = ct.attention_plan(s, keys, cpx.AttentionHeads(2, 2, 8), comm)
    k = torch.zeros(batch.tokens, 2, 8, device=device)
    yield "attention: dtype of q: expected float32, bfloat16, float16, got float64", (
        lambda: ct.attention(q.double(), k.double(), k.double(), plan_of, comm)
    )
    yield "attention: shape of k: expected", lambda: ct.attention(q, k[1:], k, plan_of, comm)
    yield "attention: device of k", lambda: ct.attention(q, k.cpu(), k, plan_of, comm)
    yield "attention: dim: expected from 1 to 256", (
        lambda: ct.attention(
            torch.zeros(rows, 2, 257, device=device), *[torch.zeros(batch.tokens, 2, 257, device=device)] * 2,
            ct.attention_plan(s, keys, cpx.AttentionHeads(2, 2, 257), comm), comm
        )
    )
    chosen = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    places = s.global_rows(rank)
    for make, of in ((ct.ExpertExchange, comm), (cpx.ExpertExchange, comm.of)):
        yield "expert_exchange: device of chosen: expected cuda.*got cpu", (
            lambda make=make, of=of: make(chosen.cpu(), world, places, of)
        )
        yield "expert_exchange: dtype of chosen: expected int64, got int32", (
            lambda make=make, of=of: make(chosen.int(), world, places, of)
        )
    yield "expert_exchange: places: expected", lambda: ct.ExpertExchange(chosen, world, places[:-1], comm)
    at = ct.ExpertExchange(chosen, world, places, comm)
    yield "ExpertExchange.to_experts: device of x", lambda: at.to_experts(x.cpu())
    yield "ExpertExchange.to_experts: dtype of x: expected float32, bfloat16, float16, got float64", (
        lambda: at.to_experts(x.double())
    )
    yield "expert_exchange::to_experts: x: |expert_exchange::to_experts: shape of x", lambda: at.to_experts(x[1:])
    yield "ExpertExchange.to_tokens: device of x", lambda: at.to_tokens(x.cpu())
    pictures, media, ids = pictured()
    shown = cpx.shard(pictures, cpx.zigzag(world))
    own = share(shown, ids)
    for make, of in ((ct.mrope_positions, comm), (cpx.mrope_positions, comm.of)):
        yield f"mrope_positions: device of ids: expected {device}.*got cpu", (
            lambda make=make, of=of: make(media, shown, own.cpu(), of, image, video)
        )
        yield "mrope_positions: dtype of ids: expected int64, int32, got float32", (
            lambda make=make, of=of: make(media, shown, own.float(), of, image, video)
        )
        yield "mrope_positions: shape of ids", lambda make=make, of=of: make(media, shown, own[1:], of, image, video)
        yield "mrope_positions: ranks of the sharding", (
            lambda make=make, of=of: make(media, cpx.shard(pictures, cpx.zigzag(world + 1)), own, of, image, video)
        )
        yield "mrope_positions: image placeholders in the batch: expected 59.*got 0", (
            lambda make=make, of=of: make(media, shown, own, of, 77, video)
        )
    with_media = ct.mrope_positions(media, shown, own, comm, image, video)
    z = torch.zeros(shown.rows(rank), 4, device=device)
    f = torch.zeros(with_media.features("image").rows(rank), 4, device=device)
    for name, run in (("put_features", ct.put_features), ("add_features", ct.add_features)):
        yield f"{name}: device of x: expected {device}.*got cpu", lambda run=run: run(z.cpu(), f, with_media, "image")
        yield f"{name}: device of features", lambda run=run: run(z, f.cpu(), with_media, "image")
        yield f"{name}: dtype of features", lambda run=run: run(z, f.half(), with_media, "image")
        yield f"{name}: dtype of x: expected float32, bfloat16, float16, got float64", (
            lambda run=run: run(z.double(), f.double(), with_media, "image")
        )
        yield f"{name}: shape of x", lambda run=run: run(z[1:], f, with_media, "image")
        yield f"{name}: shape of features", (
            lambda run=run: run(z, torch.zeros(len(f) + 1, 4, device=device), with_media, "image")
        )
        yield f"{name}: shape of features", lambda run=run: run(z, f[:, :3], with_media, "image")
        yield f"{name}: kind: .*text", lambda run=run: run(z, f, with_media, "text")
    yield "mrope_positions: communicator: expected the one that the positions were made with", (
        lambda: with_media.of.deltas(cpx.threads(1)[0])
    )
    after = ct.halo(s, comm, 1, "after")
    yield f"shift_rows: device of x: expected {device}.*got cpu", lambda: ct.shift_rows(x.cpu(), after, comm)
    yield "shift_rows: dtype of x: expected float32, float64, bfloat16, float16, int64, int32, got int16", (
        lambda: ct.shift_rows(x.short(), after, comm)
    )
    yield "shift_rows: shape of x|shift_rows: x", lambda: ct.shift_rows(x[1:], after, comm)
    yield "shift_rows: .*out", lambda: cpx.shift_rows(after.of, x, comm.of, out=x)
    yield "shift_rows: memory of x: .*copy it first", (
        lambda: cpx.shift_rows(after.of, torch.zeros(rows, 8, device=device)[:, :4], comm.of)
    )
    yield f"sum_over_ranks: device of x: expected {device}.*got cpu", lambda: ct.sum_over_ranks(x.cpu(), comm)
    yield f"sum_over_ranks: device of values: expected {device}.*got cpu", (
        lambda: cpx.sum_over_ranks(x.cpu(), comm.of)
    )
    yield "sum_over_ranks: dtype of values: expected float32, float64, bfloat16, float16, got int64", (
        lambda: ct.sum_over_ranks(x.long(), comm)
    )
    yield "sum_over_ranks: .*values", lambda: cpx.sum_over_ranks(torch.zeros(4, 3, device=device).t(), comm.of)
    of_layer = cpx.Heads(2, 4, 24, 40)
    layer = {name: w.float().to(device) for name, w in layer_weights(of_layer, 4, torch.float32).items()}
    net = ct.gated_delta_net_plan(s, of_layer, comm)
    yield f"gated_delta_net: device of x: expected {device}.*got cpu", (
        lambda: ct.gated_delta_net(x.cpu(), layer, net, comm)
    )
    yield "gated_delta_net: device of norm.weight", (
        lambda: ct.gated_delta_net(x, layer | {"norm.weight": torch.zeros(40)}, net, comm)
    )
    yield "gated_delta_net: dtype of norm.weight", (
        lambda: ct.gated_delta_net(x, layer | {"norm.weight": torch.zeros(40, device=device).half()}, net, comm)
    )
    yield "gated_delta_rule: chunk: expected 64", (
        lambda: ct.gated_delta_net(x, layer, ct.gated_delta_net_plan(s, of_layer, comm, chunk=32), comm)
    )
    yield "gated_rms_norm: dtype of x: expected float32, bfloat16, float16, got float64", (
        lambda: ct.gated_rms_norm(x.double(), x.double(), weight[0].double())
    )
    yield "gated_rms_norm: device of z", lambda: ct.gated_rms_norm(x, x.cpu(), weight[0])
    yield "rotary: device of positions", lambda: ct.rotary(x, positions.cpu(), frequencies, 4)
    yield "rotary: device of frequencies: expected cpu", lambda: ct.rotary(x, positions, frequencies.to(device), 4)
    yield "rotary: dtype of x.*float64", lambda: ct.rotary(x.double(), positions, frequencies.double(), 4)


def test_a_wrong_call_is_named_with_its_line_and_moves_nothing(comm):
    for text, call in wrong_calls(comm):
        with pytest.raises(cpx.Error) as raised:
            call()
        place = r"^test_cuda.py:[0-9]+: (cuda::)?"
        assert re.match(place + "(" + text + ")", str(raised.value)), str(raised.value)
    batch = batches[0]
    s = cpx.shard(batch, cpx.zigzag(world))
    x = share(s, numbers(batch.tokens, 4).float())
    assert torch.equal(ct.exchange(x, ct.relayout(s, s, comm), comm), x)
    with pytest.raises(cpx.Error, match="exchange: double backward"):
        y = ct.exchange(x, ct.relayout(s, s, comm), comm)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        dx.sum().backward()


@pytest.mark.skipif(torch.cuda.device_count() < 2 or world > 1, reason="wants two GPUs in one process")
def test_a_tensor_of_another_device_is_named(comm):
    batch = batches[0]
    s = cpx.shard(batch, cpx.zigzag(1))
    with pytest.raises(cpx.Error, match="exchange: device of x: expected cuda:0.*got cuda:1"):
        ct.exchange(torch.zeros(s.rows(0), 4, device="cuda:1"), ct.relayout(s, s, comm), comm)


@pytest.mark.skipif(world != 2, reason="wants two ranks")
def test_ranks_that_disagree_are_named(comm):
    one, other = (cpx.shard(cpx.thd([0, 9 + n]), cpx.zigzag(2)) for n in (0, rank))
    target = cpx.shard(other.batch, cpx.striped(2))
    x = torch.zeros(other.rows(rank), 13, device=device)
    with pytest.raises(cpx.Error, match="ranks disagree on offset 1 of cu_seqlens"):
        ct.exchange(x, ct.relayout(other, target, comm), comm)
        comm.wait()
    same = cpx.shard(one.batch, cpx.striped(2))
    y = ct.exchange(torch.ones(one.rows(rank), 13, device=device), ct.relayout(one, same, comm), comm)
    comm.wait()
    assert y.sum().item() == 13 * same.rows(rank)


@pytest.mark.skipif(world != 2, reason="wants two ranks")
def test_ranks_whose_known_plans_differ_are_named_and_the_next_call_works(comm):
    plans, rows = [], []
    for n in (60, 64):
        batch = cpx.thd([0, n])
        source, target = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.striped(2))
        plans.append(ct.relayout(source, target, comm))
        rows.append(share(source, numbers(n, 17).float()).detach())
        for _ in range(2):
            assert torch.equal(ct.exchange(rows[-1], plans[-1], comm), share(target, numbers(n, 17).float()))
    comm.wait()
    if comm.exchange_path != "window":
        pytest.skip("messages of different plans wait for each other")
    for _ in range(3):
        with pytest.raises(cpx.Error, match=f"cu_seqlens of a relayout: .*others on ranks {1 - rank}"):
            ct.exchange(rows[rank], plans[rank], comm)
            comm.wait()
        assert torch.equal(ct.exchange(rows[1], plans[1], comm), share(target, numbers(64, 17).float()))
        comm.wait()


@pytest.mark.skipif(world != 2, reason="wants two ranks")
def test_ranks_whose_media_differ_are_named(comm):
    batch, media, ids = pictured((12, 16) if rank == 0 else (16, 12))
    sharding = cpx.shard(batch, cpx.zigzag(2))
    with pytest.raises(cpx.Error, match="ranks disagree on"):
        places(comm, sharding, ids, media)
    assert places(comm, sharding, ids, pictured()[1]).axes.shape == (3, sharding.rows(rank))


leaving = """
    import os, sys, time
    import torch, torch.distributed as dist
    import cpx, cpx.torch as ct

    rank = int(os.environ["RANK"])
    if torch.cuda.device_count() < 2:
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    comm = ct.communicator(deadline=15.0, window=64 << 20)
    batch = cpx.thd([0, 64])
    s, t = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.sequential(2))
    x = torch.ones(s.rows(rank), 8, device=device)
    plan = ct.relayout(s, t, comm)
    ct.exchange(x, plan, comm)
    comm.wait()
    if rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(1)
    begin = time.time()
    try:
        for _ in range(3):
            ct.exchange(x, plan, comm)
            comm.wait()
        print("no error")
    except cpx.Error as e:
        print(f"after {time.time() - begin:.0f} s: {e}")
    try:
        ct.exchange(x, plan, comm)
    except cpx.Error as e:
        print(f"later: {e}")
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.skipif(rank > 0 or world > 1, reason="starts ranks of its own")
def test_a_group_of_which_a_rank_dies_raises_within_its_deadline(tmp_path):
    program = tmp_path / "leaving.py"
    program.write_text(textwrap.dedent(leaving))
    at = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    members = [
        subprocess.Popen(
            [sys.executable, str(program)], env={**at, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True
        )
        for r in range(2)
    ]
    text, _ = members[0].communicate(timeout=120)
    members[1].kill()
    members[1].communicate()
    assert re.search(r"after [0-9]+ s: leaving.py:[0-9]+: nccl", text), text
    assert re.search(r"later: leaving.py:[0-9]+: nccl: communicator: expected one that has not failed", text), text
    assert float(re.search(r"after ([0-9]+) s", text)[1]) <= 40


ending = """
    import gc, os, sys, tempfile
    import torch, torch.distributed as dist
    import cpx, cpx.torch as ct
    from cpx.torch import _group

    torch.cuda.set_device(0)
    at = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("nccl", init_method=at, rank=0, world_size=1)
    comm = ct.communicator(deadline=60.0, window=64 << 20)
    batch = cpx.thd([0, 64])
    s, t = cpx.shard(batch, cpx.zigzag(1)), cpx.shard(batch, cpx.sequential(1))
    x, weight = (torch.ones(n, 4096, device="cuda", requires_grad=True) for n in (64, 4))
    relayout, halo = ct.relayout(s, t, comm), ct.halo(s, comm, 3)

    def call():
        return ct.causal_conv1d(ct.exchange(x, relayout, comm), weight.T.contiguous(), halo, comm)

    y = call()
    y.sum().backward()
    y = call()
"""
endings = {
    "all is left as it is": "",
    "the group ends first": "comm.wait(); dist.destroy_process_group()",
    "the communicator leaves, twice": "comm.of.leave(); comm.of.leave(); dist.destroy_process_group()",
    "references go": "_group._made.clear(); del comm, relayout, halo, y; gc.collect(); dist.destroy_process_group()",
    "the device is busy": "torch.cuda._sleep(500_000_000); z = [call() for _ in range(20)]",
    "an exception ends it": "torch.cuda._sleep(500_000_000); call(); raise KeyError('as planned')",
    "a call after it has left": "comm.of.leave()\ntry: call()\nexcept cpx.Error as e: print(e)",
    "a backward after it has left": "comm.of.leave()\ntry: y.sum().backward()\nexcept cpx.Error as e: print(e)",
    "a call after its group": "dist.destroy_process_group()\ntry: call()\nexcept cpx.Error as e: print(e)",
}


@pytest.mark.skipif(world > 1, reason="starts processes of its own")
def test_a_process_ends_cleanly_in_whatever_order_things_go():
    begin = textwrap.dedent(ending)
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", begin + end], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) for name, end in endings.items()
    }
    for name, process in started.items():
        out, text = process.communicate(timeout=120)
        wanted = 1 if "exception" in name else 0
        assert process.returncode == wanted and "Fatal" not in text, (name, process.returncode, text[-2000:])
        if "after it has left" in name:
            assert "expected one that has not left" in out, (name, out, text[-2000:])
        if "after its group" in name:
            assert "communicator: NCCL's communicator: expected one that lasts" in out, (name, out, text[-2000:])
