# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens at the ranks that own the experts which they chose, as operators of torch."""

from __future__ import annotations

import math
from typing import Any

import torch

import cpx
from cpx._error import require

from ._objects import AnyCommunicator, _Held, held, taken_comm
from ._operator import array, backward_operator, check, moved, operator

_to_experts_name, _to_tokens_name = "ExpertExchange.to_experts", "ExpertExchange.to_tokens"


def _gather(x, shape, at, where):
    y = x.new_empty(shape)
    held(where, "experts", at).of._to_experts(moved(x.contiguous()), y)
    return y


def _scatter(x, shape, at, where):
    y = x.new_empty(shape)
    held(where, "experts", at).of._to_tokens(moved(x.contiguous()), y)
    return y


def _keep(ctx, where, at):
    ctx.at = at
    if isinstance(at, int):
        ctx.held = held(where, "experts", at)


def _save_gather(ctx, args, y):
    x, _, ctx.tokens, ctx.choices, at = args
    _keep(ctx, _to_experts_name, at)
    ctx.shape = x.shape


def _gather_gradient(ctx, dy):
    """The gradient of a row that all choices of a token share is the sum of theirs, in an order that torch chooses."""
    dx = _gather_back(dy, [ctx.tokens, ctx.choices, dy.shape[1]], ctx.at)
    if math.prod(ctx.shape[1:]) == dy.shape[1]:
        dx = dx.sum(1)
    return dx.reshape(ctx.shape), None, None, None, None


def _save_scatter(ctx, args, y):
    x, *_, at = args
    _keep(ctx, _to_tokens_name, at)
    ctx.shape = x.shape


def _scatter_gradient(ctx, dy):
    return _scatter_back(dy, ctx.shape, ctx.at), None, None, None


_gather_back = backward_operator(
    "to_experts_backward(Tensor dy, SymInt[] shape, SymInt at) -> Tensor",
    lambda dy, shape, at: _scatter(dy, shape, at, _to_experts_name), lambda dy, shape, at: dy.new_empty(shape),
)
_gather_op = operator(
    "to_experts(Tensor x, SymInt[] shape, SymInt tokens, SymInt choices, SymInt at) -> Tensor",
    lambda x, shape, tokens, choices, at: _gather(x, shape, at, _to_experts_name),
    lambda x, shape, tokens, choices, at: x.new_empty(shape), _save_gather, _gather_gradient,
)
_scatter_back = backward_operator(
    "to_tokens_backward(Tensor dy, SymInt[] shape, SymInt at) -> Tensor",
    lambda dy, shape, at: _gather(dy.flatten(1), shape, at, _to_tokens_name),
    lambda dy, shape, at: dy.new_empty(shape),
)
_scatter_op = operator(
    "to_tokens(Tensor x, SymInt tokens, SymInt choices, SymInt at) -> Tensor",
    lambda x, tokens, choices, at: _scatter(x, [tokens, choices, *x.shape[1:]], at, _to_tokens_name),
    lambda x, tokens, choices, at: x.new_empty([tokens, choices, *x.shape[1:]]), _save_scatter, _scatter_gradient,
)


class ExpertExchange(_Held):
    """The rows of tokens, one for each expert that a token chose, between the tokens' ranks and the experts' owners.

    chosen: (tokens, choices) int64 of this rank on its device, each expert once a token; places: where the tokens stand
    in the batch, sharding.global_rows(rank); comm: the ranks that share the experts. Rank r of W owns the experts from
    r * experts / W on, `own`. `begins`, of NumPy, says where the rows of each own expert begin, and behind the last
    one's, which is `count`; `places` where their tokens stand in the batch.
    Its making and its calls are collective, and on devices the host waits in them: make it outside of what is compiled;
    no graph captures its calls. On devices they are of the stream that was current when it was made.
    """

    device: torch.device
    experts: int
    own: tuple[int, int]
    tokens: int
    choices: int
    count: int
    begins: Any
    places: Any

    def __init__(self, chosen: torch.Tensor, experts: int, places: Any, comm: AnyCommunicator) -> None:
        where = "expert_exchange"
        comm = taken_comm(where, comm)
        check(where, comm.device, chosen=chosen)
        super().__init__(cpx.ExpertExchange(array(moved(chosen)), experts, places, comm.of))
        of = self.of
        self.device, self.experts, self.own = comm.device, of.experts, of.own
        self.tokens, self.choices, self.count = of.tokens, of.choices, of.count
        self.begins, self.places = of.begins, of.places

    def to_experts(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """Brings rows to the owners: (count, width), experts ascending, of one expert in the order of the batch.

        x: (tokens, width), the same for all choices of a token; or, with `width`, (tokens, choices * width), or
        (tokens, choices, width). Choices' gradients of one row are added by torch's `sum`: of eight choices and more
        not always in their order.
        """
        recorded = check(_to_experts_name, self.device, x=x)
        require(x.dim() > 0, _to_experts_name, "x", "an array of rows", "a number")
        require(width is None or width >= 0, _to_experts_name, "width", "at least 0", width)
        width = math.prod(x.shape[1:]) if width is None else width
        return _gather_op(recorded, x, [self.count, width], self.tokens, self.choices, self.handle)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Brings them back: x (count, ...), to (tokens, choices, ...)."""
        recorded = check(_to_tokens_name, self.device, x=x)
        require(x.dim() > 0, _to_tokens_name, "x", "an array of rows", "a number")
        return _scatter_op(recorded, x, self.tokens, self.choices, self.handle)
