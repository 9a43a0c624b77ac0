# SPDX-License-Identifier: Apache-2.0
"""Prints what a call of cpx.torch costs the host on a GPU, with tiny tensors, and how long the device takes with large
ones: one rank, or several by torchrun."""

import os
import tempfile
import time

import torch
import torch.distributed as dist

import cpx
import cpx.torch as ct

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
if world > torch.cuda.device_count():  # NCCL takes ranks of one GPU if they seem to be on several hosts
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def microseconds(call, calls=200, times=9):
    """Returns the time of the host for one call, the least of several, with a device that has nothing else to do."""
    call()
    best = float("inf")
    for _ in range(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - begin)
    torch.cuda.synchronize()
    return best / calls * 1e6


def milliseconds(call, calls=10, times=5):
    """Returns the time of the device for one call, the least of several."""
    call()
    best = float("inf")
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best / calls


def problem(comm, lengths, hidden, heads):
    """Returns calls of the operators on one packing, and what they begin with."""
    batch = cpx.thd.from_lengths(lengths)
    source, target = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world))
    rows = source.rows(rank)
    plans = ct.relayout(source, target, comm), ct.halo(source, comm, 3), ct.carry(source, comm)
    kind = {"device": device, "dtype": torch.bfloat16}
    x, weight = torch.randn(rows, hidden, **kind), torch.randn(hidden, 4, **kind)
    q, k = (torch.randn(rows, heads[0], heads[2], **kind) for _ in range(2))
    v = torch.randn(rows, heads[1], heads[3], **kind)
    g = -torch.rand(rows, heads[1], device=device)
    return {
        "exchange": (lambda x: ct.exchange(x, plans[0], comm), x),
        "causal_conv1d": (lambda x: ct.causal_conv1d(x, weight, plans[1], comm, None, "silu"), x),
        "gated_delta_rule": (lambda q: ct.gated_delta_rule(q, k, v, g, -g, plans[2], comm), q),
    }, batch


def backward(call, x):
    x.grad = None
    y = call(x)
    y.backward(y.detach())


def main():
    torch.cuda.set_device(device)
    at = {} if world > 1 else {"init_method": f"file://{tempfile.mkdtemp()}/store", "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", **at)
    comm = ct.communicator()
    say = print if rank == 0 else lambda *_: None
    say(f"{torch.cuda.get_device_name(device)}, {world} ranks, torch {torch.__version__}")
    small, _ = problem(comm, [7, 13], 8, (2, 2, 16, 16))
    say("host, us a call, tiny tensors     forward   forward and backward")
    for name, (call, x) in small.items():
        forward = microseconds(lambda: call(x))
        x = x.clone().requires_grad_()
        say(f"{name:30} {forward:10.1f} {microseconds(lambda: backward(call, x)):22.1f}")
    comm.wait()
    lengths = [4096, 12288, 2048, 14336]
    large, batch = problem(comm, lengths, 2048, (16, 32, 128, 128))
    say(f"device, ms a call, {batch.tokens} tokens, bfloat16, 2048 channels, 16 and 32 heads of 128")
    for name, (call, x) in large.items():
        forward = milliseconds(lambda: call(x))
        x = x.clone().requires_grad_()
        say(f"{name:30} {forward:10.3f} {milliseconds(lambda: backward(call, x)):22.3f}")
    comm.wait()
    others = [cpx.thd.from_lengths([n, 40 - n]) for n in range(1, 40)]
    pairs = [(cpx.shard(b, cpx.zigzag(world)), cpx.shard(b, cpx.sequential(world))) for b in others]
    plans = [ct.relayout(*pair, comm) for pair in pairs]
    rows = [torch.randn(pair[0].rows(rank), 8, device=device) for pair in pairs]
    at = iter(range(10**9))

    def next_packing():
        n = next(at) % len(plans)
        ct.exchange(rows[n], plans[n], comm)

    say(f"{'exchange, another packing':30} {microseconds(next_packing):10.1f}")
    comm.wait()
    comm.of.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
