# SPDX-License-Identifier: Apache-2.0
"""A caller's mistake is a cpx.Error that names it, before anything moves; a rank's failure ends the others."""

import pickle
import queue
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import cpx
from ranks import shard

batch = cpx.thd([0, 7, 20])


def alone():
    return cpx.threads(1)[0]


def one(batch=batch):
    return cpx.shard(batch, cpx.zigzag(1))


mistakes = {
    "decreasing offsets": (lambda: cpx.thd([0, 5, 3]), "thd: offset 2 decreases: expected at least 5, got 3"),
    "offsets of fractions": (lambda: cpx.thd([0, 1.5]), "thd: offsets, number 1: expected an integer.*got float"),
    "offsets of a float array": (
        lambda: cpx.thd(np.zeros(2)),
        "thd: dtype of offsets: expected int64, int32, got float64",
    ),
    "offsets that are none": (lambda: cpx.thd(7), "thd: offsets: expected a list or an array of integers, got int"),
    "huge offsets": (
        lambda: cpx.thd([0, 2**70]),
        "thd: offsets, number 1: expected an integer below 2.63, got one beyond",
    ),
    "no such row": (lambda: batch.sequence(20), "thd: row: expected 0 to 19, got 20"),
    "valid lengths": (lambda: cpx.thd([0, 5], valid=[6]), "thd: valid length of sequence 0: expected 0 to 5, got 6"),
    "no ranks": (lambda: cpx.zigzag(0), "zigzag: ranks: expected at least 1, got 0"),
    "many ranks": (lambda: cpx.striped(2**21), "striped: ranks: expected at most 2.20"),
    "no owner": (lambda: cpx.table(2, [0, 2]), "table: owner of chunk 1: expected 0 to 1, got 2"),
    "no scope": (
        lambda: cpx.shard(batch, cpx.zigzag(2), "rows"),
        'shard: scope: expected "sequence", "batch", got "rows"',
    ),
    "no unit": (lambda: cpx.aligned(0), "aligned: unit: expected at least 1, got 0"),
    "no section": (lambda: cpx.head_sharded(2, batch, []), "head_sharded: number of sections"),
    "heads that do not divide": (lambda: cpx.head_sharded(2, batch, [(4, 2), (3, 1)]), "heads of section 1"),
    "pieces with a gap": (lambda: cpx.piecewise(2, batch, [(0, 5, 0), (6, 20, 1)]), "piecewise: rows of piece 1"),
    "no rank": (lambda: one().rows(1), "sharding::rows: rank: expected 0 to 0, got 1"),
    "another batch": (lambda: cpx.relayout(one(), one(cpx.thd([0, 20])), 0), "relayout: batch of the target"),
    "other ranks": (lambda: cpx.relayout(one(), cpx.shard(batch, cpx.zigzag(2)), 0), "relayout: ranks of the target"),
    "no side": (lambda: cpx.halo(one(), 0, 3, "left"), 'halo: side: expected "before", "after", got "left"'),
    "no reach": (lambda: cpx.halo(one(), 0, -1), "halo: rows beside a segment"),
    "no carry": (lambda: cpx.carry(one(), 0, "both"), 'carry: how: expected "scan", "serial", got "both"'),
    "no deadline": (lambda: cpx.threads(2, deadline=0), "threads: deadline, s: expected more than 0"),
    "a deadline that is none": (lambda: cpx.threads(2, deadline=float("nan")), "threads: deadline, s"),
    "no threads": (lambda: cpx.threads(0), "threads::group: ranks: expected at least 1, got 0"),
    "rows that are too few": (
        lambda: cpx.exchange(cpx.relayout(one(), one(), 0), np.zeros((19, 2)), alone()),
        "exchange, source: rows of the buffer: expected 20, got 19",
    ),
    "a target of another type": (
        lambda: cpx.exchange(cpx.relayout(one(), one(), 0), np.zeros((20, 2)), alone(), np.zeros((20, 2), "f4")),
        "exchange: dtype of out: expected float64, got float32",
    ),
    "elements that are not moved": (
        lambda: cpx.exchange(cpx.relayout(one(), one(), 0), np.zeros((20, 2), complex), alone()),
        "exchange: dtype of x: expected .*, got complex128",
    ),
    "no array": (
        lambda: cpx.exchange(cpx.relayout(one(), one(), 0), [1, 2], alone()),
        "exchange: x: expected an array of rows, got list",
    ),
    "columns apart": (
        lambda: cpx.exchange(cpx.relayout(one(), one(), 0), np.zeros((20, 4))[:, ::2], alone()),
        "exchange: memory of x: expected rows of elements side by side.*copy it first",
    ),
    "rows backwards": (
        lambda: cpx.exchange(cpx.relayout(one(), one(), 0), np.zeros((20, 4))[::-1], alone()),
        "exchange: memory of x",
    ),
    "rows that are one": (
        lambda: cpx.exchange(cpx.relayout(one(), one(), 0), np.broadcast_to(np.zeros(4), (20, 4)), alone()),
        "exchange: memory of x",
    ),
    "a number": (
        lambda: cpx.exchange(cpx.relayout(one(), one(), 0), np.float32(1), alone()),
        "exchange: x: expected an array of rows",
    ),
    "a target that is read-only": (
        lambda: cpx.exchange(
            cpx.relayout(one(), one(), 0), np.zeros((20, 2)), alone(), np.broadcast_to(np.zeros(2), (20, 2))
        ),
        "exchange: out: expected an array that may be written, got one that is read-only",
    ),
    "a target that is the source": (
        lambda: (lambda x: cpx.exchange(cpx.relayout(one(), one(), 0), x, alone(), x))(np.zeros((20, 2))),
        "exchange: overlap of target and source",
    ),
    "another weight": (
        lambda: cpx.causal_conv1d(cpx.halo(one(), 0, 3), np.zeros((20, 4)), np.zeros((4, 3)), alone()),
        r"causal_conv1d: shape of weight: expected \(4, 4\)",
    ),
    "no activation": (
        lambda: cpx.causal_conv1d(cpx.halo(one(), 0, 1), np.zeros((20, 4)), np.zeros((4, 2)), alone(), None, "relu"),
        'causal_conv1d: activation: expected "silu", "none", got "relu"',
    ),
    "elements that the host does not compute": (
        lambda: cpx.causal_conv1d(cpx.halo(one(), 0, 1), np.zeros((20, 4), "f2"), np.zeros((4, 2), "f2"), alone()),
        "causal_conv1d: dtype of x: expected float32, float64, got float16",
    ),
    "heads that cannot be told": (
        lambda: cpx.gated_delta_rule(cpx.carry(one(), 0), *[np.zeros((20, 4))] * 5, alone()),
        "gated_delta_rule: heads: expected Heads",
    ),
    "no such recurrence": (
        lambda: cpx.saved_states(cpx.carry(one(), 0), np.zeros(1), (1, 1, 1, 1), "rnn"),
        "saved_states: recurrence",
    ),
    "keys by tokens": (
        lambda: cpx.attention(one(), one(), 0, *[np.zeros((20, 1, 2))] * 3, cpx.AttentionHeads(1, 1, 2)),
        "attention: sharding of keys and values: expected replicated or head_sharded.*got zigzag",
    ),
    "experts that are none": (
        lambda: cpx.ExpertExchange(np.full((20, 1), 4), 4, np.arange(20), alone()),
        "expert_exchange: chosen expert: expected 0 to 3, got 4",
    ),
    "an odd rotary size": (lambda: cpx.rotary_frequencies(1e4, 3), "rotary_frequencies: rotary_dim"),
    "missing weights": (
        lambda: cpx.gated_delta_net(one(), 0, 8, (1, 1, 4, 4))({}, np.zeros((20, 8)), alone()),
        "gated_delta_net: weights: expected in_proj_qkv.weight",
    ),
}


@pytest.mark.parametrize("name", mistakes)
def test_a_mistake_is_named(name):
    call, text = mistakes[name]
    with pytest.raises(cpx.Error, match=text) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith("test_errors.py:")
    assert str(caught.value).endswith(caught.value.message())
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_error_has_the_line_of_the_call_and_its_parts():
    with pytest.raises(cpx.Error) as caught:
        cpx.thd([0, 5, 3])  # this line
    e = caught.value
    line = next(i for i, text in enumerate(open(__file__), 1) if text.endswith("# this line\n"))
    assert str(e) == f"test_errors.py:{line}: thd: offset 2 decreases: expected at least 5, got 3"
    assert (e.where, e.problem, e.expected, e.got) == ("thd", "offset 2 decreases", "at least 5", "3")


def test_a_rank_that_raises_ends_the_others():
    def program(comm):
        if comm.rank == 1:
            raise KeyError("lost")
        plan = cpx.relayout(source, target, comm.rank)
        with pytest.raises(cpx.Error, match="rank 1 failed: KeyError: 'lost'"):
            while True:
                cpx.exchange(plan, np.zeros((plan.source_rows, 1)), comm)

    source, target = cpx.shard(batch, cpx.zigzag(3)), cpx.shard(batch, cpx.sequential(3))
    begin = time.monotonic()
    with pytest.raises(cpx.Error, match="threads: rank 1 failed: KeyError") as caught:
        cpx.run(3, program)
    assert isinstance(caught.value.__cause__, KeyError)
    assert time.monotonic() - begin < 30


def test_a_rank_that_returns_or_never_comes_is_named():
    source, target = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.sequential(2))

    def program(comm, wait):
        if comm.rank == 1:
            wait()
            return
        cpx.exchange(cpx.relayout(source, target, 0), np.zeros((source.rows(0), 1)), comm)

    with pytest.raises(cpx.Error, match="rank 0 waits.*for rank 1: expected rank 1 to take part, got its return"):
        cpx.run(2, program, lambda: None)
    late = threading.Event()
    threading.Timer(1.0, late.set).start()
    with pytest.raises(cpx.Error, match="expected an end within 200 ms, got nothing from rank 1"):
        cpx.run(2, program, late.wait, deadline=0.2)


def test_ranks_that_disagree_are_named():
    shardings = [cpx.shard(batch, layout(2)) for layout in (cpx.zigzag, cpx.sequential, cpx.striped)]

    def program(comm):
        plan = cpx.relayout(shardings[0], shardings[1 + comm.rank], comm.rank)
        cpx.exchange(plan, np.zeros((plan.source_rows, 1)), comm)

    expected = (
        r"target layout: expected one value on all ranks, got sequential\(2\) over sequence \(rank 0\), striped\(2\)"
    )
    with pytest.raises(cpx.Error, match=expected):
        cpx.run(2, program)

    def types(comm):
        plan = cpx.relayout(shardings[0], shardings[1], comm.rank)
        cpx.exchange(plan, np.zeros((plan.source_rows, 1), "f4" if comm.rank else "i4"), comm)

    with pytest.raises(cpx.Error, match=r"element type.*int32 \(rank 0\), float32 \(rank 1\)"):
        cpx.run(2, types)


def test_one_thread_at_a_time_calls_a_communicator():
    comms = cpx.threads(2)
    source, target = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.sequential(2))
    plan = cpx.relayout(source, target, 0)
    errors = queue.SimpleQueue()

    def program():
        try:
            cpx.exchange(plan, np.zeros((plan.source_rows, 1)), comms[0])
        except cpx.Error as e:
            errors.put(e)

    both = [threading.Thread(target=program) for _ in range(2)]
    for thread in both:
        thread.start()
    assert "exchange: communicator: expected one thread at a time, got another in a call" in str(errors.get())
    comms[1].leave()  # which the other waits for
    for thread in both:
        thread.join()
    assert "rank 1 to take part, got its return" in str(errors.get())


def test_an_array_of_another_sharding_is_refused():
    zigzag, sequential = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.sequential(2))

    def program(comm):
        plan = cpx.relayout(zigzag, sequential, comm.rank)
        x = cpx.Sharded(np.ones((zigzag.rows(comm.rank), 2)), zigzag, comm.rank)
        y = cpx.exchange(plan, x, comm)
        assert isinstance(y, cpx.Sharded) and y.sharding == sequential and y.rank == comm.rank
        with pytest.raises(cpx.Error, match="exchange: sharding of x: expected .*zigzag.*, got .*sequential"):
            cpx.exchange(plan, y, comm)
        with pytest.raises(cpx.Error, match="causal_conv1d: sharding of x: expected .*zigzag.*, got .*sequential"):
            cpx.causal_conv1d(cpx.halo(zigzag, comm.rank, 1), y, np.ones((2, 2)), comm)
        z = cpx.causal_conv1d(cpx.halo(sequential, comm.rank, 1), y, np.ones((2, 2)), comm)
        assert isinstance(z, cpx.Sharded) and z.sharding == sequential
        assert cpx.exchange(plan.transposed(), y, comm).sharding == zigzag

    cpx.run(2, program)
    with pytest.raises(cpx.Error, match="Sharded: rows of the array: expected 10, got 9"):
        cpx.Sharded(np.ones((9, 2)), zigzag, 0)
    with pytest.raises(cpx.Error, match="exchange: rank of x: expected 0, got 1"):
        cpx.exchange(cpx.relayout(zigzag, sequential, 0), cpx.Sharded(np.ones((10, 2)), zigzag, 1), cpx.threads(2)[0])


def fuzzed(random_state):
    """Returns something that may stand for any argument."""
    r = random_state
    shape = [r.choice([0, 1, 2, 3, 20]) for _ in range(r.choice([0, 1, 2, 2, 2, 3, 4]))]
    x = np.zeros(shape, r.choice(["f4", "f8", "f8", "f8", "i8", "i4", "f2", "?", "c8", "U3", "O"]))
    return r.choice(
        [
            x,
            x,
            x,
            x.T,
            x[::2] if x.ndim else x,
            x[::-1] if x.ndim else x,
            None,
            -1,
            0,
            1,
            3,
            2**40,
            -(2**70),
            0.5,
            "silu",
            "",
            [],
            [0, 20],
            [0, 7, 20],
            (1, 2, 3, 4),
            {},
            object(),
            np.float64(3),
            b"bytes",
            batch,
            one(),
            cpx.replicated(1, batch),
            cpx.head_sharded(1, batch, [(2, 2)]),
            cpx.zigzag(1),
            cpx.zigzag(3),
            cpx.balanced,
            cpx.relayout(one(), one(), 0),
            cpx.halo(one(), 0, 3),
            cpx.halo(one(), 0, 3, "after"),
            cpx.carry(one(), 0),
            cpx.media(),
            (1, 1, 2, 2),
            (2, 2, 3),
            alone(),
        ]
    )


def test_no_argument_ends_the_interpreter():
    """Any call with any arguments returns or raises; in another process, whose end would be seen."""
    program = """
import inspect, random, sys, warnings
import numpy as np
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import cpx
import test_errors
from cpx import _ext
r = random.Random(int(sys.argv[2]))
calls = [f for name, f in vars(cpx).items() if callable(f) and name not in ("run", "Error")]
calls += [f for name, f in vars(_ext).items() if callable(f) and not name.startswith("__")]
objects = [test_errors.batch, test_errors.one(), cpx.replicated(1, test_errors.batch),
           cpx.relayout(test_errors.one(), test_errors.one(), 0), cpx.halo(test_errors.one(), 0, 3),
           cpx.carry(test_errors.one(), 0), cpx.media([(1, 4, 4)]), cpx.unpadded(test_errors.batch)]
calls += [getattr(o, name) for o in objects for name in dir(o) if not name.startswith("__")]
calls = [f for f in calls if callable(f)]
raised = 0
for _ in range(6000):
    f = r.choice(calls)
    count = r.randrange(9)
    try:
        names = inspect.signature(f).parameters.values()
        names = [p for p in names if p.default is p.empty and p.kind != p.KEYWORD_ONLY]
        count = len(names) + r.choice([0, 0, 0, 1, 2, -1])
    except (ValueError, TypeError):
        pass
    try:
        f(*[test_errors.fuzzed(r) for _ in range(max(count, 0))])
    except MemoryError:
        pass
    except Exception as e:
        raised += 1
print("done", raised)
"""
    import pathlib

    folder = str(pathlib.Path(__file__).parent)
    for seed in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program, folder, str(seed)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0 and "done" in done.stdout, done.stderr[-2000:]
