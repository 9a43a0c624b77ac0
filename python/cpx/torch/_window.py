# SPDX-License-Identifier: Apache-2.0
"""Results of exchanges in the window, memory that other ranks write.

A pool of torch's caching allocator has them, of which the extension gives the memory: so streams, record_stream and
whatever holds a tensor count there as for any other. (A tensor by DLPack would be given back without regard to streams
that have recorded it.) The pool begins as one block, which torch divides and joins: what it took in other sizes would
never fit the next packing. Where the window has grown, another pool has the new one. Where it is full the pool goes on
in other memory of the device, and rows are copied there, which other ranks need not know. A graph keeps its memory in a
pool of its own: so do results in a capture.
"""

import functools

import torch


@functools.cache
def _allocator():
    from cpx import _cuda

    return torch.cuda.memory.CUDAPluggableAllocator(_cuda.__file__, "cpx_window_allocate", "cpx_window_free")


class _Pool:
    def __init__(self, of, device):
        self._of, self._device, self.room = of, device, of.room
        self._pool = torch.cuda.MemPool(_allocator().allocator())
        whole = self.room >> 21 << 21  # as torch rounds what is large
        if whole > 10 << 20:
            self.empty(torch.empty(0, dtype=torch.uint8, device=device), [whole])  # and lets it go

    def empty(self, like, shape):
        self._of.lend(True)
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                return like.new_empty(shape)
        finally:
            self._of.lend(False)


def empty(like, shape, of):
    """Returns like.new_empty(shape), for what a communicator of package cpx moves: in its window if it has one."""
    if like.is_cpu or torch.cuda.is_current_stream_capturing():
        return like.new_empty(shape)
    room = of.room
    if not room:
        return like.new_empty(shape)
    pool = of.pool
    if pool is None or pool.room != room:
        pool = of.pool = _Pool(of, like.device)
    return pool.empty(like, shape)
