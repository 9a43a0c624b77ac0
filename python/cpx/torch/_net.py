# SPDX-License-Identifier: Apache-2.0
"""The gated delta net layer: cpx's operators between products of torch, so that the gradient is that of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

import cpx
from cpx import _ext
from cpx._error import Error, require

from ._group import device_extension
from ._objects import AnyCommunicator, Carry, Halo, Relayout, taken_comm
from ._operator import autocast, backward_operator, check, contiguous_like, operator, sums
from ._ops import causal_conv1d, exchange, gated_delta_rule

_where = "gated_delta_net"
_names = _qkv, _z, _b, _a, _conv, _A_log, _dt_bias, _norm, _out = tuple(_ext.net_parameters)


# the gated norm


def _normalise(x, z, weight, eps):
    y = contiguous_like(x)
    if x.is_cpu:
        _ext.rms_norm(x, z, weight, eps, 0.0, y)
    else:
        device_extension("gated_rms_norm").gated_rms_norm(x, z, weight, eps, y)
    return y


def _normalise_backward(x, z, weight, dy, eps):
    where = "gated_rms_norm_backward"
    dx, dz, dy = contiguous_like(x), contiguous_like(z), dy.contiguous()
    if x.is_cpu:
        dweight = torch.zeros_like(weight)
        _ext.rms_norm_backward(x, z, weight, dy, eps, 0.0, dx, dz, dweight)
        return dx, dz, dweight
    terms = x.new_zeros(x.shape[0], weight.shape[0], dtype=sums(x))  # of each row
    device_extension(where).gated_rms_norm_backward(x, z, weight, dy, eps, dx, dz, terms)
    return dx, dz, terms.sum(0).to(weight.dtype)


def _save_norm(ctx, args, y):
    x, z, weight, ctx.eps = args
    ctx.save_for_backward(x, z, weight)


_normalise_back = backward_operator(
    "gated_rms_norm_backward(Tensor x, Tensor z, Tensor weight, Tensor dy, float eps) -> (Tensor, Tensor, Tensor)",
    _normalise_backward,
    lambda x, z, weight, dy, eps: (contiguous_like(x), contiguous_like(z), contiguous_like(weight)),
)
_normalise_op = operator(
    "gated_rms_norm(Tensor x, Tensor z, Tensor weight, float eps) -> Tensor", _normalise, contiguous_like, _save_norm,
    lambda ctx, dy: (*_normalise_back(*ctx.saved_tensors, dy, ctx.eps), None),
)


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Returns x / sqrt(mean x^2 + eps) * weight * silu(z), of heads as wide as the weight: sums in float32 on devices.

    x, z: (rows, heads, value_dim) or (rows, heads * value_dim); weight: (value_dim). Returns y as x, of which a row is
    a function of its rows of x and z, bit for bit, as are the rows of their gradients. The weight's gradient is this
    rank's share. Keeps its inputs alone for the backward. No communication.
    """
    where = "gated_rms_norm"
    x, z, weight = autocast(x, z, weight)
    recorded = check(where, getattr(x, "device", None), x=x, z=z, weight=weight)
    require(x.dim() > 0, where, "x", "an array of rows", "a number")
    require(x.shape == z.shape, where, "shape of z", tuple(x.shape), tuple(z.shape))
    require(weight.dim() == 1, where, "shape of weight", "(value_dim,)", tuple(weight.shape))
    return _normalise_op(recorded, x, z, weight, float(eps))


# the gates


def _open(b, a, A_log, dt_bias):
    made = g, beta = contiguous_like(a), contiguous_like(b)
    by = _ext if a.is_cpu else device_extension("delta_gates")
    by.delta_gates(b, a, A_log, dt_bias, g, beta)
    return made


def _open_backward(b, a, A_log, dt_bias, dg, dbeta):
    by = _ext if a.is_cpu else device_extension("delta_gates_backward")
    db, da, terms = contiguous_like(b), contiguous_like(a), a.new_empty(a.shape[0], 2 * a.shape[1])
    by.delta_gates_backward(b, a, A_log, dt_bias, dg.contiguous(), dbeta.contiguous(), db, da, terms)
    dA_log, ddt_bias = terms.sum(0).view(2, -1).unbind(0)
    return db, da, dA_log.clone(), ddt_bias.clone()  # an operator returns no views


_open_back = backward_operator(
    "delta_gates_backward(Tensor b, Tensor a, Tensor A_log, Tensor dt_bias, Tensor dg, Tensor dbeta) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _open_backward,
    lambda b, a, A_log, dt_bias, *_: tuple(map(contiguous_like, (b, a, A_log, dt_bias))),
)
_open_op = operator(
    "delta_gates(Tensor b, Tensor a, Tensor A_log, Tensor dt_bias) -> (Tensor, Tensor)",
    _open, lambda b, a, *_: (contiguous_like(a), contiguous_like(b)),
    lambda ctx, args, made: ctx.save_for_backward(*args),
    lambda ctx, dg, dbeta: _open_back(*ctx.saved_tensors, dg, dbeta),
)


# the layer


class GatedDeltaNet:
    """The sizes of a gated delta net layer, and its plans of one rank. `gated_delta_net_plan` makes it."""

    rows: int
    kernel: int
    chunk: int
    eps: float
    heads: tuple[int, ...]
    there: Relayout | None
    back: Relayout | None
    keys: tuple[int, int]
    values: tuple[int, int]
    lent: tuple[int, ...]
    halo: Halo
    carry: Carry

    def __init__(
        self, sharding: _ext.Sharding, rank: int, heads: Sequence[int], how: str, kernel: int, chunk: int, eps: float
    ) -> None:
        require(len(heads) == 4, _where, "heads", "Heads(key_heads, value_heads, key_dim, value_dim)", heads)
        require(how in ("scan", "serial", "heads"), _where, "carry", '"scan", "serial", "heads"', repr(how))
        for name, size in ("kernel", kernel), ("chunk", chunk):
            require(size >= 1, _where, name, "at least 1", size)
        # Else several ranks would have the same rows, and their weights' gradients no sum.
        require(not sharding.every_row, _where, "sharding", "one of which every row is on one rank", sharding)
        self.rows, self.kernel, self.chunk, self.eps = sharding.rows(rank), kernel, chunk, eps
        self.heads = keys, values, key_dim, value_dim = tuple(int(n) for n in heads)
        self.there = self.back = None
        mix, self.keys, self.values, self.lent = sharding, (0, keys), (0, values), (0, 0)
        if how == "heads":
            sections = (keys, key_dim), (keys, key_dim), (values, value_dim), (values, 1), (values, 1)
            mix = cpx.head_sharded(sharding.ranks, sharding.batch, sections)
            output = cpx.head_sharded(sharding.ranks, sharding.batch, sections[2:3])
            self.there = Relayout(cpx.relayout(sharding, mix, rank), cpx.relayout(mix, sharding, rank))
            self.back = Relayout(cpx.relayout(output, sharding, rank), cpx.relayout(sharding, output, rank))
            self.keys, self.values = mix.heads(rank, keys), mix.heads(rank, values)
            if rank > 0:
                before = (mix.heads(rank - 1, n)[1] for n in (keys, values))
                self.lent = tuple(max(0, b - own[0]) for b, own in zip(before, (self.keys, self.values)))
        self.halo = Halo(cpx.halo(mix, rank, kernel - 1))
        self.carry = Carry(cpx.carry(mix, rank, "serial" if how == "heads" else how), self.heads)

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights by their names, whole, for a model of that width."""
        keys, values, key_dim, value_dim = self.heads
        v = values * value_dim
        qkv = 2 * keys * key_dim + v
        return {
            _qkv: (qkv, hidden), _z: (v, hidden), _b: (values, hidden), _a: (values, hidden), _conv: (qkv, self.kernel),
            _A_log: (values,), _dt_bias: (values,), _norm: (value_dim,), _out: (hidden, v),
        }

    def held(self, conv: torch.Tensor, *of_heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the rows of weights of the heads that the rank holds. conv has channels of q, k and v, others heads.

        Those of heads that a lower rank holds, too, have no gradient here: every rank that holds a head has all of it.
        """
        if self.there is None:
            return conv, *of_heads
        keys, _, key_dim, value_dim = self.heads

        def own(weight, first, heads, lent, dim):
            of_others, last = first + (heads[0] + lent) * dim, first + heads[1] * dim
            return weight[first + heads[0] * dim : of_others].detach(), weight[of_others:last]

        k = keys * key_dim
        channels = (own(conv, first, self.keys, self.lent[0], key_dim) for first in (0, k))
        v = own(conv, 2 * k, self.values, self.lent[1], value_dim)
        values = (torch.cat(own(weight, 0, self.values, self.lent[1], 1)) for weight in of_heads)
        return torch.cat([rows for parts in (*channels, v) for rows in parts]), *values


def gated_delta_net_plan(
    sharding: _ext.Sharding, heads: Sequence[int], comm: AnyCommunicator, carry: str = "scan", *, kernel: int = 4,
    chunk: int = 64, eps: float = 1e-6
) -> GatedDeltaNet:
    """Returns what `gated_delta_net` needs, for all layers of a batch. Kept as of `relayout`.

    sharding: of x and y, any of which every row is on one rank. heads: Heads(...) over all ranks. carry: "scan" or
    "serial", in place: a halo and carried states; or "heads": one exchange to heads and one back. kernel: taps of the
    convolution; chunk: tokens of the delta rule at once, 64 on devices.
    """
    comm = taken_comm("gated_delta_net_plan", comm)
    return comm.plan(GatedDeltaNet, sharding, comm.rank, tuple(heads), carry, kernel, chunk, float(eps))


def gated_delta_net(
    x: torch.Tensor, weights: Mapping[str, torch.Tensor], plan: GatedDeltaNet, comm: AnyCommunicator, *,
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = functional.linear
) -> torch.Tensor:
    """The gated delta net layer of Qwen3-Next and Qwen3.5. Collective, as is its backward.

        y = out_proj(norm(delta_rule(silu(conv(q k v)), ...)) silu(z)),    g = -exp(A_log) softplus(a + dt_bias)

    x: (rows, hidden) of the plan's sharding. plan: of `gated_delta_net_plan`. weights: whole on every rank, by the
    names `cpx.gated_delta_net.parameters` and shaped as in the checkpoint: projections (out, in), conv (q + k + v
    channels, kernel) or (channels, 1, kernel), A_log, dt_bias (value heads), norm (value_dim); those two are of any
    floating dtype, others of that of x, or, under torch.autocast, of any: it casts x and weights. Returns y as x.
    The gradients of weights are this rank's share, as of any other layer. On devices gates, states and what is added up
    are float32. Products are torch's: linear(x, weight) computes them. By "serial" on cuts at multiples of the chunk,
    and by "heads", y and the gradient of x are bitwise those of one rank where a row of a product is a function of its
    row of x alone, bit for bit: cuBLAS sees to that for equally many rows only.
    """
    comm = taken_comm(_where, comm)
    if not isinstance(plan, GatedDeltaNet):
        raise Error(_where, "plan", "one of cpx.torch.gated_delta_net_plan", type(plan).__name__)
    missing = [name for name in _names if name not in weights]
    require(not missing, _where, "weights", ", ".join(_names), f"none of {', '.join(missing)}")
    w = {name: weights[name] for name in _names}
    gates = {name: w.pop(name) for name in (_A_log, _dt_bias)}
    x, *cast = autocast(x, *w.values())
    w = dict(zip(w, cast))
    check(_where, comm.device, x=x, **w)
    for name, gate in gates.items():
        check(_where, comm.device, **{name: gate})
    require(x.dim() == 2, _where, "shape of x", "(rows, hidden)", tuple(x.shape))
    require(x.shape[0] == plan.rows, _where, "rows of x", plan.rows, x.shape[0])
    conv = w[_conv]
    if conv.dim() == 3 and conv.shape[1] == 1:  # as torch's Conv1d has it
        conv = w[_conv] = conv.squeeze(1)
    for name, shape in plan.shapes(x.shape[1]).items():
        given = tuple((gates if name in gates else w)[name].shape)
        require(given == shape, _where, f"shape of {name}", shape, given)

    keys, values = (last - first for first, last in (plan.keys, plan.values))
    q, v = keys * plan.heads[2], values * plan.heads[3]
    qkv, b, a, z = (linear(x, w[name]) for name in (_qkv, _b, _a, _z))
    if plan.there is not None:
        qkv, b, a = exchange(torch.cat((qkv, b, a), 1), plan.there, comm).split((2 * q + v, values, values), 1)
    wide = sums(x)
    conv, A_log, dt_bias = plan.held(conv, *(gates[name].to(wide) for name in (_A_log, _dt_bias)))
    mixed = causal_conv1d(qkv, conv, plan.halo, comm, activation="silu")
    inputs = b.to(wide), a.to(wide), A_log, dt_bias
    g, beta = _open_op(check(_where, comm.device, **dict(zip((_b, _a, _A_log, _dt_bias), inputs))), *inputs)
    o = gated_delta_rule(*mixed.split((q, q, v), 1), g, beta, plan.carry, comm, chunk=plan.chunk)
    if plan.back is not None:
        o = exchange(o, plan.back, comm)
    return linear(gated_rms_norm(o, z, w[_norm], plan.eps), w[_out])
