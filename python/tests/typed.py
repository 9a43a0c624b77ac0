# SPDX-License-Identifier: Apache-2.0
"""The program of README, and a call of each kind of operator, as a checker of types reads them: `mypy --strict`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import cpx

Rows = NDArray[np.float32]
batch = cpx.thd([0, 7, 20])
zigzag = cpx.shard(batch, cpx.zigzag(4))
sequential = cpx.shard(batch, cpx.sequential(4))


def program(comm: cpx.Communicator) -> Rows:
    x: Rows = np.full((zigzag.rows(comm.rank), 2), comm.rank, np.float32)
    plan = cpx.relayout(zigzag, sequential, comm.rank)
    y = cpx.exchange(plan, x, comm)
    return cpx.exchange(plan.transposed(), y, comm)


results: list[Rows] = cpx.run(4, program)


def operators(comm: cpx.Communicator, x: Rows, q: Rows, g: Rows, tokens: NDArray[np.int64]) -> None:
    rank, every = comm.rank, cpx.replicated(4, batch)
    before, after = cpx.halo(zigzag, rank, 3), cpx.halo(zigzag, rank, 3, "after")
    rows: Rows = cpx.shift_rows(after, x, comm, fill=-1)
    rows = cpx.sum_over_ranks(x, comm)
    rows = cpx.causal_conv1d(before, x, x, comm, None, "silu")
    dx, dweight, dbias = cpx.causal_conv1d_backward(before, after, x, x, x, comm)
    rows, rows = dx, dweight
    carry, heads = cpx.carry(zigzag, rank), cpx.Heads(1, 2, 4, 4)
    saved: cpx.Saved = cpx.saved_states(carry, q, heads)
    for delta in cpx.gated_delta_rule, cpx.kimi_delta_attention:
        rows = delta(carry, q, q, q, g, g, comm, heads=heads, scale=0.5, saved=saved)
    for decay in cpx.head_decay_attention, cpx.channel_decay_attention:
        rows = decay(carry, q, q, q, g, comm, heads=(1, 2, 4, 4), chunk=32)
    of_delta: tuple[Rows, Rows, Rows, Rows, Rows] = cpx.gated_delta_rule_backward(carry, q, q, q, g, g, q, saved, comm)
    of_delta = cpx.kimi_delta_attention_backward(carry, q, q, q, g, g, q, saved, comm)
    of_decay: tuple[Rows, Rows, Rows, Rows] = cpx.head_decay_attention_backward(carry, q, q, q, g, q, saved, comm)
    of_decay = cpx.channel_decay_attention_backward(carry, q, q, q, g, q, saved, comm)
    rows = cpx.attention(zigzag, every, rank, q, q, q, cpx.AttentionHeads(2, 2, 4), lse=g)
    of_q, of_k, of_v = cpx.attention_backward(zigzag, every, q, q, q, q, q, g, (2, 2, 4), comm)
    rows, rows, rows = of_q, of_k, of_v
    labels: NDArray[np.int64] = cpx.next_token_labels(cpx.halo(zigzag, rank, 1, "after"), tokens, comm)
    loss = cpx.mean_token_loss(zigzag, g, labels, comm)
    mean: float = loss.mean
    rows = cpx.mean_token_loss_backward(zigzag, rank, loss, labels, g, mean)
    layer = cpx.gated_delta_net(zigzag, rank, 8, heads)
    rows = layer({"A_log": g}, x, comm)
    rows, weights = layer.backward({"A_log": g}, x, layer.new_saved(), x, comm)
    exchange = cpx.ExpertExchange(tokens, 4, zigzag.global_rows(rank), comm)
    rows = exchange.to_tokens(exchange.to_experts(x))
    move = cpx.Movement(zigzag, sequential, 2, 20, 2, comm)
    rows = move.transposed(move(x))
    labelled: cpx.Sharded = cpx.exchange(move.plan, cpx.Sharded(x, zigzag, rank), comm)
    print(labelled.shape, weights, dbias)


def alone(x: Rows, w: Rows, tokens: NDArray[np.int64], packing: cpx.packing) -> None:
    frequencies: NDArray[Any] = cpx.rotary_frequencies(1e4, 4)
    rows: Rows = cpx.rotary(x, tokens, 4, frequencies)
    rows = cpx.rotary_backward(x, tokens, 4, frequencies, axes=[0, 1])
    rows = cpx.linear(x, w)
    rows, rows = cpx.linear_backward(x, w, x)
    rows = cpx.rms_norm(x, w)
    rows, rows = cpx.rms_norm_backward(x, w, x)
    rows = cpx.gated_rms_norm(x, x, w)
    rows, rows, rows = cpx.gated_rms_norm_backward(x, x, w, x)
    rows = cpx.log_probabilities(x, tokens)
    rows = cpx.log_probabilities_backward(x, tokens, x)
    chosen, rows = cpx.choose_experts(x, 2)
    rows = cpx.weigh_experts(x, chosen)
    rows = cpx.choose_experts_backward(x, chosen, x, x)
    rows = cpx.expert_linear([0, 20], x, w)
    rows, rows = cpx.expert_linear_backward([0, 20], x, w, x)
    rows = cpx.unpack(packing, cpx.pack(packing, x))
