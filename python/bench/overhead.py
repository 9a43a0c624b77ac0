# SPDX-License-Identifier: Apache-2.0
"""Prints what a call of cpx.torch costs beyond that of package cpx on the same memory: one rank, tiny tensors, CPU.
Then what plans of a packing cost that is seen first."""

import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch import library as registry  # noqa: E402

import cpx  # noqa: E402
import cpx.torch as ct  # noqa: E402


def microseconds(call, calls=2000, times=9):
    """Returns the time of the processor for one call, the least of several."""
    call()
    best = float("inf")
    for _ in range(times):
        begin = time.thread_time()
        for _ in range(calls):
            call()
        best = min(best, time.thread_time() - begin)
    return best / calls * 1e6


def main(comm):
    batch = cpx.thd([0, 7, 20])
    source, target = cpx.shard(batch, cpx.zigzag(1)), cpx.shard(batch, cpx.sequential(1))
    mine = ct.communicator(comm)
    relayout, halo, carry = ct.relayout(source, target, mine), ct.halo(source, mine, 3), ct.carry(source, mine)
    x, weight = torch.randn(20, 8), torch.randn(8, 4)
    q, g = torch.randn(20, 2, 4), -torch.rand(20, 2)
    delta = [q, q, q, g, -g]
    a, w, d, y = x.numpy(), weight.numpy(), [t.numpy() for t in delta], torch.empty_like(x).numpy()
    o = torch.empty_like(q).numpy()
    rows = {
        "exchange": (lambda: cpx.exchange(relayout.of, a, comm, y), lambda x: ct.exchange(x, relayout, mine), x),
        "causal_conv1d": (
            lambda: cpx.causal_conv1d(halo.of, a, w, comm, out=y),
            lambda x: ct.causal_conv1d(x, weight, halo, mine), x
        ),
        "gated_delta_rule": (
            lambda: cpx.gated_delta_rule(carry.of, *d, comm, out=o),
            lambda q: ct.gated_delta_rule(q, *delta[1:], carry, mine), q
        ),
    }
    print(f"microseconds a call          cpx   more in cpx.torch   more with autograd   torch {torch.__version__}")
    for name, (plain, torched, given) in rows.items():
        wanted = given.clone().requires_grad_()
        of_cpx, of_torch, of_autograd = (
            microseconds(f) for f in (plain, lambda: torched(given), lambda: torched(wanted))
        )
        print(f"{name:22} {of_cpx:9.1f} {of_torch - of_cpx:19.1f} {of_autograd - of_cpx:20.1f}")
    print(f"{'relayout, kept':22} {microseconds(lambda: ct.relayout(source, target, mine)):9.1f}")
    wanted = x.clone().requires_grad_()
    for name, call in {"of torch's library": operator(), "of autograd alone": Node.apply}.items():
        without, recorded = (microseconds(lambda: call(given)) for given in (x, wanted))
        print(f"{'an empty one ' + name:32} {without:19.1f} {recorded:20.1f}")
    new_packings(mine)


def new_packings(comm):
    """Prints what the plans of packings of 32768 tokens in 64 sequences over two ranks cost that are known, and that
    are not; before each, memory of 8 MB is written, as other work does that has been between."""
    other = torch.zeros(1 << 20, dtype=torch.float64)
    took = {}
    for i in range(480):
        lengths = [512] * 64
        lengths[0] += i
        lengths[1] -= i
        batch = cpx.thd.from_lengths(lengths)
        a, b = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.sequential(2))
        a.rows(0), b.rows(0)
        for known in (False, True):
            for name, call in (
                ("relayout", lambda: ct.relayout(a, b, comm)), ("halo", lambda: ct.halo(b, comm, 3)),
                ("carry", lambda: ct.carry(b, comm, "serial")), ("relayout back", lambda: ct.relayout(b, a, comm)),
            ):
                other.add_(1)
                begin = time.perf_counter()
                call()
                took.setdefault((name, known), []).append(time.perf_counter() - begin)
    all_of = {key: statistics.median(times[80:]) * 1e6 for key, times in took.items()}
    print("plans of a packing, known, new: " + ", ".join(
        f"{name} {all_of[name, True]:.1f}, {new:.1f}" for (name, known), new in all_of.items() if not known
    ))


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


def operator():
    """Returns an operator of torch that does nothing, and has a gradient, to compare with."""
    made = registry.custom_op("cpx_empty::nothing", mutates_args=())(empty)
    made.register_autograd(lambda ctx, dy: dy)
    return made


def empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


if __name__ == "__main__":
    cpx.run(1, main)
