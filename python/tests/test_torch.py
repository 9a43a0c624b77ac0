# SPDX-License-Identifier: Apache-2.0
"""cpx.torch on ranks that are threads: results and gradients against one rank, torch.compile, checkpoints, errors."""

import copy
import gc
import importlib.util
import inspect
import math
import os
import subprocess
import sys
import time
import tracemalloc
import typing
import xml.dom.minidom
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are threads: those of torch beside them cost more than they bring
torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.utils.checkpoint  # noqa: E402
from torch import library  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import cpx  # noqa: E402
import cpx.torch as ct  # noqa: E402
import ranks  # noqa: E402
from cpx import _ext  # noqa: E402
from cpx.torch import _group, _objects, _operator  # noqa: E402
from products import FixedProduct  # noqa: E402

batch = cpx.thd([0, 5, 5, 6, 70, 147])
heads = cpx.Heads(2, 4, 8, 6)
recurrences = ["gated_delta_rule", "kimi_delta_attention", "head_decay_attention", "channel_decay_attention"]
within = {torch.float64: 1e-10, torch.float32: 1e-5}


def whole(sharding, parts):
    return torch.from_numpy(ranks.whole(sharding, [p.detach().numpy() for p in parts]))


def share(sharding, comm, x):
    """Returns the rank's rows of x, which want a gradient."""
    return x[torch.from_numpy(sharding.global_rows(comm.rank))].detach().clone().requires_grad_(x.is_floating_point())


def numbers(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def near(a, b, dtype):
    scale = max(1.0, b.abs().max().item())
    assert (a - b).abs().max().item() <= within[dtype] * scale


def delta_inputs(name, dtype=torch.float64):
    tokens, (key_heads, value_heads, key_dim, value_dim) = batch.tokens, heads
    g = (tokens, value_heads, key_dim) if name in ("kimi_delta_attention", "channel_decay_attention") else (
        tokens, value_heads
    )
    made = [
        numbers(tokens, key_heads, key_dim, dtype=dtype, seed=1),
        numbers(tokens, key_heads, key_dim, dtype=dtype, seed=2),
        numbers(tokens, value_heads, value_dim, dtype=dtype, seed=3),
        -numbers(*g, dtype=dtype, seed=4).abs(),
    ]
    return made + [numbers(tokens, value_heads, dtype=dtype, seed=5).sigmoid()] * ("delta" in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_exchange_moves_the_bits_of_any_type(world, dtype):
    source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.striped(world), scope="batch")
    x = (numbers(batch.tokens, 3, 2) * 100).to(dtype)

    def program(comm):
        y = ct.exchange(share(source, comm, x), ct.relayout(source, target, comm), comm)
        return torch.equal(y, share(target, comm, x)) and y.dtype == dtype

    assert all(cpx.run(world, program))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_gradient_of_an_exchange_comes_back_and_is_added_where_rows_were_copied(world):
    source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world))
    every = cpx.replicated(world, batch)
    x, by = numbers(batch.tokens, 4), numbers(batch.tokens, 4, seed=1)

    def program(comm):
        a = share(source, comm, x)
        (ct.exchange(a, ct.relayout(source, target, comm), comm) * share(target, comm, by)).sum().backward()
        b = share(source, comm, x)
        ct.exchange(b, ct.relayout(source, every, comm), comm).sum().backward()
        return torch.equal(a.grad, share(source, comm, by)) and torch.equal(b.grad, torch.full_like(b, world))

    assert all(cpx.run(world, program))


def test_an_exchange_from_tokens_to_heads_has_rows_of_another_width():
    world, sections = 2, [(4, 3), (2, 5)]
    source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.head_sharded(world, batch, sections)
    x = numbers(batch.tokens, 22)

    def program(comm):
        mine = share(source, comm, x)
        y = ct.exchange(mine, ct.relayout(source, target, comm), comm)
        (y * y).sum().backward()
        right = torch.from_numpy(ranks.shard(target, comm.rank, x.numpy()))
        return torch.equal(y, right) and torch.equal(mine.grad, 2 * mine.detach())

    assert all(cpx.run(world, program))


@pytest.mark.parametrize("world", [2, 3])
def test_shifted_rows_and_sums_have_their_gradients(world):
    sharding = cpx.shard(batch, cpx.zigzag(world))
    x, by = numbers(batch.tokens, 2), numbers(batch.tokens, 2, seed=1)

    def program(w):
        s = cpx.shard(batch, cpx.zigzag(w))

        def rank(comm):
            mine = share(s, comm, x)
            y = ct.shift_rows(mine, ct.halo(s, comm, 2, "after"), comm, fill=7)
            total = ct.sum_over_ranks((y * share(s, comm, by)).sum(0), comm)
            (total * total).sum().backward()
            return y, mine.grad / w, total.detach()  # the loss is on every rank: its sum is differentiated

        return cpx.run(w, rank)

    one, many = program(1), program(world)
    assert torch.equal(whole(sharding, [r[0] for r in many]), one[0][0])
    torch.testing.assert_close(whole(sharding, [r[1] for r in many]), one[0][1], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(r[2], many[0][2]) for r in many)


def convolved(world, dtype, order):
    sharding = cpx.shard(batch, cpx.zigzag(world))
    x, by = numbers(batch.tokens, 6, dtype=dtype), numbers(batch.tokens, 6, dtype=dtype, seed=1)

    def program(comm):
        weight = numbers(6, 4, dtype=dtype, seed=2).requires_grad_()
        bias = numbers(6, dtype=dtype, seed=3).requires_grad_()
        mine = share(sharding, comm, x)
        plan = ct.halo(sharding, comm, 3)
        y = ct.causal_conv1d(mine, weight, plan, comm, bias, "silu", order=order)
        (y * share(sharding, comm, by)).sum().backward()
        return y, mine.grad, cpx.sum_over_ranks(weight.grad, comm.of), cpx.sum_over_ranks(bias.grad, comm.of)

    made = cpx.run(world, lambda comm: program(ct.communicator(comm)))
    return [whole(sharding, [r[0] for r in made]), whole(sharding, [r[1] for r in made]), made[0][2], made[0][3]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("world", [2, 3])
def test_a_convolution_is_that_of_one_rank(world, dtype):
    for a, b in zip(convolved(world, dtype, "by_rank"), convolved(1, dtype, "by_rank")):
        near(a, b, dtype)
    for a, b in zip(convolved(world, dtype, "by_row"), convolved(1, dtype, "by_row")):
        assert torch.equal(a, b)


def recurred(name, world, dtype, how, cut, start=False):
    sharding = cpx.shard(batch, cpx.zigzag(world), cut=cut)
    inputs, by = delta_inputs(name, dtype), numbers(batch.tokens, *heads[1::2], dtype=dtype, seed=6)
    states = numbers(batch.sequences, heads.value_heads * heads.key_dim * heads.value_dim, dtype=dtype, seed=7)

    def program(comm):
        mine = [share(sharding, comm, x) for x in inputs]
        plan = ct.carry(sharding, comm, how)
        run = getattr(ct, name)
        if not start:
            o = run(*mine, plan, comm, chunk=8)
            (o * share(sharding, comm, by)).sum().backward()
            return [o, *(x.grad for x in mine)], []
        initial = states.clone().requires_grad_()
        o, final = run(*mine, plan, comm, chunk=8, initial=initial, final=True)
        ((o * share(sharding, comm, by)).sum() + (final * final).sum()).backward()
        return [o, *(x.grad for x in mine)], [final.detach(), initial.grad]

    made = cpx.run(world, lambda comm: program(ct.communicator(comm)))
    rows = [whole(sharding, parts) for parts in zip(*(r[0] for r in made))]
    return rows + [sum(parts) for parts in zip(*(r[1] for r in made))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", recurrences)
def test_a_recurrence_is_that_of_one_rank(name, dtype):
    for a, b in zip(recurred(name, 2, dtype, "scan", cpx.balanced), recurred(name, 1, dtype, "scan", cpx.balanced)):
        near(a, b, dtype)


@pytest.mark.parametrize("name", recurrences)
def test_a_serial_recurrence_on_aligned_cuts_is_bitwise_that_of_one_rank(name):
    for a, b in zip(
        recurred(name, 3, torch.float32, "serial", cpx.aligned(8)),
        recurred(name, 1, torch.float32, "serial", cpx.aligned(8)),
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", recurrences)
def test_states_before_and_behind_the_batch_have_gradients(name):
    for a, b in zip(
        recurred(name, 2, torch.float64, "scan", cpx.balanced, start=True),
        recurred(name, 1, torch.float64, "scan", cpx.balanced, start=True),
    ):
        near(a, b, torch.float64)


@pytest.mark.parametrize("how", ["scan", "serial"])
def test_states_are_on_all_ranks_or_on_none_and_a_loss_may_see_those_of_one(how):
    sharding = cpx.shard(batch, cpx.sequential(2))
    inputs, states = delta_inputs("gated_delta_rule"), heads.value_heads * heads.key_dim * heads.value_dim

    def program(comm, some):
        comm = ct.communicator(comm)
        mine, plan = [share(sharding, comm, x) for x in inputs], ct.carry(sharding, comm, how)
        initial = torch.zeros(batch.sequences, states, dtype=torch.float64) if some and comm.rank else None
        o, final = ct.gated_delta_rule(*mine, plan, comm, initial=initial, final=True)
        (o.sum() + final.sum() if comm.rank else o.sum()).backward()
        return [x.grad for x in mine]

    def one(comm):
        whole_inputs, all_of = [x.clone().requires_grad_() for x in inputs], cpx.shard(batch, cpx.sequential(1))
        o, final = ct.gated_delta_rule(*whole_inputs, ct.carry(all_of, comm, how), comm, final=True)
        (o.sum() + final.sum()).backward()  # all sequences end on the last of two ranks
        return [x.grad for x in whole_inputs]

    with pytest.raises(cpx.Error, match=r"gated_delta_rule: .*initial states.*none \(rank 0\), given \(rank 1\)"):
        cpx.run(2, program, True)
    made = cpx.run(2, program, False)
    expected = one_rank(one)
    for i, wanted in enumerate(expected):
        near(whole(sharding, [grads[i] for grads in made]), wanted, torch.float64)


@pytest.mark.parametrize("name", recurrences)
def test_a_scale_of_nothing_is_nothing_and_an_integer_fills_as_it_is(name):
    def program(comm):
        s = cpx.shard(batch, cpx.zigzag(1))
        inputs = [x.requires_grad_() for x in delta_inputs(name)]
        o = getattr(ct, name)(*inputs, ct.carry(s, comm), comm, scale=0.0)
        o.sum().backward()
        assert not o.any() and not inputs[2].grad.any()
        labels = ct.shift_rows(torch.zeros(batch.tokens, 1, dtype=torch.int64), ct.halo(s, comm, 1), comm, 2**53 + 1)
        assert labels.max() == 2**53 + 1

    one_rank(program)


def test_a_recurrence_runs_on_a_share_of_the_heads():
    inputs = delta_inputs("gated_delta_rule")
    one = recurred("gated_delta_rule", 1, torch.float64, "serial", cpx.balanced)[0]

    def program(comm):
        def mine(x, n):
            first, last = sharding.heads(comm.rank, n)
            return x[:, first:last].contiguous().requires_grad_()

        sharding = cpx.head_sharded(2, batch, [(2, 8), (2, 8), (4, 6)])
        plan = ct.carry(sharding, comm, "serial", heads)
        o = ct.gated_delta_rule(*(mine(x, n) for x, n in zip(inputs, (2, 2, 4, 4, 4))), plan, comm, chunk=8)
        o.sum().backward()
        return torch.equal(o, mine(one, 4))

    assert all(cpx.run(2, program))


layer_heads, hidden = cpx.Heads(2, 4, 6, 5), 7


def layer_weights(dtype=torch.float64):
    """Returns the weights of a gated delta net of `layer_heads`, which want gradients."""
    qkv, v = 2 * 2 * 6 + 4 * 5, 4 * 5
    shapes = [(qkv, hidden), (v, hidden), (4, hidden), (4, hidden), (qkv, 1, 4), (4,), (4,), (5,), (hidden, v)]
    return {
        name: numbers(*shape, dtype=dtype, seed=n).requires_grad_()
        for n, (name, shape) in enumerate(zip(cpx.gated_delta_net.parameters, shapes))
    }


def layered(sharding, how, linear):
    """Returns y, dx, and the weights' gradients of all ranks."""
    x, dy = numbers(batch.tokens, hidden, seed=20), numbers(batch.tokens, hidden, seed=21)

    def program(comm):
        weights, mine = layer_weights(), share(sharding, comm, x)
        plan = ct.gated_delta_net_plan(sharding, layer_heads, comm, how, chunk=8)
        assert ct.gated_delta_net_plan(sharding, layer_heads, comm, how, chunk=8) is plan
        y = ct.gated_delta_net(mine, weights, plan, comm, linear=linear)
        y.backward(share(sharding, comm, dy).detach())
        return y, mine.grad, [cpx.sum_over_ranks(w.grad, comm.of) for w in weights.values()]

    y, dx, dweights = zip(*cpx.run(sharding.ranks, lambda comm: program(ct.communicator(comm))))
    return [whole(sharding, y), whole(sharding, dx), *dweights[0]]


@pytest.mark.parametrize("how", ["scan", "serial", "heads"])
def test_a_layer_is_that_of_package_cpx_with_its_gradients(how):
    weights = {name: w.detach().numpy() for name, w in layer_weights().items()}
    x, dy = (numbers(batch.tokens, hidden, seed=s).numpy() for s in (20, 21))

    def alone(comm):
        net = cpx.gated_delta_net(cpx.shard(batch, cpx.sequential(1)), 0, hidden, layer_heads, "serial", chunk=8)
        saved = net.new_saved()
        y = net(weights, x, comm, saved=saved)
        dx, dweights = net.backward(weights, x, saved, dy, comm)
        return [y, dx, *dweights.values()]

    expected = cpx.run(1, alone)[0]
    for sharding in (
        cpx.shard(batch, cpx.sequential(1)), cpx.shard(batch, cpx.striped(2)),
        cpx.shard(batch, cpx.zigzag(3), scope="batch"),  # two ranks have a key head
        cpx.shard(batch, cpx.zigzag(5)),  # two ranks have a value head
    ):
        for got, right in zip(layered(sharding, how, torch.nn.functional.linear), expected):
            near(got, torch.from_numpy(right).reshape(got.shape), torch.float64)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_layer_widens_a_log_and_dt_bias(kind):
    x = numbers(batch.tokens, hidden, seed=20)

    def program(comm):
        comm = ct.communicator(comm)
        plan = ct.gated_delta_net_plan(cpx.shard(batch, cpx.sequential(1)), layer_heads, comm, chunk=8)
        weights = {name: w.detach() for name, w in layer_weights().items()}
        given = {name: weights[name].to(kind).requires_grad_() for name in ("A_log", "dt_bias")}
        wide = {name: w.detach().double() for name, w in given.items()}
        y = ct.gated_delta_net(x, weights | given, plan, comm)
        assert not torch.equal(wide["A_log"], weights["A_log"])
        assert torch.equal(y, ct.gated_delta_net(x, weights | wide, plan, comm))
        y.sum().backward()
        assert all(w.grad.dtype is kind for w in given.values())

    cpx.run(1, program)


@pytest.mark.parametrize("how", ["serial", "heads"])
def test_a_layer_is_bitwise_that_of_one_rank_with_products_whose_rows_are(how):
    one = layered(cpx.shard(batch, cpx.sequential(1)), "serial", FixedProduct.apply)
    for world in (2, 3):
        got = layered(cpx.shard(batch, cpx.zigzag(world), cut=cpx.aligned(8)), how, FixedProduct.apply)
        assert same(got[:2], one[:2])


def under_autocast(kind, call, *inputs):
    """Returns what a call gives under autocast, and gradients, behind it, of inputs."""
    with torch.autocast("cpu", kind):
        y = call(*inputs)
    return y, *torch.autograd.grad(y.float().square().sum(), inputs)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["scan", "heads"])
def test_a_layer_of_float32_weights_runs_under_autocast(how, kind):
    sharding = cpx.shard(batch, cpx.zigzag(2))
    whole_x = numbers(batch.tokens, hidden, dtype=torch.float32)

    def program(comm):
        comm = ct.communicator(comm)
        plan = ct.gated_delta_net_plan(sharding, layer_heads, comm, how, chunk=8)
        weights = {n: (w / 4).detach().requires_grad_() for n, w in layer_weights(torch.float32).items()}
        x = share(sharding, comm, whole_x).detach().requires_grad_()

        def layer(x, *weights_of_layer):
            return ct.gated_delta_net(x, dict(zip(weights, weights_of_layer)), plan, comm)

        right = layer(x, *weights.values())
        right = right, *torch.autograd.grad(right.square().sum(), (x, *weights.values()))
        for given in x, x.detach().to(kind).requires_grad_():  # as another layer under autocast hands it on
            found = under_autocast(kind, layer, given, *weights.values())
            assert found[0].dtype is kind and found[1].dtype is given.dtype
            assert all(d.dtype is torch.float32 for d in found[2:])
            for name, a, b in zip(("y", "dx", *weights), found, right):
                assert (a.float() - b).norm() < (0.1 if kind is torch.bfloat16 else 0.0125) * b.norm(), name
        with torch.autocast("cpu", kind, enabled=False):
            with pytest.raises(cpx.Error, match="dtype of in_proj_qkv.weight: expected"):
                layer(x.to(kind), *weights.values())

    cpx.run(2, program)


def test_operators_with_weights_take_other_dtypes_under_autocast():
    def program(comm):
        plan = ct.halo(cpx.shard(batch, cpx.zigzag(1)), comm, 3)
        x, weight, bias = (numbers(*s, dtype=torch.float32) for s in ((batch.tokens, 4), (4, 4), (4,)))
        half = x.bfloat16()
        conv, norm = lambda x, w, b: ct.causal_conv1d(x, w, plan, comm, b), ct.gated_rms_norm
        for call, inputs in (conv, (half, weight, bias)), (norm, (half, x, bias)):
            inputs = [t.detach().requires_grad_() for t in inputs]
            y, *gradients = under_autocast(torch.bfloat16, call, *inputs)
            assert torch.equal(y, call(*(t.float() for t in inputs)))  # where the host computes
            assert [d.dtype for d in gradients] == [t.dtype for t in inputs]
            with pytest.raises(cpx.Error, match="dtype of "):
                call(*inputs)
            with pytest.raises(cpx.Error, match="device of |meta"):
                call(*(t.to("meta") if t is inputs[0] else t for t in inputs))  # of which there is no autocast
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(cpx.Error, match="dtype of "):
                call(inputs[0].double(), *inputs[1:])  # as torch's, which leave float64
        torch._dynamo.reset()
        compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, weight, bias), conv(x, weight, bias))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(compiled(half, weight, bias), conv(half, weight, bias))
            assert torch.equal(compiled(x, weight.bfloat16(), bias), conv(x, weight.bfloat16(), bias))

    one_rank(program)


def attended(world, dtype, how):
    of = cpx.AttentionHeads(4, 2, 6)
    rows = cpx.shard(batch, cpx.zigzag(world))
    every = cpx.replicated(world, batch)
    by_heads = [cpx.head_sharded(world, batch, [(n, of.dim)]) for n in (of.query_heads, of.key_heads)]
    x, by = numbers(batch.tokens, 8 * of.dim, dtype=dtype), numbers(batch.tokens, 4 * of.dim, dtype=dtype, seed=1)
    frequencies = torch.from_numpy(cpx.rotary_frequencies(1e4, 6, "float64" if dtype == torch.float64 else "float32"))

    def program(comm):
        comm = ct.communicator(comm)
        mine = share(rows, comm, x)
        q, k, v = (part.contiguous() for part in mine.split([4 * of.dim, 2 * of.dim, 2 * of.dim], dim=1))
        positions = torch.from_numpy(rows.positions(comm.rank))
        q, k = (ct.rotary(part, positions, frequencies, of.dim) for part in (q, k))
        queries, keys = (rows, every) if how == "tokens" else by_heads
        k, v = (ct.exchange(part, ct.relayout(rows, keys, comm), comm) for part in (k, v))
        if how == "heads":
            q = ct.exchange(q, ct.relayout(rows, queries, comm), comm)
        o = ct.attention(q, k, v, ct.attention_plan(queries, keys, of, comm), comm)
        if how == "heads":
            o = ct.exchange(o, ct.relayout(queries, rows, comm), comm)
        (o * share(rows, comm, by)).sum().backward()
        return o, mine.grad

    return [whole(rows, parts) for parts in zip(*cpx.run(world, program))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("how", ["tokens", "heads"])
def test_attention_and_rotary_are_those_of_one_rank(how, dtype):
    one = attended(1, dtype, how)
    for a, b in zip(attended(2, dtype, how), one):
        near(a, b, dtype)
    assert torch.equal(attended(2, dtype, "heads")[0], one[0])


def test_attention_is_torchs():
    q, k, v = (numbers(10, 2, 3, seed=s).requires_grad_() for s in range(3))

    def program(comm):
        sharding = cpx.shard(small, cpx.zigzag(1))
        plan = ct.attention_plan(sharding, cpx.replicated(1, small), cpx.AttentionHeads(2, 2, 3), comm)
        return ct.attention(q, k, v, plan, comm)

    right = [
        torch.nn.functional.scaled_dot_product_attention(
            *(t[a:b].transpose(0, 1) for t in (q, k, v)), is_causal=True
        ).transpose(0, 1)
        for a, b in ((0, 3), (3, 10))
    ]
    torch.testing.assert_close(one_rank(program), torch.cat(right))


def test_rows_come_to_their_experts_and_back_with_their_gradients():
    chosen = numbers(batch.tokens, 6, seed=1).argsort(1)[:, :2]
    x, upstream = numbers(batch.tokens, 4), numbers(batch.tokens, 2, 4, seed=2)

    def mix(world):
        sharding = cpx.shard(batch, cpx.zigzag(world))

        def program(comm):
            own = torch.from_numpy(sharding.global_rows(comm.rank))
            mine = share(sharding, comm, x)
            at = ct.ExpertExchange(chosen[own], 6, own.numpy(), comm)
            each = 6 // world
            assert at.own == (each * comm.rank, each * (comm.rank + 1))
            assert at.count == at.begins[-1] == len(at.places)
            rows = at.to_experts(mine)
            weight = torch.arange(*at.own).repeat_interleave(torch.from_numpy(at.begins).diff()) + 1.0
            y = at.to_tokens(rows * weight[:, None])
            back = at.to_experts(y, 4)
            assert torch.equal(back, rows * weight[:, None])
            (dx,) = torch.autograd.grad([y, back], mine, [share(sharding, comm, upstream), torch.ones_like(back)])
            return y, dx

        y, dx = zip(*cpx.run(world, program))
        return whole(sharding, y), whole(sharding, dx)

    weight = chosen[..., None] + 1.0
    right = weight * x[:, None], (weight * (upstream + 1)).sum(1)
    for world in (1, 2, 3):
        for got, expected in zip(mix(world), right):
            near(got, expected, torch.float64)


media = cpx.media([(1, 4, 6), (1, 2, 4)], [(2, 4, 4)])
pictured = cpx.thd.from_lengths([14, 7, 12])
image, video = 100, 101
ids = torch.tensor([1] * 5 + [image] * 6 + [1] * 8 + [image] * 2 + [video] * 4 + [1] * 2 + [video] * 4 + [1] * 2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_positions_of_images_and_videos_are_those_of_the_whole_batch(world):
    sharding = cpx.shard(pictured, cpx.zigzag(world))
    axes, deltas = cpx.batch_mrope_positions(media, pictured, ids.numpy(), image, video)

    def program(comm):
        comm = ct.communicator(comm)
        at = ct.mrope_positions(media, sharding, share(sharding, comm, ids), comm, image=image, video=video)
        own = sharding.global_rows(comm.rank)
        assert at.axes.dtype is torch.int64 and torch.equal(at.axes, torch.from_numpy(axes[:, own]))
        assert torch.equal(at.placeholders("video"), (ids[own] == video).nonzero()[:, 0])
        assert torch.equal(at.deltas(comm), torch.from_numpy(deltas))

    cpx.run(world, program)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_features_come_to_their_placeholders_and_their_gradients_home(world, kind, dtype):
    held = (ids == (image if kind == "image" else video))[:, None]
    x, features = numbers(pictured.tokens, 4, dtype=dtype), numbers(media.rows(kind), 4, dtype=dtype, seed=1)
    by, deep_by = (numbers(pictured.tokens, 4, dtype=dtype, seed=s) for s in (2, 3))
    sharding, tower = cpx.shard(pictured, cpx.zigzag(world)), cpx.features_by_item(media, kind, world)

    def program(comm):
        comm = ct.communicator(comm)
        at = ct.mrope_positions(media, sharding, share(sharding, comm, ids), comm, image=image, video=video)
        plan, results = ct.relayout(tower, at.features(kind), comm), []
        for run, scale in (ct.put_features, by), (ct.add_features, deep_by):
            text, made = share(sharding, comm, x), share(tower, comm, features)
            y = run(text, ct.exchange(made, plan, comm), at, kind)
            (y * share(sharding, comm, scale).detach()).sum().backward()
            assert torch.equal(text.detach(), share(sharding, comm, x))
            results += y, text.grad, made.grad
        return results

    put, dput, dfeatures, added, dadded, ddeep = zip(*cpx.run(world, program))
    at_rows = torch.zeros_like(x).masked_scatter(held, features)
    assert torch.equal(whole(sharding, put), torch.where(held, at_rows, x))
    assert torch.equal(whole(sharding, dput), by.masked_fill(held, 0))
    assert torch.equal(whole(tower, dfeatures), by[held[:, 0]])
    assert torch.equal(whole(sharding, added), torch.where(held, x + at_rows, x))
    assert torch.equal(whole(sharding, dadded), deep_by)
    assert torch.equal(whole(tower, ddeep), deep_by[held[:, 0]])


def one_rank(program):
    """Runs a program in this thread: torch 2.11 ends the process if a second thread traces."""
    return program(ct.communicator(cpx.threads(1)[0]))


small = cpx.thd([0, 3, 3, 10])  # an image lies in its first sequence


def pictures(comm):
    """Returns the positions of a small batch, one image of 2 features in 10 rows, on one rank."""
    tokens = torch.tensor([1, image, image, 1, 1, 1, 1, 1, 1, 1])
    return ct.mrope_positions(cpx.media([(1, 2, 4)]), cpx.shard(small, cpx.zigzag(1)), tokens, comm, image=image)


def calls(comm):
    """Returns (operator, its arguments) of every operator, and of gradients, on one rank."""
    zigzag, sequential = cpx.shard(small, cpx.zigzag(1)), cpx.shard(small, cpx.sequential(1))
    relayout, halo = ct.relayout(zigzag, sequential, comm), ct.halo(sequential, comm, 3)
    x = numbers(10, 4).requires_grad_()
    weight, bias = numbers(4, 4, seed=1).requires_grad_(), numbers(4, seed=2).requires_grad_()
    ops = torch.ops.cpx
    yield ops.exchange, (x, relayout.handle, comm.handle, [10, 4])
    yield ops.exchange_backward, (x.detach(), relayout.handle, comm.handle, [10, 4])
    yield ops.shift_rows, (x, halo.handle, comm.handle, 1.0)
    yield ops.shift_rows_backward, (x.detach(), halo.handle, comm.handle)
    yield ops.sum_over_ranks, (x, comm.handle)
    yield ops.gated_rms_norm, (x, numbers(10, 4, seed=3).requires_grad_(), bias[:2], 1e-6)
    yield ops.gated_rms_norm_backward, (x.detach(), numbers(10, 4, seed=3), bias.detach()[:2], numbers(10, 4), 1e-6)
    yield ops.causal_conv1d, (x, weight, bias, "silu", "by_rank", halo.handle, comm.handle)
    yield ops.causal_conv1d, (x, weight, None, None, "by_row", halo.handle, comm.handle)
    yield ops.causal_conv1d_backward, (
        x.detach(), weight.detach(), None, x.detach(), None, "by_row", halo.handle, comm.handle
    )
    gates = x, numbers(10, 4, seed=3).requires_grad_(), bias, weight[0].detach().clone().requires_grad_()
    yield ops.delta_gates, gates
    yield ops.delta_gates_backward, (*(t.detach() for t in gates), numbers(10, 4), numbers(10, 4, seed=1))
    at = ct.ExpertExchange(torch.arange(20).reshape(10, 2) % 3, 3, range(10), comm)
    yield ops.to_experts, (x, [20, 4], 10, 2, at.handle)
    yield ops.to_experts, (x, [20, 2], 10, 2, at.handle)
    yield ops.to_experts_backward, (numbers(20, 4), [10, 2, 4], at.handle)
    yield ops.to_tokens, (numbers(20, 3, 2).requires_grad_(), 10, 2, at.handle)
    yield ops.to_tokens_backward, (numbers(10, 2, 4), [20, 4], at.handle)
    shown, features = pictures(comm), numbers(2, 4, seed=1).requires_grad_()
    for name in ("put_features", "add_features"):
        yield getattr(ops, name), (x, features, shown.handle, "image")
        yield getattr(ops, name + "_backward"), (x.detach(), shown.handle, "image", [2, 4])
    plan = ct.attention_plan(zigzag, cpx.replicated(1, small), cpx.AttentionHeads(2, 1, 3), comm)
    q, k, v = numbers(10, 2, 3).requires_grad_(), numbers(10, 1, 3, seed=1), numbers(10, 1, 3, seed=2).requires_grad_()
    yield ops.attention, (q, k, v, None, 2, plan.handle, comm.handle)
    yield ops.rotary, (
        x, torch.arange(10), torch.tensor([1.0, 0.1], dtype=torch.float64), 4, None, "fp32_inside"
    )
    for name in recurrences:
        plan = ct.carry(sequential, comm)
        wide = (10, 2, 3) if name in ("kimi_delta_attention", "channel_decay_attention") else (10, 2)
        beta = numbers(10, 2, seed=3).sigmoid().requires_grad_() if "delta" in name else None
        q, k, v = (numbers(10, 2, 3, seed=s).requires_grad_() for s in (4, 5, 6))
        g = (-numbers(*wide, seed=7).abs()).requires_grad_()
        initial = numbers(3, 2 * 3 * 3, seed=8).requires_grad_()
        sizes = [plan.segments, plan.maps, plan.sequences, 2, 0]
        yield getattr(ops, name), (
            q, k, v, g, beta, initial, True, True, 4, True, 0.0, [2, 2, 3, 3], sizes, plan.handle, comm.handle
        )


def test_torch_itself_finds_nothing_wrong_with_the_operators():
    def program(comm):
        for op, args in calls(comm):
            assert set(library.opcheck(op.default, args).values()) == {"SUCCESS"}

    one_rank(program)


def test_modes_classes_of_tensors_and_profiles_see_the_operators():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.add(str(op))
            return op(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            functions.add(getattr(function, "__name__", str(function)).partition(".")[0])
            return super().__torch_function__(function, types, args, kwargs)

    def program(comm):
        zigzag = cpx.shard(small, cpx.zigzag(1))
        relayout, halo, carry = ct.relayout(zigzag, zigzag, comm), ct.halo(zigzag, comm, 3), ct.carry(zigzag, comm)
        weight = numbers(4, 4, seed=1)

        def run(x):
            y = ct.causal_conv1d(ct.exchange(x, relayout, comm), weight.to(x.device), halo, comm)
            q = y.reshape(10, 2, 2)
            return ct.head_decay_attention(q, q, q, -q[..., 0].abs(), carry, comm)

        x = numbers(10, 4).requires_grad_()
        right = run(x)
        right.sum().backward()
        with Seen():
            y = run(x)
            (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, right) and torch.equal(dx, x.grad)
        assert isinstance(run(x.detach().as_subclass(Own)), Own) and "exchange" in functions
        with torch.profiler.profile() as profile:
            run(x)
        names = {e.name for e in profile.events()}
        assert names >= {"cpx::exchange", "cpx::causal_conv1d", "cpx::head_decay_attention"}, names

    seen, functions = set(), set()
    one_rank(program)
    for name in ("exchange", "causal_conv1d", "head_decay_attention"):
        assert {f"cpx.{name}.default", f"cpx.{name}_backward.default"} <= seen


def test_what_torch_must_see_is_told_from_what_needs_the_kernel_alone():
    """None: torch must see it, or it does not fit; else whether autograd records a call."""
    plain, x, y = {torch.Tensor, torch.nn.Parameter}, torch.zeros(3), torch.zeros(3, requires_grad=True)

    class Own(torch.Tensor):
        pass

    for tensors, wanted in [
        ((x, None), False), ((x, y), True), ((x, torch.nn.Parameter(x)), True), ((torch._neg_view(x), y), None),
        ((x, x.as_subclass(Own)), None), ((x, x.numpy()), None),
    ]:
        assert _ext.gradient_wanted(tensors, plain) is wanted
        named = dict(zip("qg", tensors))
        described = wanted if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else None
        assert _ext.gradient_wanted_of(named, plain, 1, 0, (), ("g",)) is described
        assert _ext.gradient_wanted_of(named, plain, 2, 0, (), ("g",)) is None  # all are on the host
        assert _ext.gradient_wanted_of({**named, "v": x.double()}, plain, 1, 0, ("v",), ("g",)) is None
    assert _ext.gradient_wanted_of({"q": x, "g": None}, plain, 1, 0, (), ()) is None
    with torch.no_grad():
        assert not _operator.check("exchange", x.device, x=y)


def test_parameters_and_lazily_negated_tensors_are_read_as_their_values():
    def program(comm):
        s = cpx.shard(small, cpx.zigzag(1))
        plan, x = ct.relayout(s, s, comm), numbers(10, 4)
        assert torch.equal(ct.exchange(torch._neg_view(x), plan, comm), -x)
        assert torch.equal(ct.exchange(torch.nn.Parameter(x), plan, comm), x)
        assert torch.equal(cpx.exchange(plan.of, torch.nn.Parameter(x), comm.of), x)

    one_rank(program)


def test_gradients_are_those_of_differences():
    def program(comm):
        sharding = cpx.shard(small, cpx.zigzag(1))
        relayout, halo = ct.relayout(sharding, cpx.shard(small, cpx.sequential(1)), comm), ct.halo(sharding, comm, 3)
        carry, check = ct.carry(sharding, comm), torch.autograd.gradcheck
        x, weight = numbers(10, 4).requires_grad_(), numbers(4, 4, seed=1).requires_grad_()
        check(lambda x: ct.exchange(x, relayout, comm), x)
        check(lambda x: ct.shift_rows(x, halo, comm), x)
        check(lambda x: ct.sum_over_ranks(x, comm), x)
        check(lambda x, w: ct.causal_conv1d(x, w, halo, comm, w[0], "silu"), (x, weight))
        check(lambda b, a, w: torch.ops.cpx.delta_gates(b, a, w[0], w[1]), (x, numbers(10, 4, seed=3), weight))
        check(lambda x, z, w: ct.gated_rms_norm(x, z, w[0, :2], 1e-3), (x, numbers(10, 4, seed=3), weight))
        shown, features = pictures(comm), numbers(2, 4, seed=2).requires_grad_()
        check(lambda x, f: ct.put_features(x, f, shown, "image"), (x, features))
        check(lambda x, f: ct.add_features(x, f, shown, "image"), (x, features))
        plan = ct.attention_plan(sharding, cpx.replicated(1, small), cpx.AttentionHeads(2, 1, 3), comm)
        q, k, v = (numbers(10, n, 3, seed=n).requires_grad_() for n in (2, 1, 1))
        check(lambda *qkv: ct.attention(*qkv, plan, comm, scale=0.7), (q, k, v))
        frequencies = torch.from_numpy(cpx.rotary_frequencies(100.0, 4, "float64"))
        check(lambda x: ct.rotary(x, torch.arange(10), frequencies, 4), x)
        for name in recurrences:
            *tensors, initial = next(a for op, a in calls(comm) if op is getattr(torch.ops.cpx, name))[:6]
            tensors = [t for t in tensors if t is not None]
            run = getattr(ct, name)
            check(lambda s, *t: run(*t, carry, comm, chunk=4, initial=s, final=True), (initial, *tensors))

    one_rank(program)


class Layer:
    """Several operators, as a model has them; plans and communicator are arguments."""

    def __init__(self, world, of=batch):
        self.zigzag, self.sequential = cpx.shard(of, cpx.zigzag(world)), cpx.shard(of, cpx.sequential(world))
        self.weight = numbers(12, 4, dtype=torch.float32, seed=9)

    def plans(self, comm):
        there, back = ct.relayout(self.zigzag, self.sequential, comm), ct.relayout(self.sequential, self.zigzag, comm)
        return there, back, ct.halo(self.sequential, comm, 3), ct.carry(self.sequential, comm, "serial")

    @staticmethod
    def forward(x, weight, there, back, halo, carry, comm):
        y = ct.causal_conv1d(ct.exchange(torch.sin(x), there, comm), weight, halo, comm, activation="silu")
        q, k, v = (t.reshape(-1, 2, 2) for t in y.split(4, dim=1))
        o = ct.gated_delta_rule(q.contiguous(), k.contiguous(), v.contiguous(), -v[..., 0].exp(), k[..., 1].sigmoid(),
                                carry, comm)
        return ct.exchange(o.reshape(-1, 4), back, comm) + x[:, :4]

    def gradients(self, comm, call):
        x = share(self.zigzag, comm, numbers(self.zigzag.batch.tokens, 12, dtype=torch.float32))
        weight = self.weight.clone().requires_grad_()
        y = call(x, weight, *self.plans(comm), comm)
        y.square().sum().backward()
        return y.detach(), x.grad, weight.grad


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_gives_the_same_bits_and_new_packings_do_not_compile_again(backend):
    torch._dynamo.reset()
    compiled = torch.compile(Layer.forward, fullgraph=True, backend=backend)
    packings = [cpx.thd([0, n, 2 * n, 64 + n]) for n in (5, 9, 21, 33, 17, 40)]

    def program(comm):
        for of in packings[:3]:
            layer = Layer(1, of)
            assert same(layer.gradients(comm, compiled), layer.gradients(comm, Layer.forward))
        with torch.compiler.set_stance("fail_on_recompile"):
            for of in packings[3:]:
                layer = Layer(1, of)
                assert same(layer.gradients(comm, compiled), layer.gradients(comm, Layer.forward))

    one_rank(program)


def test_compiled_it_runs_on_ranks_that_are_threads():
    torch._dynamo.reset()
    compiled = torch.compile(Layer.forward, fullgraph=True, backend="aot_eager")
    layer = Layer(2)

    def program(comm):
        comm = ct.communicator(comm)
        plain = layer.gradients(comm, Layer.forward)
        return all(same(layer.gradients(comm, compiled), plain) for _ in range(3))

    assert cpx.run(2, program, deadline=60) == [True, True]


@pytest.mark.parametrize("how", ["scan", "heads"])
def test_a_compiled_layer_serves_other_packings_without_another_compilation(how):
    torch._dynamo.reset()

    def forward(x, weights, plan, comm):
        return ct.gated_delta_net(x, weights, plan, comm) + x

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")

    def gradients(call, of, comm):
        sharding = cpx.shard(of, cpx.zigzag(1))
        weights, x = layer_weights(), numbers(of.tokens, hidden).requires_grad_()
        y = call(x, weights, ct.gated_delta_net_plan(sharding, layer_heads, comm, how, chunk=8), comm)
        y.square().sum().backward()
        return y.detach(), x.grad, *(w.grad for w in weights.values())

    def program(comm):
        packings = [cpx.thd([0, n, 2 * n, 64 + n]) for n in (5, 9, 21, 33)]
        for n, of in enumerate(packings):
            with torch.compiler.set_stance("fail_on_recompile" if n > 2 else "default"):
                assert same(gradients(compiled, of, comm), gradients(forward, of, comm))

    one_rank(program)


def test_compiled_features_serve_other_positions_without_another_compilation():
    torch._dynamo.reset()

    def forward(x, features, at):
        return ct.add_features(ct.put_features(torch.sin(x), features, at, "image"), 2 * features, at, "image")

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")

    def gradients(call, at):
        x, features = numbers(10, 4).requires_grad_(), numbers(2, 4, seed=1).requires_grad_()
        y = call(x, features, at)
        y.square().sum().backward()
        return y.detach(), x.grad, features.grad

    def program(comm):
        made = [pictures(comm) for _ in range(4)]
        for at in made[:2]:
            assert same(gradients(compiled, at), gradients(forward, at))
        with torch.compiler.set_stance("fail_on_recompile"):
            for at in made[2:]:
                assert same(gradients(compiled, at), gradients(forward, at))

    one_rank(program)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_the_same_bits_again(reentrant):
    layer = Layer(2)

    def program(comm):
        comm = ct.communicator(comm)

        def call(*args):
            return torch.utils.checkpoint.checkpoint(Layer.forward, *args, use_reentrant=reentrant)

        return same(layer.gradients(comm, call), layer.gradients(comm, Layer.forward))

    assert all(cpx.run(2, program))


def test_every_function_says_the_types_of_its_arguments():
    for name in ct.__all__:
        function = getattr(ct, name)
        if inspect.isfunction(function):
            told = typing.get_type_hints(function)
            assert {*inspect.signature(function).parameters, "return"} == set(told), name


def test_a_double_backward_is_refused_by_name():
    def program(comm):
        zigzag = cpx.shard(small, cpx.zigzag(1))
        halo, weight, shown = ct.halo(zigzag, comm, 3), numbers(4, 4, seed=1), pictures(comm)
        for name, call in {
            "exchange": lambda x: ct.exchange(x, ct.relayout(zigzag, zigzag, comm), comm),
            "causal_conv1d": lambda x: ct.causal_conv1d(x, weight, halo, comm),
            "put_features": lambda x: ct.put_features(x, x[:2], shown, "image"),
            "add_features": lambda x: ct.add_features(x, x[:2], shown, "image"),
            "gated_delta_rule": lambda x: ct.gated_delta_rule(
                *(x.reshape(10, 2, 2) for _ in range(3)), -x[:, :2].exp(), x[:, 2:].sigmoid().contiguous(),
                ct.carry(zigzag, comm), comm
            ),
        }.items():
            x = numbers(10, 4).requires_grad_()
            gradient = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)[0]
            with pytest.raises(cpx.Error, match=f"^test_torch.py:[0-9]+: {name}: double backward"):
                gradient.sum().backward()

    one_rank(program)


def test_a_derivative_in_forward_mode_is_refused_by_name():
    def program(comm):
        zigzag = cpx.shard(small, cpx.zigzag(1))
        relayout, halo, x = ct.relayout(zigzag, zigzag, comm), ct.halo(zigzag, comm, 3), numbers(10, 4)
        refused = r"^test_torch.py:[0-9]+: {}: forward-mode derivative: expected gradients, by backward"
        with torch.autograd.forward_ad.dual_level():
            same(ct.exchange(x, relayout, comm), x)  # that has none
            dual = torch.autograd.forward_ad.make_dual(x, x)
            with pytest.raises(cpx.Error, match=refused.format("exchange")):
                ct.exchange(dual, relayout, comm)
            with pytest.raises(cpx.Error, match=refused.format("exchange")):
                torch.ops.cpx.exchange(dual, relayout.handle, comm.handle, [10, 4])
        with pytest.raises(cpx.Error, match=refused.format("causal_conv1d")):
            torch.func.jvp(lambda w: ct.causal_conv1d(x, w, halo, comm), (numbers(4, 4),), (numbers(4, 4),))

    one_rank(program)


def wrong_calls(comm):
    zigzag = cpx.shard(small, cpx.zigzag(1))
    relayout, halo, carry = ct.relayout(zigzag, zigzag, comm), ct.halo(zigzag, comm, 3), ct.carry(zigzag, comm)
    x, w = torch.zeros(10, 4), torch.zeros(4, 4)
    delta = [torch.zeros(10, 2, 3)] * 3 + [torch.zeros(10, 2)] * 2
    yield "exchange: device of x: expected cpu.*got meta", lambda: ct.exchange(x.to("meta"), relayout, comm)
    yield "exchange: x: expected a torch.Tensor, got ndarray", lambda: ct.exchange(x.numpy(), relayout, comm)
    yield "exchange: x: expected a torch.Tensor, got NoneType", lambda: ct.exchange(None, relayout, comm)
    yield "exchange: comm: expected one of cpx.torch.communicator or of cpx.run", lambda: ct.exchange(x, relayout, None)
    yield "causal_conv1d: order: expected .*got 'by_column'", (
        lambda: ct.causal_conv1d(x, w, halo, comm, order="by_column")
    )
    yield "causal_conv1d: weight: expected a torch.Tensor", lambda: ct.causal_conv1d(x, None, halo, comm)
    yield "gated_delta_rule: q: expected", lambda: ct.gated_delta_rule(None, *delta[1:], carry, comm)
    yield "exchange: layout of x", lambda: ct.exchange(x.to_sparse(), relayout, comm)
    yield "exchange: dtype of x.*complex64", lambda: ct.exchange(x.to(torch.complex64), relayout, comm)
    yield "exchange: x: expected an array of rows", lambda: ct.exchange(torch.tensor(1.0), relayout, comm)
    yield "exchange, source: rows.*10.*9", lambda: ct.exchange(x[:9], relayout, comm)
    yield "exchange: memory of x.*side by side", lambda: ct.exchange(torch.zeros(4, 10).t(), relayout, comm)
    yield "exchange: plan: expected one of cpx.torch.relayout", lambda: ct.exchange(x, halo, comm)
    yield "exchange: comm: .*got int", lambda: ct.exchange(x, relayout, 3)
    yield "causal_conv1d: dtype of weight.*float64", lambda: ct.causal_conv1d(x, w.double(), halo, comm)
    yield "causal_conv1d: dtype of x.*float16", lambda: ct.causal_conv1d(x.half(), w.half(), halo, comm)
    yield "causal_conv1d: shape of weight", lambda: ct.causal_conv1d(x, torch.zeros(5, 4), halo, comm)
    yield "causal_conv1d: activation.*relu", lambda: ct.causal_conv1d(x, w, halo, comm, activation="relu")
    yield "gated_delta_rule: dtype of beta", lambda: ct.gated_delta_rule(*delta[:4], delta[4].double(), carry, comm)
    flat = [t.reshape(10, -1) for t in delta]
    yield "gated_delta_rule: heads", lambda: ct.gated_delta_rule(*flat, carry, comm)
    other = [*delta[:3], torch.zeros(10, 3), delta[4]]
    yield "gated_delta_rule: shape of g", lambda: ct.gated_delta_rule(*other, carry, comm)
    layer, row = ct.gated_delta_net_plan(zigzag, layer_heads, comm, chunk=8), torch.zeros(10, hidden)
    weights = layer_weights(torch.float32)
    yield "gated_delta_net: plan: expected one of cpx.torch.gated_delta_net_plan, got Carry", (
        lambda: ct.gated_delta_net(row, weights, carry, comm)
    )
    for name, wrong in (
        ("weights: expected in_proj_qkv.weight, .*got none of norm.weight", None),
        ("norm.weight: expected a torch.Tensor, got int", 3),
        ("dtype of norm.weight: expected torch.float32.*float64", torch.zeros(5, dtype=torch.float64)),
        (r"shape of norm.weight: expected \(5,\), got \(6,\)", torch.zeros(6)),
    ):
        changed = {k: w for k, w in weights.items() if k != "norm.weight"}
        if wrong is not None:
            changed["norm.weight"] = wrong
        yield "gated_delta_net: " + name, lambda changed=changed: ct.gated_delta_net(row, changed, layer, comm)
    yield "gated_delta_net: device of A_log: expected cpu", (
        lambda: ct.gated_delta_net(row, weights | {"A_log": torch.zeros(4, device="meta")}, layer, comm)
    )
    yield "gated_delta_net: rows of x: expected 10, got 9", lambda: ct.gated_delta_net(row[1:], weights, layer, comm)
    yield "gated_delta_net: shape of x", lambda: ct.gated_delta_net(row[None], weights, layer, comm)
    yield "gated_delta_net: shape of in_proj_qkv.weight", lambda: ct.gated_delta_net(row[:, 1:], weights, layer, comm)
    yield "gated_delta_net: carry: .*got 'both'", lambda: ct.gated_delta_net_plan(zigzag, layer_heads, comm, "both")
    yield "gated_delta_net: heads", lambda: ct.gated_delta_net_plan(zigzag, (1, 1, 4), comm)
    yield "gated_delta_net: kernel: expected at least 1, got 0", (
        lambda: ct.gated_delta_net_plan(zigzag, layer_heads, comm, kernel=0)
    )
    yield r"gated_delta_net: sharding: expected one of which every row is on one rank, got .*replicated\(1\)", (
        lambda: ct.gated_delta_net_plan(cpx.replicated(1, small), layer_heads, comm)
    )
    yield "gated_rms_norm: shape of z", lambda: ct.gated_rms_norm(x, x[1:], w[0])
    yield "gated_rms_norm: shape of weight", lambda: ct.gated_rms_norm(x, x, w)
    yield "gated_rms_norm: z: expected a torch.Tensor", lambda: ct.gated_rms_norm(x, None, w[0])
    yield "gated_rms_norm: .*dtype of x.*float16", lambda: ct.gated_rms_norm(x.half(), x.half(), w[0].half())
    positions, frequencies = torch.arange(10), torch.ones(2)
    yield "rotary: x: expected a torch.Tensor, got list", lambda: ct.rotary([1.0], positions, frequencies)
    yield "rotary: device of positions", lambda: ct.rotary(delta[0], positions.to("meta"), frequencies, 2)
    yield "rotary: x without head_dim", lambda: ct.rotary(x, positions, frequencies)
    yield "rotary: dtype of positions.*int32", lambda: ct.rotary(x, positions.int(), frequencies, 4)
    yield "rotary: frequencies.*no gradient", lambda: ct.rotary(x, positions, frequencies.requires_grad_(), 4)
    yield "attention: plan", lambda: ct.attention(*delta[:3], carry, comm)
    every = ct.attention_plan(zigzag, cpx.replicated(1, small), cpx.AttentionHeads(2, 2, 3), comm)
    yield "attention: .*v", lambda: ct.attention(delta[0], delta[1], delta[2][:9], every, comm)
    yield "gated_delta_rule: .*initial", lambda: ct.gated_delta_rule(*delta, carry, comm, initial=torch.zeros(3, 2))
    shown, f = pictures(comm), torch.zeros(2, 4)
    yield "put_features: dtype of features.*float64", lambda: ct.put_features(x, f.double(), shown, "image")
    yield "put_features: dtype of .*int64", lambda: ct.put_features(x.long(), f.long(), shown, "image")
    yield "put_features: device of features", lambda: ct.put_features(x, f.to("meta"), shown, "image")
    yield "put_features: .*features.*2.*3", lambda: ct.put_features(x, torch.zeros(3, 4), shown, "image")
    yield "add_features: .*x.*10.*9", lambda: ct.add_features(x[:9], f, shown, "image")
    yield "add_features: memory of features.*side by side", (
        lambda: ct.add_features(x, torch.zeros(4, 2).t(), shown, "image")
    )
    yield "add_features: kind.*text", lambda: ct.add_features(x, f, shown, "text")
    yield "add_features: positions: expected what cpx.torch.mrope_positions returns, got Relayout", (
        lambda: ct.add_features(x, f, relayout, "image")
    )
    yield "put_features: positions.*is gone", lambda: torch.ops.cpx.put_features(x, f, -1, "image")
    tokens = torch.ones(10, dtype=torch.int64)
    yield "mrope_positions: media: .*got int", lambda: ct.mrope_positions(3, zigzag, tokens, comm)
    yield "mrope_positions: sharding: .*got Relayout", lambda: ct.mrope_positions(media, relayout, tokens, comm)
    yield "mrope_positions: dtype of ids", lambda: ct.mrope_positions(media, zigzag, tokens.double(), comm)
    yield "mrope_positions: ids: .*got list", lambda: ct.mrope_positions(media, zigzag, [1], comm)
    yield "mrope_positions: image placeholders.*got 0", lambda: ct.mrope_positions(media, zigzag, tokens, comm, image)
    at = ct.ExpertExchange(torch.zeros(10, 1, dtype=torch.int64), 2, range(10), comm)
    yield "expert_exchange: chosen: expected a torch.Tensor, got ndarray", (
        lambda: ct.ExpertExchange(torch.zeros(10, 1).numpy(), 2, range(10), comm)
    )
    yield "expert_exchange: dtype of chosen.*float32", lambda: ct.ExpertExchange(x[:, :1], 2, range(10), comm)
    yield "ExpertExchange.to_experts: x: expected an array of rows", lambda: at.to_experts(torch.tensor(1.0))
    yield "expert_exchange::to_experts: .*x", lambda: at.to_experts(x[1:])
    yield "ExpertExchange.to_experts: width: expected at least 0, got -4", lambda: at.to_experts(x, -4)
    yield "expert_exchange::to_tokens: .*x", lambda: at.to_tokens(x[1:])
    yield "ExpertExchange.to_tokens: device of x", lambda: at.to_tokens(x.to("meta"))
    yield "ExpertExchange.to_experts: experts.*is gone", lambda: torch.ops.cpx.to_experts(x, [10, 4], 10, 1, -1)
    yield "exchange: plan.*is gone", lambda: torch.ops.cpx.exchange(x, -1, comm.handle, [10, 4])
    yield "gated_delta_rule: chunk: expected int, got float", (
        lambda: ct.gated_delta_rule(*delta, carry, comm, chunk=64.5)
    )
    yield "attention_plan: queries: expected cpx.Sharding, got NoneType", (
        lambda: ct.attention_plan(None, zigzag, (2, 2, 3), comm)
    )
    yield r"carry: heads: expected Sequence\[int\] or None, got int", lambda: ct.carry(zigzag, comm, heads=4)
    yield r"carry: heads: expected Sequence\[int\] or None, got str", lambda: ct.carry(zigzag, comm, heads="abcd")
    yield "relayout: source: expected cpx.Sharding, got dict", lambda: ct.relayout({}, zigzag, comm)
    yield "halo: reach: expected int, got list", lambda: ct.halo(zigzag, comm, [])
    yield r"gated_delta_net_plan: heads: expected Sequence\[int\], got int", (
        lambda: ct.gated_delta_net_plan(zigzag, 4, comm)
    )
    yield "gated_delta_net: weights: expected Mapping.*got Tensor", lambda: ct.gated_delta_net(row, row, layer, comm)
    yield "gated_rms_norm: eps: expected float, got str", lambda: ct.gated_rms_norm(x, x, w[0], "a")
    yield "put_features: kind: expected str, got int", lambda: ct.put_features(x, f, shown, 3)
    yield "mrope_positions: image: expected int or None, got str", (
        lambda: ct.mrope_positions(media, zigzag, tokens, comm, "a")
    )
    yield "ExpertExchange: experts: expected int, got str", (
        lambda: ct.ExpertExchange(torch.zeros(10, 1, dtype=torch.int64), "2", range(10), comm)
    )
    yield "ExpertExchange.to_experts: width: expected int or None, got Relayout", lambda: at.to_experts(x, relayout)
    yield "ExpertExchange.to_experts: width: expected int or None, got Tensor", lambda: at.to_experts(x, x)
    for dtype, fill, wanted in (
        (torch.int32, 2**40, "an integer of 32 bits"), (torch.int64, 0.5, "an integer of 64 bits"),
        (torch.int64, math.inf, "an integer of 64 bits"), (torch.float32, "a", "a number, got str"),
        (torch.float16, 1e6, "a number that a float of 16 bits holds"),
    ):
        yield f"shift_rows: fill: expected {wanted}", (
            lambda y=x.to(dtype), fill=fill: ct.shift_rows(y, ct.halo(zigzag, comm, 1), comm, fill)
        )


def test_a_mistake_is_named_with_the_line_of_the_caller():
    def program(comm):
        for text, call in wrong_calls(comm):
            with pytest.raises(cpx.Error, match="^test_torch.py:[0-9]+: " + text):
                call()

    one_rank(program)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_mistake_that_compiled_code_makes_has_the_line_of_the_caller(backend):
    torch._dynamo.reset()

    def program(comm):
        s = cpx.shard(small, cpx.zigzag(1))
        plan = ct.relayout(s, s, comm)
        call = torch.compile(lambda x: ct.exchange(x[:9], plan, comm) + 1, backend=backend)
        with pytest.raises(cpx.Error, match="^test_torch.py:[0-9]+: exchange, source: rows.*10.*9"):
            call(torch.zeros(10, 4))

    one_rank(program)


@pytest.mark.parametrize("wrong", [None, "nccl", torch.distributed.ProcessGroup, 0])
def test_another_object_than_a_communicator_is_refused_by_name(wrong):
    def calls_of(comm):
        s, x = cpx.shard(small, cpx.zigzag(1)), torch.zeros(10, 4)
        q, g, ids = torch.zeros(10, 2, 3), torch.zeros(10, 2), torch.ones(10, 1, dtype=torch.int64)
        every, heads = cpx.replicated(1, small), cpx.AttentionHeads(2, 2, 3)
        carry, halo, relayout = ct.carry(s, comm), ct.halo(s, comm, 3), ct.relayout(s, s, comm)
        of_heads, of_layer = ct.attention_plan(s, every, heads, comm), ct.gated_delta_net_plan(s, layer_heads, comm)
        wide = g[..., None].expand_as(q)
        return [
            ("relayout", lambda comm: ct.relayout(s, s, comm)),
            ("halo", lambda comm: ct.halo(s, comm, 3)),
            ("carry", lambda comm: ct.carry(s, comm)),
            ("attention_plan", lambda comm: ct.attention_plan(s, every, heads, comm)),
            ("gated_delta_net_plan", lambda comm: ct.gated_delta_net_plan(s, layer_heads, comm)),
            ("exchange", lambda comm: ct.exchange(x, relayout, comm)),
            ("shift_rows", lambda comm: ct.shift_rows(x, halo, comm)),
            ("sum_over_ranks", lambda comm: ct.sum_over_ranks(x, comm)),
            ("causal_conv1d", lambda comm: ct.causal_conv1d(x, torch.zeros(4, 4), halo, comm)),
            ("gated_delta_rule", lambda comm: ct.gated_delta_rule(q, q, q, g, g, carry, comm)),
            ("kimi_delta_attention", lambda comm: ct.kimi_delta_attention(q, q, q, wide, g, carry, comm)),
            ("head_decay_attention", lambda comm: ct.head_decay_attention(q, q, q, g, carry, comm)),
            ("channel_decay_attention", lambda comm: ct.channel_decay_attention(q, q, q, wide, carry, comm)),
            ("attention", lambda comm: ct.attention(q, q, q, of_heads, comm)),
            ("gated_delta_net", lambda comm: ct.gated_delta_net(torch.zeros(10, 7), {}, of_layer, comm)),
            ("expert_exchange", lambda comm: ct.ExpertExchange(ids, 2, range(10), comm)),
            ("mrope_positions", lambda comm: ct.mrope_positions(cpx.media(), s, ids[:, 0], comm)),
            ("mrope_positions", lambda comm: pictures(one).deltas(comm)),
        ]

    one = ct.communicator(cpx.threads(1)[0])
    for name, call in calls_of(one):
        text = f"^test_torch.py:[0-9]+: {name}: comm: expected one of cpx.torch.communicator or of cpx.run, got "
        with pytest.raises(cpx.Error, match=text + type(wrong).__name__):
            call(wrong)


def test_a_group_that_has_no_communicator_is_named():
    with pytest.raises(cpx.Error, match="communicator: group: .*not initialized"):
        ct.communicator()
    with pytest.raises(cpx.Error, match="communicator: group: .*got int"):
        ct.communicator(3)


@pytest.mark.skipif(importlib.util.find_spec("cpx._cuda") is not None, reason="this cpx has CUDA")
def test_a_group_on_devices_without_cuda_is_named():
    class OfNccl:
        def size(self):
            return 2

        def name(self):
            return "nccl"

        def _get_backend(self, device):
            return self

    with pytest.raises(cpx.Error, match="communicator: cpx of this process: expected one that is built with CUDA"):
        _group._of(OfNccl(), 1.0, None, 64)


def test_a_process_group_of_one_rank_has_a_communicator(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        comm = ct.communicator()
        assert (comm.rank, comm.ranks) == (0, 1) and ct.communicator(dist.group.WORLD) is comm
        x, s = torch.ones(10, 1), cpx.shard(small, cpx.zigzag(1))
        assert torch.equal(ct.exchange(x, ct.relayout(s, s, comm), comm), x)
    finally:
        dist.destroy_process_group()


def test_ranks_that_disagree_are_named_and_none_hangs():
    zigzag, sequential = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.sequential(2))

    def program(comm):
        target = zigzag if comm.rank == 0 else sequential
        ct.exchange(torch.zeros(sequential.rows(comm.rank), 1), ct.relayout(sequential, target, comm), comm)

    with pytest.raises(cpx.Error, match="target"):
        cpx.run(2, program, deadline=20)


def test_an_exception_in_the_backward_of_one_rank_ends_the_others():
    layer = Layer(2)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            raise RuntimeError("out of luck")

    def program(comm):
        def call(x, weight, *args):
            y = Layer.forward(x, weight, *args)
            return Layer.forward(torch.cat([Fails.apply(y) if comm.rank == 1 else y] * 3, 1), weight, *args)

        layer.gradients(ct.communicator(comm), call)

    begin = time.monotonic()
    with pytest.raises(cpx.Error, match="rank 1 failed: RuntimeError: out of luck"):
        cpx.run(2, program, deadline=30)
    assert time.monotonic() - begin < 20


def test_a_plan_lives_until_the_backward_of_its_calls():
    def program(comm):
        s = cpx.shard(small, cpx.zigzag(1))
        x = torch.ones(10, 2, requires_grad=True)
        y = ct.exchange(x, cpx.relayout(s, s, 0), comm.of)  # of package cpx: nothing else keeps it
        gc.collect()
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones(10, 2))

    one_rank(program)


def test_a_copy_of_a_plan_is_the_plan():
    def program(comm):
        comm = ct.communicator(comm)
        s = cpx.shard(small, cpx.zigzag(1))
        for plan in (ct.relayout(s, s, comm), ct.halo(s, comm, 1), ct.carry(s, comm)):
            assert copy.copy(plan) is plan and copy.deepcopy([plan])[0] is plan
        assert copy.copy(comm) is comm and copy.deepcopy([comm])[0] is comm
        gc.collect()
        x = torch.ones(10, 2)
        assert torch.equal(ct.exchange(x, ct.relayout(s, s, comm), comm), x)

    one_rank(program)


def test_arguments_of_plans_are_told_by_the_function_that_was_called():
    def program(comm):
        s = cpx.shard(small, cpx.zigzag(1))
        for call, text in (
            (lambda: ct.relayout(1, s, comm), "relayout: source: expected .*Sharding"),
            (lambda: ct.halo(s, comm, "a"), "halo: reach: expected int"),
            (lambda: ct.carry(3, comm), "carry: sharding: expected .*Sharding"),
        ):
            with pytest.raises(cpx.Error, match=text):
                call()

    one_rank(program)


def test_plans_are_kept_by_shardings_and_forgotten_with_their_communicator():
    def program(comm):
        comm = ct.communicator(comm)
        a, b = cpx.shard(small, cpx.zigzag(1)), cpx.shard(small, cpx.sequential(1))
        again = cpx.shard(cpx.thd([0, 3, 3, 10]), cpx.zigzag(1))
        assert ct.relayout(a, b, comm) is ct.relayout(again, b, comm) is not ct.relayout(b, a, comm)
        assert ct.relayout(a, b, comm.of) is ct.relayout(a, b, ct.communicator(comm.of)) is ct.relayout(a, b, comm)
        for n in range(2 * _objects.cached_plans):
            s = cpx.shard(cpx.thd([0, n]), cpx.zigzag(1))
            ct.halo(s, comm, 1)
        assert len(_objects._objects) - before <= _objects.cached_plans + 1

    gc.collect()
    before = len(_objects._objects)
    cpx.run(1, program)
    gc.collect()
    assert len(_objects._objects) == before


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ten_thousand_calls_leak_nothing():
    layer = Layer(1, small)

    def program(comm):
        x, weight = numbers(10, 12, dtype=torch.float32).requires_grad_(), layer.weight.clone().requires_grad_()
        plans = layer.plans(comm)

        def step(n):
            for _ in range(n):
                Layer.forward(x, weight, *plans, comm).sum().backward()

        step(300)
        gc.collect()
        objects, memory = len(gc.get_objects()), resident()
        step(2500)  # of 4 operators, each with its backward
        gc.collect()
        objects, memory = len(gc.get_objects()) - objects, resident() - memory
        tracemalloc.start()
        for _ in range(20):  # what leaks does so every time, and an integer a step is 2800 bytes; free lists fill up
            first = tracemalloc.get_traced_memory()[0]
            step(100)
            gc.collect()
            traced = tracemalloc.get_traced_memory()[0] - first
            if traced < 2_800:
                break
        tracemalloc.stop()
        return objects, traced, memory

    objects, traced, memory = one_rank(program)
    assert objects < 100 and traced < 2_800 and memory < 8 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_new_packing_a_step_leaves_memory_as_it_was():
    """Of more packings than plans are kept for."""

    def program(comm):
        def steps(first, last):
            for n in range(first, last):
                rows = 2000 + n % 600  # sizes come again: of ones that grow the heap keeps holes
                made = cpx.thd([0, n % 97, 97 + n % 89, rows])
                zigzag, sequential = (cpx.shard(made, layout(1)) for layout in (cpx.zigzag, cpx.sequential))
                x = torch.zeros(rows, 1, requires_grad=True)
                y = ct.exchange(x, ct.relayout(zigzag, sequential, comm), comm)
                ct.shift_rows(y, ct.halo(zigzag, comm, 1), comm).sum().backward()
            gc.collect()
            return resident(), len(_objects._objects)

        steps(0, 600)
        memory, objects = steps(600, 1200)
        later = steps(1200, 4200)
        return later[0] - memory, later[1] - objects

    memory, objects = one_rank(program)
    assert memory < 8 << 20  # plans that stay would be 80 MB, of 8 bytes a row
    assert abs(objects) < _objects.dropped_plans  # which go at once


@pytest.mark.parametrize("end", ["", "del comm, plan", "del x, y", "del cpx", "y.sum().backward()"])
def test_the_interpreter_ends_cleanly_with_whatever_is_alive(end):
    program = f"""
import cpx, cpx.torch, torch
comm = cpx.torch.communicator(cpx.threads(1)[0])
s = cpx.shard(cpx.thd([0, 10]), cpx.zigzag(1))
plan = cpx.torch.relayout(s, s, comm)
x = torch.ones(10, 2, requires_grad=True)
y = cpx.torch.exchange(x, plan, comm)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""


def test_a_hybrid_language_model_has_the_same_losses_under_one_rank_and_two(tmp_path):
    example = Path(__file__).parents[1] / "examples" / "train_hybrid.py"
    command = [sys.executable, example, "--steps", "6", "--plot", tmp_path / "losses.svg"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["1 rank", "2 ranks", "largest difference of any step"]
    assert float(lines[2].rpartition(" ")[2]) < 1e-12
    assert len(xml.dom.minidom.parse(str(tmp_path / "losses.svg")).getElementsByTagName("polyline")) == 3
