# SPDX-License-Identifier: Apache-2.0
"""How trainers move a tensor between layouts today, in PyTorch; the rows are those of bench.cuda.exchange, by name.

torchrun --nproc-per-node RANKS bench/peers/exchange.py [PROGRAM]    (needs PyTorch; RANKS: at least 2, each with a GPU)

With PROGRAM, the path of bench.cuda.exchange, that is then run on the same GPUs, and a table says how many times as
fast as each way in PyTorch its one kernel is; of 4 ranks a limit is printed, too. All ranks must be on one host.

Written from descriptions of the methods, with PyTorch's own calls; no code of the projects named. Exit code 1 if a
result is wrong or PROGRAM prints no times; a limit that is missed changes no exit code.
"""

import math
import os
import re
import statistics
import subprocess
import sys


def stop(code, *lines):
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once a host
        print(*lines, sep="\n", file=sys.stderr if code else sys.stdout)
    sys.exit(code)


USAGE = """usage: torchrun --nproc-per-node RANKS bench/peers/exchange.py [PROGRAM]
  RANKS    at least 2, each with a GPU
  PROGRAM  build/gpu/bench/bench.cuda.exchange, to compare with it on one host;
           of: cmake --preset gpu && cmake --build --preset gpu --target bench.cuda.exchange"""
if len(sys.argv) > 2 or "".join(sys.argv[1:]).startswith("-"):
    stop(2, USAGE)
if "LOCAL_RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
    stop(2, USAGE)
PROGRAM = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else None
if PROGRAM and not (os.path.isfile(PROGRAM) and os.access(PROGRAM, os.X_OK)):
    stop(2, USAGE, f"no such program: {PROGRAM}")
if PROGRAM and os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
    stop(2, USAGE, f"PROGRAM runs on one host: {os.environ['LOCAL_WORLD_SIZE']} of {os.environ['WORLD_SIZE']} ranks "
         "are on this one")
try:
    import torch
    import torch.distributed as dist
except ImportError as e:
    stop(2, USAGE, f"needs PyTorch: {e}")

TO_HEADS, FROM_HEADS = "zigzag -> heads, q k v z b a, 32768 x 12352", "heads -> zigzag, o, 32768 x 4096"
MEGATRON = "permute, all-to-all, permute (Megatron)"
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
               "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "NCCL_ASYNC_ERROR_HANDLING",
               "OMP_NUM_THREADS")


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
    """Returns where each row stands in the shares of all ranks, end to end or `apart` rows from one to the next."""
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
        dist.barrier(device_ids=[torch.cuda.current_device()])
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
        self.times = []  # name, way, us

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
        self.times.append((name, way, us))

    def all_to_all(self, name, tokens, width):
        share = tokens * width // self.ranks // self.ranks // 8 * 8
        a, b = (torch.zeros(share * self.ranks, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.run(name, "bare all-to-all of the shard", share * 2 * (self.ranks - 1),
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

        self.run(name, MEGATRON, counts[rank] * share * 2 * (ranks - 1), permute_all_to_all_permute, out,
                 element(torch.arange(tokens), torch.tensor(columns[rank])))
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

        self.run(name, MEGATRON, (tokens - counts[rank]) * share * 2, permute_all_to_all_permute, out,
                 element(rows[rank], torch.arange(width)))
        self.all_to_all(name, tokens, width)


def read_one_kernel(lines):
    """Returns the us of one kernel by relayout, NaN where it was not run, from the first table of PROGRAM."""
    us, inside = {}, False
    for line in lines:
        name, *cells = re.split(r" {2,}", line.strip())
        if name == "relayout" and cells[:1] == ["one kernel"]:
            inside = True
        elif not name:  # the tables that follow have rows of the same names
            inside = False
        elif inside and cells and re.fullmatch(r"-|\d+\.\d+", cells[0]):
            us[name] = math.nan if cells[0] == "-" else float(cells[0])
    return us


def run_program(ranks):
    """Runs PROGRAM, which starts its own ranks, shows what it prints and returns that, line by line."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in OF_TORCHRUN and not name.startswith(("TORCHELASTIC_", "TORCH_NCCL_"))}
    lines = []
    print(f"\n{PROGRAM} {ranks}", flush=True)
    try:
        with subprocess.Popen([PROGRAM, str(ranks)], env=environment, stdout=subprocess.PIPE, text=True,
                              errors="replace") as program:
            for line in program.stdout:
                print(line, end="", flush=True)
                lines.append(line)
    except OSError as e:
        stop(1, f"PROGRAM does not run: {e}")
    if program.returncode != 0:
        stop(1, f"PROGRAM failed: exit code {program.returncode}")
    return lines


def compare(times, ranks):
    """Runs PROGRAM and prints how many times as fast as these ways its one kernel is."""
    one_kernel = read_one_kernel(run_program(ranks))
    if not one_kernel:
        stop(1, "PROGRAM has printed no times of one kernel")
    for name, _, _ in times:
        if name not in one_kernel:
            stop(1, f"PROGRAM has printed no time of one kernel for: {name}")
    ratios = {(name, way): us / one_kernel[name] for name, way, us in times}

    show = lambda x, digits: "-" if math.isnan(x) else f"{x:.{digits}f}"
    columns = "{:54s} {:40s} {:>10s} {:>13s} {:>6s}"
    print("\n" + columns.format("relayout, us", "way", "in PyTorch", "one kernel", "ratio"))
    for name, way, us in times:
        print(columns.format(name, way, show(us, 1), show(one_kernel[name], 1), show(ratios[name, way], 2)))
    if ranks == 4:
        ratio, least = ratios[TO_HEADS, MEGATRON], 2.0
        if math.isnan(ratio):
            verdict = "not run"
        elif "H200" not in torch.cuda.get_device_name():
            verdict = "none on this GPU"
        else:
            verdict = "ok" if ratio >= least else "missed"
        print("\n{:76s} {:>15s}   {:20s} verdict".format("limits on H200s", "measured", "limit"))
        print("{:76s} {:10.2f}        at least {:6.1f}      {}".format(f"{TO_HEADS}: times as fast as Megatron", ratio,
                                                                        least, verdict))


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
    if 16 % ranks == 0:
        bench.to_heads(TO_HEADS, lengths, [(16, 128), (16, 128), (32, 128), (32, 128), (32, 1), (32, 1)])
        bench.from_heads(FROM_HEADS, lengths, 4096)
    else:
        for name in (TO_HEADS, FROM_HEADS):
            bench.say(name, "-", "-", "-", f"not run: {ranks} ranks do not share 16 heads evenly")
    dist.destroy_process_group()
    if not bench.all_right:  # on every rank; torchrun would end PROGRAM if some failed beside it
        sys.exit(1)
    if PROGRAM and bench.rank == 0:  # the others end here, and torchrun waits for this one
        torch.cuda.empty_cache()
        compare(bench.times, ranks)


if __name__ == "__main__":
    main()
