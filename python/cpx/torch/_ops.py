# SPDX-License-Identifier: Apache-2.0
"""Operators of torch: each is registered with its fake kernel and its gradient, and has a function for users.

Kernels get handles; fakes get sizes and look nothing up.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any, Literal, Protocol, overload

import torch

from cpx import _ext
from cpx._error import Error, require

from ._objects import AnyCommunicator, Carry, Halo, Relayout, held, taken_comm, taken_plan
from ._operator import (
    autocast, backward_operator, check, contiguous_like, keep, moved, operator, sums, wants_gradient
)
from ._window import empty


def _held(where, plan, comm):
    return held(where, "plan", plan), held(where, "communicator", comm)


def _rows(where, x):
    require(x.dim() > 0, where, "x", "an array of rows", "a number")
    return list(x.shape[1:])


# exchange


def _exchange(x, plan, comm, shape):
    p, c = _held("exchange", plan, comm)
    y = empty(x, shape, c)
    _ext.exchange(p.of, moved(x), y, c)
    return y


def _exchange_backward(dy, plan, comm, shape):
    p, c = _held("exchange_backward", plan, comm)
    dx = empty(dy, shape, c)
    _ext.exchange(p.back, moved(dy.contiguous()), dx, c)
    return dx


def _save_exchange(ctx, args, y):
    x, plan, comm, _ = args
    keep(ctx, "exchange", plan, comm)
    ctx.shape = x.shape


def _exchange_gradient(ctx, dy):
    return _exchange_back(dy, ctx.plan, ctx.comm, ctx.shape), None, None, None


_exchange_back = backward_operator(
    "exchange_backward(Tensor dy, SymInt plan, SymInt comm, SymInt[] shape) -> Tensor",
    _exchange_backward, lambda dy, plan, comm, shape: dy.new_empty(shape),
)
_exchange_op = operator(
    "exchange(Tensor x, SymInt plan, SymInt comm, SymInt[] shape) -> Tensor",
    _exchange, lambda x, plan, comm, shape: x.new_empty(shape), _save_exchange, _exchange_gradient,
)


def exchange(x: torch.Tensor, plan: Relayout | _ext.Relayout, comm: AnyCommunicator) -> torch.Tensor:
    """Moves this rank's rows of x to where they belong on all ranks. Collective, as is its backward.

    x: (plan.source_rows, ...), of any dtype that cpx moves. plan: of `relayout`. Returns (plan.target_rows, ...), in
    bits as they were. The gradient comes back by the transposed plan: it is added where rows were copied.
    Raises cpx.Error before anything moves if a tensor does not fit or ranks' plans differ; later, within the deadline,
    if a rank fails or does not come.
    """
    where = "exchange"
    comm, plan = taken_comm(where, comm), taken_plan(where, plan, Relayout)
    recorded = check(where, comm.device, x=x)
    row = _rows(where, x)
    if plan.target_width and plan.target_width != math.prod(row):
        row = [plan.target_width]
    return _exchange_op(recorded, x, plan.handle, comm.handle, [plan.target_rows, *row])


# shift_rows


def _number(where, name, x):
    """Returns a number as operators take it: an integer as it is."""
    if isinstance(x, (int, float)):
        return x
    for of in index, float:
        try:
            return of(x)
        except (TypeError, ValueError):
            pass
    raise Error(where, name, "a number", type(x).__name__)


def _shift(x, plan, comm, fill):
    p, c = _held("shift_rows", plan, comm)
    y = contiguous_like(x)
    _ext.shift_rows(p.of, moved(x), y, c, fill)
    return y


def _shift_backward(dy, plan, comm):
    p, c = _held("shift_rows_backward", plan, comm)
    dx = contiguous_like(dy)
    _ext.shift_rows(p.back, moved(dy.contiguous()), dx, c, 0)
    return dx


_shift_back = backward_operator(
    "shift_rows_backward(Tensor dy, SymInt plan, SymInt comm) -> Tensor", _shift_backward, contiguous_like
)
_shift_op = operator(
    "shift_rows(Tensor x, SymInt plan, SymInt comm, Scalar fill) -> Tensor", _shift, contiguous_like,
    lambda ctx, args, y: keep(ctx, "shift_rows", args[1], args[2]),
    lambda ctx, dy: (_shift_back(dy, ctx.plan, ctx.comm), None, None, None),
)


def shift_rows(x: torch.Tensor, plan: Halo | _ext.Halo, comm: AnyCommunicator, fill: float = 0.0) -> torch.Tensor:
    """Returns for every token the row of the token plan.reach behind it ("after") or before it ("before"). Collective.

    plan: of `halo`. x: (rows, ...). `fill` where either is no valid token of the sequence: labels are tokens' ids
    shifted by halo(..., 1, "after"). An integer comes exactly; cpx.Error is raised of what the dtype does not hold.
    """
    where = "shift_rows"
    comm, plan = taken_comm(where, comm), taken_plan(where, plan, Halo)
    recorded = check(where, comm.device, x=x)
    _rows(where, x)
    return _shift_op(recorded, x, plan.handle, comm.handle, _number(where, "fill", fill))


# sum_over_ranks


def _sum(x, comm):
    c = held("sum_over_ranks", "communicator", comm)
    y = x.clone(memory_format=torch.contiguous_format)
    _ext.sum_over_ranks(y, c)
    return y


def _keep_comm(ctx, args, y):
    ctx.comm = args[1]
    if isinstance(ctx.comm, int):
        ctx.held = held("sum_over_ranks", "communicator", ctx.comm)


_sum_back = backward_operator("sum_over_ranks_backward(Tensor dy, SymInt comm) -> Tensor", _sum, contiguous_like)
_sum_op = operator(
    "sum_over_ranks(Tensor x, SymInt comm) -> Tensor", _sum, contiguous_like,
    _keep_comm, lambda ctx, dy: (_sum_back(dy, ctx.comm), None),
)


def sum_over_ranks(x: torch.Tensor, comm: AnyCommunicator) -> torch.Tensor:
    """Returns the sums over all ranks of x, of any shape, added in rank order. Collective.

    Its gradient is that of the sum of what the ranks differentiate: on every rank the sum of all ranks' gradients.
    """
    comm = taken_comm("sum_over_ranks", comm)
    return _sum_op(check("sum_over_ranks", comm.device, x=x), x, comm.handle)


# causal_conv1d


def _conv(x, weight, bias, activation, order, plan, comm):
    p, c = _held("causal_conv1d", plan, comm)
    y = contiguous_like(x)
    _ext.causal_conv1d(p.of, moved(x), weight, bias, activation, y, c, None, None)
    return y


def _conv_backward(x, weight, bias, dy, activation, order, plan, comm):
    p, c = _held("causal_conv1d_backward", plan, comm)
    dx = contiguous_like(x)
    dweight = weight.new_zeros(weight.shape, dtype=sums(weight))
    dbias = weight.new_zeros(0 if bias is None else bias.shape, dtype=sums(weight))
    _ext.causal_conv1d_backward(
        p.of, p.back, moved(x), weight, bias, activation, dy.contiguous(), dx, dweight,
        None if bias is None else dbias, c, order
    )
    return dx, dweight.to(weight.dtype), dbias.to(weight.dtype)


def _conv_backward_fake(x, weight, bias, dy, activation, order, plan, comm):
    return contiguous_like(x), contiguous_like(weight), weight.new_empty(0 if bias is None else bias.shape)


def _save_conv(ctx, args, y):
    x, weight, bias, ctx.activation, ctx.order, plan, comm = args
    keep(ctx, "causal_conv1d", plan, comm)
    ctx.save_for_backward(x, weight, bias)


def _conv_gradient(ctx, dy):
    x, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = _conv_back(x, weight, bias, dy, ctx.activation, ctx.order, ctx.plan, ctx.comm)
    return dx, dweight, None if bias is None else dbias, None, None, None, None


_conv_back = backward_operator(
    "causal_conv1d_backward(Tensor x, Tensor weight, Tensor? bias, Tensor dy, str? activation, str order, SymInt plan, "
    "SymInt comm) -> (Tensor, Tensor, Tensor)",
    _conv_backward, _conv_backward_fake,
)
_conv_op = operator(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, str? activation, str order, SymInt plan, SymInt comm) "
    "-> Tensor",
    _conv, contiguous_like, _save_conv, _conv_gradient,
)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, plan: Halo | _ext.Halo, comm: AnyCommunicator,
    bias: torch.Tensor | None = None, activation: str | None = None, *, order: str = "by_rank"
) -> torch.Tensor:
    """Causal depthwise convolution: y_t = activation(bias + sum_j weight_j x_{t-K+1+j}), zeros before a sequence.

    x: (rows, channels); weight: (channels, K); bias: (channels); plan: halo(sharding, comm, K - 1); activation: None or
    "silu". Returns y as x, bitwise the same on every sharding. Collective, as is its backward.
    The gradients of weight and bias are this rank's share, as of any other layer. order: "by_row" adds them in the
    order of the batch: then their sums over the ranks are bitwise the same on every sharding.
    """
    where = "causal_conv1d"
    comm, plan = taken_comm(where, comm), taken_plan(where, plan, Halo)
    if order not in ("by_rank", "by_row"):  # which the backward alone would find out
        raise Error(where, "order", '"by_rank", "by_row"', repr(order))
    x, weight, bias = autocast(x, weight, bias)
    recorded = check(where, comm.device, x=x, weight=weight, bias=bias)
    return _conv_op(recorded, x, weight, bias, activation, order, plan.handle, comm.handle)


# recurrences

_map_width = {
    "gated_delta_rule": lambda dim: dim * dim,
    "kimi_delta_attention": lambda dim: dim * dim,
    "channel_decay_attention": lambda dim: dim,
    "head_decay_attention": lambda dim: 1,
}
_recurrences = {}
_gates = "g", "beta", "initial"


def _state_sizes(name, heads, sizes):
    """Returns the shape of initial or final states, and how many numbers saved starts, and all that is saved, have."""
    segments, maps, sequences, value_heads, kept = sizes
    state = value_heads * heads[2] * heads[3]
    starts = segments * state
    return (sequences, state), starts, starts + maps * value_heads * _map_width[name](heads[2]) + kept


def _make_recurrence(name):
    """Registers a recurrence and its gradient.

    sizes: segments, maps, sequences and value heads of this rank, and how many numbers kernels keep, of `_kept`. What
    is saved is one tensor: states before segments, maps and those.
    """
    takes_beta = name in ("gated_delta_rule", "kimi_delta_attention")

    def results(make, v, initial, save, final, heads, sizes):
        o, of_sums = contiguous_like(v), sums(v)
        if not (save or final):
            return o, None, None
        whole, _, saved = _state_sizes(name, heads, sizes)
        return o, make(whole, dtype=of_sums) if final else None, v.new_empty(saved, dtype=of_sums) if save else None

    def parts(saved, heads, sizes):
        """Returns what the extension takes: on the host, states and maps; on a device all, at a multiple of 256 bytes,
        where torch's own memory begins, but not all that hooks of saved tensors bring back."""
        if saved is None:
            return None, None
        if not saved.is_cpu:
            return saved.clone() if saved.data_ptr() % 256 else saved, None
        starts = _state_sizes(name, heads, sizes)[1]
        return saved[:starts], saved[starts:]

    def inputs(q, k, v, g, beta):
        return [q, k, v, g, beta] if takes_beta else [q, k, v, g]

    def alone(q, k, v, g, beta, initial, save, final, chunk, qk_l2norm, scale, heads, sizes, plan, comm):
        p, c = _held(name, plan, comm)
        made = o, last, saved = results(v.new_zeros, v, initial, save, final, heads, sizes)
        _ext.recur(
            name, p.of, inputs(q, k, v, g, beta), o, tuple(heads), (chunk, qk_l2norm, scale), c, initial, last,
            *parts(saved, heads, sizes)
        )
        return made

    def filled(made, v):
        return tuple(v.new_empty(0, dtype=sums(v)) if x is None else x for x in made)

    def run(q, k, v, *more):
        return filled(alone(q, k, v, *more), v)

    def fake(q, k, v, g, beta, initial, save, final, chunk, qk_l2norm, scale, heads, sizes, plan, comm):
        return filled(results(v.new_empty, v, initial, save, final, heads, sizes), v)

    def gradients(make, q, k, v, g, beta, dinitial, heads, sizes):
        like = contiguous_like
        return (
            like(q), like(k), like(v), like(g), None if beta is None else like(beta),
            make(_state_sizes(name, heads, sizes)[0], dtype=sums(q)) if dinitial else None,
        )

    def back_alone(q, k, v, g, beta, do, dfinal, saved, dinitial, chunk, qk_l2norm, scale, heads, sizes, plan, comm):
        p, c = _held(name + "_backward", plan, comm)
        made = gradients(q.new_zeros, q, k, v, g, beta, dinitial, heads, sizes)
        _ext.recur_backward(
            name, p.of, inputs(q, k, v, g, beta), do.contiguous(), made[:5 if takes_beta else 4],
            tuple(heads), (chunk, qk_l2norm, scale), c, *parts(saved, heads, sizes),
            None if dfinal is None else dfinal.contiguous(), made[5]
        )
        return made

    def run_back(q, *more):
        return filled(back_alone(q, *more), q)

    def fake_back(q, k, v, g, beta, do, dfinal, saved, dinitial, chunk, qk_l2norm, scale, heads, sizes, plan, comm):
        return filled(gradients(q.new_empty, q, k, v, g, beta, dinitial, heads, sizes), q)

    back = backward_operator(
        f"{name}_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor do, Tensor? dfinal, "
        "Tensor saved, bool dinitial, SymInt chunk, bool qk_l2norm, float? scale, SymInt[] heads, SymInt[] sizes, "
        "SymInt plan, SymInt comm) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        run_back, fake_back, back_alone,
    )

    def save_inputs(ctx, args, made):
        q, k, v, g, beta, initial, save, ctx.final, *ctx.options, plan, comm = args
        keep(ctx, name, plan, comm)
        require(save, name, "save", "True where a gradient is wanted", save)
        ctx.dinitial = initial is not None and initial.requires_grad
        ctx.mark_non_differentiable(made[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, made[2])

    def gradient(ctx, do, dfinal, *_):
        q, k, v, g, beta, saved = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(v)
        if dfinal is None and ctx.final:  # as of every rank: they compare whether there is one
            dfinal = v.new_zeros(_state_sizes(name, *ctx.options[-2:])[0], dtype=sums(v))
        dq, dk, dv, dg, dbeta, dinitial = back(
            q, k, v, g, beta, do, dfinal, saved, ctx.dinitial, *ctx.options, ctx.plan, ctx.comm
        )
        return (
            dq, dk, dv, dg, None if beta is None else dbeta, dinitial if ctx.dinitial else None, None, None, None, None,
            None, None, None, None, None
        )

    _recurrences[name] = operator(
        f"{name}(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? initial, bool save, bool final, "
        "SymInt chunk, bool qk_l2norm, float? scale, SymInt[] heads, SymInt[] sizes, SymInt plan, SymInt comm) "
        "-> (Tensor, Tensor, Tensor)",
        run, fake, save_inputs, gradient, alone, 2,
    )


for _name in _map_width:
    _make_recurrence(_name)


def _kept(name, q, plan, comm, heads, value_heads):
    """Returns how many float32 kernels keep for the backward at most: of any grouping of the rank's segments."""
    if name != "gated_delta_rule" or comm.kept_chunk == 0 or q.dtype not in (torch.bfloat16, torch.float16):
        return 0
    if any(dim > 128 or dim % 8 != 0 for dim in heads[2:4]):
        return 0
    return (plan.chunks * value_heads * comm.kept_chunk + 512 * plan.segments) // 4


def _recur(name, q, k, v, g, beta, plan, comm, chunk, qk_l2norm, scale, initial, final):
    comm, plan = taken_comm(name, comm), taken_plan(name, plan, Carry)
    recorded = check(name, comm.device, _gates, q=q, k=k, v=v, g=g, beta=beta, initial=initial)
    heads, value_heads = plan.heads, plan.value_heads
    if heads is None:
        keys, values = q.shape, v.shape
        if value_heads < 0 or len(keys) != 3 or len(values) != 3:
            wanted = "q and v as (rows, heads, dim) of all heads, or carry(..., heads=Heads(...))"
            raise Error(name, "heads", wanted, f"{tuple(keys)} and {tuple(values)}")
        value_heads = values[1]
        heads = keys[1], value_heads, keys[2], values[2]
    save = wants_gradient((q, k, v, g, beta, initial)) if recorded is None else recorded
    kept = _kept(name, q, plan, comm, heads, value_heads) if save else 0
    made = _recurrences[name](
        recorded, q, k, v, g, beta, initial, save, final, chunk, qk_l2norm, scale, heads,
        [plan.segments, plan.maps, plan.sequences, value_heads, kept], plan.handle, comm.handle
    )
    return made[:2] if final else made[0]


# What checkers of types know: o, and with `final` a state.


class _DeltaRule(Protocol):
    """The delta rules."""

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        plan: Carry | _ext.Carry, comm: AnyCommunicator, *, chunk: int = 64, qk_l2norm: bool = True,
        scale: float | None = None, initial: torch.Tensor | None = None, final: Literal[False] = False
    ) -> torch.Tensor: ...

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        plan: Carry | _ext.Carry, comm: AnyCommunicator, *, chunk: int = 64, qk_l2norm: bool = True,
        scale: float | None = None, initial: torch.Tensor | None = None, final: Literal[True]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        plan: Carry | _ext.Carry, comm: AnyCommunicator, *, chunk: int = 64, qk_l2norm: bool = True,
        scale: float | None = None, initial: torch.Tensor | None = None, final: bool
    ) -> Any: ...


class _Decay(Protocol):
    """The decays."""

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, plan: Carry | _ext.Carry,
        comm: AnyCommunicator, *, chunk: int = 64, scale: float | None = None, initial: torch.Tensor | None = None,
        final: Literal[False] = False
    ) -> torch.Tensor: ...

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, plan: Carry | _ext.Carry,
        comm: AnyCommunicator, *, chunk: int = 64, scale: float | None = None, initial: torch.Tensor | None = None,
        final: Literal[True]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, plan: Carry | _ext.Carry,
        comm: AnyCommunicator, *, chunk: int = 64, scale: float | None = None, initial: torch.Tensor | None = None,
        final: bool
    ) -> Any: ...


def _delta_rule(function: Any) -> _DeltaRule:
    return function


def _decay(function: Any) -> _Decay:
    return function


@_delta_rule
def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, plan: Carry | _ext.Carry,
    comm: AnyCommunicator, *, chunk: int = 64, qk_l2norm: bool = True, scale: float | None = None,
    initial: torch.Tensor | None = None, final: bool = False
) -> Any:
    """The gated delta rule in place on any sharding.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t

    q, k: (rows, key heads, key_dim), v: (rows, value heads, value_dim), g: log decay, and beta: (rows, value heads).
    plan: carry(sharding, comm, "scan" or "serial"). scale: by default 1 / sqrt(key_dim). qk_l2norm: q and k are divided
    by sqrt(sum of squares + 1e-6) first. Returns o, as v. Collective, as is its backward.
    initial: (sequences, value heads * key_dim * value_dim) before the batch. final: returns (o, states behind the
    batch), of a sequence on the rank where it ends, and zeros on the others. Both have gradients, and all ranks have
    the same of them, which they compare.

    For the backward it keeps its inputs and, in float32, the state before each segment and, by scan, a map (value
    heads, key_dim, key_dim) of each that lies between two others. On tensor cores also what the backward would make
    again of k, g and beta, in 16 bits and float32: 5.5 KB for every 64 tokens and value head, 32768 tokens and 32
    heads 92 MB. A checkpoint drops all of it.

    On devices tensor cores multiply bfloat16 and float16, with float32 sums. Errors of float16 are a quarter to an
    eighth of those of bfloat16, but states and gradients beyond 65504 make results infinite or NaN, and gradients below
    6e-5 lose bits: a loss wants a scale, as torch.amp.GradScaler gives it.
    """
    return _recur("gated_delta_rule", q, k, v, g, beta, plan, comm, chunk, qk_l2norm, scale, initial, final)


@_delta_rule
def kimi_delta_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, plan: Carry | _ext.Carry,
    comm: AnyCommunicator, *, chunk: int = 64, qk_l2norm: bool = True, scale: float | None = None,
    initial: torch.Tensor | None = None, final: bool = False
) -> Any:
    """The delta rule with a decay a channel, g: (rows, value heads, key_dim). All else as of `gated_delta_rule`."""
    return _recur("kimi_delta_attention", q, k, v, g, beta, plan, comm, chunk, qk_l2norm, scale, initial, final)


@_decay
def head_decay_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, plan: Carry | _ext.Carry,
    comm: AnyCommunicator, *, chunk: int = 64, scale: float | None = None, initial: torch.Tensor | None = None,
    final: bool = False
) -> Any:
    """Linear attention with a decay a head: S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t.

    g: (rows, value heads). All else as of `gated_delta_rule`.
    """
    return _recur("head_decay_attention", q, k, v, g, None, plan, comm, chunk, True, scale, initial, final)


@_decay
def channel_decay_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, plan: Carry | _ext.Carry,
    comm: AnyCommunicator, *, chunk: int = 64, scale: float | None = None, initial: torch.Tensor | None = None,
    final: bool = False
) -> Any:
    """Linear attention with a decay a channel, g: (rows, value heads, key_dim). As of `head_decay_attention`."""
    return _recur("channel_decay_attention", q, k, v, g, None, plan, comm, chunk, True, scale, initial, final)
