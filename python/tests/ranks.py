# SPDX-License-Identifier: Apache-2.0
"""Shards of whole arrays, and whole arrays of what ranks return."""

import numpy as np

import cpx


def shard(sharding, rank, x):
    """Returns the rows of x, of the whole batch, that a rank holds: of heads, its columns of all sections."""
    if not sharding.sections:
        return x[sharding.global_rows(rank)].copy()
    parts, column = [], 0
    for heads, width in sharding.sections:
        first, last = sharding.heads(rank, heads)
        parts.append(x[:, column + first * width : column + last * width])
        column += heads * width
    return np.concatenate(parts, axis=1)


def whole(sharding, parts):
    """Returns the whole array of the shards of all ranks, of tokens that each live on one."""
    result = np.empty((sharding.batch.tokens, *parts[0].shape[1:]), parts[0].dtype)
    for rank, part in enumerate(parts):
        result[sharding.global_rows(rank)] = part
    return result


def layouts(ranks):
    """Returns layouts over as many ranks, one of which leaves a rank without rows."""
    last = ranks - 1
    return [
        cpx.sequential(ranks),
        cpx.zigzag(ranks),
        cpx.striped(ranks),
        cpx.table(ranks, [last, 0, last, 0, 0, last // 2, last]),
        cpx.by_length(cpx.zigzag(ranks), cpx.sequential(ranks), 2 * ranks),
    ]


def shardings(ranks, batch):
    """Returns shardings by tokens: every layout, both scopes, balanced and aligned."""
    return [
        cpx.shard(batch, layout, scope=scope, cut=cut)
        for layout in layouts(ranks)
        for scope in ("sequence", "batch")
        for cut in (cpx.balanced, cpx.aligned(4))
    ]


batches = [
    cpx.thd([0]),
    cpx.thd([0, 0, 1]),
    cpx.thd([0, 7, 20]),
    cpx.thd([0, 5, 5, 6, 33, 40]),
    cpx.thd.uniform(3, 16),
]
worlds = [1, 2, 3, 5, 8]
