# SPDX-License-Identifier: Apache-2.0
"""twinkle: the exchange of tokens for heads (twinkle.model.transformers.strategy.sequence_parallel.utils).

    from cpx.dropin.twinkle import head_to_seq_shard, seq_to_head_shard

`seq_to_head_shards` does it for q, k, v, b and a of a gated delta net at once: one exchange instead of five.
"""

from collections.abc import Iterable

import torch

import cpx

from ._common import by_heads, communicator, integer, move, packed, sharding, tensor_list


def _comm(where, sequence_parallel):
    """Returns the communicator, or None of one rank."""
    ranks = integer(where, "sp_world_size", getattr(sequence_parallel, "sp_world_size", 1))
    if ranks <= 1:
        return None
    if integer(where, "rp_world_size", getattr(sequence_parallel, "rp_world_size", 1) or 1) > 1:
        raise cpx.Error(where, "rp_world_size", "1: tokens sequential over the ranks", sequence_parallel.rp_world_size)
    comm = communicator(getattr(sequence_parallel, "_sp_group", None))
    if comm.ranks != ranks:
        raise cpx.Error(where, "sp_world_size", f"{comm.ranks}, as of the group", ranks)
    return comm


def _move(where, tensors, comm, to_heads):
    tensors = tensor_list(where, "tensors", tensors, comm.device)
    for x in tensors:
        if x.dim() != 4 or to_heads and x.shape[2] % comm.ranks:
            expected = f"(batch, tokens, heads, dim), heads a multiple of {comm.ranks}"
            raise cpx.Error(where, "shape", expected, tuple(x.shape))
        if x.shape[:2] != tensors[0].shape[:2]:
            raise cpx.Error(where, "batch and tokens", tuple(tensors[0].shape[:2]), tuple(x.shape[:2]))
    count, tokens = tensors[0].shape[:2]
    shares, all_tokens = (1, tokens * comm.ranks) if to_heads else (comm.ranks, tokens)
    sections = tuple((x.shape[2] * shares, count * x.shape[3]) for x in tensors)  # a head's elements of all rows
    by_tokens = sharding(packed, (0, all_tokens), comm.ranks)
    heads = sharding(by_heads, (0, all_tokens), comm.ranks, sections)
    rows = torch.cat([x.permute(1, 2, 0, 3).reshape(tokens, -1) for x in tensors], 1)
    y = move(rows, by_tokens, heads, comm) if to_heads else move(rows, heads, by_tokens, comm)
    held = [n // comm.ranks if to_heads else n for n, _ in sections]
    parts = y.split([n * width for n, (_, width) in zip(held, sections)], 1)
    return [p.reshape(len(y), n, count, -1).permute(2, 0, 1, 3).contiguous() for p, n in zip(parts, held)]


def seq_to_head_shards(tensors: Iterable[torch.Tensor], sequence_parallel: object) -> list[torch.Tensor]:
    """Exchanges tokens for heads of several tensors of one dtype, (batch, S / W, heads, dim) each, at once."""
    comm = _comm("seq_to_head_shards", sequence_parallel)
    return list(tensors) if comm is None else _move("seq_to_head_shards", tensors, comm, True)


def seq_to_head_shard(tensor: torch.Tensor, sequence_parallel: object) -> torch.Tensor:
    """Exchanges (batch, S / W, heads, dim) for (batch, S, heads / W, dim). Collective, as is its backward."""
    comm = _comm("seq_to_head_shard", sequence_parallel)
    return tensor if comm is None else _move("seq_to_head_shard", [tensor], comm, True)[0]


def head_to_seq_shard(tensor: torch.Tensor, sequence_parallel: object) -> torch.Tensor:
    """Exchanges (batch, S, heads / W, dim) for (batch, S / W, heads, dim): the inverse. Collective."""
    comm = _comm("head_to_seq_shard", sequence_parallel)
    return tensor if comm is None else _move("head_to_seq_shard", [tensor], comm, False)[0]
