# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM: the exchange of tokens for features around a gated delta net (megatron.core.ssm.gated_delta_net).

    from cpx.dropin.megatron import a2a_cp_to_hp, a2a_hp_to_cp, tensor_a2a_cp2hp, tensor_a2a_hp2cp

All sections, all sequences and the undoing of zigzag are one exchange, without an index_select before or behind it.
Sequences may have any length; widths of sections are multiples of the ranks, as the layer's weights want it.
"""

import cpx
import torch

from ._common import by_heads, communicator, move, offsets, packed, sharding, zigzag


def _between(where, tensor, ranks, sections, cu, balanced):
    """Returns the sharding by tokens and that by features. sections: of the whole rows."""
    uneven = [n for n in sections if n % ranks]
    if uneven:
        raise cpx.Error(where, "sections", f"multiples of {ranks} ranks", uneven)
    if tensor.dim() != 3:
        raise cpx.Error(where, "shape", "(tokens, batch, features)", tuple(tensor.shape))
    by_features = tuple((n, 1) for n in sections) * tensor.shape[1]
    return sharding(zigzag if balanced else packed, cu, ranks), sharding(by_heads, cu, ranks, by_features)


def _comm(cp_group):
    """Returns the communicator of a group, or None of one rank, as which Megatron takes None, too."""
    comm = None if cp_group is None else communicator(cp_group)
    return None if comm is None or comm.ranks == 1 else comm


def _is_first(where, seq_dim, head_dim):
    if seq_dim != 0 or head_dim not in (-1, 2):
        raise cpx.Error(where, "seq_dim, head_dim", "0, -1", f"{seq_dim}, {head_dim}")


def _to_features(where, tensor, comm, sections, cu, balanced):
    tokens, features = _between(where, tensor, comm.ranks, sections, cu, balanced)
    y = move(tensor, tokens, features, comm)
    return y.reshape(len(y), tensor.shape[1], tensor.shape[2] // comm.ranks)


def _to_tokens(where, tensor, comm, sections, cu, balanced):
    tokens, features = _between(where, tensor, comm.ranks, sections, cu, balanced)
    y = move(tensor, features, tokens, comm)
    return y.reshape(len(y), tensor.shape[1], tensor.shape[2] * comm.ranks)


def tensor_a2a_cp2hp(
    tensor: torch.Tensor, seq_dim: int, head_dim: int, cp_group: object,
    split_sections: list[int] | tuple[int, ...] | None = None, undo_attention_load_balancing: bool = True
) -> torch.Tensor:
    """Exchanges (S / W, batch, F), a share of the tokens, for (S, batch, F / W), of each section a share. Collective.

    undo_attention_load_balancing: the tokens are zigzag; else they lie one rank's behind another's.
    """
    comm = _comm(cp_group)
    if comm is None:
        return tensor
    _is_first("tensor_a2a_cp2hp", seq_dim, head_dim)
    sections = split_sections or (tensor.shape[-1],)
    cu = (0, tensor.shape[0] * comm.ranks)
    return _to_features("tensor_a2a_cp2hp", tensor, comm, sections, cu, undo_attention_load_balancing)


def tensor_a2a_hp2cp(
    tensor: torch.Tensor, seq_dim: int, head_dim: int, cp_group: object,
    split_sections: list[int] | tuple[int, ...] | None = None, redo_attention_load_balancing: bool = True
) -> torch.Tensor:
    """Exchanges (S, batch, F / W) for (S / W, batch, F): the inverse. split_sections: of a rank's share. Collective."""
    comm = _comm(cp_group)
    if comm is None:
        return tensor
    _is_first("tensor_a2a_hp2cp", seq_dim, head_dim)
    sections = [n * comm.ranks for n in split_sections or (tensor.shape[-1],)]
    cu = (0, tensor.shape[0])
    return _to_tokens("tensor_a2a_hp2cp", tensor, comm, sections, cu, redo_attention_load_balancing)


def a2a_cp_to_hp(
    qkvzba: torch.Tensor, in_proj_split_sections: list[int] | tuple[int, ...], cp_size: int, cp_group: object,
    cu_seqlens_q: torch.Tensor | list[int] | tuple[int, ...] | None, seq_len: int, packed_seq_params: object
) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """Exchanges tokens for features of all sections, of a packed batch or of rows of one length. Collective.

    qkvzba: (seq_len / W, batch, F), zigzag. Returns (seq_len, batch, F / W) and what `a2a_hp_to_cp` wants: the offsets
    of a packed batch.
    """
    comm = _comm(cp_group)
    is_packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
    if comm is None:
        return qkvzba, None
    cu = offsets(cu_seqlens_q) if is_packed else (0, seq_len)
    if cu[-1] != seq_len:
        raise cpx.Error("a2a_cp_to_hp", "cu_seqlens_q", f"offsets that end at seq_len, {seq_len}", cu[-1])
    return _to_features("a2a_cp_to_hp", qkvzba, comm, in_proj_split_sections, cu, True), cu if is_packed else None


def a2a_hp_to_cp(
    norm_out: torch.Tensor, cp_size: int, cp_group: object, packed_seq_params: object,
    thd_cp_a2a_inv: tuple[int, ...] | None
) -> torch.Tensor:
    """Exchanges features for tokens: (seq_len, batch, F / W) for (seq_len / W, batch, F), zigzag. Collective."""
    comm = _comm(cp_group)
    if comm is None:
        return norm_out
    cu = (0, norm_out.shape[0]) if thd_cp_a2a_inv is None else thd_cp_a2a_inv
    return _to_tokens("a2a_hp_to_cp", norm_out, comm, (norm_out.shape[-1] * comm.ranks,), cu, True)
