# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention: the gated delta rule and the causal convolution with a context of context parallelism.

    from cpx.dropin.fla import build_cp_context, causal_conv1d, chunk_gated_delta_rule

Tokens are packed, and each rank has an equal part of all of them, sequential over the batch. Beyond the peer's: batches
of any size and ranks with fewer rows than the convolution's history. A call without a context goes to the peer itself.
"""

import bisect
import collections.abc
import dataclasses
import itertools
import numbers

import torch
import torch.nn.functional as F

import cpx
import cpx.torch

from . import _common
from ._common import communicator, integer, integers, packed, sharding, tensors

Offsets = torch.Tensor | collections.abc.Sequence[int]


@dataclasses.dataclass(frozen=True)
class CPContext:
    """A rank's part of a packed batch. Fields as of the peer's FLACPContext, which its own modules read too.

    cu_seqlens: the local offsets, int32, on the device of the global ones; cu_seqlens_cpu: on the host.
    first: of the sequence of the first local row, last: of the last one. pre_num_ranks: how many ranks before this one
    have rows of the first; post_num_ranks: how many behind have rows of the last. pre_num_conv_tokens: tokens of the
    first on other ranks before this one. carry: how states are handed on, see `build_cp_context`.
    """

    group: object = None
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None
    is_last_rank: bool | None = None
    pre_num_ranks: int | None = None
    is_first_rank: bool | None = None
    post_num_ranks: int | None = None
    conv1d_kernel_size: int | None = None
    pre_num_conv_tokens: int | None = None
    sharding: cpx.Sharding | None = None
    comm: cpx.torch.Communicator | None = None
    carry: str = "scan"

    @property
    def num_seqs(self) -> int:
        """How many sequences have rows of this rank."""
        return 0 if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def is_cp_enabled(self) -> bool:
        """Whether it is of a group."""
        return self.group is not None

    def copy_for_backward(self) -> "CPContext":
        """Returns itself: it does not change."""
        return self


def get_cp_cu_seqlens(
    cu_seqlens: Offsets, cu_seqlens_cpu: Offsets | None = None, world_size: int | None = None, rank: int | None = None,
    group: object = None, conv1d_kernel_size: int | None = None, *, carry: str = "scan"
) -> CPContext:
    """Returns the context of a rank, told or of a group; with the group it can be computed with. Local."""
    comm = None if group is None else communicator(group)
    if comm is not None:
        world_size, rank = comm.ranks, comm.rank
    where = "get_cp_cu_seqlens"
    if world_size is None or rank is None:
        raise cpx.Error(where, "rank", "a group, or world_size and rank", "neither")
    world_size, rank = integer(where, "world_size", world_size), integer(where, "rank", rank)
    if carry not in ("scan", "serial"):
        raise cpx.Error(where, "carry", '"scan" or "serial"', repr(carry))
    cu = integers(where, "cu_seqlens", cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    of = sharding(packed, cu, world_size)
    segments, batch = of.segments(rank).tolist(), of.batch
    begins = list(itertools.accumulate((of.rows(r) for r in range(world_size)), initial=0))
    local = torch.tensor([row for _, _, row, _ in segments] + [of.rows(rank)], dtype=torch.int32)
    before = behind = tokens = 0
    if segments:
        tokens, last = segments[0][1], batch.offset(segments[-1][0] + 1) - 1
        before = rank + 1 - bisect.bisect(begins, begins[rank] - tokens)
        behind = bisect.bisect(begins, last) - 1 - rank
    return CPContext(
        group, local.to(getattr(cu_seqlens, "device", "cpu")), local, behind == 0, before, before == 0, behind,
        conv1d_kernel_size, tokens, of, comm, carry,
    )


def build_cp_context(
    cu_seqlens: Offsets, group: object, conv1d_kernel_size: int | None = None, cu_seqlens_cpu: Offsets | None = None, *,
    carry: str = "scan"
) -> CPContext:
    """Returns the context of this rank of a group, for the batch with these global offsets. Local.

    cu_seqlens_cpu: the same on the host, which saves waiting for the device. carry, beyond the peer's: "scan", all
    ranks compute at once, or "serial", one behind another, bitwise as one rank where each rank's rows begin at a
    multiple of 64 tokens (chunk_size) of their sequence; as of cpx.carry.
    """
    return get_cp_cu_seqlens(cu_seqlens, cu_seqlens_cpu, None, None, group, conv1d_kernel_size, carry=carry)


def _peer(where):
    try:
        import fla.modules.convolution
        import fla.ops.gated_delta_rule
    except ImportError as e:
        raise cpx.Error(where, "cp_context", "one of build_cp_context, or flash-linear-attention", "neither") from e
    return fla


def _rows(where, context, states, **of_rows):
    """Returns tensors, (1, rows, ...), without their first dimension."""
    if not isinstance(context, CPContext):
        raise cpx.Error(where, "cp_context", "one of cpx.dropin.fla.build_cp_context", type(context).__name__)
    if context.comm is None:
        raise cpx.Error(where, "cp_context", "one of a group", "one of build_cp_context without a group")
    if any(states):
        raise cpx.Error(where, "states", "neither initial nor final ones with a cp_context", "one of them")
    tensors(where, context.comm.device, **of_rows)
    for x in of_rows.values():
        if x.dim() < 2 or x.shape[0] != 1:
            raise cpx.Error(where, "shape", "(1, rows, ...) of a packed batch", tuple(x.shape))
    return [x.squeeze(0) for x in of_rows.values()]  # whose backward is a view, of x[0] a fill and a copy


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, initial_state: torch.Tensor | None = None, output_final_state: bool = False,
    activation: str | None = None, backend: str = "triton", cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None, chunk_indices: torch.Tensor | None = None,
    cp_context: CPContext | None = None, **kwargs: object
) -> tuple[torch.Tensor, object]:
    """Causal depthwise convolution of x, (1, rows, channels). weight: (channels, K). Returns (y, None). Collective.

    The gradients of weight and bias are this rank's share. activation: None, "silu" or "swish".
    """
    where = "causal_conv1d"
    if cp_context is None:
        return _peer(where).modules.convolution.causal_conv1d(
            x, weight, bias, residual, initial_state, output_final_state, activation, backend, cu_seqlens,
            cu_seqlens_cpu, chunk_indices, **kwargs
        )
    (rows,) = _rows(where, cp_context, (initial_state is not None, output_final_state), x=x)
    tensors(where, x.device, ("bias", "residual"), weight=weight, bias=bias, residual=residual)
    if weight.dim() != 2:
        raise cpx.Error(where, "shape of weight", "(channels, K)", tuple(weight.shape))
    if bias is not None and bias.dim() != 1:
        raise cpx.Error(where, "shape of bias", "(channels,)", tuple(bias.shape))
    if residual is not None and residual.shape != x.shape:
        raise cpx.Error(where, "shape of residual", f"{tuple(x.shape)}, as of x", tuple(residual.shape))
    activation = "silu" if activation == "swish" else activation
    y = _common.causal_conv1d(rows, weight, bias, activation, cp_context.sharding, cp_context.comm)[None]
    return (y if residual is None else y + residual), None


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None, cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None, cp_context: CPContext | None = None, **kwargs: object
) -> tuple[torch.Tensor, object]:
    """The gated delta rule of q, k: (1, rows, key heads, dim), v, g, beta: (1, rows, value heads, ...). Collective.

    Returns (o, None), o as v. state_v_first says how states lie in memory: here none are handed over. chunk_size, 16,
    32 or 64, is how the peer cuts its computation: on GPUs cpx's kernels take 64 tokens at once, whichever is asked.
    """
    where = "chunk_gated_delta_rule"
    if cp_context is None:
        return _peer(where).ops.gated_delta_rule.chunk_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu, chunk_indices,
            **kwargs
        )
    states = initial_state is not None, output_final_state
    q, k, v, g, beta = _rows(where, cp_context, states, q=q, k=k, v=v, g=g, beta=beta)
    chunk = kwargs.get("chunk_size", 64)
    for name, fits, expected, got in (
        ("allow_neg_eigval", use_beta_sigmoid_in_kernel or not allow_neg_eigval, "use_beta_sigmoid_in_kernel", False),
        ("head_first", "head_first" not in kwargs, "none: tensors are (1, rows, heads, dim)", "one"),
        ("chunk_size", chunk in (16, 32, 64), "16, 32 or 64", chunk),
        ("scale", scale is None or isinstance(scale, numbers.Real), "None, or a number", scale),
    ):
        if not fits:
            raise cpx.Error(where, name, expected, repr(got))
    if kwargs.get("use_gate_in_kernel"):
        A_log, bias = kwargs.get("A_log"), kwargs.get("dt_bias")
        tensors(where, g.device, ("dt_bias",), A_log=A_log, dt_bias=bias)
        for name, x in ("A_log", A_log), ("dt_bias", bias):
            if x is not None and x.shape != g.shape[1:]:
                raise cpx.Error(where, f"shape of {name}", f"{tuple(g.shape[1:])}, the value heads", tuple(x.shape))
        g = -A_log.float().exp() * F.softplus(g.float() if bias is None else g.float() + bias)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    o = _common.gated_delta_rule(
        q, k, v, g, beta, cp_context.sharding, cp_context.comm, cp_context.carry,
        qk_l2norm=bool(use_qk_l2norm_in_kernel), scale=scale, chunk=chunk if v.is_cpu else 64,
    )
    return o[None], None


chunk_gdn = chunk_gated_delta_rule
