# SPDX-License-Identifier: Apache-2.0
"""Attention and rotary embedding as operators of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import cpx
from cpx import _ext
from cpx._error import Error, require

from ._group import device_extension
from ._objects import AnyCommunicator, Attention, held, taken_comm
from ._operator import backward_operator, check, contiguous_like, keep, operator, sums


def _results(q, heads):
    return contiguous_like(q), q.new_empty(q.shape[0], heads, dtype=sums(q))


def _attention(q, k, v, scale, heads, plan, comm):
    p, c = held("attention", "plan", plan), held("attention", "communicator", comm)
    o, lse = made = _results(q, heads)
    cpx.attention(
        p.queries, p.keys, p.rank, q, k, v, p.heads, scale=scale, lse=lse, out=o, comm=c
    )
    return made


def _attention_backward(q, k, v, o, do, lse, scale, plan, comm):
    where = "attention_backward"
    p, c = held(where, "plan", plan), held(where, "communicator", comm)
    made = dq, dk, dv = contiguous_like(q), contiguous_like(k), contiguous_like(v)
    cpx.attention_backward(
        p.queries, p.keys, q, k, v, o, do.contiguous(), lse, p.heads, c,
        scale=scale, dq=dq, dk=dk, dv=dv
    )
    return made


def _save_attention(ctx, args, made):
    q, k, v, ctx.scale, _, plan, comm = args
    keep(ctx, "attention", plan, comm)
    ctx.mark_non_differentiable(made[1])
    ctx.save_for_backward(q, k, v, *made)


def _attention_gradient(ctx, do, _):
    q, k, v, o, lse = ctx.saved_tensors
    return *_attention_back(q, k, v, o, do, lse, ctx.scale, ctx.plan, ctx.comm), None, None, None, None


_attention_back = backward_operator(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor do, Tensor lse, float? scale, SymInt plan, "
    "SymInt comm) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    lambda q, k, v, *_: (contiguous_like(q), contiguous_like(k), contiguous_like(v)),
)
_attention_op = operator(
    "attention(Tensor q, Tensor k, Tensor v, float? scale, SymInt heads, SymInt plan, SymInt comm) -> (Tensor, Tensor)",
    _attention,
    lambda q, k, v, scale, heads, plan, comm: _results(q, heads),
    _save_attention, _attention_gradient,
)


def attention_plan(
    queries: _ext.Sharding, keys: _ext.Sharding, heads: Sequence[int], comm: AnyCommunicator
) -> Attention:
    """Returns what `attention` needs. Kept as of `relayout`.

    queries: the sharding of q and o; keys: that of k and v, where every rank holds every row: replicated, or the same
    head_sharded as q. heads: AttentionHeads(...) over all ranks.
    """
    comm = taken_comm("attention_plan", comm)
    require(len(heads) == 3, "attention_plan", "heads", "AttentionHeads(query_heads, key_heads, dim)", heads)
    return comm.plan(Attention, queries, keys, tuple(int(n) for n in heads), comm.rank)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Attention, comm: AnyCommunicator, *,
    scale: float | None = None
) -> torch.Tensor:
    """Causal softmax attention: o = softmax(scale q K^T) V over the keys of a query's sequence up to its own token.

    q: (rows, query heads, dim), k, v: (tokens, key heads, dim), of the heads that the rank holds, as plan says, of
    `attention_plan`. scale: by default 1 / sqrt(dim). Returns o, as q. Exchange q, k and v first: k and v to
    `replicated` have the gradients of all ranks' queries added on their way back. No communication, but for the
    gradients of keys of which several ranks have query heads. On devices of bfloat16 and float16 tensor cores multiply
    weights, and in the backward their gradients, of that precision; of float32 a plain kernel, some ten times slower.
    """
    where = "attention"
    comm = taken_comm(where, comm)
    if not isinstance(plan, Attention):
        raise Error(where, "plan", "one of cpx.torch.attention_plan", type(plan).__name__)
    recorded = check(where, comm.device, q=q, k=k, v=v)
    require(q.dim() > 0, where, "q", "an array of rows", "a number")
    return _attention_op(recorded, q, k, v, scale, plan.query_heads, plan.handle, comm.handle)[0]


def _turned(x, positions, frequencies, head_dim, axes, rounding, back):
    y = contiguous_like(x)
    rotate = _ext.rotary if x.is_cpu else device_extension("rotary").rotary
    options = head_dim, frequencies, list(axes or []), rounding, back
    rotate(x, positions.contiguous(), *options, y)
    return y


def _rotate(x, positions, frequencies, head_dim, axes, rounding):
    return _turned(x, positions, frequencies, head_dim, axes, rounding, False)


def _rotate_back(dy, positions, frequencies, head_dim, axes, rounding):
    return _turned(dy.contiguous(), positions, frequencies, head_dim, axes, rounding, True)


def _save_rotary(ctx, args, y):
    _, positions, frequencies, *ctx.options = args
    ctx.save_for_backward(positions, frequencies)


def _rotary_gradient(ctx, dy):
    return _rotary_back(dy, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_rotary_back = backward_operator(
    "rotary_backward(Tensor dy, Tensor positions, Tensor frequencies, SymInt head_dim, int[]? axes, str rounding) "
    "-> Tensor",
    _rotate_back, contiguous_like,
)
_rotary_op = operator(
    "rotary(Tensor x, Tensor positions, Tensor frequencies, SymInt head_dim, int[]? axes, str rounding) -> Tensor",
    _rotate, contiguous_like, _save_rotary, _rotary_gradient,
)


def rotary(
    x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, head_dim: int | None = None, *,
    axes: Sequence[int] | None = None, rounding: str = "fp32_inside"
) -> torch.Tensor:
    """Rotates channel i of every head with channel i + D by the angle positions * frequencies[i], D frequencies.

    x: (rows, heads, head_dim), or (rows, heads * head_dim) with head_dim. positions: (rows,) int64, such as
    torch.from_numpy(sharding.positions(rank)), or (3, rows), of which pair i takes axes[i], of `cpx.rotary_axes`.
    frequencies: of `cpx.rotary_frequencies`, float32, of float64 for x of float64, on the CPU, wherever x is. They have
    no gradient. rounding as of `cpx.rotary`. Bitwise the same on every sharding. No communication.
    """
    where = "rotary"
    seen = [check(where, getattr(x, "device", None), x=x), check(where, x.device, positions=positions)]
    seen.append(check(where, torch.device("cpu"), frequencies=frequencies))
    if head_dim is None:
        require(x.dim() == 3, where, "x without head_dim", "(rows, heads, head_dim)", tuple(x.shape))
        head_dim = x.shape[2]
    if torch.is_grad_enabled() and frequencies.requires_grad:
        raise Error(where, "frequencies", "a tensor that wants no gradient", "one that does")
    recorded = None if None in seen else seen[0]
    return _rotary_op(recorded, x, positions, frequencies, head_dim, None if axes is None else list(axes), rounding)
