# SPDX-License-Identifier: Apache-2.0
"""What trainers do today to move a tensor between layouts, in PyTorch, for comparison with bench/cuda/exchange.

torchrun --nproc-per-node 4 bench/peers/exchange.py

Written from descriptions of the methods, with PyTorch's own calls; no code of the projects named.
"""

import os
import statistics

import torch
import torch.distributed as dist


def zigzag_rows(lengths, ranks):
    """Returns the global rows of each rank, zigzag over sequence."""
    rows, offset = [[] for _ in range(ranks)], 0
    for n in lengths:
        cuts = [offset + n * c // (2 * ranks) for c in range(2 * ranks + 1)]
        for r in range(ranks):
            for c in (r, 2 * ranks - 1 - r):
                rows[r].extend(range(cuts[c], cuts[c + 1]))
        offset += n
    return rows


def slowest_us(f, calls=20, rounds=9):
    """Returns the median microseconds of a call, of the slowest rank."""
    times = []
    for _ in range(3):
        f()
    for _ in range(rounds):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            f()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    mine = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def report(name, us):
        if rank == 0:
            print(f"{name:64s} {us:8.1f} us", flush=True)

    for tokens, sequences in ((131072, 8), (32768, 8), (256 * ranks, 8)):
        lengths = [tokens // sequences] * sequences  # divisible by 2 W, as these methods want
        rows = zigzag_rows(lengths, ranks)
        x = torch.randn(tokens // ranks, 2048, device="cuda", dtype=torch.bfloat16)
        gathered = torch.empty(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        # where each global row of this rank's sequential part stands in the gathered tensor
        place = torch.empty(tokens, dtype=torch.long)
        place[torch.tensor(sum(rows, []))] = torch.arange(tokens)
        index = place[rank * (tokens // ranks) : (rank + 1) * (tokens // ranks)].cuda()

        def all_gather_then_slice():
            dist.all_gather_into_tensor(gathered, x)
            return gathered.index_select(0, index)

        report(f"all-gather, then slice (miles): {tokens} x 2048, {sequences} sequences", slowest_us(all_gather_then_slice))
        y = torch.empty_like(x)
        report(f"bare all_to_all_single of the shard: {tokens} x 2048", slowest_us(lambda: dist.all_to_all_single(y, x)))

    tokens, widths = 32768, [2048, 2048, 4096, 4096, 32, 32]
    width = sum(widths)
    x = torch.randn(tokens // ranks, width, device="cuda", dtype=torch.bfloat16)
    heads, first = [[] for _ in range(ranks)], 0
    for w in widths:
        for r in range(ranks):
            heads[r].extend(range(first + r * w // ranks, first + (r + 1) * w // ranks))
        first += w
    head_index = torch.tensor(sum(heads, [])).cuda()
    place = torch.empty(tokens, dtype=torch.long)
    place[torch.tensor(sum(zigzag_rows([tokens // 4] * 4, ranks), []))] = torch.arange(tokens)
    token_index = place.cuda()
    out = torch.empty(ranks, tokens // ranks, width // ranks, device="cuda", dtype=torch.bfloat16)

    def permute_all_to_all_permute():
        by_head = x.index_select(1, head_index).view(-1, ranks, width // ranks)
        dist.all_to_all_single(out, by_head.permute(1, 0, 2).contiguous())
        return out.view(tokens, -1).index_select(0, token_index)

    report("permute, all-to-all, permute (Megatron): 32768 x 12352", slowest_us(permute_all_to_all_permute))
    y = torch.empty_like(x)
    report("bare all_to_all_single of the shard: 32768 x 12352", slowest_us(lambda: dist.all_to_all_single(y, x)))
    dist.destroy_process_group()


main()
