# SPDX-License-Identifier: Apache-2.0
"""Laws of relayouts and exchanges."""

import numpy as np
import pytest

import cpx
from ranks import batches, shard, shardings, whole, worlds


def pairs(ranks, batch, count=12):
    all_of = shardings(ranks, batch)
    random = np.random.default_rng(ranks * 1000 + batch.tokens)
    return [(all_of[i], all_of[j]) for i, j in random.integers(len(all_of), size=(count, 2))]


@pytest.mark.parametrize("ranks", worlds)
@pytest.mark.parametrize("batch", batches, ids=str)
def test_a_relayout_moves_every_row_to_its_owner_and_its_transpose_back(ranks, batch):
    x = np.random.default_rng(0).normal(size=(batch.tokens, 3)).astype(np.float32)
    for source, target in pairs(ranks, batch):

        def program(comm):
            plan = cpx.relayout(source, target, comm.rank)
            poisoned = np.full((plan.target_rows, 3), np.nan, np.float32)
            y = cpx.exchange(plan, shard(source, comm.rank, x), comm, out=poisoned)
            assert np.array_equal(y, shard(target, comm.rank, x))
            back = cpx.exchange(plan.transposed(), y, comm)
            assert np.array_equal(back, shard(source, comm.rank, x))
            twice = cpx.relayout(source, target, comm.rank).transposed().transposed()  # none lists messages before
            assert (twice.sent_rows, twice.messages) == (plan.sent_rows, plan.messages)
            assert twice.fingerprint == plan.fingerprint
            for _ in range(1000):  # each would hold the one before
                twice = twice.transposed()
            assert twice.messages == plan.messages
            return plan.sent_rows

        sent = cpx.run(ranks, program)
        matrix = cpx.relayout(source, target, 0).rows_matrix()
        assert (matrix.sum(axis=1) - matrix.diagonal()).tolist() == sent
        assert sum(sent) == cpx.relayout(source, target, 0).lower_bound()[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"])
def test_every_element_type_is_moved(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    batch = cpx.thd([0, 7, 20])
    source, target = cpx.shard(batch, cpx.zigzag(3)), cpx.shard(batch, cpx.striped(3), scope="batch")
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x = np.random.default_rng(0).integers(0, 2, size=(20, 5)).astype(dtype)

    def program(comm):
        y = cpx.exchange(cpx.relayout(source, target, comm.rank), shard(source, comm.rank, x), comm)
        assert y.dtype == dtype
        return y

    assert np.array_equal(whole(target, cpx.run(3, program)), x)


def test_bits_of_a_nan_are_kept():
    batch = cpx.thd([0, 9])
    source, target = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.sequential(2))
    bits = (0x7FC00000 + np.arange(9)).astype(np.uint32)
    x = bits.view(np.float32)[:, None]

    def program(comm):
        return cpx.exchange(cpx.relayout(source, target, comm.rank), shard(source, comm.rank, x), comm)

    assert np.array_equal(whole(target, cpx.run(2, program)).view(np.uint32)[:, 0], bits)
