# SPDX-License-Identifier: Apache-2.0
"""Batches, packings, layouts and shardings, and what plans tell of them."""

import copy
import itertools
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import batches, shard, shardings, worlds

import cpx


def test_a_batch_is_its_offsets():
    batch = cpx.thd(np.array([0, 7, 20], np.int32), valid=[5, 13])
    assert (batch.sequences, batch.tokens, batch.length(1), batch.sequence(7)) == (2, 20, 13, 1)
    assert batch.offsets.tolist() == [0, 7, 20] and batch.valid_lengths.tolist() == [5, 13]
    assert batch == cpx.thd([0, 7, 20], [5, 13]) != cpx.thd([0, 7, 20])
    assert hash(batch) == hash(cpx.thd([0, 7, 20], [5, 13]))
    assert pickle.loads(pickle.dumps(batch)) == copy.deepcopy(batch) == batch
    assert cpx.thd.from_lengths([7, 13]) == cpx.thd([0, 7, 20]) and cpx.thd.uniform(2, 3) == cpx.thd([0, 3, 6])
    assert batch != 7 and repr(cpx.thd([0, 2])) == "cpx.thd([0, 2])"


def test_layouts_cuts_and_shardings_can_be_pickled():
    batch = cpx.thd([0, 7, 20], valid=[5, 13])
    many = cpx.table(2, [c % 2 for c in range(40)])
    layouts = [cpx.sequential(2), cpx.zigzag(2), cpx.striped(2), cpx.table(2, [0, 1, 1]), many]
    layouts.append(cpx.by_length(layouts[1], many, 4))
    cuts = [cpx.balanced, cpx.aligned(4)]
    every = [cpx.shard(batch, *rest) for rest in itertools.product(layouts, ("sequence", "batch"), cuts)]
    every += [cpx.replicated(2, batch), cpx.head_sharded(2, batch, [(4, 8), (2, 3)])]
    every.append(cpx.piecewise(2, batch, [(0, 9, 1), (9, 20, 0)]))
    for thing in [*layouts, *cuts, *every]:
        again = pickle.loads(pickle.dumps(thing))
        assert again == thing and hash(again) == hash(thing) and repr(again) == repr(thing)
        assert pickle.loads(pickle.dumps(again)) == thing
    assert pickle.loads(pickle.dumps({"batch": batch, "of": every[0]}))["of"].batch == batch
    with pytest.raises(TypeError, match="cpx: shardings of features are not pickled; make them again"):
        pickle.dumps(cpx.features_by_item(cpx.media([(1, 4, 4)]), "image", 2))


def test_shardings_that_are_equal_hash_alike_and_those_of_one_batch_differ():
    batch = cpx.thd([0, 7, 20])
    every = [*shardings(2, batch), cpx.replicated(2, batch), cpx.head_sharded(2, batch, [(4, 8)])]
    again = [*shardings(2, cpx.thd([0, 7, 20])), cpx.replicated(2, batch), cpx.head_sharded(2, batch, [(4, 8)])]
    assert every == again and [hash(s) for s in every] == [hash(s) for s in again]
    zigzag, sequential = (cpx.shard(batch, layout(2)) for layout in (cpx.zigzag, cpx.sequential))
    assert hash(zigzag) != hash(sequential) and zigzag != sequential  # dictionaries of plans need not compare them


def test_batches_of_what_loaders_have():
    positions = np.array([0, 1, 2, 0, 1, -1, -1])
    joined = cpx.thd_from_positions(positions, "joins_last_sequence")
    assert joined == cpx.thd([0, 3, 7], valid=[3, 2])
    assert cpx.thd_from_positions(positions, "own_sequence").valid_lengths.tolist() == [3, 2, 0, 0]
    with pytest.raises(cpx.Error, match="thd_from_positions: position of row 2"):
        cpx.thd_from_positions(np.array([0, 1, 3]), "own_sequence")
    assert cpx.thd_from_cu_seqlens([0, 3, 5], [0, 4, 8]) == cpx.thd([0, 4, 8], valid=[3, 2])
    assert cpx.pad_to_multiple(cpx.thd([0, 3, 5]), 4) == cpx.thd([0, 4, 8], valid=[3, 2])


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int32, np.int64])
def test_rows_are_packed_and_unpacked(dtype):
    mask = np.array([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]], dtype)
    packing = cpx.packing_from_mask(mask)
    assert packing.batch == cpx.thd([0, 2, 5, 5]) and packing.rows().tolist() == [0, 1, 5, 6, 7]
    x = np.arange(24.0).reshape(12, 2)
    packed = cpx.pack(packing, x)
    assert np.array_equal(packed, x[packing.rows()])
    assert np.array_equal(cpx.unpack(packing, packed), x * mask.reshape(12, 1))
    with pytest.raises(cpx.Error, match="packing_from_mask: row 1, column 0: expected 1|row 0, column 2"):
        cpx.packing_from_mask(mask, padding="left")
    positions = np.array([[0, 1, 9, 9], [7, 0, 0, 1], [0, 0, 0, 0]])
    assert cpx.packing_from_mask(mask, positions).batch == cpx.thd([0, 2, 3, 5])


@pytest.mark.parametrize("ranks", worlds)
def test_every_token_has_one_slot(ranks):
    for batch in batches:
        for sharding in shardings(ranks, batch):
            rows = [sharding.global_rows(rank) for rank in range(ranks)]
            assert [len(r) for r in rows] == [sharding.rows(rank) for rank in range(ranks)]
            assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(batch.tokens))
            slots = sharding.slots()
            for rank, own in enumerate(rows):
                assert np.array_equal(slots[own], np.stack([np.full(len(own), rank), np.arange(len(own))], 1))
                pieces = [np.arange(first, last) for first, last in sharding.pieces(rank)]
                assert np.array_equal(np.concatenate([np.empty(0, int), *pieces]), own)
                starts = np.array([batch.offset(batch.sequence(row)) for row in own], int)
                assert np.array_equal(sharding.positions(rank), own - starts)
                assert sharding.segments(rank)[:, 3].sum() == len(own)


def test_layouts_are_what_their_names_say():
    batch = cpx.thd([0, 16])
    assert cpx.shard(batch, cpx.zigzag(2)).global_rows(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert cpx.shard(batch, cpx.sequential(2)).global_rows(1).tolist() == list(range(8, 16))
    assert cpx.shard(batch, cpx.striped(2)).global_rows(1).tolist() == [2, 3, 6, 7, 10, 11, 14, 15]
    assert cpx.shard(batch, cpx.table(2, [1, 0, 0, 1])) != cpx.shard(batch, cpx.zigzag(2))
    rule = cpx.by_length(cpx.zigzag(2), cpx.sequential(2), 4)
    assert cpx.shard(cpx.thd([0, 8, 15]), rule).global_rows(0).tolist() == [0, 1, 6, 7, 8, 9, 10]
    cut = cpx.shard(cpx.thd([0, 20]), cpx.sequential(2), cut=cpx.aligned(8))
    assert cut.rows(0) == 8 and repr(cut.batch) in repr(cut) or "20 tokens" in repr(cut)
    assert repr(cpx.zigzag(4)) == "cpx.zigzag(4)" and cpx.zigzag(4) == cpx.zigzag(4) != cpx.sequential(4)
    assert repr(cpx.balanced) == "cpx.balanced" and cpx.aligned(64).unit == 64


def test_rows_go_to_heads_and_back():
    batch = cpx.thd([0, 7, 20])
    sections = [(4, 3), (2, 2)]
    x = np.random.default_rng(0).normal(size=(20, 16))
    for ranks in (1, 2, 3, 5):
        heads = cpx.head_sharded(ranks, batch, sections)
        for source in shardings(ranks, batch)[::5]:

            def program(comm):
                plan = cpx.relayout(source, heads, comm.rank)
                assert plan.target_width == heads.width(comm.rank)
                y = cpx.exchange(plan, shard(source, comm.rank, x), comm)
                assert np.array_equal(y, shard(heads, comm.rank, x))
                back = cpx.exchange(cpx.relayout(heads, source, comm.rank), y, comm)
                assert np.array_equal(back, shard(source, comm.rank, x))
                return plan.sent_elements()

            sent = cpx.run(ranks, program)
            matrix = cpx.relayout(source, heads, 0).bytes_matrix(itemsize=8)
            assert (matrix.sum(axis=1) - matrix.diagonal()).tolist() == [8 * n for n in sent]


def test_the_transpose_of_a_copy_adds_in_rank_order():
    batch = cpx.thd([0, 7, 20])
    everywhere = cpx.replicated(3, batch)
    source = cpx.shard(batch, cpx.zigzag(3))
    gradients = np.random.default_rng(0).normal(size=(3, 20, 2)).astype(np.float32)

    def program(comm):
        plan = cpx.relayout(source, everywhere, comm.rank).transposed()
        return cpx.exchange(plan, gradients[comm.rank], comm)

    expected = (gradients[0] + gradients[1]) + gradients[2]
    for rank, part in enumerate(cpx.run(3, program)):
        assert np.array_equal(part, expected[source.global_rows(rank)])
    matrix = cpx.relayout(source, everywhere, 0).rows_matrix()
    assert np.array_equal(cpx.relayout(source, everywhere, 0).transposed().rows_matrix(), matrix.T)


def test_what_never_changes_is_compared_hashed_and_copied():
    batch = cpx.thd([0, 7, 20])
    z = cpx.shard(batch, cpx.zigzag(2))
    plans = cpx.relayout(z, z, 0), cpx.halo(z, 0, 1), cpx.carry(z, 0)
    for x in (batch, z, cpx.zigzag(2), cpx.balanced, cpx.packing(batch, [0, 7], 20)):
        assert x != None and not x == None and None not in [x] and x != "x"  # noqa: E711
        assert len({x, copy.copy(x), copy.deepcopy(x)}) == 1
    for x in (z, cpx.zigzag(2), cpx.aligned(4), *plans):
        assert copy.copy(x) is x and copy.deepcopy([x])[0] is x
    assert len({cpx.zigzag(2), cpx.zigzag(2), cpx.zigzag(3)}) == 2
    assert len({cpx.aligned(4), cpx.aligned(4), cpx.aligned(8), cpx.balanced}) == 3
    long = [cpx.table(2, [0] * 16 + list(rest)) for rest in ((1, 1), (0, 1), (1, 1), (0, 1, 1))]
    assert long[0] == long[2] and len(set(long)) == 3 and "of 18" in repr(long[0])
    assert batch.from_lengths([3, 4]) == cpx.thd([0, 3, 7])  # a static method, of an object


def test_the_example_runs():
    example = Path(__file__).resolve().parents[1] / "examples" / "relayout.py"
    for ranks in (1, 3):
        done = subprocess.run([sys.executable, str(example), str(ranks)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and f"rank {ranks - 1} sent" in done.stdout, done.stderr


def test_the_stubs_know_what_the_package_has():
    folder = Path(cpx.__file__).parent
    if not (folder / "_ext.pyi").exists():
        pytest.skip("not installed")
    stub = (folder / "_ext.pyi").read_text()
    for name in ("def relayout(source: Sharding", "class Communicator", "def thd_from_positions("):
        assert name in stub
    assert (folder / "py.typed").exists() and all(hasattr(cpx, name) for name in cpx.__all__)
