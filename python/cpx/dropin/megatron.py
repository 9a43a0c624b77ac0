# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM: the exchange of tokens for features around a gated delta net (megatron.core.ssm.gated_delta_net).

    from cpx.dropin.megatron import a2a_cp_to_hp, a2a_hp_to_cp, tensor_a2a_cp2hp, tensor_a2a_hp2cp

All sections, all sequences and the undoing of zigzag are one exchange, without an index_select before or behind it.
Packed sequences may have any length, and `a2a_cp_to_hp` takes any `seq_len`; `tensor_a2a_cp2hp` is not told how many
tokens there are: all ranks hold as many. Widths of sections are multiples of the ranks, as the layer's weights want it.
"""

import reprlib

import cpx
import torch

from ._common import by_heads, communicator, integer, integers, move, packed, sharding, tensors, zigzag


def _between(where, tensor, ranks, sections, width, cu, balanced):
    """Returns the sharding by tokens and that by features. sections: of the whole rows, `width` features."""
    uneven = [n for n in sections if n < 1 or n % ranks]
    if uneven:
        raise cpx.Error(where, "sections", f"multiples of {ranks} ranks", uneven)
    if sum(sections) != width:
        raise cpx.Error(where, "sum of the sections", width, sum(sections))
    by_features = tuple((ranks, n // ranks) for n in sections) * tensor.shape[1]
    return sharding(zigzag if balanced else packed, cu, ranks), sharding(by_heads, cu, ranks, by_features)


def _comm(where, tensor, cp_group, cp_size=None):
    """Returns the communicator of a group, or None of one rank, as which Megatron takes None, too."""
    comm = None if cp_group is None else communicator(cp_group)
    ranks = 1 if comm is None else comm.ranks
    tensors(where, None if ranks == 1 else comm.device, tensor=tensor)
    if tensor.dim() != 3:
        raise cpx.Error(where, "shape", "(tokens, batch, features)", tuple(tensor.shape))
    if cp_size is not None and integer(where, "cp_size", cp_size) != ranks:
        raise cpx.Error(where, "cp_size", f"{ranks}, as of cp_group", cp_size)
    return None if ranks == 1 else comm


def _sections(where, tensor, split_sections):
    return (tensor.shape[-1],) if split_sections is None else integers(where, "split_sections", split_sections)


def _is_packed(where, packed_seq_params):
    if packed_seq_params is None:
        return False
    if not hasattr(packed_seq_params, "qkv_format"):
        raise cpx.Error(where, "packed_seq_params", "None, or what has qkv_format", type(packed_seq_params).__name__)
    return packed_seq_params.qkv_format == "thd"


def _is_first(where, seq_dim, head_dim):
    if integer(where, "seq_dim", seq_dim) != 0 or integer(where, "head_dim", head_dim) not in (-1, 2):
        raise cpx.Error(where, "seq_dim, head_dim", "0, -1", f"{seq_dim}, {head_dim}")


def _to_features(where, tensor, comm, sections, cu, balanced):
    tokens, features = _between(where, tensor, comm.ranks, sections, tensor.shape[2], cu, balanced)
    y = move(tensor, tokens, features, comm)
    return y.reshape(len(y), tensor.shape[1], tensor.shape[2] // comm.ranks)


def _to_tokens(where, tensor, comm, sections, cu, balanced):
    tokens, features = _between(where, tensor, comm.ranks, sections, tensor.shape[2] * comm.ranks, cu, balanced)
    y = move(tensor, features, tokens, comm)
    return y.reshape(len(y), tensor.shape[1], tensor.shape[2] * comm.ranks)


def tensor_a2a_cp2hp(
    tensor: torch.Tensor, seq_dim: int, head_dim: int, cp_group: object,
    split_sections: list[int] | tuple[int, ...] | None = None, undo_attention_load_balancing: bool = True
) -> torch.Tensor:
    """Exchanges (S / W, batch, F), a share of the tokens, for (S, batch, F / W), of each section a share. Collective.

    All ranks hold as many tokens. undo_attention_load_balancing: the tokens are zigzag; else they lie one rank's behind
    another's.
    """
    where = "tensor_a2a_cp2hp"
    comm = _comm(where, tensor, cp_group)
    if comm is None:
        return tensor
    _is_first(where, seq_dim, head_dim)
    cu, sections = (0, tensor.shape[0] * comm.ranks), _sections(where, tensor, split_sections)
    return _to_features(where, tensor, comm, sections, cu, undo_attention_load_balancing)


def tensor_a2a_hp2cp(
    tensor: torch.Tensor, seq_dim: int, head_dim: int, cp_group: object,
    split_sections: list[int] | tuple[int, ...] | None = None, redo_attention_load_balancing: bool = True
) -> torch.Tensor:
    """Exchanges (S, batch, F / W) for (S / W, batch, F): the inverse. split_sections: of a rank's share. Collective."""
    where = "tensor_a2a_hp2cp"
    comm = _comm(where, tensor, cp_group)
    if comm is None:
        return tensor
    _is_first(where, seq_dim, head_dim)
    cu, sections = (0, tensor.shape[0]), [n * comm.ranks for n in _sections(where, tensor, split_sections)]
    return _to_tokens(where, tensor, comm, sections, cu, redo_attention_load_balancing)


def a2a_cp_to_hp(
    qkvzba: torch.Tensor, in_proj_split_sections: list[int] | tuple[int, ...], cp_size: int, cp_group: object,
    cu_seqlens_q: torch.Tensor | list[int] | tuple[int, ...] | None, seq_len: int, packed_seq_params: object
) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """Exchanges tokens for features of all sections, of a packed batch or of rows of one length. Collective.

    qkvzba: (seq_len / W, batch, F), zigzag. Returns (seq_len, batch, F / W) and what `a2a_hp_to_cp` wants: the offsets
    of a packed batch.
    """
    where = "a2a_cp_to_hp"
    comm, is_packed = _comm(where, qkvzba, cp_group, cp_size), _is_packed(where, packed_seq_params)
    if comm is None:
        return qkvzba, None
    seq_len = integer(where, "seq_len", seq_len)
    cu = integers(where, "cu_seqlens_q", cu_seqlens_q) if is_packed else (0, seq_len)
    if cu[-1] != seq_len:
        raise cpx.Error(where, "cu_seqlens_q", f"offsets that end at seq_len, {seq_len}", cu[-1])
    sections = integers(where, "in_proj_split_sections", in_proj_split_sections)
    return _to_features(where, qkvzba, comm, sections, cu, True), cu if is_packed else None


def a2a_hp_to_cp(
    norm_out: torch.Tensor, cp_size: int, cp_group: object, packed_seq_params: object,
    thd_cp_a2a_inv: tuple[int, ...] | None
) -> torch.Tensor:
    """Exchanges features for tokens: (seq_len, batch, F / W) for (seq_len / W, batch, F), zigzag. Collective."""
    where = "a2a_hp_to_cp"
    comm, is_packed = _comm(where, norm_out, cp_group, cp_size), _is_packed(where, packed_seq_params)
    if comm is None:
        return norm_out
    cu = (0, norm_out.shape[0])
    if is_packed:  # None, of a packed batch, is none of them
        cu = integers(where, "thd_cp_a2a_inv", thd_cp_a2a_inv)
    elif thd_cp_a2a_inv is not None:
        raise cpx.Error(where, "thd_cp_a2a_inv", "None, as of rows that are not packed", reprlib.repr(thd_cp_a2a_inv))
    return _to_tokens(where, norm_out, comm, (norm_out.shape[-1] * comm.ranks,), cu, True)
