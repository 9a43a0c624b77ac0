# SPDX-License-Identifier: Apache-2.0
"""What other programs have computed: tests/golden of the repository, whose README names them."""

import ast
import json
import pathlib

import numpy as np
import pytest

import cpx
from ranks import shard, whole

safetensors = pytest.importorskip("safetensors")
folder = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
pytestmark = pytest.mark.skipif(not folder.exists(), reason="without the repository")


class Golden:
    def __init__(self, name, dtype=np.float64):
        with safetensors.safe_open(folder / f"{name}.safetensors", "np") as file:
            self.metadata = file.metadata()
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}
        for key, x in self.tensors.items():
            if x.dtype.kind == "f":
                self.tensors[key] = x.astype(dtype)
        self.batch = cpx.thd(self.tensors["cu_seqlens"])

    def __getitem__(self, key):
        return self.tensors[key]

    def __contains__(self, key):
        return key in self.tensors


def close(got, expected, relative):
    """Whether they differ by at most so much of the largest expected number."""
    assert got.shape == expected.shape and not np.isnan(got).any()
    error = np.abs(got - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30)
    assert error <= relative, error


def of_ranks(sharding, program):
    return list(zip(*cpx.run(sharding.ranks, program)))


shardings = [
    lambda b: cpx.shard(b, cpx.sequential(1)),
    lambda b: cpx.shard(b, cpx.zigzag(3)),
    lambda b: cpx.shard(b, cpx.sequential(4), scope="batch"),
    lambda b: cpx.shard(b, cpx.striped(2), cut=cpx.aligned(64)),
]


@pytest.mark.parametrize("make", shardings)
@pytest.mark.parametrize("how", ["scan", "serial"])
@pytest.mark.parametrize(
    "name", ["gdr_small", "gdr_odd", "gdr_fast_decay", "head_decay", "channel_decay", "kimi_delta"]
)
def test_recurrences(name, how, make):
    golden = Golden(name)
    kind = {
        "head_decay": "head_decay_attention",
        "channel_decay": "channel_decay_attention",
        "kimi_delta": "kimi_delta_attention",
    }.get(golden.metadata["kind"], "gated_delta_rule")
    keys = ["q", "k", "v", "g"] + (["beta"] if "beta" in golden else [])
    sharding = make(golden.batch)
    options = {"qk_l2norm": golden.metadata["qk_l2norm"] == "True"} if "beta" in golden else {}
    heads = cpx.Heads(golden["q"].shape[1], golden["v"].shape[1], golden["q"].shape[2], golden["v"].shape[2])

    def program(comm):
        plan = cpx.carry(sharding, comm.rank, how)
        x = [shard(sharding, comm.rank, golden[key]) for key in keys]
        saved = cpx.saved_states(plan, x[0], heads, kind)
        final = np.zeros_like(golden["final_state"])
        o = getattr(cpx, kind)(plan, *x, comm, final=final, saved=saved, **options)
        do = shard(sharding, comm.rank, golden["do"])
        gradients = getattr(cpx, kind + "_backward")(plan, *x, do, saved, comm, **options)
        return o, *gradients, final

    parts = of_ranks(sharding, program)
    relative = 1e-6 if name.startswith("gdr") else 1e-11  # the former are stored as float32
    close(sum(parts[-1]), golden["final_state"], relative)
    for key, part in zip(["o"] + ["d" + key for key in keys], parts):
        close(whole(sharding, part), golden[key], relative)


@pytest.mark.parametrize("make", shardings)
@pytest.mark.parametrize("name", ["conv_silu", "conv_bias", "conv_linear"])
def test_convolutions(name, make):
    golden = Golden(name)
    sharding = make(golden.batch)
    activation = ast.literal_eval(repr(golden.metadata["activation"]))
    activation = None if activation == "None" else activation
    weight, bias = golden["weight"], golden.tensors.get("bias")

    def program(comm):
        before = cpx.halo(sharding, comm.rank, weight.shape[1] - 1)
        after = cpx.halo(sharding, comm.rank, weight.shape[1] - 1, "after")
        x, dy = shard(sharding, comm.rank, golden["x"]), shard(sharding, comm.rank, golden["dy"])
        y = cpx.causal_conv1d(before, x, weight, comm, bias, activation)
        dx, dweight, dbias = cpx.causal_conv1d_backward(before, after, x, weight, dy, comm, bias, activation)
        return y, dx, dweight, 0 if dbias is None else dbias

    y, dx, dweight, dbias = of_ranks(sharding, program)
    close(whole(sharding, y), golden["y"], 1e-6)  # stored as float32, and computed so
    close(whole(sharding, dx), golden["dx"], 2e-6)
    close(sum(dweight), golden["dweight"], 2e-6)
    if bias is not None:
        close(sum(dbias), golden["dbias"], 2e-6)


@pytest.mark.parametrize("carry", ["scan", "serial", "heads"])
@pytest.mark.parametrize("name", ["gdn_layer_small", "gdn_layer_odd"])
def test_layers(name, carry):
    golden = Golden(name)
    config = json.loads(golden.metadata["config"])
    heads = cpx.Heads(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
    )
    weights = {key: golden["weight." + key] for key in cpx.gated_delta_net.parameters}
    sharding = cpx.shard(golden.batch, cpx.zigzag(3), cut=cpx.aligned(64))

    def program(comm):
        net = cpx.gated_delta_net(
            sharding,
            comm.rank,
            config["hidden_size"],
            heads,
            carry,
            config["linear_conv_kernel_dim"],
            eps=config["rms_norm_eps"],
        )
        x = shard(sharding, comm.rank, golden["hidden_states"])
        saved = net.new_saved()
        y = net(weights, x, comm, saved=saved)
        dx, dweights = net.backward(weights, x, saved, shard(sharding, comm.rank, golden["d_output"]), comm)
        for dweight in dweights.values():
            cpx.sum_over_ranks(dweight, comm)
        return y, dx, dweights

    y, dx, dweights = of_ranks(sharding, program)
    close(whole(sharding, y), golden["output"], 1e-6)  # stored as float32
    close(whole(sharding, dx), golden["d_hidden_states"], 1e-6)
    for key in cpx.gated_delta_net.parameters:
        close(dweights[0][key].reshape(golden["grad." + key].shape), golden["grad." + key], 1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("name", ["mrope_qwen3_vl", "mrope_qwen2_5_vl"])
def test_positions_and_rotary(name, ranks):
    golden = Golden(name, np.float32)
    of = golden.metadata
    rope = json.loads(of["rope"])
    options = {"merge": int(of["spatial_merge_size"])}
    if of["model"] == "qwen2_5_vl":
        options |= {
            "rule": "qwen2_5_vl_spatial_advance",
            "tokens_per_second": int(of["tokens_per_second"]),
            "seconds": [float(of["second_per_grid_t"])] * len(golden["video_grid_thw"]),
        }
    media = cpx.media(golden["image_grid_thw"], golden["video_grid_thw"], **options)
    tokens = {"image": int(of["image_token_id"]), "video": int(of["video_token_id"])}
    axes = cpx.rotary_axes(rope.get("mrope_section", (24, 20, 20)), of["layout"])
    dim = int(of["head_dim"])
    frequencies = cpx.rotary_frequencies(rope["rope_theta"], dim)

    whole_axes, deltas = cpx.batch_mrope_positions(media, golden.batch, golden["input_ids"], **tokens)
    assert np.array_equal(whole_axes, golden["position_ids"])
    assert deltas.tolist() == [s["delta"] for s in json.loads(of["segments"])]

    for make in (cpx.zigzag, cpx.striped):
        sharding = cpx.shard(golden.batch, make(ranks))

        def program(comm):
            rows = sharding.global_rows(comm.rank)
            positions = cpx.mrope_positions(media, sharding, golden["input_ids"][rows], comm, **tokens)
            assert np.array_equal(positions.axes, golden["position_ids"][:, rows])
            assert np.array_equal(positions.deltas(comm), deltas)
            q = cpx.rotary(golden["q"][rows], positions, dim, frequencies, axes)
            dq = cpx.rotary_backward(golden["dq_rot"][rows], positions, dim, frequencies, axes)
            return q, dq

        q, dq = of_ranks(sharding, program)
        close(whole(sharding, q), golden["q_rot"], 2e-5)  # angles of some thousand radians in float32
        close(whole(sharding, dq), golden["dq"], 2e-5)
