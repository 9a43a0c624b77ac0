# SPDX-License-Identifier: Apache-2.0
"""Rows of features come to their placeholders and their gradients home."""

import numpy as np
import pytest

import cpx
from ranks import shard, whole

batch = cpx.thd.from_lengths([14, 7, 12])
media = cpx.media([(1, 4, 6), (1, 2, 4)], [(2, 4, 4)])
image, video = 100, 101
ids = np.array([1] * 5 + [image] * 6 + [1] * 3 + [1] * 5 + [image] * 2 + [video] * 4 + [1] * 2 + [video] * 4 + [1] * 2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_features(ranks, kind):
    token = image if kind == "image" else video
    x = np.random.default_rng(0).normal(size=(batch.tokens, 4)).astype(np.float32)
    features = np.random.default_rng(1).normal(size=(media.rows(kind), 4)).astype(np.float32)
    expected, added = x.copy(), x.copy()
    expected[ids == token] = features
    added[ids == token] += features
    tower = cpx.features_by_item(media, kind, ranks)
    sharding = cpx.shard(batch, cpx.zigzag(ranks))

    def program(comm):
        positions = cpx.mrope_positions(
            media, sharding, shard(sharding, comm.rank, ids), comm, image=image, video=video
        )
        plan = cpx.relayout(tower, positions.features(kind), comm.rank)
        at_home = cpx.exchange(plan, shard(tower, comm.rank, features), comm)
        own = shard(sharding, comm.rank, x)
        deep = own.copy()
        cpx.put_features(positions, kind, at_home, own)
        cpx.add_features(positions, kind, at_home, deep)
        dx, dfeatures = own.copy(), np.full_like(at_home, np.nan)
        cpx.add_features_backward(positions, kind, dx, dfeatures)
        assert np.array_equal(dx, own) and np.array_equal(dfeatures, at_home)
        cpx.put_features_backward(positions, kind, dx, dfeatures)
        assert (dx[positions.placeholders(kind)] == 0).all()
        return own, deep, cpx.exchange(plan.transposed(), dfeatures, comm)

    own, deep, home = zip(*cpx.run(ranks, program))
    assert np.array_equal(whole(sharding, own), expected)
    assert np.array_equal(whole(sharding, deep), added)
    assert np.array_equal(whole(tower, home), features)


def test_placeholders_without_a_grid_are_named():
    wrong = ids.copy()
    wrong[0] = image
    sharding = cpx.shard(batch, cpx.zigzag(2))

    def program(comm):
        with pytest.raises(cpx.Error, match="image placeholders in the batch: expected 8.*got 9"):
            cpx.mrope_positions(media, sharding, shard(sharding, comm.rank, wrong), comm, image=image, video=video)

    cpx.run(2, program)
