# SPDX-License-Identifier: Apache-2.0
"""Exchanges and operators: each takes its arrays, a plan and a communicator, and each has its backward beside it.

Results are new arrays in the framework of the inputs, unless `out` (of a backward: `dx` and so on) names memory for
them. An array is rows in its first dimension; all others make up a row, whose elements stand side by side.
"""

import math
from typing import NamedTuple, Optional

from . import _ext
from ._array import empty_like, finish
from ._error import Error, require


def _shape(where, name, x):
    shape = getattr(x, "shape", None)
    require(shape is not None and len(shape) > 0, where, name, "an array of rows", type(x).__name__)
    return tuple(shape)


def _result(x, out, shape, dtype=None, zeros=False):
    return empty_like(x, shape, dtype, zeros) if out is None else out


def exchange(plan, x, comm, out=None):
    """Runs a plan of `relayout`: moves this rank's rows of x to where they belong on all ranks. Collective.

    x: (plan.source_rows, ...), of any dtype that is moved, or added where the plan sums: bfloat16 and float16 too.
    Returns (plan.target_rows, ...), or writes it to `out`, which does not overlap x. Bits are preserved, NaN included.
    Raises cpx.Error before anything moves if an array does not fit or ranks' plans differ; later, within the deadline,
    if a rank fails or does not come.
    """
    row = _shape("exchange", "x", x)[1:]
    if plan.target_width and plan.target_width != math.prod(row):
        row = (plan.target_width,)
    y = _result(x, out, (plan.target_rows, *row))
    _ext.exchange(plan, x, y, comm)
    return finish(x, y)


def shift_rows(plan, x, comm, fill=0, out=None):
    """Returns for every token the row of the token plan.reach behind it ("after") or before it ("before"). Collective.

    plan: of `halo`. `fill` where either is no valid token of the sequence. The backward is the same by the other side.
    """
    y = _result(x, out, _shape("shift_rows", "x", x))
    _ext.shift_rows(plan, x, y, comm, fill)
    return finish(x, y)


def sum_over_ranks(values, comm):
    """Replaces values, an array of any shape, on every rank by their sums over all ranks, added in rank order.

    Collective. Each rank sends 2 (W - 1) / W times the values. Returns values.
    """
    _ext.sum_over_ranks(values, comm)
    return values


def causal_conv1d(plan, x, weight, comm, bias=None, activation=None, *, initial=None, final=None, out=None):
    """Causal depthwise convolution: y_t = activation(bias + sum_j weight_j x_{t-K+1+j}), zeros before a sequence.

    plan: halo(sharding, rank, K - 1). x: (rows, channels) of its sharding; weight: (channels, K); bias: (channels);
    activation: None or "silu". float32 or float64. Bitwise the same on every sharding. Collective.
    initial, final: (sequences, K * channels), the newest K rows before and behind the batch, for decoding; `final` is
    written on the rank where a sequence ends; they may be one array.
    """
    y = _result(x, out, _shape("causal_conv1d", "x", x))
    _ext.causal_conv1d(plan, x, weight, bias, activation, y, comm, initial, final)
    return finish(x, y)


def causal_conv1d_backward(
    before, after, x, weight, dy, comm, bias=None, activation=None, *, order="by_rank", dx=None, dweight=None, dbias=None
):
    """The gradients of `causal_conv1d` of sequences that began with it: (dx, dweight, dbias). Collective.

    before: the plan of the forward; after: halo(sharding, rank, K - 1, "after"). dweight and dbias are this rank's
    share, which `sum_over_ranks` completes; arrays that are given for them are added to. dbias is None without bias.
    order: "by_row" adds weights' gradients in the order of the batch, bitwise the same on every sharding.
    """
    where = "causal_conv1d_backward"
    to_x = _result(x, dx, _shape(where, "x", x))
    to_weight = _result(weight, dweight, _shape(where, "weight", weight), zeros=True)
    to_bias = None if bias is None else _result(bias, dbias, _shape(where, "bias", bias), zeros=True)
    _ext.causal_conv1d_backward(
        before, after, x, weight, bias, activation, dy, to_x, to_weight, to_bias, comm, order
    )
    return finish(x, to_x), finish(weight, to_weight), to_bias if to_bias is None else finish(bias, to_bias)


class Heads(NamedTuple):
    """Heads of a recurrence over all ranks: value head h reads q and k of head h / (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


class Saved(NamedTuple):
    """What the backward of a recurrence needs of its forward: the state before every segment, and the scan's maps."""

    starts: object
    maps: object


_map_width = {
    "gated_delta_rule": lambda dim: dim * dim,
    "kimi_delta_attention": lambda dim: dim * dim,
    "channel_decay_attention": lambda dim: dim,
    "head_decay_attention": lambda dim: 1,
}


def _heads(where, plan, q, v, heads) -> Heads:
    if heads is not None:
        require(len(heads) == 4, where, "heads", "Heads(key_heads, value_heads, key_dim, value_dim)", heads)
        return Heads(*(int(n) for n in heads))
    a, b = _shape(where, "q", q), _shape(where, "v", v)
    if plan.sharding.sections or len(a) != 3 or len(b) != 3:
        raise Error(where, "heads", "Heads(...), or q and v as (rows, heads, dim) of all heads", f"{a} and {b}")
    return Heads(a[1], b[1], a[2], b[2])


def saved_states(plan, like, heads, recurrence="gated_delta_rule") -> Saved:
    """Returns memory for what the backward of a recurrence needs, in the framework, dtype and device of `like`."""
    require(recurrence in _map_width, "saved_states", "recurrence", ", ".join(_map_width), recurrence)
    heads = Heads(*heads)
    first, last = plan.sharding.heads(plan.rank, heads.value_heads)
    width = _map_width[recurrence](heads.key_dim)
    return Saved(
        empty_like(like, (plan.segments, (last - first) * heads.key_dim * heads.value_dim)),
        empty_like(like, (plan.maps if plan.how == "scan" and not plan.sharding.every_row else 0, (last - first) * width)),
    )


def _recur(name, plan, inputs, comm, heads, chunk, norm, scale, initial, final, saved, out):
    q, v = inputs[0], inputs[2]
    heads = _heads(name, plan, q, v, heads)
    o = _result(v, out, _shape(name, "v", v))
    starts, maps = saved if saved is not None else (None, None)
    _ext.recur(name, plan, inputs, o, tuple(heads), (chunk, norm, scale or 0.0), comm, initial, final, starts, maps)
    return finish(v, o)


def _recur_backward(name, plan, inputs, do, saved, comm, heads, chunk, norm, scale, dfinal, dinitial, gradients):
    heads = _heads(name + "_backward", plan, inputs[0], inputs[2], heads)
    given = gradients or (None,) * len(inputs)
    made = [_result(x, d, _shape(name + "_backward", "x", x)) for x, d in zip(inputs, given)]
    parameters = (chunk, norm, scale or 0.0)
    _ext.recur_backward(name, plan, inputs, do, made, tuple(heads), parameters, comm, saved[0], saved[1], dfinal, dinitial)
    return tuple(finish(x, d) for x, d in zip(inputs, made))


def gated_delta_rule(
    plan, q, k, v, g, beta, comm, *, heads=None, chunk=64, qk_l2norm=True, scale=None, initial=None, final=None,
    saved=None, out=None
):
    """The gated delta rule in place on any sharding: S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, o = scale S^T q.

    plan: carry(sharding, rank, "scan" or "serial"). q, k: (rows, key heads, key_dim), v: (rows, value heads, value_dim),
    g: log decay, and beta: (rows, value heads), of the heads that the rank holds. float32 or float64. Collective.
    heads: Heads(...) of all ranks, by default those of q and v. scale: by default 1 / sqrt(key_dim). qk_l2norm: q and k
    are divided by sqrt(sum of squares + 1e-6) first.
    initial, final: (sequences, value heads * key_dim * value_dim) before and behind the batch; `final` is written on the
    rank where a sequence ends. saved: of `saved_states`, takes what the backward needs. Returns o, as v.
    """
    return _recur(
        "gated_delta_rule", plan, [q, k, v, g, beta], comm, heads, chunk, qk_l2norm, scale, initial, final, saved, out
    )


def gated_delta_rule_backward(
    plan, q, k, v, g, beta, do, saved, comm, *, heads=None, chunk=64, qk_l2norm=True, scale=None, dfinal=None,
    dinitial=None, out=None
):
    """The gradients of `gated_delta_rule`: (dq, dk, dv, dg, dbeta). Arguments as there; do: the gradient of o.

    dfinal: of the final states; dinitial is written on the rank where a sequence begins. out: five arrays, or none.
    """
    return _recur_backward(
        "gated_delta_rule", plan, [q, k, v, g, beta], do, saved, comm, heads, chunk, qk_l2norm, scale, dfinal, dinitial, out
    )


def kimi_delta_attention(
    plan, q, k, v, g, beta, comm, *, heads=None, chunk=64, qk_l2norm=True, scale=None, initial=None, final=None,
    saved=None, out=None
):
    """Kimi delta attention: the delta rule with a decay a channel, g: (rows, value heads, key_dim). Else as there."""
    return _recur(
        "kimi_delta_attention", plan, [q, k, v, g, beta], comm, heads, chunk, qk_l2norm, scale, initial, final, saved, out
    )


def kimi_delta_attention_backward(
    plan, q, k, v, g, beta, do, saved, comm, *, heads=None, chunk=64, qk_l2norm=True, scale=None, dfinal=None,
    dinitial=None, out=None
):
    """The gradients of `kimi_delta_attention`: (dq, dk, dv, dg, dbeta)."""
    return _recur_backward(
        "kimi_delta_attention", plan, [q, k, v, g, beta], do, saved, comm, heads, chunk, qk_l2norm, scale, dfinal,
        dinitial, out
    )


def _linear(name):
    def forward(plan, q, k, v, g, comm, *, heads=None, chunk=64, scale=None, initial=None, final=None, saved=None, out=None):
        return _recur(name, plan, [q, k, v, g], comm, heads, chunk, True, scale, initial, final, saved, out)

    def backward(
        plan, q, k, v, g, do, saved, comm, *, heads=None, chunk=64, scale=None, dfinal=None, dinitial=None, out=None
    ):
        return _recur_backward(
            name, plan, [q, k, v, g], do, saved, comm, heads, chunk, True, scale, dfinal, dinitial, out
        )

    of = "a decay a head, g: (rows, value heads)" if name.startswith("head") else (
        "a decay a channel, g: (rows, value heads, key_dim)"
    )
    forward.__name__ = forward.__qualname__ = name
    backward.__name__ = backward.__qualname__ = name + "_backward"
    forward.__doc__ = (
        f"Linear attention with {of}: S_t = exp(g_t) S_{{t-1}} + k_t v_t^T, o_t = scale S_t^T q_t.\n\n"
        "Other arguments as of `gated_delta_rule`."
    )
    backward.__doc__ = f"The gradients of `{name}`: (dq, dk, dv, dg)."
    return forward, backward


head_decay_attention, head_decay_attention_backward = _linear("head_decay_attention")
channel_decay_attention, channel_decay_attention_backward = _linear("channel_decay_attention")


class Movement:
    """Moves rows between two kinds of sharding, whichever batch they are of: prepared once, for every packing.

    source, target: of a first batch. width: elements of a row, unless a sharding has sections. rows, sequences: the
    most of any batch that comes. `set` makes ready for another batch: no communication. Collective are its making, a
    call and `transposed`, the backward of a call.
    """

    def __init__(self, source, target, width, rows, sequences, comm):
        self.comm, self.width, self.rows, self.sequences = comm, width, rows, sequences
        self._like = source, target
        self._source = self._target = None
        self.set(source, target)

    def set(self, source, target):
        """Takes another batch, of shardings over as many ranks with the sections of the first."""
        if source is self._source and target is self._target:
            return
        for given, like in zip((source, target), self._like):
            require(given.ranks == like.ranks, "movement", "ranks of the sharding", like.ranks, given.ranks)
            require(given.sections == like.sections, "movement", "sections", like.sections, given.sections)
        most = max(source.rows(self.comm.rank), target.rows(self.comm.rank))
        sequences = source.batch.sequences
        require(
            most <= self.rows and sequences <= self.sequences, "movement", "rows and sequences of the batch",
            f"at most {self.rows}, {self.sequences}", f"{most}, {sequences}"
        )
        self._plan = _ext.relayout(source, target, self.comm.rank)
        self._back = self._plan.transposed()
        self._source, self._target = source, target

    @property
    def plan(self):
        """The plan of the last batch."""
        return self._plan

    def __call__(self, x, out=None):
        return exchange(self._plan, x, self.comm, out)

    def transposed(self, dy, out=None):
        """Moves rows back: the backward of a call, which adds what was copied."""
        return exchange(self._back, dy, self.comm, out)
