# SPDX-License-Identifier: Apache-2.0
"""A caller's mistake is a cpx.Error that names it, before anything moves; a rank's failure ends the others."""

import concurrent.futures
import contextlib
import ctypes
import math
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


def delta_inputs():
    return cpx.carry(one(), 0), *[np.zeros((20, 1, 2))] * 3, *[np.zeros((20, 1))] * 2


def of_layer(**others):
    net = cpx.gated_delta_net(one(), 0, 4, (1, 2, 4, 3))
    shapes = [(14, 4), (6, 4), (2, 4), (2, 4), (14, 4), (2,), (2,), (3,), (4, 6)]
    weights = {name: np.ones(shape) for name, shape in zip(net.parameters, shapes)}
    return net(weights | others, np.ones((20, 4)), alone())


mistakes = {
    "decreasing offsets": (lambda: cpx.thd([0, 5, 3]), "thd: offset 2 decreases: expected at least 5, got 3"),
    "offsets of fractions": (lambda: cpx.thd([0, 1.5]), "thd: offsets, number 1: expected an integer.*got float"),
    "offsets of a float array": (
        lambda: cpx.thd(np.zeros(2)),
        "thd: dtype of offsets: expected int64, int32, got float64",
    ),
    "offsets of two dimensions": (
        lambda: cpx.thd(np.array([[0, 7], [7, 20]])), r"thd: dimensions of offsets: expected 1, got \(2, 2\)",
    ),
    "grids that are none": (lambda: cpx.media(5), r"media: images: expected a list or an array of \(time.*got int"),
    "grids of two numbers": (lambda: cpx.media([(1, 4), (4, 1, 4, 4)]), "media: images: expected three numbers.*got 2"),
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
    "a batch for a sharding": (
        lambda: cpx.relayout(cpx.thd([0, 20]), one(), 0),
        r"relayout: arguments: expected \(source: cpx.Sharding, target: cpx.Sharding, rank: int\), got .*thd, "
        r".*Sharding",
    ),
    "a plan for a sharding": (
        lambda: cpx.carry(cpx.halo(one(), 0, 3), 0), r"carry: arguments: expected \(sharding: cpx.Sharding, rank: int",
    ),
    "no batch": (lambda: cpx.shard([0, 20], cpx.zigzag(1)), r"shard: arguments: expected \(batch: cpx.thd, layout"),
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
    "another plan": (
        lambda: cpx.causal_conv1d(cpx.relayout(one(), one(), 0), np.zeros((20, 4)), np.zeros((4, 4)), alone()),
        "causal_conv1d: plan: expected what cpx.halo returns, got Relayout",
    ),
    "no query heads": (
        lambda: cpx.attention(one(), cpx.replicated(1, batch), 0, *[np.zeros((20, 1, 2))] * 3, (0, 1, 2)),
        "attention: query heads: expected at least 1, got 0",
    ),
    "heads without their width": (
        lambda: cpx.attention(one(), cpx.replicated(1, batch), 0, *[np.zeros((20, 1, 2))] * 3, (1, 1)),
        "attention: heads: expected AttentionHeads",
    ),
    "rows of less than nothing for experts": (
        lambda: cpx.ExpertExchange(np.zeros((20, 1), int), 4, np.arange(20), alone()).to_experts(np.ones((20, 4)), -4),
        "ExpertExchange.to_experts: width: expected at least 0, got -4",
    ),
    "experts that are none": (
        lambda: cpx.ExpertExchange(np.full((20, 1), 4), 4, np.arange(20), alone()),
        "expert_exchange: chosen expert: expected 0 to 3, got 4",
    ),
    "a rank that is no number": (
        lambda: one().rows("a"), r"Sharding.rows: arguments: expected \(self, rank: int\), got .*str",
    ),
    "bytes that are no number": (
        lambda: cpx.relayout(one(), one(), 0).bytes_matrix("a"), "Relayout.bytes_matrix: arguments: expected .*str",
    ),
    "ranks that are no number": (lambda: cpx.run("2", print), "run: ranks: expected int, got str"),
    "offsets of nothing": (
        lambda: cpx.thd(None), "thd: offsets: expected a list or an array of integers, got NoneType",
    ),
    "a chunk of fractions": (
        lambda: cpx.gated_delta_rule(*delta_inputs(), alone(), chunk=64.5),
        "gated_delta_rule: chunk: expected int, got float",
    ),
    "heads of letters": (
        lambda: cpx.gated_delta_rule(*delta_inputs(), alone(), heads="abcd"),
        r"gated_delta_rule: heads: expected Sequence\[int\] or None, got str",
    ),
    "an array of no sharding": (
        lambda: cpx.Sharded(np.zeros(20), None, 0), "Sharded: sharding: expected cpx.Sharding, got NoneType",
    ),
    "rows of a number of experts": (
        lambda: cpx.ExpertExchange(np.zeros((20, 1), int), 4.5, np.arange(20), alone()),
        "ExpertExchange: experts: expected int, got float",
    ),
    "a weight of nothing": (
        lambda: cpx.causal_conv1d(cpx.halo(one(), 0, 1), np.zeros((20, 4)), None, alone()),
        "causal_conv1d: weight: expected an array, got NoneType",
    ),
    **{
        f"fill of {dtype} with {fill}": (
            lambda x=np.zeros((20, 1), dtype), fill=fill: cpx.shift_rows(cpx.halo(one(), 0, 1), x, alone(), fill),
            f"shift_rows: fill: expected {wanted}, got ",
        )
        for dtype, fill, wanted in (
            ("i4", 2**40, "an integer of 32 bits"), ("i4", 2**31, "an integer of 32 bits"),
            ("i8", math.inf, "an integer of 64 bits"), ("i8", math.nan, "an integer of 64 bits"),
            ("i8", 0.5, "an integer of 64 bits"), ("i8", 2**63, "an integer of 64 bits"),
            ("i8", 2**2000, "a number"), ("i8", "a", "a number"), ("i8", None, "a number"),
            ("f4", 1e300, "a number that a float of 32 bits holds"),
            ("f2", 70000, "a number that a float of 16 bits holds"),
        )
    },
    "an odd rotary size": (lambda: cpx.rotary_frequencies(1e4, 3), "rotary_frequencies: rotary_dim"),
    "missing weights": (
        lambda: cpx.gated_delta_net(one(), 0, 8, (1, 1, 4, 4))({}, np.zeros((20, 8)), alone()),
        "gated_delta_net: weights: expected in_proj_qkv.weight",
    ),
    "gates of another dtype": (
        lambda: of_layer(A_log=np.ones(2, np.float32)), "gated_delta_net: dtype of A_log: expected float64, got float32"
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


def test_an_error_has_the_line_of_who_called_through_other_packages():
    def line(e):
        return str(e.value).partition(": ")[0]

    @contextlib.contextmanager
    def batch_of(offsets):
        yield cpx.thd(offsets)

    here = "test_errors.py:{}".format
    with pytest.raises(cpx.Error) as caught:
        with batch_of([0, 5, 3]):
            pass
    assert line(caught) == here(batch_of.__wrapped__.__code__.co_firstlineno + 2)

    for file, module in (
        ("<eval_with_key>.107", None),
        ("csjmpz7.py", "torch._inductor.runtime.compile_tasks.csjmpz7"),
        ("modeling_qwen3_5.py", "transformers.models.qwen3_5"),
        ("mine.py", "cpx.dropin.mine"),
    ):
        names = {"thd": cpx.thd, **({} if module is None else {"__name__": module})}
        exec(compile("def forward():\n    thd([0, 5, 3])", file, "exec"), names)
        with pytest.raises(cpx.Error) as caught:
            names["forward"]()
        assert line(caught).startswith("test_errors.py:"), file
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(cpx.Error) as caught:
        pool.submit(cpx.thd, [0, 5, 3]).result()
    assert line(caught).startswith("threading.py:")  # nobody has called there: this is how the thread began


def test_ranks_of_which_some_have_states_before_the_batch_are_told():
    sharding = cpx.shard(batch, cpx.sequential(2))

    def program(comm, back):
        plan = cpx.carry(sharding, comm.rank, how)
        n, states = sharding.rows(comm.rank), np.zeros((2, 4)) if comm.rank else None
        inputs = *[np.zeros((n, 1, 2))] * 3, *[np.zeros((n, 1))] * 2
        saved = cpx.saved_states(plan, inputs[0], (1, 1, 2, 2))
        cpx.gated_delta_rule(plan, *inputs, comm, initial=None if back else states, saved=saved)
        cpx.gated_delta_rule_backward(plan, *inputs, inputs[0], saved, comm, dfinal=states)

    for how in ("scan", "serial"):
        for back in (False, True):
            where = "gated_delta_rule_backward" if back else "gated_delta_rule"
            with pytest.raises(cpx.Error, match=where + r": .*initial states.*got none \(rank 0\), given \(rank 1\)"):
                cpx.run(2, program, back)


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


class OnDevice:
    """An array that says that it is a GPU's: its DLPack capsule does."""

    def __init__(self, x):
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **options):
        capsule = self.x.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        device_type = pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
        ctypes.c_int32.from_address(device_type).value = 2
        return capsule


def test_an_array_of_another_batch_or_of_other_chunks_is_told_where_texts_are_the_same():
    one, another = cpx.thd([0, 7, 20]), cpx.thd([0, 8, 20])
    cut = [cpx.piecewise(2, one, [(0, n, 0), (n, 20, 1)]) for n in (7, 8)]

    def program(comm):
        for of, other, text in (
            (cpx.shard(one, cpx.zigzag(2)), cpx.shard(another, cpx.zigzag(2)), "another batch"), (*cut, "other chunks"),
        ):
            assert str(of) == str(other) and of != other
            x = cpx.Sharded(np.ones((other.rows(comm.rank), 1)), other, comm.rank)
            with pytest.raises(cpx.Error, match=f"exchange: sharding of x: expected .*, got one of {text}"):
                cpx.exchange(cpx.relayout(of, of, comm.rank), x, comm)

    cpx.run(2, program)


def test_an_array_of_a_device_is_refused_by_name():
    x = np.zeros((20, 4))
    expected = "memory of {}: expected the host's, where the ranks of this call are, got cuda:0"
    with pytest.raises(cpx.Error, match="exchange: " + expected.format("x")):
        cpx.exchange(cpx.relayout(one(), one(), 0), OnDevice(x), alone())
    with pytest.raises(cpx.Error, match="causal_conv1d: " + expected.format("weight")):
        cpx.causal_conv1d(cpx.halo(one(), 0, 3), x, OnDevice(np.zeros((4, 4))), alone())
    with pytest.raises(cpx.Error, match="sum_over_ranks: " + expected.format("values")):
        cpx.sum_over_ranks(OnDevice(x), alone())


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


def calls_that_fit():
    """Returns calls with arguments that fit each other, to be spoiled."""
    s, everywhere, comm = one(), cpx.replicated(1, batch), alone()
    halo, after, carry = cpx.halo(s, 0, 3), cpx.halo(s, 0, 3, "after"), cpx.carry(s, 0)
    x, w, b = np.ones((20, 4)), np.ones((4, 4)), np.ones(4)
    q, v, g = np.ones((20, 1, 4)), np.ones((20, 2, 3)), -np.ones((20, 2))
    ids, of = np.arange(20), cpx.Heads(1, 2, 4, 3)
    saved = cpx.saved_states(carry, q, of)
    media, text = cpx.media([(1, 4, 4)]), np.array([9] * 4 + [1] * 16)
    positions = cpx.mrope_positions(media, s, text, comm, 9)
    net = cpx.gated_delta_net(s, 0, 4, of)
    shapes = [(14, 4), (6, 4), (2, 4), (2, 4), (14, 4), (2,), (2,), (3,), (4, 6)]
    weights = {name: np.ones(shape) for name, shape in zip(net.parameters, shapes)}
    kept = net.new_saved()
    net(weights, x, comm, saved=kept)
    heads = cpx.AttentionHeads(2, 1, 2)
    a, k, lse, logits = np.ones((20, 2, 2)), np.ones((20, 1, 2)), np.ones((20, 2)), np.ones((20, 6))
    chosen, of_choices = cpx.choose_experts(logits, 2)
    at = cpx.ExpertExchange(chosen, 6, ids, comm)
    packing = cpx.packing_from_mask(np.ones((2, 3), bool))
    return [
        (cpx.thd, [[0, 7, 20], [6, 13]]),
        (cpx.thd_from_positions, [np.array([0, 1, 0]), "own_sequence", 3]),
        (cpx.packing_from_mask, [np.ones((2, 3), bool), np.array([[0, 1, 2]] * 2), "any", 3]),
        (cpx.thd_from_cu_seqlens, [[0, 3], [0, 4], 4, 2]),
        (cpx.packing, [batch, [0, 7], 30]),
        (cpx.pack, [packing, np.ones((6, 2))]),
        (cpx.unpack, [packing, np.ones((6, 2))]),
        (cpx.shard, [batch, cpx.zigzag(2), "batch", cpx.aligned(4)]),
        (cpx.head_sharded, [2, batch, [(4, 2), (2, 1)]]),
        (cpx.piecewise, [2, batch, [(0, 7, 0), (7, 20, 1)]]),
        (cpx.table, [2, [0, 1, 1, 0]]),
        (cpx.by_length, [cpx.zigzag(2), cpx.sequential(2), 4]),
        (cpx.relayout, [s, everywhere, 0]),
        (s.heads, [0, 4]),
        (s.is_exact, ["serial", 64]),
        (cpx.relayout(s, everywhere, 0).bytes_matrix, [4, 2]),
        (cpx.exchange, [cpx.relayout(s, everywhere, 0), x, comm, x.copy()]),
        (cpx.shift_rows, [after, x, comm, -1, x.copy()]),
        (cpx.sum_over_ranks, [x.copy(), comm]),
        (cpx.causal_conv1d, [halo, x, w, comm, b, "silu"]),
        (cpx.causal_conv1d_backward, [halo, after, x, w, x, comm, b, "silu"]),
        (cpx.saved_states, [carry, q, of]),
        (cpx.gated_delta_rule, [carry, q, q, v, g, g, comm]),
        (cpx.gated_delta_rule_backward, [carry, q, q, v, g, g, v, saved, comm]),
        (cpx.kimi_delta_attention, [carry, q, q, v, np.ones((20, 2, 4)), g, comm]),
        (cpx.head_decay_attention, [carry, q, q, v, g, comm]),
        (cpx.head_decay_attention_backward, [carry, q, q, v, g, v, saved, comm]),
        (cpx.channel_decay_attention, [carry, q, q, v, np.ones((20, 2, 4)), comm]),
        (cpx.gated_delta_net, [s, 0, 4, of, "scan", 4, 64]),
        (net, [weights, x, comm]),
        (net.backward, [weights, x, kept, x, comm]),
        (cpx.attention, [s, everywhere, 0, a, k, k, heads]),
        (cpx.attention_backward, [s, everywhere, a, k, k, a, a, lse, heads, comm]),
        (cpx.next_token_labels, [after, ids, comm]),
        (cpx.mean_token_loss, [s, b.repeat(5), ids, comm]),
        (cpx.mean_token_loss_backward, [s, 0, (1.0, 20.0), ids, b.repeat(5)]),
        (cpx.ExpertExchange, [chosen, 6, ids, comm]),
        (at.to_experts, [x, 4]),
        (at.to_tokens, [np.ones((40, 4))]),
        (cpx.expert_linear, [at.begins, np.ones((40, 4)), np.ones((6, 3, 4))]),
        (cpx.expert_linear_backward, [at.begins, np.ones((40, 4)), np.ones((6, 3, 4)), np.ones((40, 3))]),
        (cpx.choose_experts, [logits, 2]),
        (cpx.weigh_experts, [logits, chosen]),
        (cpx.choose_experts_backward, [logits, chosen, of_choices, of_choices]),
        (cpx.rotary, [x, ids, 4, np.ones(2)]),
        (cpx.rotary_backward, [x, np.ones((3, 20), int), 4, np.ones(2), [0, 1]]),
        (cpx.rotary_frequencies, [1e4, 4, np.float32]),
        (cpx.rotary_axes, [(1, 1, 2), "sectioned"]),
        (cpx.linear, [x, w]),
        (cpx.linear_backward, [x, w, x]),
        (cpx.rms_norm, [x, b]),
        (cpx.rms_norm_backward, [x, b, x]),
        (cpx.gated_rms_norm, [x, x, b]),
        (cpx.gated_rms_norm_backward, [x, x, b, x]),
        (cpx.log_probabilities, [logits, ids % 6]),
        (cpx.log_probabilities_backward, [logits, ids % 6, b.repeat(5)]),
        (cpx.media, [[(1, 4, 4)], [], "qwen3_vl", 2, 2, []]),
        (cpx.mrope_positions, [media, s, text, comm, 9]),
        (cpx.batch_mrope_positions, [media, batch, text, 9]),
        (cpx.features_by_item, [media, "image", [1]]),
        (cpx.put_features, [positions, "image", np.ones((4, 4)), x.copy()]),
        (cpx.put_features_backward, [positions, "image", x.copy(), np.ones((4, 4))]),
        (cpx.add_features, [positions, "image", np.ones((4, 4)), x.copy()]),
        (cpx.add_features_backward, [positions, "image", x.copy(), np.ones((4, 4))]),
        (cpx.Movement, [s, everywhere, 4, 20, 2, comm]),
        (cpx.Sharded, [x, s, 0]),
        (cpx.threads, [2, 1.0]),
    ]


def test_calls_that_fit_do_not_raise():
    for call, arguments in calls_that_fit():
        call(*arguments)


class ProcessGroup:
    """Stands for torch.distributed's, which is no communicator."""


@pytest.mark.parametrize("wrong", [None, "nccl", ProcessGroup(), ProcessGroup, 0])
def test_another_object_than_a_communicator_is_refused_by_name(wrong):
    seen = set()
    for call, arguments in calls_that_fit():
        at = [i for i, a in enumerate(arguments) if isinstance(a, cpx.Communicator)]
        if not at:
            continue
        arguments[at[0]] = wrong
        seen.add(call)
        wanted = "comm: expected what cpx.run hands to a rank"
        if call is cpx.mrope_positions:  # which is asked of all its arguments at once
            wanted = "comm: cpx.Communicator"
        with pytest.raises(cpx.Error, match=f"^test_errors.py:.*{wanted}.*, got .*{type(wrong).__name__}"):
            call(*arguments)
    assert len(seen) >= 18
    media = cpx.media([(1, 4, 4)])
    positions = cpx.mrope_positions(media, one(), np.array([9] * 4 + [0] * 16), alone(), 9)
    with pytest.raises(cpx.Error, match="mrope_positions: comm: expected what cpx.run hands to a rank, got "):
        positions.deltas(wrong)


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
fitting = test_errors.calls_that_fit()
for _ in range(6000):
    f, arguments = r.choice(fitting)
    arguments = list(arguments)
    for i in r.sample(range(len(arguments)), r.choice([1, 1, 2]) if len(arguments) > 1 else 1):
        a = arguments[i]
        if isinstance(a, np.ndarray) and r.random() < 0.5:
            others = [a[1:], a[:-1], a.T, a[..., :1], a.astype("f4"), a.astype("i8"), a * 0 - 5, a * 0 + 2**40, a[None]]
            a = r.choice(others)
        elif isinstance(a, tuple) and all(isinstance(n, int) for n in a):
            a = tuple(r.choice([n, n, n, 0, -1, 2**40]) for n in a)
        else:
            a = test_errors.fuzzed(r)
        arguments[i] = a
    try:
        f(*arguments)
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
