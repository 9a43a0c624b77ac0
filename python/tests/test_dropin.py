# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for trainers against what their peers define, on ranks that are threads."""

import importlib
import math
import pathlib
import re
import types

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

import cpx

pytest.importorskip("cpx.torch")
import cpx.torch
from cpx.dropin import fla, megatron, miles, twinkle

page = pathlib.Path(__file__).parents[2] / "docs" / "trainers.md"
batches = [(0, 8, 20), (0, 30, 50, 86), (0, 6, 16, 17), (0, 40, 40, 45), (0, 3)]
# Multiples of what miles divides by, and a tail of padding that lies one rank's behind another's.
padded = {1: (0, 5, 14), 2: (0, 12, 32, 38), 3: (0, 18, 48, 57), 4: (0, 24, 64, 76)}


def rows_of(cu, width=3, seed=0):
    return torch.randn((cu[-1], width), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(sharding, rank):
    return torch.from_numpy(sharding.global_rows(rank))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_miles_rows_become_equal_parts_of_the_packed_batch_and_back(ranks):
    cu = padded[ranks]
    whole, upstream = rows_of(cu), rows_of(cu, seed=1)

    def mine(rank):  # the peer's rule, written without a layout
        rows = []
        for first, last in zip(cu, cu[1:]):
            n = last - first
            if n % (2 * ranks) == 0:
                half = n // (2 * ranks)
                begins = (first + rank * half, first + (2 * ranks - 1 - rank) * half)
                rows += [b + i for b in begins for i in range(half)]
            else:
                rows += [first + rank * (n // ranks) + i for i in range(n // ranks)]
        return torch.tensor(rows, dtype=torch.int64)

    def program(comm):
        x = whole[mine(comm.rank)][:, None].requires_grad_()  # rows, batch, hidden
        group = (torch.tensor(cu, dtype=torch.int32), comm, comm.rank, ranks)
        y = miles.zigzag_to_packed_shard(x, *group)
        each = cu[-1] // ranks
        part = slice(comm.rank * each, (comm.rank + 1) * each)
        assert torch.equal(y[:, 0], whole[part])
        back = miles.packed_shard_to_zigzag(y, *group)
        assert torch.equal(back, x)
        y.backward(upstream[part][:, None])
        assert torch.equal(x.grad[:, 0], upstream[mine(comm.rank)])

    cpx.run(ranks, program)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_any_number_of_ranks_puts_a_whole_row_together(ranks):
    cu = [0, 4 * ranks, 10 * ranks, 10 * ranks, 12 * ranks]
    whole = rows_of(cu)
    cuts = [whole[a:b] for a, b in zip(cu, cu[1:])]
    rows = [torch.cat([miles.natural_to_zigzag_slice(x, ranks, r, dim=0) for x in cuts]) for r in range(ranks)]
    assert torch.equal(miles.reassemble_full_row(rows, cu, ranks), whole)
    assert all(torch.equal(x, whole[own(cpx.shard(cpx.thd(cu), cpx.zigzag(ranks)), r)]) for r, x in enumerate(rows))


def test_a_whole_row_is_put_together_of_all_ranks_rows():
    cu = [0, 8, 24, 24, 28]
    whole = torch.arange(28)
    rows = []
    for rank in range(2):
        cuts = [whole[a:b] for a, b in zip(cu, cu[1:])]
        rows.append(torch.cat([miles.natural_to_zigzag_slice(x, 2, rank, dim=0) for x in cuts]))
    assert rows[0].tolist()[:6] == [0, 1, 6, 7, 8, 9]
    assert torch.equal(miles.reassemble_full_row(rows, cu, 2), whole)
    assert miles.reassemble_full_row([rows[0][:3]] * 2, [0, 6], 2) is None
    table = torch.arange(24).view(3, 8)
    assert miles.natural_to_zigzag_slice(table, 2, 1, dim=1)[0].tolist() == [2, 3, 4, 5]


def test_miles_group_is_the_one_it_says():
    with pytest.raises(cpx.Error, match="cp_rank and cp_size: expected 0, 1 of the group, got 0, 2"):
        cpx.run(1, lambda comm: miles.zigzag_to_packed_shard(torch.zeros(8, 1), [0, 8], comm, 0, 2))


def test_a_rank_that_has_another_batch_or_ends_is_named_to_all():
    cu = padded[3]

    def program(comm, cu_of):
        x = torch.zeros(cu[-1] // 3, 2, requires_grad=True)
        miles.zigzag_to_packed_shard(x, cu_of(comm.rank), comm, comm.rank, 3).sum().backward()

    with pytest.raises(cpx.Error, match="exchange.*expected one value on all ranks"):
        cpx.run(3, program, lambda rank: (0, 24, 48, 57) if rank == 2 else cu, deadline=20)

    def ends(comm):
        if comm.rank != 1:
            program(comm, lambda rank: cu)

    with pytest.raises(cpx.Error, match="rank 1 to take part, got its return"):
        cpx.run(3, ends, deadline=20)


def reference_convolution(x, weight, bias, cu):
    taps = weight.shape[1]
    history = x.new_zeros(taps - 1, x.shape[1])
    parts = [torch.cat([history, x[a:b]]).unfold(0, taps, 1) for a, b in zip(cu, cu[1:]) if a < b]
    return torch.nn.functional.silu((torch.cat(parts) * weight).sum(-1) + bias)


def reference_rule(q, k, v, g, beta, cu):
    """The recurrence, token by token."""
    groups, scale, out = v.shape[1] // q.shape[1], 1 / math.sqrt(q.shape[2]), []
    q, k = (x.repeat_interleave(groups, 1) for x in (q, k))
    for first, last in zip(cu, cu[1:]):
        state = v.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        for t in range(first, last):
            state = state * g[t].exp()[:, None, None]
            error = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t, :, None]
            state = state + k[t, :, :, None] * error[:, None]
            out.append(scale * torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out)


def fla_inputs(tokens):
    draw = lambda *shape: torch.randn(*shape, generator=made, dtype=torch.float64)
    made = torch.Generator().manual_seed(3)
    q, k = (torch.nn.functional.normalize(draw(tokens, 2, 4), dim=-1) for _ in range(2))
    return q, k, draw(tokens, 4, 3), -draw(tokens, 4).exp(), draw(tokens, 4).sigmoid()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("cu", batches)
def test_fla_convolution_and_delta_rule_are_those_of_the_whole_batch(cu, ranks):
    tokens = cu[-1]
    x, weight, bias, up = rows_of(cu, 6), rows_of((0, 6), 4, 1), rows_of((0, 6), 1, 2)[:, 0], rows_of(cu, 6, 4)
    whole = [y.requires_grad_() for y in (x, weight, bias)]
    wanted = reference_convolution(*whole, cu)
    d_wanted = torch.autograd.grad(wanted, whole, up)
    inputs = [y.requires_grad_() for y in fla_inputs(tokens)]
    o = reference_rule(*inputs, cu)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=o.dtype)
    d_inputs = torch.autograd.grad(o, inputs, do)

    def program(comm):
        context = fla.build_cp_context(torch.tensor(cu), comm, conv1d_kernel_size=4)
        rows = own(context.sharding, comm.rank)
        mine, w, b = (y.detach().clone().requires_grad_() for y in (x[rows][None], weight, bias))
        y, state = fla.causal_conv1d(mine, w, b, activation="swish", cp_context=context)
        assert state is None
        torch.testing.assert_close(y[0], wanted[rows], rtol=1e-9, atol=1e-12)
        d_mine, d_w, d_b = torch.autograd.grad(y, (mine, w, b), up[rows][None])
        torch.testing.assert_close(d_mine[0], d_wanted[0][rows], rtol=1e-9, atol=1e-12)
        local = [t.detach()[rows][None].requires_grad_() for t in inputs]
        got, state = fla.chunk_gated_delta_rule(*local, cp_context=context)
        assert state is None
        torch.testing.assert_close(got[0], o[rows], rtol=1e-9, atol=1e-12)
        for name, found, right in zip("qkvgb", torch.autograd.grad(got, local, do[rows][None]), d_inputs):
            torch.testing.assert_close(found[0], right[rows], rtol=1e-8, atol=1e-10, msg=lambda m: f"d{name}: {m}")
        return d_w, d_b

    for found, right in zip((sum(d) for d in zip(*cpx.run(ranks, program))), d_wanted[1:]):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cu", [(0, 1920), (0, 640, 1920)])
def test_fla_rule_in_serial_is_bitwise_that_of_one_rank(cu):  # whose ranks begin at chunks of sequences
    inputs = [x.float() for x in fla_inputs(cu[-1])]
    do = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(9))

    def program(comm):
        context = fla.build_cp_context(torch.tensor(cu), comm, carry="serial")
        rows = own(context.sharding, comm.rank)
        local = [t[rows][None].requires_grad_() for t in inputs]
        o, _ = fla.chunk_gated_delta_rule(*local, cp_context=context)
        return [t[0].detach() for t in (o, *torch.autograd.grad(o, local, do[rows][None]))]

    alone = cpx.run(1, program)[0]
    for ranks in (2, 3, 5):
        for name, of_ranks, right in zip(["o", "dq", "dk", "dv", "dg", "dbeta"], zip(*cpx.run(ranks, program)), alone):
            assert torch.equal(torch.cat(of_ranks), right), f"{name}, {ranks} ranks"
    with pytest.raises(cpx.Error, match='carry: expected "scan" or "serial", got'):
        cpx.run(1, lambda comm: fla.chunk_gated_delta_rule(
            *(t[None] for t in inputs), cp_context=fla.build_cp_context(torch.tensor(cu), comm, carry="both")
        ))


def test_fla_gates_are_computed_where_it_says_so():
    q, k, v, g, beta = (x.float()[None] for x in fla_inputs(12))
    a_log, bias = torch.linspace(-1, 1, 4), torch.linspace(0, 1, 4)

    def program(comm):
        context = fla.build_cp_context(torch.tensor([0, 12]), comm)
        decay = -a_log.exp() * torch.nn.functional.softplus(g + bias)
        raw, _ = fla.chunk_gated_delta_rule(
            q, k, v, g, beta, use_gate_in_kernel=True, A_log=a_log, dt_bias=bias, use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True, cp_context=context,
        )
        made, _ = fla.chunk_gated_delta_rule(q, k, v, decay, 2 * beta.sigmoid(), cp_context=context)
        torch.testing.assert_close(raw, made)
        half, _ = fla.chunk_gated_delta_rule(*(x.bfloat16() for x in (q, k, v, g, beta)), cp_context=context)
        assert half.dtype == torch.bfloat16

    cpx.run(1, program)


def test_gradients_of_fla_rows_are_not_copied():
    """The first dimension, of one, comes and goes by views, in the backward, too: select's would fill and copy."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.add(str(op))
            return op(*args, **(kwargs or {}))

    def program(comm):
        context = fla.build_cp_context([0, 12], comm, conv1d_kernel_size=4)
        x, *inputs = (t.float()[None].requires_grad_() for t in (rows_of((0, 12), 6), *fla_inputs(12)))
        with Seen():
            y, _ = fla.causal_conv1d(x, torch.ones(6, 4), activation="silu", cp_context=context)
            o, _ = fla.chunk_gated_delta_rule(*inputs, cp_context=context)
            torch.autograd.grad((y, o), (x, *inputs), (torch.ones_like(y), torch.ones_like(o)))

    seen = set()
    cpx.run(1, program)
    assert {"cpx.causal_conv1d_backward.default", "cpx.gated_delta_rule_backward.default"} <= seen
    assert not seen & {"aten.select_backward.default", "aten.copy_.default", "aten.clone.default"}, seen


@pytest.mark.parametrize(
    "cu, ranks, rank, local, before, behind, tokens",
    [
        ([0, 8, 20], 2, 0, [0, 8, 10], 0, 1, 0),
        ([0, 8, 20], 2, 1, [0, 10], 1, 0, 2),
        ([0, 5, 12], 3, 1, [0, 1, 4], 1, 1, 4),
        ([0, 700, 1024], 4, 2, [0, 188, 256], 2, 1, 512),
        ([0, 257, 258, 511, 768, 769, 1022, 1024], 4, 1, [0, 1, 2, 255, 256], 1, 1, 256),
    ],
)
def test_fla_context_says_what_the_peers_says(cu, ranks, rank, local, before, behind, tokens):
    context = fla.get_cp_cu_seqlens(torch.tensor(cu), world_size=ranks, rank=rank)
    assert context.cu_seqlens.tolist() == local and context.cu_seqlens.dtype == torch.int32
    assert (context.pre_num_ranks, context.post_num_ranks, context.pre_num_conv_tokens) == (before, behind, tokens)
    assert context.is_first_rank == (before == 0) and context.is_last_rank == (behind == 0)


def test_fla_refuses_states_and_batches_by_name():
    def program(comm):
        context = fla.build_cp_context([0, 12], comm)
        inputs = [x[None] for x in fla_inputs(12)]
        with pytest.raises(cpx.Error, match="chunk_gated_delta_rule: states"):
            fla.chunk_gated_delta_rule(*inputs, output_final_state=True, cp_context=context)
        with pytest.raises(cpx.Error, match="causal_conv1d: shape"):
            fla.causal_conv1d(torch.zeros(2, 6, 4), torch.zeros(4, 4), cp_context=context)
        alone = fla.get_cp_cu_seqlens([0, 12], world_size=1, rank=0)
        with pytest.raises(cpx.Error, match="get_cp_cu_seqlens: rank: expected a group"):
            fla.build_cp_context([0, 12], None)
        with pytest.raises(cpx.Error, match="cp_context: expected one of a group"):
            fla.causal_conv1d(torch.zeros(1, 12, 4), torch.zeros(4, 4), cp_context=alone)

    cpx.run(1, program)


sections = (24, 24, 12, 48, 96, 12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("cu", [(0, 32, 64), (0, 16, 48, 80), (0, 5, 19)])
def test_megatron_exchanges_all_sections_of_a_packed_batch_at_once(cu, ranks):
    whole = rows_of(cu, sum(sections))[:, None]
    zigzag = cpx.shard(cpx.thd(list(cu)), cpx.zigzag(ranks))
    params = types.SimpleNamespace(qkv_format="thd")

    def program(comm):
        x = whole[own(zigzag, comm.rank)].requires_grad_()
        y, back = megatron.a2a_cp_to_hp(x, sections, ranks, comm, torch.tensor(cu), cu[-1], params)
        share = [p.chunk(ranks, -1)[comm.rank] for p in whole.split(sections, -1)]
        wanted = whole[own(zigzag, 0)] if ranks == 1 else torch.cat(share, -1)  # of one rank the peer moves nothing
        assert torch.equal(y, wanted)
        v = share[3].clone().requires_grad_()
        norm = megatron.a2a_hp_to_cp(v, ranks, comm, params, back)
        assert torch.equal(norm, x[..., 60:108])
        norm.backward(whole[own(zigzag, comm.rank)][..., 60:108])
        assert torch.equal(v.grad, share[3])
        y.backward(y.detach())
        assert torch.equal(x.grad, x)

    cpx.run(ranks, program)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("sections", [[12, 24], [24, 36], [24, 24, 36, 36, 12, 12]])
def test_megatron_rows_of_one_length_keep_their_batch(sections, balanced, ranks):
    whole = rows_of((0, 24), 2 * sum(sections)).view(24, 2, sum(sections))
    layout = cpx.zigzag(ranks) if balanced else cpx.sequential(ranks)
    sharding = cpx.shard(cpx.thd([0, 24]), layout)

    def program(comm):
        x = whole[own(sharding, comm.rank)]
        y = megatron.tensor_a2a_cp2hp(x, 0, -1, comm, sections, undo_attention_load_balancing=balanced)
        share = torch.cat([p.chunk(ranks, -1)[comm.rank] for p in whole.split(sections, -1)], -1)
        assert torch.equal(y, share)
        shares = [n // ranks for n in sections]
        z = megatron.tensor_a2a_hp2cp(y, 0, -1, comm, shares, redo_attention_load_balancing=balanced)
        assert torch.equal(z, x)
        uneven = rf"tensor_a2a_cp2hp: sections: expected multiples of {ranks} ranks, got \[7\]"
        with pytest.raises(cpx.Error, match=uneven):
            megatron.tensor_a2a_cp2hp(x[..., :7], 0, -1, comm)
        less = sum(sections) - ranks
        with pytest.raises(cpx.Error, match=f"cp2hp: sum of the sections: expected {sum(sections)}, got {less}"):
            megatron.tensor_a2a_cp2hp(x, 0, -1, comm, (less,))
        with pytest.raises(cpx.Error, match="hp2cp: sum of the sections"):
            megatron.tensor_a2a_hp2cp(y, 0, -1, comm, (1,))
        with pytest.raises(cpx.Error, match="seq_dim, head_dim"):
            megatron.tensor_a2a_cp2hp(x, 1, -1, comm)
        assert megatron.tensor_a2a_cp2hp(x, 0, -1, None) is x  # as Megatron has it, of no group

    cpx.run(ranks, program)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_twinkle_heads_of_several_tensors_come_in_one_exchange(ranks):
    tokens = 4 * ranks
    draw = torch.Generator().manual_seed(1)
    whole = [torch.randn(2, tokens, h, d, generator=draw) for h, d in ((12, 3), (12, 3), (24, 2), (24, 1))]

    def program(comm):
        context = types.SimpleNamespace(sp_world_size=ranks, rp_world_size=1, _sp_group=comm)
        part = slice(4 * comm.rank, 4 * comm.rank + 4)
        mine = [x[:, part].clone().requires_grad_() for x in whole]
        heads = twinkle.seq_to_head_shards(mine, context)
        for x, y, z in zip(whole, mine, heads):
            assert torch.equal(z, x.chunk(ranks, 2)[comm.rank])
            assert torch.equal(z, twinkle.seq_to_head_shard(y, context))
            back = twinkle.head_to_seq_shard(z, context)
            assert torch.equal(back, y)
            back.backward(2 * y.detach())
            assert torch.equal(y.grad, 2 * y)

    cpx.run(ranks, program)


def test_twinkle_wants_heads_for_every_rank_and_no_ring():
    def program(comm):
        context = types.SimpleNamespace(sp_world_size=2, rp_world_size=1, _sp_group=comm)
        with pytest.raises(cpx.Error, match="heads a multiple of 2"):
            twinkle.seq_to_head_shard(torch.zeros(1, 4, 3, 2), context)
        context.rp_world_size = 2
        with pytest.raises(cpx.Error, match="rp_world_size: expected 1"):
            twinkle.seq_to_head_shard(torch.zeros(1, 4, 4, 2), context)

    cpx.run(2, program)


def conv(comm, x=torch.ones(1, 20, 4), weight=torch.ones(4, 3), cp_context=None, **options):
    context = fla.build_cp_context([0, 12, 20], comm) if cp_context is None else cp_context
    return fla.causal_conv1d(x, weight, cp_context=context, **options)


def rule(comm, changed={}, **options):
    heads, gates = torch.ones(1, 20, 2, 4), torch.zeros(1, 20, 2)
    given = {"q": heads, "k": heads, "v": heads, "g": gates, "beta": gates, **changed}
    return fla.chunk_gated_delta_rule(**given, cp_context=fla.build_cp_context([0, 12, 20], comm), **options)


def to_packed(comm, x=torch.ones(20, 1, 4), cu=(0, 12, 20)):
    return miles.zigzag_to_packed_shard(x, cu, comm, 0, 1)


def rows_together(comm, rows, cu=(0, 8), ranks=2):
    return miles.reassemble_full_row(rows, cu, ranks)


def to_features(comm, cu=None, sections=(4,), ranks=1, packed=None, x=torch.ones(20, 1, 4), seq_len=20):
    packed = packed and types.SimpleNamespace(qkv_format=packed)
    return megatron.a2a_cp_to_hp(x, sections, ranks, comm, cu, seq_len, packed)


def to_heads(comm, tensors, ranks=2):
    return twinkle.seq_to_head_shards(tensors, types.SimpleNamespace(sp_world_size=ranks, _sp_group=comm))


four = torch.ones(1, 10, 4, 2)
mistakes = [  # ranks, what is called, what it says
    (1, lambda c: to_packed(c, torch.ones(20, 4).numpy()), "zigzag_to_packed_shard: hidden_states: expected a torch.T"),
    (1, lambda c: to_packed(c, None), "hidden_states: expected a torch.Tensor, got NoneType"),
    (1, lambda c: to_packed(c, torch.ones(20, 4, device="meta")), "device of hidden_states: expected cpu"),
    (1, lambda c: to_packed(c, cu=None), "cu_seqlens: expected whole numbers, a tensor or a list, got None"),
    (1, lambda c: to_packed(c, cu=[0, 12.7, 20]), r"cu_seqlens: expected whole numbers.*got \[0, 12.7, 20\]"),
    (1, lambda c: to_packed(c, cu=torch.tensor([0.0, 20.0])), "cu_seqlens: expected whole numbers"),
    (1, lambda c: to_packed(c, cu=torch.tensor([[0, 20]])), "cu_seqlens: expected whole numbers"),
    (1, lambda c: to_packed(c, cu=[]), "cu_seqlens: expected at least one number, got none"),
    (1, lambda c: miles.natural_to_zigzag_slice(None, 2, 0, 0), "natural_to_zigzag_slice: t: expected a torch.Tensor"),
    (1, lambda c: miles.natural_to_zigzag_slice(torch.ones(8), 2, 0, 1), "dim: expected one of t's 1, got 1"),
    (1, lambda c: miles.natural_to_zigzag_slice(torch.ones(8), 2, None, 0), "cp_rank: expected a whole number"),
    (1, lambda c: rows_together(c, [torch.ones(4)]), "reassemble_full_row: shapes of gathered, by rank: expected"),
    (1, lambda c: rows_together(c, [torch.ones(4)] * 3), "shapes of gathered, by rank"),
    (1, lambda c: rows_together(c, [torch.ones(3), torch.ones(4)]), "shapes of gathered, by rank"),
    (1, lambda c: rows_together(c, [torch.ones(4), torch.ones(4).long()]), "dtype of gathered: expected one, got"),
    (1, lambda c: rows_together(c, []), "gathered: expected at least one tensor, got none"),
    (1, lambda c: rows_together(c, None), "gathered: expected a list of tensors, got NoneType"),
    (1, lambda c: rows_together(c, [None, None]), r"gathered\[0\]: expected a torch.Tensor, got NoneType"),
    (1, lambda c: conv(c, torch.ones(1, 20, 4).numpy()), "causal_conv1d: x: expected a torch.Tensor, got ndarray"),
    (1, lambda c: conv(c, torch.ones(1, 20, 4, device="meta")), "causal_conv1d: device of x: expected cpu"),
    (1, lambda c: conv(c, weight=None), "causal_conv1d: weight: expected a torch.Tensor, got NoneType"),
    (1, lambda c: conv(c, weight=torch.ones(4)), r"shape of weight: expected \(channels, K\)"),
    (1, lambda c: conv(c, bias=torch.ones(2, 2)), r"shape of bias: expected \(channels,\), got \(2, 2\)"),
    (1, lambda c: conv(c, residual=torch.ones(1, 20, 1)), "shape of residual: expected"),
    (1, lambda c: conv(c, cp_context=types.SimpleNamespace(cu_seqlens=[0, 20])), "cp_context: expected one of cpx.dr"),
    (1, lambda c: fla.build_cp_context(None, c), "cu_seqlens: expected whole numbers"),
    (1, lambda c: fla.get_cp_cu_seqlens([0, 20], world_size=2.5, rank=0), "world_size: expected a whole number"),
    (1, lambda c: rule(c, {"q": torch.ones(1, 20, 2, 4).numpy()}), "chunk_gated_delta_rule: q: expected a torch.Ten"),
    (1, lambda c: rule(c, {"g": None}), "chunk_gated_delta_rule: g: expected a torch.Tensor, got NoneType"),
    (1, lambda c: rule(c, {"beta": None}), "beta: expected a torch.Tensor, got NoneType"),
    (1, lambda c: rule(c, use_gate_in_kernel=True), "A_log: expected a torch.Tensor, got NoneType"),
    (1, lambda c: rule(c, use_gate_in_kernel=True, A_log=torch.ones(3)), "shape of A_log: expected .*the value heads"),
    (1, lambda c: rule(c, allow_neg_eigval=True), "allow_neg_eigval: expected use_beta_sigmoid_in_kernel, got False"),
    (1, lambda c: rule(c, head_first=True), "head_first: expected none"),
    (1, lambda c: rule(c, chunk_size=48), "chunk_size: expected 16, 32 or 64, got 48"),
    (1, lambda c: rule(c, scale="a"), "scale: expected None, or a number, got 'a'"),
    (2, lambda c: megatron.tensor_a2a_cp2hp(torch.ones(4, 1, 4), None, -1, c), "seq_dim: expected a whole number"),
    (1, lambda c: miles.zigzag_to_packed_shard(torch.ones(20, 4), [0, 20], c, None, 1), "cp_rank: expected a whole"),
    (1, lambda c: miles.natural_to_zigzag_slice(torch.ones(8), 2, 2**40, 0), "cp_rank: expected 0 to 1, got 1099"),
    (1, lambda c: to_packed(c, cu=torch.zeros(3, dtype=torch.int64, device="meta")), "cu_seqlens: expected whole num"),
    (2, lambda c: to_features(c, ranks=2, packed="thd"), "a2a_cp_to_hp: cu_seqlens_q: expected whole numbers"),
    (2, lambda c: to_features(c, ranks=4), "cp_size: expected 2, as of cp_group, got 4"),
    (1, lambda c: to_features(c, ranks=8), "cp_size: expected 1, as of cp_group, got 8"),
    (2, lambda c: to_features(c, ranks=2, sections=None), "in_proj_split_sections: expected whole numbers"),
    (2, lambda c: to_features(c, ranks=2, x=None), "tensor: expected a torch.Tensor, got NoneType"),
    (2, lambda c: to_features(c, ranks=2, seq_len=None), "seq_len: expected a whole number, got None"),
    (1, lambda c: megatron.a2a_cp_to_hp(torch.ones(4, 1, 4), (4,), 1, c, None, 4, 3), "packed_seq_params: expected"),
    (2, lambda c: megatron.a2a_hp_to_cp(torch.ones(4, 1, 4), 2, c, types.SimpleNamespace(qkv_format="thd"), None),
     "a2a_hp_to_cp: thd_cp_a2a_inv: expected whole numbers"),
    (2, lambda c: megatron.a2a_hp_to_cp(torch.ones(4, 1, 4), 2, c, None, (0, 4)), "thd_cp_a2a_inv: expected None"),
    (2, lambda c: megatron.tensor_a2a_cp2hp(torch.ones(4, 4).numpy(), 0, -1, c), "tensor_a2a_cp2hp: tensor: expected"),
    (2, lambda c: to_heads(c, []), "seq_to_head_shards: tensors: expected at least one tensor, got none"),
    (2, lambda c: to_heads(c, None), "tensors: expected a list of tensors, got NoneType"),
    (2, lambda c: to_heads(c, [four, four[:, 1:]]), r"batch and tokens: expected \(1, 10\), got \(1, 9\)"),
    (2, lambda c: to_heads(c, [four, four.double()]), "dtype of tensors: expected one, got torch.float32, torch"),
    (1, lambda c: to_heads(c, [four], 4), "sp_world_size: expected 1, as of the group, got 4"),
    (1, lambda c: to_heads(c, [four], None), "sp_world_size: expected a whole number, got None"),
]


@pytest.mark.parametrize("ranks, call, text", mistakes, ids=[text[:40] for _, _, text in mistakes])
def test_a_mistake_is_named_before_anything_moves(ranks, call, text):
    def program(comm):
        comm = cpx.torch.communicator(comm)
        if comm.rank == 0:  # alone: what moved would wait for the others
            with pytest.raises(cpx.Error, match=text):
                call(comm)

    cpx.run(ranks, program, deadline=5)


def test_of_one_rank_megatrons_tensor_stays_what_and_where_it_is():
    x = torch.ones(4, 1, 4, device="meta")
    for group in None, cpx.threads(1)[0]:
        assert megatron.tensor_a2a_cp2hp(x, 0, -1, group) is x and megatron.tensor_a2a_hp2cp(x, 0, -1, group) is x


def test_fla_chunks_are_on_gpus_those_of_the_kernels(monkeypatch):
    asked = []
    monkeypatch.setattr(fla._common, "gated_delta_rule", lambda q, k, v, *_, chunk, **more: asked.append(chunk) or v)

    class OnGpu(torch.Tensor):
        is_cpu = False

    def program(comm):
        for kind in torch.Tensor, OnGpu:
            for size in 16, 32, 64:
                rule(comm, {"v": torch.ones(1, 20, 2, 4).as_subclass(kind)}, chunk_size=size)

    cpx.run(1, program)
    assert asked == [16, 32, 64, 64, 64, 64]


def test_every_import_on_the_page_for_trainers_is_there():
    imports = re.findall(r"^from (cpx\.dropin\.\w+) import ([^#\n]*)", page.read_text(), re.MULTILINE)
    assert {module for module, _ in imports} >= {f"cpx.dropin.{n}" for n in ("miles", "fla", "megatron", "twinkle")}
    for module, names in imports:
        if module.endswith("transformers"):
            pytest.importorskip("transformers")
        for name in names.split(","):
            assert callable(getattr(importlib.import_module(module), name.split(" as ")[0].strip()))
