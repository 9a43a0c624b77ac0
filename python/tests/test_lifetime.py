# SPDX-License-Identifier: Apache-2.0
"""Calls keep no reference and no memory, and the interpreter exits in any order."""

import gc
import itertools
import subprocess
import sys

import numpy as np
import pytest

import cpx

batch = cpx.thd([0, 7, 20])
sharding = cpx.shard(batch, cpx.zigzag(1))


def resident():
    """Returns the pages of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def calls():
    """Returns what is called again and again, each with the arrays that it is given."""
    comm = cpx.threads(1)[0]
    plan, halo, carry = cpx.relayout(sharding, sharding, 0), cpx.halo(sharding, 0, 3), cpx.carry(sharding, 0)
    after = cpx.halo(sharding, 0, 3, "after")
    x, weight = np.ones((20, 4)), np.ones((4, 4))
    q, g = np.ones((20, 1, 2)), -np.ones((20, 1))
    saved = cpx.saved_states(carry, q, (1, 1, 2, 2))
    wrong = np.ones((19, 4))

    def refused():
        try:
            cpx.exchange(plan, wrong, comm)
        except cpx.Error:
            pass

    return (x, weight, q, g, wrong, *saved), [
        lambda: cpx.exchange(plan, x, comm),
        lambda: cpx.relayout(sharding, cpx.shard(batch, cpx.sequential(1)), 0).transposed(),
        lambda: cpx.thd([0, 3, 9]).offsets,
        lambda: sharding.global_rows(0),
        lambda: cpx.causal_conv1d(halo, x, weight, comm),
        lambda: cpx.causal_conv1d_backward(halo, after, x, weight, x, comm),
        lambda: cpx.gated_delta_rule(carry, q, q, q, g, g, comm, saved=saved),
        lambda: cpx.gated_delta_rule_backward(carry, q, q, q, g, g, q, saved, comm),
        lambda: cpx.run(1, lambda c: c.rank),
        refused,
    ]


def test_ten_thousand_calls_keep_no_reference_and_no_memory():
    arrays, functions = calls()
    for f in functions:
        for _ in range(50):
            f()
    gc.collect()
    references, pages = [sys.getrefcount(a) for a in arrays], resident()
    for _ in range(1000):
        for f in functions:
            f()
    gc.collect()
    assert [sys.getrefcount(a) for a in arrays] == references
    assert resident() - pages < 2048  # 8 MiB: one kept array of 640 bytes a call would be more than 6 of them


def test_a_result_outlives_everything_else():
    def made():
        s = cpx.shard(cpx.thd([0, 100000]), cpx.zigzag(1))
        return s.global_rows(0), cpx.thd([0, 5]).offsets

    rows, offsets = made()
    gc.collect()
    assert np.array_equal(rows, np.arange(100000)) and offsets.tolist() == [0, 5]


names = ["batch", "sharding", "plan", "comms", "thread", "x"]


@pytest.mark.parametrize("order", list(itertools.permutations(names[:4]))[::5] + [tuple(names)])
def test_the_interpreter_exits_in_any_order(order):
    program = f"""
import sys, threading
import numpy as np
import cpx
cpx._ext.set_leak_warnings(True)
batch = cpx.thd([0, 7, 20])
sharding = cpx.shard(batch, cpx.zigzag(2))
plan = cpx.relayout(sharding, cpx.shard(batch, cpx.sequential(2)), 0)
comms = cpx.threads(2, deadline=0.2)
x = np.zeros((plan.source_rows, 1))
class Holder: pass
holder = Holder()
holder.all = [globals()[name] for name in {[n for n in order if n != "thread"]!r}]
def wait(comm=comms[0], plan=plan, x=x):
    try:
        cpx.exchange(plan, x, comm)
    except cpx.Error:
        pass
thread = threading.Thread(target=wait)
thread.start()
for name in {order!r}:
    del globals()[name]
del wait, holder
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr


@pytest.mark.parametrize("to", ["os.kill(os.getpid()", "signal.pthread_kill(threading.get_ident()"])
def test_an_interrupt_ends_all_ranks(to):
    """Also one that does not wake the thread that waits for them."""
    program = """
import os, signal, threading, time, numpy as np, cpx
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this without
batch = cpx.thd([0, 7, 20])
source, target = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.sequential(2))
stop = threading.Event()
def program(comm):
    if comm.rank == 1:
        time.sleep(0.3)
        TO, signal.SIGINT)
        return stop.wait(60)
    try:
        cpx.exchange(cpx.relayout(source, target, 0), np.zeros((source.rows(0), 1)), comm)
    except cpx.Error as e:
        stop.set()
        print(e)
try:
    cpx.run(2, program)
except KeyboardInterrupt:
    print("interrupted")
""".replace("TO", to)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "failed: KeyboardInterrupt" in done.stdout and "interrupted\n" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_an_interpreter_that_exits_with_waiting_ranks_ends_within_the_deadline():
    program = """
import threading, numpy as np, cpx
batch = cpx.thd([0, 7, 20])
source, target = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.sequential(2))
comms = cpx.threads(2, deadline=1)
plan = cpx.relayout(source, target, 0)
threading.Thread(target=lambda: cpx.exchange(plan, np.zeros((plan.source_rows, 1)), comms[0])).start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert "nothing from rank 1" in done.stderr or "its return" in done.stderr
    assert done.returncode == 0
