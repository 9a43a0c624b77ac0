# SPDX-License-Identifier: Apache-2.0
"""What the drop-ins share: groups, batches from offsets, shardings of them, and operators in the types of peers."""

import functools

import torch

import cpx
import cpx.torch


def communicator(group):
    """Returns the cpx.torch.Communicator of a group: of a torch.distributed.ProcessGroup or of a cpx.Communicator."""
    return group if isinstance(group, cpx.torch.Communicator) else cpx.torch.communicator(group)


def offsets(cu_seqlens):
    """Returns cu_seqlens, a tensor or a list, as a tuple of int: from a device that is one copy, and a wait for it."""
    return tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else (int(n) for n in cu_seqlens))


@functools.lru_cache(maxsize=64)
def sharding(kind, cu_seqlens, ranks, *more):
    """Returns kind(batch, ranks, *more): made once a packing, so that plans of it are found by a look-up."""
    return kind(cpx.thd(list(cu_seqlens)), ranks, *more)


def zigzag(batch, ranks):
    return cpx.shard(batch, cpx.zigzag(ranks))


def packed(batch, ranks):
    """The whole batch as one run, in equal parts: what flash-linear-attention takes."""
    return cpx.shard(batch, cpx.sequential(ranks), "batch")


def by_heads(batch, ranks, sections):
    return cpx.head_sharded(ranks, batch, list(sections))


def move(x, source, target, comm):
    """Returns x, (rows, ...), moved from one sharding to another: contiguous, in bits as it was."""
    return cpx.torch.exchange(x.contiguous(), cpx.torch.relayout(source, target, comm), comm)


def _computed(tensors):
    """Returns tensors in one type, in which their device computes: the widest of them, on the host 32 bits or more."""
    kinds = {x.dtype for x in tensors if x is not None}
    kind = kinds.pop() if len(kinds) == 1 else functools.reduce(torch.promote_types, kinds)
    if kind.itemsize < 4 and all(x.is_cpu for x in tensors if x is not None):
        kind = torch.float32
    return [x if x is None else _as(kind, x).contiguous() for x in tensors]


def _as(kind, x):
    return x if x.dtype is kind else x.to(kind)  # which takes a microsecond to find it so


def causal_conv1d(x, weight, bias, activation, of, comm):
    """cpx.torch.causal_conv1d on the sharding `of`. x: (rows, channels), weight: (channels, K). Returned as x."""
    a, w, b = _computed((x, weight, bias))
    y = cpx.torch.causal_conv1d(a, w, cpx.torch.halo(of, comm, w.shape[1] - 1), comm, b, activation)
    return _as(x.dtype, y)


def gated_delta_rule(q, k, v, g, beta, of, comm, how, **options):
    """cpx.torch.gated_delta_rule on the sharding `of`. q, k, v: (rows, heads, dim), g, beta: (rows, heads). As v.

    how: states are handed on, as of cpx.carry."""
    if v.is_cpu:
        q, k, v_, g, beta = _computed((q, k, v, g, beta))
    else:  # where gates are float32, whatever the others
        q, k, v_ = _computed((q, k, v))
        g, beta = (x.float().contiguous() for x in (g, beta))
    inputs = q, k, v_, g, beta
    return _as(v.dtype, cpx.torch.gated_delta_rule(*inputs, cpx.torch.carry(of, comm, how), comm, **options))
