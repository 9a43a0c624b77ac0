# SPDX-License-Identifier: Apache-2.0
"""Prints what a call of cpx.torch costs the host on a GPU, with tiny tensors, and how long the device takes with large
ones: one rank, or several by torchrun. An argument: the path of bench.cuda.delta_rule_calls, of which one rank prints
C++'s times of the delta rule before and behind its own, of a cool device and of a warm one."""

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import cpx
import cpx.torch as ct
from cpx import _ext

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
if world > torch.cuda.device_count():  # NCCL takes ranks of one GPU if they seem to be on several hosts
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def microseconds(call, calls=10, times=101):
    """Returns the time of the host for one call, the median of many tens, with a device that has nothing else to do.

    Of more calls in a row it would be the device's: the driver takes a thousand launches ahead of it. First three
    times as many are not measured, for what has waited runs slowly; on all ranks as many, for calls are collective.
    """
    took = []
    for _ in range(4 * times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        took.append(time.perf_counter() - begin)
    took = took[3 * times:]
    torch.cuda.synchronize()
    return statistics.median(took) / calls * 1e6


def milliseconds(call, calls=10, times=9):
    """Returns the time of the device for one call, the median of several tens."""
    call()
    took = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end))
    return statistics.median(took) / calls


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


in_a_row = 100  # calls of which a backward is timed; their launches wait for no device


class Nothing(torch.autograd.Function):
    """What torch itself takes for a node with as many tensors: it keeps six and makes one."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, saved):
        ctx.save_for_backward(q, k, v, g, beta, saved)
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx, do):
        q, k, v, g, beta, _ = ctx.saved_tensors
        return None, None, torch.empty_like(v), None, None, None


def of_delta_rule(say, comm, lengths, heads, norms):
    """Prints a line of the delta rule as bench.cuda.delta_rule_calls does: a forward that autograd does not record, one
    that it does, and a backward; of tiny tensors the host's times, a backward being one of many in a row, for the
    thread that runs them must wake first, and the same of the extension's calls alone, whose results are there, of an
    empty node of autograd, and of a tensor that is made: by it processes, of which some run at half speed, compare."""
    sharding = cpx.shard(cpx.thd.from_lengths(lengths), cpx.zigzag(1))
    plan, rows = ct.carry(sharding, comm), sharding.rows(0)
    kind = {"device": device, "dtype": torch.bfloat16}
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(rows, heads[0], heads[2], **kind), dim=-1) for _ in range(2))
    v = torch.randn(rows, heads[1], heads[3], **kind)
    g, beta = -torch.rand(rows, heads[1], device=device), torch.rand(rows, heads[1], device=device)
    dy = torch.randn_like(v)

    def call(v, q=q, k=k, g=g, beta=beta):
        return ct.gated_delta_rule(q, k, v, g, beta, plan, comm, qk_l2norm=norms)

    def line(name, unit, digits, *times):
        size = f"{len(lengths):2} x {lengths[0]:<6} {'norms' if norms else '':5}"
        say(f"{name:6} {unit:6} {size}" + "".join(f" {t:10.{digits}f}" for t in times), flush=True)

    if rows > 100:
        wanted = [x.clone().requires_grad_() for x in (v, q, k, g, beta)]
        y = call(*wanted)
        line(
            "torch", "ms", 3, milliseconds(lambda: call(v)), milliseconds(lambda: call(*wanted)),
            milliseconds(lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True))
        )
        return
    x = v.clone().requires_grad_()

    def row(node):
        y = x
        for _ in range(in_a_row):
            y = node(y)
        return y

    line(
        "torch", "us", 1, microseconds(lambda: call(v)), microseconds(lambda: call(x)),
        backward_microseconds(row(call), x)
    )
    name, given, options = "gated_delta_rule", [q, k, v, g, beta], (heads, (64, norms, 0.0), comm.of)
    y, gradients = torch.empty_like(v), tuple(torch.empty_like(x) for x in given)
    saved = torch.empty(plan.segments * heads[1] * heads[2] * heads[3], device=device)
    line(
        "alone", "us", 1,
        microseconds(lambda: _ext.recur(name, plan.of, given, y, *options, None, None, None, None)),
        microseconds(lambda: _ext.recur(name, plan.of, given, y, *options, None, None, saved, None)),
        microseconds(lambda: _ext.recur_backward(name, plan.of, given, dy, gradients, *options, saved, *[None] * 3)),
    )
    empty = lambda v: Nothing.apply(q, k, v, g, beta, saved)
    line("empty", "us", 1, float("nan"), microseconds(lambda: empty(x)), backward_microseconds(row(empty), x))
    line("tensor", "us", 1, microseconds(lambda: torch.empty_like(v)))


def backward_microseconds(y, x):
    """Returns the time of the host for the backward of one of the calls of which y is made."""
    dy = torch.ones_like(y)
    return microseconds(lambda: torch.autograd.grad(y, x, dy, retain_graph=True), calls=1) / in_a_row


def backward(call, x):
    x.grad = None
    y = call(x)
    y.backward(y.detach())


def new_packings(say, comm):
    """Prints what packings of 32768 tokens in 64 sequences cost the host when they are seen first, beyond the same
    calls of ones that are known: exchanges between zigzag and sequential, there and back, a convolution and a delta
    rule, and each of their plans; the device has other work for 10 ms. `operators` of bench.cuda.new_packing are the
    same in C++."""
    hidden, heads, key = 2048, (16, 32), 128
    kind = {"device": device, "dtype": torch.bfloat16}
    most = 32768 // world + 64
    unit = torch.nn.functional.normalize
    x, weight = torch.randn(most, hidden, **kind), torch.randn(hidden, 4, **kind)
    q, k = (unit(torch.randn(most, heads[0], key, **kind), dim=-1) for _ in range(2))
    v = torch.randn(most, heads[1], key, **kind)
    g, beta = -torch.rand(most, heads[1], device=device), torch.rand(most, heads[1], device=device)
    made, fresh, known = [], [], []
    for i in range(240):
        lengths = [512] * 64
        lengths[0] += 100 + i % 500
        lengths[1] -= i % 500
        lengths[-1] -= 100
        begin = time.perf_counter()
        batch = cpx.thd.from_lengths(lengths)
        a, b = cpx.shard(batch, cpx.zigzag(world)), cpx.shard(batch, cpx.sequential(world))
        made.append(time.perf_counter() - begin)
        here, there = a.rows(rank), b.rows(rank)
        before, inner = x[:here], [t[:there] for t in (q, k, v, g, beta)]
        for took in (fresh, known):
            torch.cuda._sleep(20_000_000)
            at = [time.perf_counter()]

            def lap(result, at=at):
                at.append(time.perf_counter())
                return result

            move = lap(ct.relayout(a, b, comm))
            y = lap(ct.exchange(before, move, comm))
            halo = lap(ct.halo(b, comm, 3))
            lap(ct.causal_conv1d(y, weight, halo, comm, None, "silu"))
            carry = lap(ct.carry(b, comm, "serial"))
            lap(ct.gated_delta_rule(*inner, carry, comm))
            back = lap(ct.relayout(b, a, comm))
            z = lap(ct.exchange(y, back, comm))
            took.append([end - begin for begin, end in itertools.pairwise(at)] + [at[-1] - at[0]])
            torch.cuda.synchronize()
        assert torch.equal(z, before)
    made = statistics.median(made[40:]) * 1e6
    *known, known_all = (statistics.median(t) * 1e6 for t in zip(*known[40:]))
    *fresh, fresh_all = (statistics.median(t) * 1e6 for t in zip(*fresh[40:]))
    say(f"a packing, us: four calls of one that is known {known_all:.1f}, of a new one {fresh_all:.1f}, "
        f"{fresh_all - known_all:.1f} more; its offsets and shardings {made:.1f}; exchanges by {comm.exchange_path}")
    names = ("relayout", "exchange", "halo", "causal_conv1d", "carry", "gated_delta_rule", "relayout back",
             "exchange back")
    say("of which, known, new: " + ", ".join(
        f"{name} {before:.1f}, {now:.1f}" for name, before, now in zip(names, known, fresh)))


def main():
    torch.cuda.set_device(device)
    at = {} if world > 1 else {"init_method": f"file://{tempfile.mkdtemp()}/store", "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", **at)
    comm = ct.communicator()
    say = print if rank == 0 else lambda *_: None
    say(f"{torch.cuda.get_device_name(device)}, {world} ranks, torch {torch.__version__}")
    if world == 1:
        peer = sys.argv[1:]
        for _ in range(2):
            if peer:
                print(subprocess.run(peer, check=True, capture_output=True, text=True).stdout, end="", flush=True)
            for norms in (False, True):
                of_delta_rule(say, comm, [20], (2, 2, 16, 16), norms)
                for lengths in ([32768], [8192] * 4):
                    of_delta_rule(say, comm, lengths, (16, 32, 128, 128), norms)
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
    new_packings(say, comm)
    comm.wait()
    comm.of.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
