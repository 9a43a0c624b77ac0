# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers under context parallelism against what transformers itself computes in float64."""

import copy
import json
import pathlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

import cpx

dropin = pytest.importorskip("cpx.dropin.transformers")
BaseModelOutputWithPooling = transformers.modeling_outputs.BaseModelOutputWithPooling

data = pathlib.Path(__file__).parents[2] / "examples" / "data"
models = ["tiny_qwen3_5", "tiny_qwen3_5_moe", "tiny_qwen3_5_vl", "tiny_qwen3_vl"]


@pytest.fixture(scope="module", params=models)
def golden(request):
    directory = data / request.param
    config = json.loads((directory / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(directory, dtype=torch.float32)
    return model, load_file(directory / "reference.safetensors")


def tower_results(reference, leaves):
    """The features of the file in the form in which the tower returns them."""
    results = {}
    for kind in ("image", "video"):
        if f"{kind}_features" not in leaves:
            continue
        results[kind] = BaseModelOutputWithPooling(pooler_output=(leaves[f"{kind}_features"],))
        deep = [leaves[n] for n in sorted(leaves) if n.startswith(f"deepstack_{kind}.")]
        results[kind].deepstack_features = [(x,) for x in deep]
    return results


def leaves_of(reference):
    kinds = ("image_features", "video_features", "deepstack_")
    return {n: x.float().clone().requires_grad_() for n, x in reference.items() if n.startswith(kinds)}


def train_step(comm, model, reference, options):
    model, leaves = copy.deepcopy(model), leaves_of(reference)
    more = {n: reference[n] for n in ("image_grid_thw", "video_grid_thw") if n in reference}
    if leaves:
        more["mm_encoder_outputs"] = tower_results(reference, leaves)
    with dropin.context_parallel(model, reference["cu_seqlens"], comm, **options) as part:
        logp = part.log_probs(reference["input_ids"][part.rows], **more)
        (-logp.sum() / part.predicted).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()} | {n: x.grad for n, x in leaves.items()}
    return part.rows, logp.detach(), {n: g for n, g in gradients.items() if g is not None}


def gathered(results, reference):
    logp = torch.empty_like(reference["logprobs"])
    for rows, values, _ in results:
        logp[rows] = values.double()
    names = {n for _, _, gradients in results for n in gradients}
    return logp, {n: sum(g[n].double() for _, _, g in results if n in g) for n in names}


@pytest.mark.parametrize("linear", ["sequential", "in_place"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_on_any_ranks_has_transformers_own_log_probabilities_and_gradients(golden, ranks, linear):
    model, reference = golden
    if linear == "in_place" and "Qwen3VL" in type(model).__name__:
        pytest.skip("no linear attention")
    results = cpx.run(ranks, train_step, model, reference, {"linear": linear})
    logp, gradients = gathered(results, reference)
    delta = (logp - reference["logprobs"]).abs()
    assert delta.max() < 1e-3 and delta.mean() < 5e-5
    wanted = {n[5:]: x.double() for n, x in reference.items() if n.startswith("grad.")}
    errors = {n: ((gradients[n].flatten() - w.flatten()).norm() / w.norm().clamp(min=1e-30)).item() for n, w in wanted.items()}
    worst = max(errors, key=errors.get)
    print(f"max {delta.max():.2e} mean {delta.mean():.2e} gradient {errors[worst]:.2e} of {worst}")
    assert errors[worst] < 5e-3
