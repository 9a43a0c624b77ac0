# SPDX-License-Identifier: Apache-2.0
"""Prints how long the relayout of cpx.dropin.miles takes on GPUs, by each path that an exchange has, beside what it
replaces: an all-gather of every rank's rows, then a selection of those that are wanted, by PyTorch's own calls.

torchrun --nproc-per-node RANKS python/bench/relayout_cuda.py [BLOCKS ...]    (a GPU a rank)

BLOCKS: multiprocessors that the kernel into the window takes, beside NCCL's messages and what a drop-in's group has
unasked. By default 128.
"""

import os
import sys

import torch
import torch.distributed as dist

import cpx
from cpx.dropin import miles

from slowest import slowest_ms


def measure(tokens, sequences, width, communicators):
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

    expected = gather_and_select()
    theirs = slowest_ms(gather_and_select, 20) * 1e3
    if rank == 0:
        print(f"{cu[-1]} x {width}, {sequences} sequences: all-gather and selection {theirs:.1f} us", flush=True)
    for blocks, comm in communicators:

        def relayout():
            return miles.zigzag_to_packed_shard(x, cu, comm, rank, ranks)

        y = relayout()
        comm.wait()
        wrong = (y.view(torch.int16) != expected.view(torch.int16)).any(1).sum().item()
        assert wrong == 0, f"rank {rank}, {comm.exchange_path}: {wrong} of {len(y)} rows are wrong"
        back = miles.packed_shard_to_zigzag(y, cu, comm, rank, ranks)
        assert torch.equal(back.view(torch.int16), x.view(torch.int16)), f"rank {rank}, {comm.exchange_path}: not back"
        ours = slowest_ms(relayout, 20) * 1e3
        comm.wait()
        path = comm.exchange_path + (f", {blocks} blocks" if comm.exchange_path == "window" else "")
        if rank == 0:
            print(f"    relayout by {path}: {ours:.1f} us, {theirs / ours:.2f} times as fast", flush=True)


def main():
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        nccl = ".".join(str(n) for n in torch.cuda.nccl.version())
        print(f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}; bfloat16")
    communicators = [
        (blocks, cpx.torch.communicator(dist.new_group(list(range(ranks))), 60.0, window=window, blocks=blocks))
        for window, blocks in [(0, 0), *((4 << 30, int(n)) for n in sys.argv[1:] or [128])]
    ]
    communicators.append(("unasked", cpx.torch.communicator(dist.new_group(list(range(ranks))))))
    for tokens, sequences in ((131072, 8), (131072, 1), (32768, 8)):
        measure(tokens, sequences, 2048, communicators)
    for _, comm in communicators:
        comm.of.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
