# SPDX-License-Identifier: Apache-2.0
"""Exchanges and operators: each takes its arrays, a plan and a communicator, and each has its backward beside it.

Results are new arrays in the framework of the inputs, unless `out` (of a backward: `dx` and so on) names memory for
them. An array is rows in its first dimension; all others make up a row, whose elements stand side by side.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import _ext
from ._ext import Carry, Communicator, Halo, Relayout, Sharding
from ._array import AnyArray, Array, Weight, empty_like, finish, result as _result, shape_of as _shape
from ._error import Error, require
from ._sharded import bare, labelled


def _require_plan(where, plan, kind):
    if not isinstance(plan, kind):
        raise Error(where, "plan", f"what cpx.{kind.__name__.lower()} returns", type(plan).__name__)


def _require_comm(where, comm):
    if not isinstance(comm, Communicator):
        kind = type(comm)
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        raise Error(where, "comm", "what cpx.run hands to a rank, or cpx.threads returns", name)


def exchange(plan: Relayout, x: Array, comm: Communicator, out: Array | None = None) -> Array:
    """Runs a plan of `relayout`: moves this rank's rows of x to where they belong on all ranks. Collective.

    x: (plan.source_rows, ...), of any dtype that is moved, or added where the plan sums: bfloat16 and float16 too.
    Returns (plan.target_rows, ...), or writes it to `out`, which does not overlap x. Bits are preserved, NaN included.
    Raises cpx.Error before anything moves if an array does not fit or ranks' plans differ; later, within the deadline,
    if a rank fails or does not come.
    """
    _require_plan("exchange", plan, Relayout)
    _require_comm("exchange", comm)
    rows = bare("exchange", "x", x, plan.source, plan.rank)
    row = _shape("exchange", "x", rows)[1:]
    if plan.target_width and plan.target_width != math.prod(row):
        row = (plan.target_width,)
    y = _result(rows, bare("exchange", "out", out, plan.target, plan.rank), (plan.target_rows, *row))
    _ext.exchange(plan, rows, y, comm)
    return labelled(x, finish(rows, y), plan.target, plan.rank)


def shift_rows(plan: Halo, x: Array, comm: Communicator, fill: float = 0, out: Array | None = None) -> Array:
    """Returns for every token the row of the token plan.reach behind it ("after") or before it ("before"). Collective.

    plan: of `halo`. x: (rows, ...) of its sharding; float32, float64, bfloat16, float16, int64 or int32. fill: the same
    on all ranks, where either is no valid token of the sequence; an integer comes exactly, and cpx.Error is raised of
    what the dtype does not hold. Returns y as x. The backward is the same by the other side.
    """
    _require_plan("shift_rows", plan, Halo)
    _require_comm("shift_rows", comm)
    place = plan.sharding, plan.rank
    rows = bare("shift_rows", "x", x, *place)
    y = _result(rows, bare("shift_rows", "out", out, *place), _shape("shift_rows", "x", rows))
    _ext.shift_rows(plan, rows, y, comm, fill)
    return labelled(x, finish(rows, y), *place)


def sum_over_ranks(values: Array, comm: Communicator) -> Array:
    """Replaces values, an array of any shape, on every rank by their sums over all ranks, added in rank order.

    Collective. Each rank sends 2 (W - 1) / W times the values. Returns values.
    """
    _require_comm("sum_over_ranks", comm)
    _ext.sum_over_ranks(values, comm)
    return values


def causal_conv1d(
    plan: Halo, x: Array, weight: AnyArray, comm: Communicator, bias: AnyArray | None = None,
    activation: str | None = None, *, initial: AnyArray | None = None, final: AnyArray | None = None,
    out: Array | None = None
) -> Array:
    """Causal depthwise convolution: y_t = activation(bias + sum_j weight_j x_{t-K+1+j}), zeros before a sequence.

    plan: halo(sharding, rank, K - 1). x: (rows, channels) of its sharding; weight: (channels, K); bias: (channels);
    activation: None or "silu". float32 or float64. Bitwise the same on every sharding. Collective.
    initial, final: (sequences, K * channels), the newest K rows before and behind the batch, for decoding; `initial` is
    read on every rank that holds one of the first K - 1 tokens of a sequence, `final` is written on the rank where it
    ends; they may be one array.
    """
    _require_plan("causal_conv1d", plan, Halo)
    _require_comm("causal_conv1d", comm)
    where, place = "causal_conv1d", (plan.sharding, plan.rank)
    rows = bare(where, "x", x, *place)
    y = _result(rows, bare(where, "out", out, *place), _shape(where, "x", rows))
    _ext.causal_conv1d(plan, rows, weight, bias, activation, y, comm, initial, final)
    return labelled(x, finish(rows, y), *place)


def causal_conv1d_backward(
    before: Halo, after: Halo, x: Array, weight: Weight, dy: AnyArray, comm: Communicator, bias: Weight | None = None,
    activation: str | None = None, *, order: str = "by_rank", dx: Array | None = None, dweight: Weight | None = None,
    dbias: Weight | None = None
) -> tuple[Array, Weight, Weight | None]:
    """The gradients of `causal_conv1d` of sequences that began with it: (dx, dweight, dbias). Collective.

    before: the plan of the forward; after: halo(sharding, rank, K - 1, "after"). dweight and dbias are this rank's
    share, which `sum_over_ranks` completes; arrays that are given for them are added to. dbias is None without bias.
    order: "by_row" adds weights' gradients in the order of the batch, bitwise the same on every sharding.
    """
    for plan in (before, after):
        _require_plan("causal_conv1d_backward", plan, Halo)
    _require_comm("causal_conv1d_backward", comm)
    where, place = "causal_conv1d_backward", (before.sharding, before.rank)
    given, x, dy = x, bare(where, "x", x, *place), bare(where, "dy", dy, *place)
    to_x = _result(x, bare(where, "dx", dx, *place), _shape(where, "x", x))
    to_weight = _result(weight, dweight, _shape(where, "weight", weight), zeros=True)
    to_bias = None if bias is None else _result(bias, dbias, _shape(where, "bias", bias), zeros=True)
    _ext.causal_conv1d_backward(before, after, x, weight, bias, activation, dy, to_x, to_weight, to_bias, comm, order)
    of_x = labelled(given, finish(x, to_x), *place)
    return of_x, finish(weight, to_weight), to_bias if to_bias is None else finish(bias, to_bias)


class Heads(NamedTuple):
    """Heads of a recurrence over all ranks: value head h reads q and k of head h / (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


class Saved(NamedTuple):
    """What the backward of a recurrence needs of its forward: the state before every segment, and the scan's maps."""

    starts: Any
    maps: Any


_input_names = "q", "k", "v", "g", "beta"
_map_width = {
    "gated_delta_rule": lambda dim: dim * dim,
    "kimi_delta_attention": lambda dim: dim * dim,
    "channel_decay_attention": lambda dim: dim,
    "head_decay_attention": lambda dim: 1,
}


def _heads(where, plan: Carry, q, v, heads) -> Heads:
    if heads is not None:
        require(len(heads) == 4, where, "heads", "Heads(key_heads, value_heads, key_dim, value_dim)", heads)
        return Heads(*(int(n) for n in heads))
    a, b = _shape(where, "q", q), _shape(where, "v", v)
    if plan.sharding.sections or len(a) != 3 or len(b) != 3:
        raise Error(where, "heads", "Heads(...), or q and v as (rows, heads, dim) of all heads", f"{a} and {b}")
    return Heads(a[1], b[1], a[2], b[2])


def saved_states(plan: Carry, like: AnyArray, heads: Sequence[int], recurrence: str = "gated_delta_rule") -> Saved:
    """Returns memory for what the backward of a recurrence needs, in the framework, dtype and device of `like`.

    heads: Heads(...) of all ranks. starts: (plan.segments, value heads * key_dim * value_dim) of the heads that the
    rank holds; maps: (plan.maps, value heads * width), by scan, else (0, value heads * width), where width is key_dim^2
    of the delta rules, key_dim of a decay a channel, 1 of a decay a head.
    """
    require(recurrence in _map_width, "saved_states", "recurrence", ", ".join(_map_width), recurrence)
    heads = Heads(*heads)
    first, last = plan.sharding.heads(plan.rank, heads.value_heads)
    width = _map_width[recurrence](heads.key_dim)
    return Saved(
        empty_like(like, (plan.segments, (last - first) * heads.key_dim * heads.value_dim)),
        empty_like(
            like, (plan.maps if plan.how == "scan" and not plan.sharding.every_row else 0, (last - first) * width)
        ),
    )


def _recur(name, plan, inputs, comm: Communicator, heads, chunk, norm, scale, initial, final, saved, out):
    _require_plan(name, plan, Carry)
    _require_comm(name, comm)
    given, place = inputs[2], (plan.sharding, plan.rank)
    inputs = [bare(name, of, x, *place) for of, x in zip(_input_names, inputs)]
    q, v = inputs[0], inputs[2]
    heads = _heads(name, plan, q, v, heads)
    o = _result(v, bare(name, "out", out, *place), _shape(name, "v", v))
    starts, maps = saved if saved is not None else (None, None)
    _ext.recur(name, plan, inputs, o, tuple(heads), (chunk, norm, scale), comm, initial, final, starts, maps)
    return labelled(given, finish(v, o), *place)


def _recur_backward(
    name, plan, inputs, do, saved, comm: Communicator, heads, chunk, norm, scale, dfinal, dinitial, gradients
):
    _require_plan(name + "_backward", plan, Carry)
    _require_comm(name + "_backward", comm)
    where, place, of_inputs = name + "_backward", (plan.sharding, plan.rank), inputs
    inputs = [bare(where, of, x, *place) for of, x in zip(_input_names, inputs)]
    do = bare(where, "do", do, *place)
    heads = _heads(where, plan, inputs[0], inputs[2], heads)
    given = [bare(where, "a gradient", d, *place) for d in gradients or (None,) * len(inputs)]
    made = [_result(x, d, _shape(where, of, x)) for of, x, d in zip(_input_names, inputs, given)]
    parameters = (chunk, norm, scale)
    _ext.recur_backward(
        name, plan, inputs, do, made, tuple(heads), parameters, comm, saved[0], saved[1], dfinal, dinitial
    )
    return tuple(labelled(s, finish(x, d), *place) for s, x, d in zip(of_inputs, inputs, made))


def gated_delta_rule(
    plan: Carry, q: Array, k: Array, v: Array, g: Array, beta: Array, comm: Communicator, *,
    heads: Sequence[int] | None = None, chunk: int = 64, qk_l2norm: bool = True, scale: float | None = None,
    initial: AnyArray | None = None, final: AnyArray | None = None, saved: Saved | None = None, out: Array | None = None
) -> Array:
    """The gated delta rule in place on any sharding.

        S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t,    a_t = exp(g_t)

    plan: carry(sharding, rank, "scan" or "serial"). q, k: (rows, key heads, key_dim), v: (rows, value heads,
    value_dim), g: log decay, and beta: (rows, value heads), of the heads that the rank holds. float32 or float64.
    Collective. heads: Heads(...) of all ranks, by default those of q and v. scale: by default 1 / sqrt(key_dim).
    qk_l2norm: q and k are divided by sqrt(sum of squares + 1e-6) first.
    initial, final: (sequences, value heads * key_dim * value_dim) before and behind the batch; `initial` on all ranks
    or on none, which they compare, `final` is written on the rank where a sequence ends. saved: of `saved_states`,
    takes what the backward needs. Returns o, as v.
    """
    return _recur(
        "gated_delta_rule", plan, [q, k, v, g, beta], comm, heads, chunk, qk_l2norm, scale, initial, final, saved, out
    )


def gated_delta_rule_backward(
    plan: Carry, q: Array, k: Array, v: Array, g: Array, beta: Array, do: AnyArray, saved: Saved, comm: Communicator, *,
    heads: Sequence[int] | None = None, chunk: int = 64, qk_l2norm: bool = True, scale: float | None = None,
    dfinal: AnyArray | None = None, dinitial: AnyArray | None = None, out: Sequence[Any] | None = None
) -> tuple[Array, Array, Array, Array, Array]:
    """The gradients of `gated_delta_rule`: (dq, dk, dv, dg, dbeta). Arguments as there; do: the gradient of o.

    dfinal: of the final states, on all ranks or on none, which they compare; dinitial is written on the rank where a
    sequence begins. out: five arrays, or none.
    """
    name, inputs = "gated_delta_rule", [q, k, v, g, beta]
    return _recur_backward(
        name, plan, inputs, do, saved, comm, heads, chunk, qk_l2norm, scale, dfinal, dinitial, out
    )


def kimi_delta_attention(
    plan: Carry, q: Array, k: Array, v: Array, g: Array, beta: Array, comm: Communicator, *,
    heads: Sequence[int] | None = None, chunk: int = 64, qk_l2norm: bool = True, scale: float | None = None,
    initial: AnyArray | None = None, final: AnyArray | None = None, saved: Saved | None = None, out: Array | None = None
) -> Array:
    """Kimi delta attention: the delta rule with a decay a channel, g: (rows, value heads, key_dim). Else as there."""
    name, inputs = "kimi_delta_attention", [q, k, v, g, beta]
    return _recur(name, plan, inputs, comm, heads, chunk, qk_l2norm, scale, initial, final, saved, out)


def kimi_delta_attention_backward(
    plan: Carry, q: Array, k: Array, v: Array, g: Array, beta: Array, do: AnyArray, saved: Saved, comm: Communicator, *,
    heads: Sequence[int] | None = None, chunk: int = 64, qk_l2norm: bool = True, scale: float | None = None,
    dfinal: AnyArray | None = None, dinitial: AnyArray | None = None, out: Sequence[Any] | None = None
) -> tuple[Array, Array, Array, Array, Array]:
    """The gradients of `kimi_delta_attention`: (dq, dk, dv, dg, dbeta)."""
    name, inputs = "kimi_delta_attention", [q, k, v, g, beta]
    return _recur_backward(
        name, plan, inputs, do, saved, comm, heads, chunk, qk_l2norm, scale, dfinal, dinitial, out
    )


def head_decay_attention(
    plan: Carry, q: Array, k: Array, v: Array, g: Array, comm: Communicator, *, heads: Sequence[int] | None = None,
    chunk: int = 64, scale: float | None = None, initial: AnyArray | None = None, final: AnyArray | None = None,
    saved: Saved | None = None, out: Array | None = None
) -> Array:
    """Linear attention with a decay a head: S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t.

    g: (rows, value heads). Other arguments as of `gated_delta_rule`.
    """
    name, inputs = "head_decay_attention", [q, k, v, g]
    return _recur(name, plan, inputs, comm, heads, chunk, True, scale, initial, final, saved, out)


def head_decay_attention_backward(
    plan: Carry, q: Array, k: Array, v: Array, g: Array, do: AnyArray, saved: Saved, comm: Communicator, *,
    heads: Sequence[int] | None = None, chunk: int = 64, scale: float | None = None, dfinal: AnyArray | None = None,
    dinitial: AnyArray | None = None, out: Sequence[Any] | None = None
) -> tuple[Array, Array, Array, Array]:
    """The gradients of `head_decay_attention`: (dq, dk, dv, dg). Arguments as of `gated_delta_rule_backward`."""
    return _recur_backward(
        "head_decay_attention", plan, [q, k, v, g], do, saved, comm, heads, chunk, True, scale, dfinal, dinitial, out
    )


def channel_decay_attention(
    plan: Carry, q: Array, k: Array, v: Array, g: Array, comm: Communicator, *, heads: Sequence[int] | None = None,
    chunk: int = 64, scale: float | None = None, initial: AnyArray | None = None, final: AnyArray | None = None,
    saved: Saved | None = None, out: Array | None = None
) -> Array:
    """Linear attention with a decay a channel, g: (rows, value heads, key_dim). Else as of `head_decay_attention`."""
    name, inputs = "channel_decay_attention", [q, k, v, g]
    return _recur(name, plan, inputs, comm, heads, chunk, True, scale, initial, final, saved, out)


def channel_decay_attention_backward(
    plan: Carry, q: Array, k: Array, v: Array, g: Array, do: AnyArray, saved: Saved, comm: Communicator, *,
    heads: Sequence[int] | None = None, chunk: int = 64, scale: float | None = None, dfinal: AnyArray | None = None,
    dinitial: AnyArray | None = None, out: Sequence[Any] | None = None
) -> tuple[Array, Array, Array, Array]:
    """The gradients of `channel_decay_attention`: (dq, dk, dv, dg). Arguments as of `gated_delta_rule_backward`."""
    return _recur_backward(
        "channel_decay_attention", plan, [q, k, v, g], do, saved, comm, heads, chunk, True, scale, dfinal, dinitial, out
    )


class gated_delta_net:
    """The gated delta net layer of Qwen3-Next and Qwen3.5 on a sharding. Made once a batch, used by all layers.

        y = out_proj(norm(delta_rule(silu(conv(q k v)), ...)) silu(z)),    g = -exp(A_log) softplus(a + dt_bias)

    carry: "scan" or "serial", in place: a halo and carried states; or "heads": one exchange to heads and one back.
    heads: Heads(...); kernel: taps of the convolution; chunk: tokens of the delta rule at once.
    """

    parameters: tuple[str, ...] = _ext.net_parameters  #: names of the weights, in a checkpoint of transformers

    sharding: Sharding
    rank: int

    def __init__(
        self, sharding: Sharding, rank: int, hidden: int, heads: Sequence[int], carry: str = "scan", kernel: int = 4,
        chunk: int = 64, eps: float = 1e-6
    ) -> None:
        self._net = _ext.Net(sharding, rank, hidden, tuple(heads), carry, kernel, chunk, eps)
        self.sharding, self.rank = sharding, rank

    def __call__(
        self, weights: Mapping[str, Any], x: Array, comm: Communicator, *, conv: AnyArray | None = None,
        recurrent: AnyArray | None = None, saved: _ext.NetSaved | None = None, out: Array | None = None
    ) -> Array:
        """Returns y of x: (rows, hidden) of float32 or float64. Collective.

        weights: a dict by `parameters`, whole on every rank, of the dtype of x, A_log and dt_bias, too, shaped as in
        the checkpoint: projections (out, in), conv (q + k + v channels, kernel), A_log, dt_bias (value heads,), norm
        (value_dim,).
        conv, recurrent: states to go on from, read and written in place: (sequences, kernel * channels) and
        (sequences, value heads * key_dim * value_dim) of the heads that the rank holds. saved: of `new_saved`.
        """
        where, place = "gated_delta_net", (self.sharding, self.rank)
        _require_comm(where, comm)
        rows = bare(where, "x", x, *place)
        y = _result(rows, bare(where, "out", out, *place), _shape(where, "x", rows))
        self._net.forward(self._list(where, weights), rows, y, comm, conv, recurrent, saved)
        return labelled(x, finish(rows, y), *place)

    def new_saved(self) -> _ext.NetSaved:
        """Returns what takes what the backward needs; of one layer and rank."""
        return _ext.NetSaved()

    def backward(
        self, weights: Mapping[str, Any], x: Array, saved: _ext.NetSaved, dy: AnyArray, comm: Communicator, *,
        order: str = "by_rank", dx: Array | None = None, dweights: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Returns (dx, dweights), a dict: the weights' gradients of this rank's rows.

        `sum_over_ranks` completes these. A dweights that is given is added to. order: "by_row" adds in the
        order of the batch.
        """
        where, place = "gated_delta_net_backward", (self.sharding, self.rank)
        _require_comm(where, comm)
        rows, dy = bare(where, "x", x, *place), bare(where, "dy", dy, *place)
        to_x = _result(rows, bare(where, "dx", dx, *place), _shape(where, "x", rows))
        given = self._list(where, weights)
        made = dweights or {
            name: empty_like(w, _shape(where, name, w), zeros=True) for name, w in zip(self.parameters, given)
        }
        self._net.backward(given, rows, saved, dy, to_x, self._list(where, made), comm, order)
        return labelled(x, finish(rows, to_x), *place), made

    def _list(self, where, weights):
        missing = [name for name in self.parameters if name not in weights]
        require(not missing, where, "weights", ", ".join(self.parameters), f"none of {', '.join(missing)}")
        return [_flat(weights[name]) if name == "conv1d.weight" else weights[name] for name in self.parameters]


def _flat(conv):
    """Returns (channels, kernel) of (channels, 1, kernel), as torch has it."""
    shape = _shape("gated_delta_net", "conv1d.weight", conv)
    return conv.reshape(shape[0], shape[2]) if len(shape) == 3 and shape[1] == 1 else conv


class AttentionHeads(NamedTuple):
    """Heads of an attention, over all ranks: query head h reads key head h / (query_heads / key_heads)."""

    query_heads: int
    key_heads: int
    dim: int


def _attended(where, heads, scale):
    """Returns heads as numbers, and scale or its default."""
    require(len(heads) == 3, where, "heads", "AttentionHeads(query_heads, key_heads, dim)", heads)
    heads = tuple(int(n) for n in heads)
    return heads, 1 / math.sqrt(max(heads[2], 1)) if scale is None else scale


def attention(
    queries: Sharding, keys: Sharding, rank: int, q: Array, k: Array, v: Array, heads: Sequence[int], *,
    scale: float | None = None, lse: AnyArray | None = None, out: Array | None = None, comm: Communicator | None = None
) -> Array:
    """Causal softmax attention: o = softmax(scale q K^T) V over the keys of a query's sequence up to its own token.

    queries: the sharding of q and o, any; keys: that of k and v, where every rank holds every row: replicated, or the
    same head_sharded as q. q: (rows, query heads, dim), k, v: (tokens, key heads, dim), of the heads that the rank
    holds; heads: AttentionHeads(...). float32, float64. scale: by default 1 / sqrt(dim). lse: (rows, query heads),
    takes what the backward needs. No communication: relayout q, k and v first. comm: of ranks with arrays on devices,
    which have float32, bfloat16 and float16, and lse of float32.
    """
    heads, scale = _attended("attention", heads, scale)
    if comm is not None:
        _require_comm("attention", comm)
    given, q = q, bare("attention", "q", q, queries, rank)
    k, v = bare("attention", "k", k, keys, rank), bare("attention", "v", v, keys, rank)
    o = _result(q, bare("attention", "out", out, queries, rank), _shape("attention", "q", q))
    _ext.attention(queries, keys, rank, q, k, v, heads, scale, o, lse, comm)
    return labelled(given, finish(q, o), queries, rank)


def attention_backward(
    queries: Sharding, keys: Sharding, q: Array, k: Array, v: Array, o: AnyArray, do: AnyArray, lse: AnyArray,
    heads: Sequence[int], comm: Communicator, *, scale: float | None = None, dq: Array | None = None,
    dk: Array | None = None, dv: Array | None = None
) -> tuple[Array, Array, Array]:
    """The gradients of `attention`: (dq, dk, dv). Arguments as there; do: the gradient of o.

    dk and dv are this rank's share of all keys' gradients where queries are sharded by tokens: the transposed plan of
    the keys' relayout adds them in rank order. Collective where query heads of one group are on several ranks.
    """
    where, of_q, of_k = "attention_backward", q, k
    _require_comm(where, comm)
    rank = comm.rank
    heads, scale = _attended(where, heads, scale)
    q, o, do = (bare(where, name, x, queries, rank) for name, x in (("q", q), ("o", o), ("do", do)))
    k, v = bare(where, "k", k, keys, rank), bare(where, "v", v, keys, rank)
    dq, dk, dv = (
        bare(where, "dq", dq, queries, rank),
        bare(where, "dk", dk, keys, rank),
        bare(where, "dv", dv, keys, rank),
    )
    to_q, to_k, to_v = (_result(x, d, _shape(where, "q, k and v", x)) for x, d in ((q, dq), (k, dk), (v, dv)))
    _ext.attention_backward(queries, keys, q, k, v, o, lse, do, heads, scale, to_q, to_k, to_v, comm)
    of_keys = (labelled(of_k, finish(k, d), keys, rank) for d in (to_k, to_v))
    return labelled(of_q, finish(q, to_q), queries, rank), *of_keys


def next_token_labels(plan: Halo, tokens: Array, comm: Communicator, out: Array | None = None) -> Array:
    """Returns the token that follows every row's, and cpx.ignored behind the last valid one. Collective.

    plan: halo(sharding, rank, 1, "after"), or of k rows for the token k ahead; tokens: (rows,) int64.
    """
    _require_plan("next_token_labels", plan, Halo)
    _require_comm("next_token_labels", comm)
    where, place = "next_token_labels", (plan.sharding, plan.rank)
    rows = bare(where, "tokens", tokens, *place)
    labels = _result(rows, bare(where, "out", out, *place), _shape(where, "tokens", rows))
    _ext.next_token_labels(plan, rows, labels, comm)
    return labelled(tokens, finish(rows, labels), *place)


class TokenLoss(NamedTuple):
    """The weighted mean of -log p over the batch, and the sum of weights: the same bits on every rank."""

    mean: float
    weight: float


def mean_token_loss(
    sharding: Sharding, logp: AnyArray, labels: AnyArray, comm: Communicator, weights: AnyArray | None = None
) -> TokenLoss:
    """Returns TokenLoss of all rows of the batch that have a label. logp, labels, weights: (rows,). Collective.

    Bitwise the same on every sharding and any number of ranks.
    """
    _require_comm("mean_token_loss", comm)
    logp = bare("mean_token_loss", "logp", logp, sharding, comm.rank)
    labels = bare("mean_token_loss", "labels", labels, sharding, comm.rank)
    return TokenLoss(*_ext.mean_token_loss(sharding, logp, labels, comm, weights))


def mean_token_loss_backward(
    sharding: Sharding, rank: int, loss: Sequence[float], labels: AnyArray, like: Array, upstream: float = 1.0,
    weights: AnyArray | None = None, out: Array | None = None
) -> Array:
    """Returns dlogp of `mean_token_loss`, like `like`: -upstream w_i / sum w_i, and 0 in rows that do not count."""
    dlogp = _result(like, out, _shape("mean_token_loss_backward", "labels", labels))
    _ext.mean_token_loss_backward(sharding, rank, tuple(loss), labels, upstream, dlogp, weights)
    return finish(like, dlogp)


class ExpertExchange(_ext.ExpertExchange):
    """The rows of tokens, one for each expert that a token chose, between the tokens' ranks and the experts' owners.

    chosen: (tokens, choices) int64 of this rank, each expert once a token, on a device rows side by side; places: where
    the tokens stand in the batch, sharding.global_rows(rank); comm: the ranks that share the experts. Rank r of W owns
    the experts from r * experts / W on. Its making and its calls are collective. `begins` says where the rows of each
    own expert begin.
    """

    def __init__(self, chosen: AnyArray, experts: int, places: AnyArray | Sequence[int], comm: Communicator) -> None:
        _require_comm("expert_exchange", comm)
        super().__init__(chosen, experts, places, comm)

    def to_experts(self, x: Array, width: int | None = None, out: Array | None = None) -> Array:
        """Brings rows to the owners: (count, width), experts ascending, of one expert in the order of the batch.

        x: (tokens, width), the same for all choices of a token; or, with `width`, (tokens, choices * width).
        """
        where = "ExpertExchange.to_experts"
        require(width is None or width >= 0, where, "width", "at least 0", width)
        shape = _shape(where, "x", x)
        width = math.prod(shape[1:]) if width is None else width
        y = _result(x, out, (self.count, width))
        self._to_experts(x, y)
        return finish(x, y)

    def to_tokens(self, x: Array, out: Array | None = None) -> Array:
        """Brings them back: x (count, width), to (tokens, choices, width)."""
        shape = _shape("ExpertExchange.to_tokens", "x", x)
        y = _result(x, out, (self.tokens, self.choices, *shape[1:]))
        self._to_tokens(x, y)
        return finish(x, y)


class Movement:
    """Moves rows between two kinds of sharding, whichever batch they are of: prepared once, for every packing.

    source, target: of a first batch. width: elements of a row, unless a sharding has sections. rows, sequences: the
    most of any batch that comes. `set` makes ready for another batch: no communication. Collective are its making, a
    call and `transposed`, the backward of a call.
    """

    comm: Communicator
    width: int
    rows: int
    sequences: int

    def __init__(
        self, source: Sharding, target: Sharding, width: int, rows: int, sequences: int, comm: Communicator
    ) -> None:
        _require_comm("movement", comm)
        for name, number, least in (("width", width, 1), ("rows", rows, 0), ("sequences", sequences, 0)):
            fits = hasattr(number, "__index__") and number >= least
            require(fits, "movement", name, f"a number, at least {least}", number)
        self.comm = comm
        self.width, self.rows, self.sequences = map(operator.index, (width, rows, sequences))
        self._like = source, target
        self._source = self._target = None
        self.set(source, target)

    def set(self, source: Sharding, target: Sharding) -> None:
        """Takes another batch, of shardings over as many ranks with the sections of the first."""
        if source is self._source and target is self._target:
            return
        for given, like in zip((source, target), self._like):
            require(given.ranks == like.ranks, "movement", "ranks of the sharding", like.ranks, given.ranks)
            require(given.sections == like.sections, "movement", "sections", like.sections, given.sections)
        most = max(source.rows(self.comm.rank), target.rows(self.comm.rank))
        sequences = source.batch.sequences
        require(
            most <= self.rows and sequences <= self.sequences,
            "movement",
            "rows and sequences of the batch",
            f"at most {self.rows}, {self.sequences}",
            f"{most}, {sequences}",
        )
        self._plan = _ext.relayout(source, target, self.comm.rank)
        self._back = self._plan.transposed()
        self._source, self._target = source, target

    @property
    def plan(self) -> Relayout:
        """The plan of the last batch."""
        return self._plan

    def __call__(self, x: Array, out: Array | None = None) -> Array:
        return self._move(self._plan, x, out)

    def transposed(self, dy: Array, out: Array | None = None) -> Array:
        """Moves rows back: the backward of a call, which adds what was copied."""
        return self._move(self._back, dy, out)

    def _move(self, plan, x, out):
        width = plan.source_width or self.width
        if (shape := getattr(x, "shape", None)) is not None:
            require(math.prod(shape[1:]) == width, "movement", "elements of a row", width, math.prod(shape[1:]))
        return exchange(plan, x, self.comm, out)
