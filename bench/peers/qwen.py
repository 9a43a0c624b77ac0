# SPDX-License-Identifier: Apache-2.0
"""How far Hugging Face transformers is from its own float64 results, in another type: log-probabilities, loss and
gradients of a reference file of `qwen`, in the figures that `qwen --backward --json` prints.

    python3 bench/peers/qwen.py MODEL_DIRECTORY [MODEL_DIRECTORY ...] [--dtype bfloat16] [--device cuda] [--draws 32]

Weights are converted when they are loaded, sequences run one by one. Of a model with images and videos the features in
the file stand for the vision tower. With --draws, the most of so many more runs, in each of which embeddings are off by
up to one bit, another draw of their rounding, too. Written for transformers 5.17.
"""

import argparse
import json
import pathlib
import statistics
import sys

# A file beside this one has the name of a package that transformers looks for.
sys.path = [p for p in sys.path if pathlib.Path(p).resolve() != pathlib.Path(__file__).resolve().parent]

import safetensors.torch
import torch
import transformers


def load(directory, dtype, device):
    config = json.loads((directory / "config.json").read_text())
    of = getattr(transformers, config["architectures"][0])
    model = of.from_pretrained(directory, dtype=dtype, attn_implementation="eager").to(device)
    inner = getattr(model.model, "language_model", model.model)
    return model, inner, config


def visual_inputs(reference, config, dtype, device):
    """The features as leaves, and which kind each token is a placeholder of."""
    leaves = {
        name: value.to(device, dtype).requires_grad_()
        for name, value in reference.items()
        if name in ("image_features", "video_features") or name.startswith("deepstack_")
    }
    ids = reference["input_ids"].to(device)
    masks = {kind: ids == config.get(f"{kind}_token_id", -1) for kind in ("image", "video")}
    return leaves, masks


def put(rows, features, masks, replace):
    for kind, values in features.items():
        at = masks[kind].nonzero()[:, 0]
        rows = rows.index_copy(0, at, values) if replace else rows.index_add(0, at, values)
    return rows


def forward(model, inner, reference, config, leaves, masks):
    """Returns the log-probability of every next token, 0 at the last one of a sequence."""
    device = model.lm_head.weight.device
    ids, begins = reference["input_ids"].to(device), reference["cu_seqlens"].tolist()
    of = {kind: leaves[f"{kind}_features"] for kind in ("image", "video") if f"{kind}_features" in leaves}
    embedded = put(inner.embed_tokens(ids), of, masks, True)
    kinds = {name.split(".")[0] for name in leaves if name.startswith("deepstack_")}
    layers = sorted({int(name.split(".")[1]) for name in leaves if name.startswith("deepstack_")})
    added = [
        put(torch.zeros_like(embedded), {k.split("_")[1]: leaves[f"{k}.{layer}"] for k in kinds}, masks, False)
        for layer in layers
    ]
    seen = masks["image"] | masks["video"]
    result = []
    for first, last in zip(begins, begins[1:]):
        if first == last:
            continue
        own = slice(first, last)
        more = {}
        if "position_ids" in reference:
            more["position_ids"] = reference["position_ids"][:, None, own].to(device)
        if layers:
            more["visual_pos_masks"] = seen[None, own]
            more["deepstack_visual_embeds"] = [x[own][seen[own]] for x in added]
        hidden = inner(inputs_embeds=embedded[None, own], use_cache=False, **more).last_hidden_state[0]
        logits = model.lm_head(hidden)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        result.append(wide.log_softmax(-1)[:-1].gather(1, ids[own][1:, None])[:, 0])
        result.append(wide.new_zeros(1))
    return torch.cat(result)


def relative(found, wanted):
    wanted = wanted.double().flatten()
    difference = (found.detach().double().cpu().flatten() - wanted).norm()
    return (difference / wanted.norm()).item() if wanted.norm() > 0 else difference.item()


def measure(directory, dtype, device, draw=None):
    model, inner, config = load(directory, dtype, device)
    if draw is not None:
        of = torch.Generator(device).manual_seed(draw)

        def round_again(module, given, rows):
            off = torch.rand(rows.shape, generator=of, device=device) - 0.5
            return (rows * (1 + off * torch.finfo(dtype).eps)).to(dtype)

        inner.embed_tokens.register_forward_hook(round_again)
    reference = safetensors.torch.load_file(directory / "reference.safetensors")
    leaves, masks = visual_inputs(reference, config, dtype, device)
    logp = forward(model, inner, reference, config, leaves, masks)
    begins = reference["cu_seqlens"].tolist()
    predicted = sum(max(last - first - 1, 0) for first, last in zip(begins, begins[1:]))
    loss = -logp.sum() / predicted
    loss.backward()
    delta = (logp.detach().double().cpu() - reference["logprobs"]).abs()
    gradients = {name: p.grad for name, p in model.named_parameters()} | {name: x.grad for name, x in leaves.items()}
    errors = {
        name[5:]: relative(gradients[name[5:]], wanted) for name, wanted in reference.items() if name[:5] == "grad."
    }
    worst = max(errors, key=errors.get)
    return {
        "model": directory.name,
        "max_abs_delta": delta.max().item(),
        "mean_abs_delta": delta.mean().item(),
        "loss_delta": abs(loss.item() - reference["loss"].item()),
        "max_grad_error": errors[worst],
        "median_grad_error": statistics.median_low(errors.values()),
        "worst_gradient": worst,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", type=pathlib.Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--draws", default=0, type=int)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {options.dtype} on {options.device}")
    for directory in options.models:
        of = directory, getattr(torch, options.dtype), options.device
        runs = [measure(*of)]
        print(json.dumps(runs[0]), flush=True)
        runs += [measure(*of, draw) for draw in range(options.draws)]
        if options.draws:
            figures = [name for name, value in runs[0].items() if isinstance(value, float)]
            print(json.dumps({"most of": len(runs)} | {name: max(r[name] for r in runs) for name in figures}))


if __name__ == "__main__":
    main()
