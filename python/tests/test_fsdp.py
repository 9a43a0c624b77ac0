# SPDX-License-Identifier: Apache-2.0
"""Layers of cpx.torch's operators under FSDP2 and DDP, whole and compiled, against one rank that has all tokens.

On the CPU two processes each have a batch of their own, over gloo, and a context of one rank. By torchrun, a GPU a
rank, all ranks have parts of one batch, zigzag, over NCCL:
`torchrun --nproc-per-node 2 -m pytest python/tests/test_fsdp.py`.
"""

import os
import traceback

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch has no distributed part", allow_module_level=True)

import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import cpx  # noqa: E402
import cpx.torch as ct  # noqa: E402

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
hidden, heads, dim = 32, 2, 16
lengths = [9, 64, 23]
ways = ["fsdp", "fsdp, compiled", "ddp", "ddp, compiled"]


class Block(torch.nn.Module):
    """A convolution and a delta rule on sequential rows, among zigzag ones."""

    def __init__(self):
        super().__init__()
        width = heads * dim
        self.mix = torch.nn.Linear(hidden, 3 * width, bias=False)
        self.gates = torch.nn.Linear(hidden, 2 * heads)
        self.taps = torch.nn.Parameter(torch.randn(3 * width, 4) / 2)
        self.out = torch.nn.Linear(width, hidden, bias=False)

    def forward(self, x, there, back, before, states, comm):
        y = ct.exchange(x, there, comm)
        mixed = ct.causal_conv1d(self.mix(y), self.taps, before, comm, None, "silu")
        q, k, v = (t.reshape(-1, heads, dim).contiguous() for t in mixed.chunk(3, 1))
        g, beta = self.gates(y).sigmoid().chunk(2, 1)
        o = ct.gated_delta_rule(q, k, v, -g.contiguous(), beta.contiguous(), states, comm)
        return x + ct.exchange(self.out(o.flatten(1)), back, comm)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, *args):
        x, *more = args
        for block in self.blocks:
            x = block(x, *more)
        return x


def plans_of(batch, comm):
    zigzag, sequential = (cpx.shard(batch, layout(comm.ranks)) for layout in (cpx.zigzag, cpx.sequential))
    there = ct.relayout(zigzag, sequential, comm)
    return zigzag, (there, there.transposed(), ct.halo(sequential, comm, 3), ct.carry(sequential, comm), comm)


def made(seed=0):
    torch.manual_seed(seed)
    return Model()


def data(seed):
    return torch.randn(2, sum(lengths), hidden, generator=torch.Generator().manual_seed(seed))


def right_gradients(seeds):
    """Returns the gradients of one rank on the CPU, in float64, summed over batches."""
    model = made().double()

    def program(comm):
        for seed in seeds:
            x, up = data(seed).double()
            _, plans = plans_of(cpx.thd.from_lengths(lengths), comm)
            model(x, *plans).backward(up)

    cpx.run(1, lambda of: program(ct.communicator(of)))
    return {name: p.grad for name, p in model.named_parameters()}


def compare(way, comm, device, seed, wanted):
    """Compares the gradients that a way of training gives on this rank with those wanted, which are sums over ranks."""
    zigzag, plans = plans_of(cpx.thd.from_lengths(lengths), comm)
    model = made().to(device)
    if "compiled" in way:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    if "fsdp" in way:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
    else:
        model = DistributedDataParallel(model)
    x, up = (t[torch.from_numpy(zigzag.global_rows(comm.rank))].to(device) for t in data(seed))
    for _ in range(2):  # the second runs what the first has made
        model.zero_grad()
        model(x, *plans).backward(up)
    for name, p in model.named_parameters():
        got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        right = wanted[name.removeprefix("module.")]
        off = (got.double().cpu() * dist.get_world_size() - right).abs().max() / right.abs().max()
        assert off < 1e-5, f"{way}, {name}: {off:.2e} off"  # of means over ranks, as both take them


def member(rank, ranks, store, wanted, errors):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        alone = [dist.new_group([r]) for r in range(ranks)]
        for way in ways:
            compare(way, ct.communicator(alone[rank]), torch.device("cpu"), rank, wanted)
    except BaseException:
        errors.put(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(world > 1, reason="wants processes of its own")
def test_sharded_and_replicated_layers_on_the_cpu_have_the_gradients_of_one_rank(tmp_path):
    spawn = mp.get_context("spawn")
    errors = spawn.Queue()
    args = 2, tmp_path / "store", right_gradients([0, 1]), errors
    ranks = [spawn.Process(target=member, args=(r, *args), daemon=True) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
        if process.is_alive():
            process.kill()
    assert all(process.exitcode == 0 for process in ranks), errors.get(timeout=5) if not errors.empty() else "it hung"


@pytest.mark.skipif(world == 1 or torch.cuda.device_count() < world, reason="wants ranks by torchrun, a GPU each")
def test_sharded_and_replicated_layers_under_context_parallelism_have_the_gradients_of_one_rank():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    comm = ct.communicator(deadline=60.0)
    try:
        wanted = right_gradients([5])
        for way in ways:
            compare(way, comm, device, 5, wanted)
        comm.wait()
    finally:
        comm.of.leave()
        dist.destroy_process_group()
