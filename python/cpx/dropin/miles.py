# SPDX-License-Identifier: Apache-2.0
"""miles: the relayout around a gated delta net (miles_plugins.models.hf_attention), and what Qwen3-VL's positions need.

    from cpx.dropin.miles import zigzag_to_packed_shard as _zigzag_to_packed_shard
    from cpx.dropin.miles import packed_shard_to_zigzag as _packed_shard_to_zigzag

Sequences whose length 2 W divides are zigzag, the others sequential, as the padding behind each rank's rows is. A rank
receives the rows that become its own, and no others; miles gathers all rows on all ranks.
"""

from collections.abc import Sequence

import torch

import cpx

from ._common import communicator, integer, integers, move, packed, sharding, tensor_list, tensors, zigzag


def _by_length(batch, ranks):
    return cpx.shard(batch, cpx.by_length(cpx.zigzag(ranks), cpx.sequential(ranks), 2 * ranks))


def _between(where, hidden_states, cu_seqlens, cp_group, cp_rank, cp_size):
    comm = communicator(cp_group)
    cp_rank, cp_size = integer(where, "cp_rank", cp_rank), integer(where, "cp_size", cp_size)
    if (comm.rank, comm.ranks) != (cp_rank, cp_size):
        expected = f"{comm.rank}, {comm.ranks} of the group"
        raise cpx.Error(where, "cp_rank and cp_size", expected, f"{cp_rank}, {cp_size}")
    tensors(where, comm.device, hidden_states=hidden_states)
    cu = integers(where, "cu_seqlens", cu_seqlens)
    return sharding(_by_length, cu, cp_size), sharding(packed, cu, cp_size), comm


def zigzag_to_packed_shard(
    hidden_states: torch.Tensor, cu_seqlens: torch.Tensor | Sequence[int], cp_group: object, cp_rank: int, cp_size: int
) -> torch.Tensor:
    """Moves rows from zigzag to equal parts of the packed batch. Collective, as is its backward.

    hidden_states: (rows, ...) of this rank; cu_seqlens: global offsets, padding included.
    """
    where = "zigzag_to_packed_shard"
    source, target, comm = _between(where, hidden_states, cu_seqlens, cp_group, cp_rank, cp_size)
    return move(hidden_states, source, target, comm)


def packed_shard_to_zigzag(
    hidden_states: torch.Tensor, cu_seqlens: torch.Tensor | Sequence[int], cp_group: object, cp_rank: int, cp_size: int
) -> torch.Tensor:
    """Moves rows back: the inverse of `zigzag_to_packed_shard`."""
    where = "packed_shard_to_zigzag"
    source, target, comm = _between(where, hidden_states, cu_seqlens, cp_group, cp_rank, cp_size)
    return move(hidden_states, target, source, comm)


def natural_to_zigzag_slice(t: torch.Tensor, cp_size: int, cp_rank: int, dim: int) -> torch.Tensor:
    """Returns the entries of one whole sequence along `dim` that a rank holds zigzag; of any length. Local."""
    where = "natural_to_zigzag_slice"
    tensors(where, None, t=t)
    cp_size, cp_rank = integer(where, "cp_size", cp_size), integer(where, "cp_rank", cp_rank)
    if not 0 <= cp_rank < cp_size:
        raise cpx.Error(where, "cp_rank", f"0 to {cp_size - 1}", cp_rank)
    dim = integer(where, "dim", dim)
    if not -t.dim() <= dim < t.dim():
        raise cpx.Error(where, "dim", f"one of t's {t.dim()}", dim)
    own = sharding(zigzag, (0, t.shape[dim]), cp_size).global_rows(cp_rank)
    return t.index_select(dim, torch.from_numpy(own).to(t.device))


def reassemble_full_row(
    gathered: Sequence[torch.Tensor], cu: torch.Tensor | Sequence[int], cp_size: int
) -> torch.Tensor | None:
    """Returns a packed row in its own order, of the zigzag rows of all ranks; the inverse of slicing each sequence.

    gathered: a list of (rows, ...), by rank, of all ranks. None, as in miles, if 2 cp_size does not divide some length.
    Local.
    """
    where = "reassemble_full_row"
    gathered, cu = tensor_list(where, "gathered", gathered), integers(where, "cu", cu)
    cp_size = integer(where, "cp_size", cp_size)
    of = sharding(zigzag, cu, cp_size)
    if any((last - first) % (2 * cp_size) for first, last in zip(cu, cu[1:])):
        return None
    wanted = [(of.rows(rank), *gathered[0].shape[1:]) for rank in range(cp_size)]
    found = [tuple(rows.shape) for rows in gathered]
    if found != wanted:
        raise cpx.Error(where, "shapes of gathered, by rank", wanted, found)
    whole = gathered[0].new_empty((cu[-1], *gathered[0].shape[1:]))
    for rank, rows in enumerate(gathered):
        whole[torch.from_numpy(of.global_rows(rank)).to(rows.device)] = rows
    return whole
