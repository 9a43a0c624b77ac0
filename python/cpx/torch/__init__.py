# SPDX-License-Identifier: Apache-2.0
"""cpx under PyTorch: operators with gradients, which torch.compile and checkpointing see through.

    import cpx, cpx.torch, torch

    batch = cpx.thd([0, 7, 20])
    zigzag, sequential = (cpx.shard(batch, layout(2)) for layout in (cpx.zigzag, cpx.sequential))

    def program(comm):
        comm = cpx.torch.communicator(comm)             # under torchrun: cpx.torch.communicator()
        x = torch.ones(zigzag.rows(comm.rank), 8, requires_grad=True)
        y = cpx.torch.exchange(x, cpx.torch.relayout(zigzag, sequential, comm), comm)
        y.sum().backward()                              # moves the gradient back

    cpx.run(2, program)

Communicators and plans are made outside of what is compiled; in it they are arguments. One compilation serves all
packings. Every rank makes the same calls in the same order, in the backward, too, where torch sees to it. Operators are
`torch.ops.cpx.NAME`. They have no double backward: asked for one they raise cpx.Error.
"""

import torch as _torch

from cpx._error import tell as _tell

from ._attention import attention, attention_plan, rotary
from ._experts import ExpertExchange
from ._group import communicator
from ._media import add_features, mrope_positions, put_features
from ._net import GatedDeltaNet, gated_delta_net, gated_delta_net_plan, gated_rms_norm
from ._objects import Attention, Carry, Communicator, Halo, Positions, Relayout, carry, halo, relayout
from ._ops import (
    causal_conv1d,
    channel_decay_attention,
    exchange,
    gated_delta_rule,
    head_decay_attention,
    kimi_delta_attention,
    shift_rows,
    sum_over_ranks,
)

__all__ = [
    "Attention",
    "Carry",
    "Communicator",
    "ExpertExchange",
    "GatedDeltaNet",
    "Halo",
    "Positions",
    "Relayout",
    "add_features",
    "attention",
    "attention_plan",
    "carry",
    "causal_conv1d",
    "channel_decay_attention",
    "communicator",
    "exchange",
    "gated_delta_net",
    "gated_delta_net_plan",
    "gated_delta_rule",
    "gated_rms_norm",
    "halo",
    "head_decay_attention",
    "kimi_delta_attention",
    "mrope_positions",
    "put_features",
    "relayout",
    "rotary",
    "shift_rows",
    "sum_over_ranks",
]

_tell(globals(), (ExpertExchange,), _torch.compiler.is_compiling)
