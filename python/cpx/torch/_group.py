# SPDX-License-Identifier: Apache-2.0
"""Communicators of torch's process groups."""

import atexit
import threading
import weakref

import torch
import torch.distributed as dist

import cpx
from cpx._error import Error

from ._objects import Communicator

_where = "communicator"
_made = weakref.WeakKeyDictionary()
_making = threading.Lock()


def device_extension(where):
    """Returns the extension for tensors on GPUs. Raises cpx.Error if this cpx was built without."""
    try:
        from cpx import _cuda
    except ImportError as e:
        missing = "one for the host's memory" if "_cuda" in str(e) else str(e)
        raise Error(where, "cpx of this process", "one that is built with CUDA, as python/README.md says",
                    missing) from e
    return _cuda


def communicator(
    group: object = None, deadline: float = 600.0, window: int | None = None, blocks: int = 64
) -> Communicator:
    """Returns the communicator of this rank, which every operator takes.

    group: what `cpx.run` hands to a rank that is a thread, for tensors on the CPU; or a group of torch.distributed, by
    default that of all, for tensors on the current CUDA device. Its own NCCL communicator is used where torch gives it
    (2.8 and later), else one is made over its store. Collective; a second call returns the first one's.
    deadline: the longest, in seconds, that a rank of a group waits for the others.
    window: bytes, the same on all ranks, of memory in which results of exchanges are, so that peers' kernels store rows
    there at once; see `Communicator.exchange_path`. None: made by the first exchange, eight times its largest result
    and 64 MB at least, but no more than half of what is free, and again, twice as large where there is memory, for a
    result that is larger than a quarter of it; those before stay until this communicator leaves. 0, and exchanges are
    NCCL's messages. A quarter is for results that find no room or are made in other streams or in the capture of a
    graph: their rows are copied once more. What is larger than that quarter, because the bytes were said or a device
    has no more, goes by messages. Results that live at once have room up to five eighths of it: where many are kept
    for the backward, say the bytes.
    blocks: multiprocessors that the kernel takes, the same on all ranks; 0: up to 128. Kernels in which ranks wait for
    each other, those of NCCL in other streams, too, must all find room at once: 64 leave two of NCCL's 32 each beside
    an exchange. Where none runs there, more are faster.
    Raises cpx.Error if there is no group, none of NCCL, or if this cpx was built without CUDA.
    """
    if isinstance(group, Communicator):
        return group
    if isinstance(group, cpx.Communicator):
        return Communicator(group)
    wanted = "what cpx.run hands to a rank, or a group of torch.distributed"
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            raise Error(_where, "group", wanted, "None, and torch.distributed is not initialized")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise Error(_where, "group", wanted, type(group).__name__)
    with _making:
        if group not in _made:
            _made[group] = Communicator(_of(group, deadline, window, blocks))
        return _made[group]


@atexit.register
def _leave_all():
    for comm in list(_made.values()):  # before torch ends what they use
        comm.of.leave()


def _of(group, deadline, window, blocks):
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        backend = None
    if backend is None or "nccl" not in backend.name().lower():
        if group.size() == 1:
            return cpx.threads(1)[0]
        raise Error(_where, "backend of the group", "nccl; ranks with tensors on the CPU are threads, of cpx.run",
                    dist.get_backend(group))
    by = device_extension(_where)
    device = torch.cuda.current_device()
    if not hasattr(backend, "_comm_ptr"):
        return _over_store(group, device, deadline, window, blocks)
    backend.eager_connect_single_device(torch.device("cuda", device))
    return by.nccl_adopt(torch.Tensor, backend._comm_ptr(), device, deadline, window, blocks)


def _over_store(group, device, deadline, window, blocks):
    """Returns the rank of a communicator of its own, whose ranks find each other by the store of their group."""
    by = device_extension(_where)
    store = dist.distributed_c10d._get_process_group_store(group)
    calls = store.add("cpx/nccl", 1)  # of all ranks, which make one after the other together
    key = f"cpx/nccl/{(calls - 1) // group.size()}"
    if group.rank() == 0:
        store.set(key, by.nccl_id())
    return by.nccl_make(torch.Tensor, store.get(key), group.rank(), group.size(), device, deadline, window, blocks)
