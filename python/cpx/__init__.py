# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: a packed batch of long sequences over ranks, any layout to any other, and what runs on them.

    import cpx, numpy as np

    batch = cpx.thd([0, 7, 20])                      # two sequences, of 7 and 13 tokens
    zigzag = cpx.shard(batch, cpx.zigzag(4))         # what attention wants, on 4 ranks
    sequential = cpx.shard(batch, cpx.sequential(4)) # what a recurrence wants

    def program(comm):                               # the ranks are threads of this process
        x = np.full((zigzag.rows(comm.rank), 2), comm.rank, np.float32)
        plan = cpx.relayout(zigzag, sequential, comm.rank)
        y = cpx.exchange(plan, x, comm)              # moves the rows whose owner changes, and only those
        return cpx.exchange(plan.transposed(), y, comm)

    cpx.run(4, program)
"""

from ._error import Error
from ._ext import (
    Carry,
    Communicator,
    Cut,
    Halo,
    Layout,
    Relayout,
    Sharding,
    aligned,
    balanced,
    by_length,
    carry,
    halo,
    head_sharded,
    packing,
    packing_from_mask,
    pad_to_multiple,
    piecewise,
    relayout,
    replicated,
    sequential,
    shard,
    striped,
    table,
    thd,
    thd_from_cu_seqlens,
    thd_from_positions,
    threads,
    unpadded,
    zigzag,
)
from ._ops import (
    Heads,
    Movement,
    Saved,
    causal_conv1d,
    causal_conv1d_backward,
    channel_decay_attention,
    channel_decay_attention_backward,
    exchange,
    gated_delta_rule,
    gated_delta_rule_backward,
    head_decay_attention,
    head_decay_attention_backward,
    kimi_delta_attention,
    kimi_delta_attention_backward,
    saved_states,
    shift_rows,
    sum_over_ranks,
)
from ._run import run

__all__ = [
    "Carry",
    "Communicator",
    "Cut",
    "Error",
    "Halo",
    "Heads",
    "Layout",
    "Movement",
    "Relayout",
    "Saved",
    "Sharding",
    "aligned",
    "balanced",
    "by_length",
    "carry",
    "causal_conv1d",
    "causal_conv1d_backward",
    "channel_decay_attention",
    "channel_decay_attention_backward",
    "exchange",
    "gated_delta_rule",
    "gated_delta_rule_backward",
    "halo",
    "head_decay_attention",
    "head_decay_attention_backward",
    "head_sharded",
    "kimi_delta_attention",
    "kimi_delta_attention_backward",
    "packing",
    "packing_from_mask",
    "pad_to_multiple",
    "piecewise",
    "relayout",
    "replicated",
    "run",
    "saved_states",
    "sequential",
    "shard",
    "shift_rows",
    "striped",
    "sum_over_ranks",
    "table",
    "thd",
    "thd_from_cu_seqlens",
    "thd_from_positions",
    "threads",
    "unpadded",
    "zigzag",
]
