# SPDX-License-Identifier: Apache-2.0
"""How trainers move a tensor between layouts today, in PyTorch; the rows are those of bench.cuda.exchange, by name.

torchrun --nproc-per-node RANKS bench/peers/exchange.py     (needs PyTorch; RANKS: at least 2, each with a GPU)

Written from descriptions of the methods, with PyTorch's own calls; no code of the projects named. Exit code 1 if a
result is wrong.
"""

import os
import statistics
import sys


def stop(code, *lines):
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once a host
        print(*lines, sep="\n", file=sys.stderr if code else sys.stdout)
    sys.exit(code)


USAGE = "usage: torchrun --nproc-per-node RANKS bench/peers/exchange.py    (RANKS: at least 2, each with a GPU)"
if len(sys.argv) > 1 or "LOCAL_RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
    stop(2, USAGE)
try:
    import torch
    import torch.distributed as dist
except ImportError as e:
    stop(2, USAGE, f"needs PyTorch: {e}")


def element(rows, columns):
    """Returns these rows and columns of the whole tensor, every element of which is known; patterns of bits in bf16."""
    rows, columns = rows.int().cuda(), columns.int().cuda()
    return ((rows[:, None] * 1009 + columns * 31 + 7) % 65521).short().view(torch.bfloat16)


def zigzag_rows(lengths, ranks):
    """Returns the rows of each rank, zigzag over sequence, cut as evenly as can be."""
    rows, offset = [[] for _ in range(ranks)], 0
    for n in lengths:
        cuts = [offset + n * c // (2 * ranks) for c in range(2 * ranks + 1)]
        for r in range(ranks):
            rows[r] += [torch.arange(cuts[c], cuts[c + 1]) for c in (r, 2 * ranks - 1 - r)]
        offset += n
    return [torch.cat(r) for r in rows]


def places(rows, apart=None):
    """Returns where each row stands in the parts of all ranks, end to end or `apart` rows from one to the next."""
    place, begin = torch.empty(sum(len(r) for r in rows), dtype=torch.long), 0
    for held in rows:
        place[held] = begin + torch.arange(len(held))
        begin += apart or len(held)
    return place.cuda()


def median_us(f, calls=20, rounds=9):
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
    return statistics.median(times)


class Bench:
    def __init__(self):
        self.rank, self.ranks, self.all_right = dist.get_rank(), dist.get_world_size(), True

    def say(self, *columns):
        if self.rank == 0:
            print("{:54s} {:40s} {:>9s} {:>6s}  {}".format(*columns), flush=True)

    def run(self, name, way, moved, f, target, expected):
        """Times f of the slowest rank; then poisons `target`, by which f returns its result, and compares that."""
        figures = torch.tensor([median_us(f), moved], device="cuda", dtype=torch.float64)
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        us, moved = figures.tolist()
        result = "not compared"
        if expected is not None:
            target.view(torch.int16).fill_(-1)
            right = torch.ones(1, device="cuda")
            right *= torch.equal(f().view(torch.int16), expected.view(torch.int16))
            dist.all_reduce(right, dist.ReduceOp.MIN)
            self.all_right = self.all_right and bool(right)
            result = "correct" if right else "WRONG"
        self.say(name, way, f"{us:.1f}", f"{moved / us * 1e-3:.0f}", result)

    def all_to_all(self, name, tokens, width):
        part = tokens * width // self.ranks // self.ranks // 8 * 8
        a, b = (torch.zeros(part * self.ranks, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.run(name, "bare all-to-all of the shard", part * 2 * (self.ranks - 1),
                 lambda: dist.all_to_all_single(b, a), None, None)

    def sequential(self, name, lengths, width):
        rank, ranks, tokens = self.rank, self.ranks, sum(lengths)
        rows, columns = zigzag_rows(lengths, ranks), torch.arange(width)
        most = max(len(r) for r in rows)  # the same number of every rank can be gathered
        x = torch.zeros(most, width, device="cuda", dtype=torch.bfloat16)
        x[: len(rows[rank])] = element(rows[rank], columns)
        gathered = torch.empty(ranks * most, width, device="cuda", dtype=torch.bfloat16)
        wanted = torch.arange(tokens * rank // ranks, tokens * (rank + 1) // ranks)
        index = places(rows, most)[wanted.cuda()]

        def gather_slice():
            dist.all_gather_into_tensor(gathered, x)
            return gathered.index_select(0, index)

        self.run(name, "all-gather, then slice (miles)", most * width * 2 * (ranks - 1), gather_slice, gathered,
                 element(wanted, columns))
        self.all_to_all(name, tokens, width)

    def splits(self, into, out_of):
        return {} if len(set(into + out_of)) == 1 else {"output_split_sizes": into, "input_split_sizes": out_of}

    def to_heads(self, name, lengths, sections):
        rank, ranks, tokens = self.rank, self.ranks, sum(lengths)
        width = sum(heads * size for heads, size in sections)
        share, rows = width // ranks, zigzag_rows(lengths, ranks)
        columns, first = [[] for _ in range(ranks)], 0
        for heads, size in sections:
            for r in range(ranks):
                columns[r] += range(first + heads * size * r // ranks, first + heads * size * (r + 1) // ranks)
            first += heads * size
        x = element(rows[rank], torch.arange(width))
        head_index, token_index = torch.tensor(sum(columns, [])).cuda(), places(rows)
        counts = [len(r) for r in rows]
        out = torch.empty(tokens, share, device="cuda", dtype=torch.bfloat16)
        splits = self.splits(counts, [counts[rank]] * ranks)

        def permute_all_to_all_permute():
            by_head = x.index_select(1, head_index).view(-1, ranks, share).permute(1, 0, 2).contiguous()
            dist.all_to_all_single(out, by_head.view(-1, share), **splits)
            return out.index_select(0, token_index)

        self.run(name, "permute, all-to-all, permute (Megatron)", counts[rank] * share * 2 * (ranks - 1),
                 permute_all_to_all_permute, out, element(torch.arange(tokens), torch.tensor(columns[rank])))
        self.all_to_all(name, tokens, width)

    def from_heads(self, name, lengths, width):
        rank, ranks, tokens = self.rank, self.ranks, sum(lengths)
        share, rows = width // ranks, zigzag_rows(lengths, ranks)
        x = element(torch.arange(tokens), torch.arange(rank * share, (rank + 1) * share))
        token_index, counts = torch.cat(rows).cuda(), [len(r) for r in rows]
        out = torch.empty(ranks * counts[rank], share, device="cuda", dtype=torch.bfloat16)
        splits = self.splits([counts[rank]] * ranks, counts)

        def permute_all_to_all_permute():
            dist.all_to_all_single(out, x.index_select(0, token_index), **splits)
            return out.view(ranks, -1, share).permute(1, 0, 2).reshape(-1, width)

        self.run(name, "permute, all-to-all, permute (Megatron)", (tokens - counts[rank]) * share * 2,
                 permute_all_to_all_permute, out, element(rows[rank], torch.arange(width)))
        self.all_to_all(name, tokens, width)


def main():
    local, wanted, found = (int(n) for n in (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"],
                                             torch.cuda.device_count()))
    if found < wanted:
        stop(0, f"cpx: skipped, {wanted} GPUs wanted, {found} found")
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    bench = Bench()
    ranks = bench.ranks
    if bench.rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"{ranks} x {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, NCCL {nccl}; bf16; us of the "
              "slowest rank, GB/s that leave the busiest")
    bench.say("relayout", "way", "us", "GB/s", "result")

    for what, tokens, sequences in (("131072 x 2048, 8 sequences", 131072, 8), ("131072 x 2048, 1 sequence", 131072, 1),
                                    ("32768 x 2048, 8 sequences", 32768, 8),
                                    ("1 MiB a rank, 8 sequences", 256 * ranks, 8)):
        mean = tokens // sequences
        apart = 37 if sequences > 1 and mean >= 100 else 0
        bench.sequential(f"zigzag -> sequential:batch, {what}",
                         [mean + (apart if s % 2 else -apart) for s in range(sequences)], 2048)

    lengths = [12000, 9000, 11768]
    to_heads, from_heads = "zigzag -> heads, q k v z b a, 32768 x 12352", "heads -> zigzag, o, 32768 x 4096"
    if 16 % ranks == 0:
        bench.to_heads(to_heads, lengths, [(16, 128), (16, 128), (32, 128), (32, 128), (32, 1), (32, 1)])
        bench.from_heads(from_heads, lengths, 4096)
    else:
        for name in (to_heads, from_heads):
            bench.say(name, "-", "-", "-", f"not run: {ranks} ranks do not share 16 heads evenly")
    dist.destroy_process_group()
    sys.exit(0 if bench.all_right else 1)


if __name__ == "__main__":
    main()
