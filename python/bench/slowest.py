# SPDX-License-Identifier: Apache-2.0
"""How long calls take that ranks make together, on GPUs."""

import statistics

import torch
import torch.distributed as dist


def slowest_ms(call, calls=10, rounds=9):
    """Returns the median of a call's milliseconds on the device, of the slowest rank."""
    took = []
    for round in range(rounds + 1):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        if round > 0:
            took.append(begin.elapsed_time(end) / calls)
    slowest = torch.tensor(statistics.median(took), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()
