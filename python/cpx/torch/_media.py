# SPDX-License-Identifier: Apache-2.0
"""Images and videos: positions of a rank's rows, and rows of features at their placeholders."""

from __future__ import annotations

import torch

import cpx
from cpx import _ext
from cpx._error import Error

from ._objects import AnyCommunicator, Positions, held, taken_comm
from ._operator import array, backward_operator, check, contiguous_like, moved, operator


def mrope_positions(
    media: _ext.media, sharding: _ext.Sharding, ids: torch.Tensor, comm: AnyCommunicator, image: int | None = None,
    video: int | None = None
) -> Positions:
    """Returns the positions of this rank's rows, a `Positions`: bitwise those of the whole batch. Collective.

    media: of `cpx.media`, the same on every rank. ids: (rows,) int64 or int32, token ids of the rank's rows, which
    sharding says, on its device; image, video: the ids of placeholders. Ranks exchange counts of placeholders, no ids.
    From devices the host reads the ids and computes, for it must know whose features go where: it waits for the
    device and for the ranks. Make it outside of what is compiled; no graph captures it, and it outlives graphs in which
    features are put by it. Raises cpx.Error on every rank if the batch has other placeholders than media has rows of
    features.
    """
    where = "mrope_positions"
    comm = taken_comm(where, comm)
    for name, given, kind in ("media", media, cpx.media), ("sharding", sharding, _ext.Sharding):
        if not isinstance(given, kind):
            raise Error(where, name, f"one of cpx.{kind.__name__}", type(given).__name__)
    check(where, comm.device, ids=ids)
    made = _ext.mrope_positions(media, sharding, array(moved(ids)), comm.of, image, video)
    return Positions(made, comm.device)


def _keep(ctx, where, args):
    _, features, handle, ctx.kind = args
    ctx.positions, ctx.shape = handle, features.shape
    if isinstance(handle, int):
        ctx.held = held(where, "positions", handle)


# put_features


def _put(x, features, positions, kind):
    at, y = held("put_features", "positions", positions), x.clone(memory_format=torch.contiguous_format)
    _ext.put_features(at.of, kind, features, y)
    return y


def _put_backward(dy, positions, kind, shape):
    at, dx = held("put_features_backward", "positions", positions), dy.clone(memory_format=torch.contiguous_format)
    dfeatures = dy.new_empty(shape)
    _ext.put_features_backward(at.of, kind, dx, dfeatures)
    return dx, dfeatures


def _put_gradient(ctx, dy):
    return *_put_back(dy, ctx.positions, ctx.kind, ctx.shape), None, None


_put_back = backward_operator(
    "put_features_backward(Tensor dy, SymInt positions, str kind, SymInt[] shape) -> (Tensor, Tensor)", _put_backward,
    lambda dy, positions, kind, shape: (contiguous_like(dy), dy.new_empty(shape)),
)
_put_op = operator(
    "put_features(Tensor x, Tensor features, SymInt positions, str kind) -> Tensor", _put, contiguous_like,
    lambda ctx, args, y: _keep(ctx, "put_features", args), _put_gradient,
)


# add_features


def _add(x, features, positions, kind):
    at, y = held("add_features", "positions", positions), x.clone(memory_format=torch.contiguous_format)
    _ext.add_features(at.of, kind, features, y)
    return y


def _add_backward(dy, positions, kind, shape):
    at, dfeatures = held("add_features_backward", "positions", positions), dy.new_empty(shape)
    _ext.add_features_backward(at.of, kind, dy.contiguous(), dfeatures)
    return dfeatures


def _add_gradient(ctx, dy):
    return dy, _add_back(dy, ctx.positions, ctx.kind, ctx.shape), None, None


_add_back = backward_operator(
    "add_features_backward(Tensor dy, SymInt positions, str kind, SymInt[] shape) -> Tensor", _add_backward,
    lambda dy, positions, kind, shape: dy.new_empty(shape),
)
_add_op = operator(
    "add_features(Tensor x, Tensor features, SymInt positions, str kind) -> Tensor", _add, contiguous_like,
    lambda ctx, args, y: _keep(ctx, "add_features", args), _add_gradient,
)


def _at_placeholders(where, op, x, features, positions, kind):
    if not isinstance(positions, Positions):
        raise Error(where, "positions", "what cpx.torch.mrope_positions returns", type(positions).__name__)
    return op(check(where, positions.device, x=x, features=features), x, features, positions.handle, kind)


def put_features(x: torch.Tensor, features: torch.Tensor, positions: Positions, kind: str) -> torch.Tensor:
    """Returns x with its rows at the placeholders of a kind, "image" or "video", replaced by features.

    x: (rows, width), float32, bfloat16, float16 or, on the host, float64, of the rows of positions; features:
    (placeholders of this rank, width), sharded as positions.features(kind): `exchange` brings them by
    relayout(cpx.features_by_item(media, kind, ranks), positions.features(kind), comm). Both are where ids were. The
    gradient of the rows that were replaced is that of features, and 0 in x's.
    No communication. Raises cpx.Error if a tensor does not fit.
    """
    return _at_placeholders("put_features", _put_op, x, features, positions, kind)


def add_features(x: torch.Tensor, features: torch.Tensor, positions: Positions, kind: str) -> torch.Tensor:
    """Returns x with features added to its rows at the placeholders of a kind: of 16 bits in float32, rounded once.

    All else as of `put_features`.
    """
    return _at_placeholders("add_features", _add_op, x, features, positions, kind)
