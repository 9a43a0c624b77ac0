# SPDX-License-Identifier: Apache-2.0
"""What a rank does alone: each operator sees one row at a time, and has its backward beside it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import _ext
from ._array import AnyArray, Array, Weight, empty_like, finish, result, shape_of
from ._error import require
from ._ext import Positions


def rotary_frequencies(theta: float, rotary_dim: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Returns theta^(-2 i / rotary_dim) for i < rotary_dim / 2: of float32, or of float64 for elements of float64."""
    require(rotary_dim >= 0 and rotary_dim % 2 == 0, "rotary_frequencies", "rotary_dim", "an even number", rotary_dim)
    out = np.empty(rotary_dim // 2, dtype)
    _ext.rotary_frequencies(theta, rotary_dim, out)
    return out


def _rotary(x, positions, head_dim, frequencies, axes, rounding, back, out):
    where = "rotary_backward" if back else "rotary"
    y = result(x, out, shape_of(where, "dy" if back else "x", x))
    if isinstance(positions, _ext.Positions):
        positions = positions.axes
    _ext.rotary(x, positions, head_dim, frequencies, list(axes or []), rounding, back, y)
    return finish(x, y)


def rotary(
    x: Array, positions: AnyArray | Positions, head_dim: int, frequencies: AnyArray, axes: Sequence[int] | None = None,
    rounding: str = "fp32_inside", out: Array | None = None
) -> Array:
    """Rotates channel i of every head with channel i + D by the angle positions * frequencies[i], D frequencies.

    x: (rows, heads * head_dim) or (rows, heads, head_dim); out may be x. positions: (rows,) int64, such as
    sharding.positions(rank), or (3, rows) or what `mrope_positions` returns, of which pair i takes axes[i], of
    `rotary_axes`. frequencies: (D,) of float32, of float64 for x of float64; 2 D <= head_dim, other channels pass
    through. float32, float64, bfloat16, float16; rounding of the latter: "fp32_inside" once at the end, as Transformer
    Engine's fused kernel, or "round_each_op", as transformers. Bitwise the same on every sharding. No communication.
    """
    return _rotary(x, positions, head_dim, frequencies, axes, rounding, False, out)


def rotary_backward(
    dy: Array, positions: AnyArray | Positions, head_dim: int, frequencies: AnyArray, axes: Sequence[int] | None = None,
    rounding: str = "fp32_inside", out: Array | None = None
) -> Array:
    """Returns dx: rotates back. Arguments as of `rotary`; out may be dy."""
    return _rotary(dy, positions, head_dim, frequencies, axes, rounding, True, out)


def linear(x: Array, weight: AnyArray, out: Array | None = None) -> Array:
    """Returns x W^T. x: (rows, in), weight: (out, in). float32, float64. An element is a function of its row alone."""
    y = result(x, out, (shape_of("linear", "x", x)[0], shape_of("linear", "weight", weight)[0]))
    _ext.linear(x, weight, y)
    return finish(x, y)


def linear_backward(
    x: Array, weight: Weight, dy: AnyArray, dx: Array | None = None, dweight: Weight | None = None
) -> tuple[Array, Weight]:
    """Returns (dx, dweight) of `linear`. A dweight that is given is added to."""
    to_x = result(x, dx, shape_of("linear_backward", "x", x))
    to_weight = result(weight, dweight, shape_of("linear_backward", "weight", weight), zeros=True)
    _ext.linear_backward(x, weight, dy, to_x, to_weight)
    return finish(x, to_x), finish(weight, to_weight)


def rms_norm(
    x: Array, weight: AnyArray, eps: float = 1e-6, gain_offset: float = 0.0, out: Array | None = None
) -> Array:
    """Returns x / sqrt(mean x^2 + eps) * (gain_offset + weight) of heads as wide as the weight; out may be x.

    gain_offset: 1 for Qwen3.5's zero-centred norms. float32, float64.
    """
    y = result(x, out, shape_of("rms_norm", "x", x))
    _ext.rms_norm(x, None, weight, eps, gain_offset, y)
    return finish(x, y)


def rms_norm_backward(
    x: Array, weight: Weight, dy: AnyArray, eps: float = 1e-6, gain_offset: float = 0.0, dx: Array | None = None,
    dweight: Weight | None = None
) -> tuple[Array, Weight]:
    """Returns (dx, dweight) of `rms_norm`. A dweight that is given is added to."""
    to_x = result(x, dx, shape_of("rms_norm_backward", "x", x))
    to_weight = result(weight, dweight, shape_of("rms_norm_backward", "weight", weight), zeros=True)
    _ext.rms_norm_backward(x, None, weight, dy, eps, gain_offset, to_x, None, to_weight)
    return finish(x, to_x), finish(weight, to_weight)


def gated_rms_norm(x: Array, z: AnyArray, weight: AnyArray, eps: float = 1e-6, out: Array | None = None) -> Array:
    """Returns x / sqrt(mean x^2 + eps) * weight * silu(z), the norm of a gated delta net's output."""
    y = result(x, out, shape_of("gated_rms_norm", "x", x))
    _ext.rms_norm(x, z, weight, eps, 0.0, y)
    return finish(x, y)


def gated_rms_norm_backward(
    x: Array, z: Array, weight: Weight, dy: AnyArray, eps: float = 1e-6, dx: Array | None = None,
    dz: Array | None = None, dweight: Weight | None = None
) -> tuple[Array, Array, Weight]:
    """Returns (dx, dz, dweight) of `gated_rms_norm`. A dweight that is given is added to."""
    where = "gated_rms_norm_backward"
    to_x, to_z = result(x, dx, shape_of(where, "x", x)), result(z, dz, shape_of(where, "z", z))
    to_weight = result(weight, dweight, shape_of(where, "weight", weight), zeros=True)
    _ext.rms_norm_backward(x, z, weight, dy, eps, 0.0, to_x, to_z, to_weight)
    return finish(x, to_x), finish(z, to_z), finish(weight, to_weight)


def log_probabilities(logits: Array, labels: AnyArray, out: Array | None = None) -> Array:
    """Returns log softmax(logits)[label] of every row, and 0 where the label is cpx.ignored: (rows,).

    logits: (rows, vocabulary) of float32 or float64; labels: (rows,) int64.
    """
    y = result(logits, out, shape_of("log_probabilities", "logits", logits)[:1])
    _ext.log_probabilities(logits, labels, y)
    return finish(logits, y)


def log_probabilities_backward(logits: Array, labels: AnyArray, dlogp: AnyArray, out: Array | None = None) -> Array:
    """Returns dlogits of `log_probabilities`: (rows, vocabulary), of dlogp: (rows,); out may be logits."""
    y = result(logits, out, shape_of("log_probabilities_backward", "logits", logits))
    _ext.log_probabilities_backward(logits, labels, dlogp, y)
    return finish(logits, y)


def choose_experts(logits: Array, choices: int) -> tuple[np.ndarray[Any, Any], Array]:
    """Chooses the largest probabilities of every row and divides them by their sum: (chosen, weights).

    logits: (rows, experts) of float32 or float64; both results are (rows, choices), chosen of int64.
    """
    rows = shape_of("choose_experts", "logits", logits)[0]
    chosen = np.empty((rows, choices), np.int64)
    weights = empty_like(logits, (rows, choices))
    _ext.choose_experts(logits, chosen, weights, False)
    return chosen, finish(logits, weights)


def weigh_experts(logits: Array, chosen: AnyArray, out: Array | None = None) -> Array:
    """Returns the weights of choices that were made before: (rows, choices)."""
    weights = result(logits, out, shape_of("weigh_experts", "chosen", chosen))
    _ext.choose_experts(logits, chosen, weights, True)
    return finish(logits, weights)


def choose_experts_backward(
    logits: Array, chosen: AnyArray, weights: AnyArray, dweights: AnyArray, out: Array | None = None
) -> Array:
    """Returns dlogits of `choose_experts` and `weigh_experts`: (rows, experts), 0 for experts that were not chosen.

    chosen, weights: what these took or returned; dweights: the gradient of weights; all (rows, choices).
    """
    dlogits = result(logits, out, shape_of("choose_experts_backward", "logits", logits))
    _ext.choose_experts_backward(chosen, weights, dweights, dlogits)
    return finish(logits, dlogits)


def expert_linear(begins: Iterable[int] | AnyArray, x: Array, weight: AnyArray, out: Array | None = None) -> Array:
    """Returns W_e x for the rows of every expert. weight: (experts, out, in); begins: of `ExpertExchange`."""
    rows, shape = shape_of("expert_linear", "x", x)[0], shape_of("expert_linear", "weight", weight)
    require(len(shape) == 3, "expert_linear", "shape of weight", "(experts, out, in)", shape)
    y = result(x, out, (rows, shape[1]))
    _ext.expert_linear(list(begins), x, weight.reshape(-1, shape[2]), y)
    return finish(x, y)


def expert_linear_backward(
    begins: Iterable[int] | AnyArray, x: Array, weight: Weight, dy: AnyArray, dx: Array | None = None,
    dweight: Weight | None = None
) -> tuple[Array, Weight]:
    """Returns (dx, dweight) of `expert_linear`. A dweight that is given is added to."""
    where = "expert_linear_backward"
    shape = shape_of(where, "weight", weight)
    require(len(shape) == 3, where, "shape of weight", "(experts, out, in)", shape)
    to_x = result(x, dx, shape_of(where, "x", x))
    to_weight = result(weight, dweight, shape, zeros=True)
    flat = to_weight.reshape(-1, shape[2])
    _ext.expert_linear_backward(list(begins), x, weight.reshape(-1, shape[2]), dy, to_x, flat)
    return finish(x, to_x), finish(weight, to_weight)


def pack(packing: _ext.packing, buffer: Array, out: Array | None = None) -> Array:
    """Returns the rows of a batch out of a padded buffer, without the padding: (packing.batch.tokens, ...)."""
    packed = result(buffer, out, (packing.batch.tokens, *shape_of("pack", "buffer", buffer)[1:]))
    _ext.pack(packing, buffer, packed)
    return finish(buffer, packed)


def unpack(packing: _ext.packing, packed: Array, out: Array | None = None) -> Array:
    """Returns the padded buffer of the rows of a batch, zeros in the padding: inverse and transpose of `pack`."""
    buffer = result(packed, out, (packing.buffer_rows, *shape_of("unpack", "packed", packed)[1:]))
    _ext.unpack(packing, packed, buffer)
    return finish(packed, buffer)
