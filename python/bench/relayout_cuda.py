# SPDX-License-Identifier: Apache-2.0
"""Prints how long the relayout of cpx.dropin.miles takes on GPUs, beside what it replaces: an all-gather of every rank's
rows, then a selection of those that are wanted, by PyTorch's own calls.

torchrun --nproc-per-node RANKS python/bench/relayout_cuda.py    (a GPU a rank)
"""

import os
import statistics

import torch
import torch.distributed as dist

import cpx
from cpx.dropin import miles


def slowest_us(call, calls=20, rounds=9):
    """Returns the median of a call's microseconds on the device, of the slowest rank."""
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
            took.append(begin.elapsed_time(end) / calls * 1e3)
    slowest = torch.tensor(statistics.median(took), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measure(tokens, sequences, width):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mean = tokens // sequences // (2 * ranks)  # of a chunk: lengths that 2 W divides, as there
    lengths = [2 * ranks * (mean + (9 if s % 2 else -9) * (sequences > 1 and mean > 9)) for s in range(sequences)]
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    batch = cpx.thd(cu)
    rows = [torch.from_numpy(cpx.shard(batch, cpx.zigzag(ranks)).global_rows(r)) for r in range(ranks)]
    x = torch.randn(len(rows[rank]), width, device="cuda", dtype=torch.bfloat16)
    place = torch.empty(cu[-1], dtype=torch.long)
    place[torch.cat(rows)] = torch.arange(cu[-1])
    own = place[cu[-1] * rank // ranks : cu[-1] * (rank + 1) // ranks].cuda()
    gathered = torch.empty(cu[-1], width, device="cuda", dtype=torch.bfloat16)

    def gather_and_select():
        dist.all_gather_into_tensor(gathered, x)
        return gathered.index_select(0, own)

    def relayout():
        return miles.zigzag_to_packed_shard(x, cu, None, rank, ranks)

    assert torch.equal(relayout().view(torch.int16), gather_and_select().view(torch.int16))
    theirs, ours = slowest_us(gather_and_select), slowest_us(relayout)
    if rank == 0:
        print(f"{cu[-1]:8d} x {width}, {sequences:2d} sequences: all-gather and selection {theirs:7.1f} us, "
              f"relayout {ours:7.1f} us, {theirs / ours:.2f} times as fast", flush=True)


def main():
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, torch {torch.__version__}; bfloat16")
    for tokens, sequences in ((131072, 8), (131072, 1), (32768, 8)):
        measure(tokens, sequences, 2048)
    cpx.torch.communicator().of.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
