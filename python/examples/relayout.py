"""A packed batch goes from zigzag to sequential and back, over ranks that are threads: python relayout.py [RANKS]"""

import sys

import numpy as np

import cpx

ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
batch = cpx.thd.from_lengths([7, 13, 0, 40])
zigzag, sequential = cpx.shard(batch, cpx.zigzag(ranks)), cpx.shard(batch, cpx.sequential(ranks))
tokens = np.arange(batch.tokens)[:, None] * [1.0, 0.5]


def program(comm):
    plan = cpx.relayout(zigzag, sequential, comm.rank)
    y = cpx.exchange(plan, tokens[zigzag.global_rows(comm.rank)], comm)
    assert np.array_equal(y, tokens[sequential.global_rows(comm.rank)])
    cpx.exchange(plan.transposed(), y, comm)
    return f"rank {comm.rank} sent {plan.sent_rows} of its {plan.source_rows} rows"


print(*cpx.run(ranks, program), cpx.relayout(zigzag, sequential, 0).rows_matrix(), sep="\n")
