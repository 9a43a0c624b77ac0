# SPDX-License-Identifier: Apache-2.0
"""Arrays of torch and JAX, where they are installed, in and out."""

import numpy as np
import pytest

import cpx

batch = cpx.thd([0, 7, 20])
zigzag, sequential = cpx.shard(batch, cpx.zigzag(2)), cpx.shard(batch, cpx.sequential(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "bool"])
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    x = (torch.arange(20)[:, None] % torch.tensor([2, 3])).to(getattr(torch, dtype))

    def program(comm):
        rows = torch.from_numpy(zigzag.global_rows(comm.rank))
        y = cpx.exchange(cpx.relayout(zigzag, sequential, comm.rank), x[rows], comm)
        assert isinstance(y, torch.Tensor) and y.dtype == x.dtype
        assert torch.equal(y, x[torch.from_numpy(sequential.global_rows(comm.rank))])

    cpx.run(2, program)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_jax(dtype):
    jnp = pytest.importorskip("jax.numpy")
    x = (jnp.arange(20)[:, None] % jnp.array([2, 3])).astype(dtype)

    def program(comm):
        y = cpx.exchange(cpx.relayout(zigzag, sequential, comm.rank), x[zigzag.global_rows(comm.rank)], comm)
        assert type(y) is type(x) and y.dtype == x.dtype
        assert (y == x[sequential.global_rows(comm.rank)]).all()

    cpx.run(2, program)


def test_operators_answer_in_the_framework_of_their_input():
    torch = pytest.importorskip("torch")
    x, weight = torch.rand(20, 3), torch.rand(3, 4)
    comm, one = cpx.threads(1)[0], cpx.shard(batch, cpx.zigzag(1))
    y = cpx.causal_conv1d(cpx.halo(one, 0, 3), x, weight, comm, activation="silu")
    expected = cpx.causal_conv1d(cpx.halo(one, 0, 3), x.numpy(), weight.numpy(), comm, activation="silu")
    assert isinstance(y, torch.Tensor) and np.array_equal(y.numpy(), expected)
