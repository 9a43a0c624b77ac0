# SPDX-License-Identifier: Apache-2.0
"""What the drop-ins share: what they check of arguments, groups, shardings, and operators in the types of peers."""

import functools
import operator
import reprlib

import torch

import cpx
import cpx.torch
from cpx.torch._operator import autocast, check_tensor


def tensors(where, device, _optional=(), **named):
    """Raises cpx.Error unless all are tensors on that device, None: on any one. Those in _optional may be None."""
    for name, x in named.items():
        if x is None and name in _optional:
            continue
        check_tensor(where, device or getattr(x, "device", None), name, x)
        device = x.device


def tensor_list(where, name, given, device=None):
    """Returns a list of tensors of one dtype on that device, None: on any one. Raises cpx.Error if they are not."""
    try:
        given = list(given)
    except TypeError as e:
        raise cpx.Error(where, name, "a list of tensors", type(given).__name__) from e
    if not given:
        raise cpx.Error(where, name, "at least one tensor", "none")
    tensors(where, device, **{f"{name}[{i}]": x for i, x in enumerate(given)})
    kinds = {x.dtype: None for x in given}
    if len(kinds) > 1:
        raise cpx.Error(where, f"dtype of {name}", "one", ", ".join(map(str, kinds)))
    return given


def integer(where, name, value):
    """Returns a whole number as an int. Raises cpx.Error if it is none."""
    try:
        return int(operator.index(value))
    except TypeError as e:
        raise cpx.Error(where, name, "a whole number", reprlib.repr(value)) from e


def integers(where, name, values):
    """Returns whole numbers, a tensor or a list, as a tuple of int: from a device that is one copy, and a wait for it.

    Raises cpx.Error if they are none, or others: none is rounded.
    """
    try:
        found = tuple(map(operator.index, values.tolist() if isinstance(values, torch.Tensor) else values))
    except (TypeError, NotImplementedError) as e:  # this of a tensor without data
        raise cpx.Error(where, name, "whole numbers, a tensor or a list", reprlib.repr(values)) from e
    if not found:
        raise cpx.Error(where, name, "at least one number", "none")
    return found


def communicator(group):
    """Returns the cpx.torch.Communicator of a group: of a torch.distributed.ProcessGroup or of a cpx.Communicator."""
    return group if isinstance(group, cpx.torch.Communicator) else cpx.torch.communicator(group)


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
    a, w, b = _computed(autocast(x, weight, bias))
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
