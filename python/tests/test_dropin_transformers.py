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

pytest.importorskip("cpx.torch")
from cpx.dropin import transformers as dropin

BaseModelOutputWithPooling = transformers.modeling_outputs.BaseModelOutputWithPooling

torch.set_num_threads(1)  # each rank would have as many of its own, and they wait for each other spinning
data = pathlib.Path(__file__).parents[2] / "examples" / "data"
models = ["tiny_qwen3_5", "tiny_qwen3_5_moe", "tiny_qwen3_5_vl", "tiny_qwen3_vl"]
with_images = pytest.mark.parametrize("golden", models[2:], indirect=True)
of_text = pytest.mark.parametrize("golden", models[:1], indirect=True)


def load(name):
    """Returns the model of a checkpoint, and what transformers computes of it in float64."""
    directory = data / name
    config = json.loads((directory / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(directory, dtype=torch.float32)
    return model, load_file(directory / "reference.safetensors")


@pytest.fixture(scope="module")
def golden(request):
    return load(request.param)


def pixels_of(model, grid):
    vision = model.config.vision_config
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(int(grid.prod(1).sum()), patch, generator=torch.Generator().manual_seed(0))
    return pixels.to(model.device)


def tower_results(model, leaves):
    """The features of the file in the form in which the tower returns them."""
    results, grid = {}, torch.tensor([[1, 4, 4]], device=model.device)
    with torch.no_grad():
        like = model.model.get_image_features(pixels_of(model, grid), grid, return_dict=True)
    deep = getattr(like, "deepstack_features", None) or [()]
    in_form = (lambda x: x) if isinstance(deep[0], torch.Tensor) else (lambda x: (x,))
    for kind in ("image", "video"):
        if f"{kind}_features" not in leaves:
            continue
        results[kind] = BaseModelOutputWithPooling(pooler_output=(leaves[f"{kind}_features"],))
        deep = [leaves[n] for n in sorted(leaves) if n.startswith(f"deepstack_{kind}.")]
        results[kind].deepstack_features = [in_form(x) for x in deep]
    return results


def leaves_of(reference):
    kinds = ("image_features", "video_features", "deepstack_")
    return {n: x.float().clone().requires_grad_() for n, x in reference.items() if n.startswith(kinds)}


def train_step(comm, model, reference, options):
    model, leaves = copy.deepcopy(model), leaves_of(reference)
    more = {n: reference[n] for n in ("image_grid_thw", "video_grid_thw") if n in reference}
    if leaves:
        more["mm_encoder_outputs"] = tower_results(model, leaves)
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


cases = [(model, linear) for model in models for linear in ("sequential", "in_place")]
cases.remove(("tiny_qwen3_vl", "in_place"))  # it has no linear attention


@pytest.mark.parametrize("golden, linear", cases, indirect=["golden"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_on_any_ranks_has_transformers_own_log_probabilities_and_gradients(golden, ranks, linear):
    model, reference = golden
    results = cpx.run(ranks, train_step, model, reference, {"linear": linear})
    logp, gradients = gathered(results, reference)
    delta = (logp - reference["logprobs"]).abs()
    assert delta.max() < 1e-3 and delta.mean() < 5e-5
    wanted = {n[5:]: x.double() for n, x in reference.items() if n.startswith("grad.")}
    errors = {n: (gradients[n].flatten() - w.flatten()).norm() / w.norm().clamp(min=1e-30) for n, w in wanted.items()}
    worst = max(errors, key=errors.get)
    print(f"max {delta.max():.2e} mean {delta.mean():.2e} gradient {errors[worst]:.2e} of {worst}")
    assert errors[worst] < 5e-3


@with_images
def test_positions_are_those_of_the_rows(golden):
    model, reference = golden
    grids = reference["image_grid_thw"], reference["video_grid_thw"]

    def program(comm):
        with dropin.context_parallel(copy.deepcopy(model), reference["cu_seqlens"], comm) as part:
            found = part._positions(reference["input_ids"], *grids)
            assert torch.equal(found, reference["position_ids"][:, part.rows])
            with pytest.raises(cpx.Error, match="image_grid_thw: expected grids of as many rows as placeholders"):
                part._positions(reference["input_ids"], grids[0][:1], grids[1])

    cpx.run(3, program)


@with_images
def test_the_models_own_tower_is_run_and_every_rank_uses_its_rows(golden):
    model, _ = golden
    config, grid = model.config, torch.tensor([[1, 4, 4], [1, 4, 6]])
    pixels = pixels_of(model, grid)
    first = [5, config.vision_start_token_id, *[config.image_token_id] * 4, 7, 8, 9]
    second = [3, *[config.image_token_id] * 6, 11, 12]
    lengths, ids = [len(first), 5, len(second)], torch.tensor([*first, 1, 2, 3, 4, 5, *second])
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def alone(tokens, **images):  # transformers itself, of one sequence
        types = (tokens == config.image_token_id).int()
        logits = model(input_ids=tokens[None], mm_token_type_ids=types[None], use_cache=False, **images).logits[0]
        return torch.cat((logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0], torch.zeros(1)))

    with torch.no_grad():
        wanted = torch.cat([
            alone(ids[: cu[1]], pixel_values=pixels[:16], image_grid_thw=grid[:1]), alone(ids[cu[1] : cu[2]]),
            alone(ids[cu[2] :], pixel_values=pixels[16:], image_grid_thw=grid[1:]),
        ])

    def program(comm):
        own = copy.deepcopy(model)
        with dropin.context_parallel(own, cu, comm) as part, torch.no_grad():
            logp = part.log_probs(ids[part.rows], pixel_values=pixels, image_grid_thw=grid)
            torch.testing.assert_close(logp, wanted[part.rows], rtol=0, atol=2e-5)
            fewer = {"pixel_values": pixels[:16], "image_grid_thw": grid[:1], "position_ids": part.rows.expand(3, -1)}
            with pytest.raises(cpx.Error, match="rows of image features: expected 10, a placeholder each, got 4"):
                part.log_probs(ids[part.rows], **fewer)

    cpx.run(2, program)


@of_text
def test_the_model_is_behind_it_what_it_was_before(golden):
    model, reference = golden
    own, ids = copy.deepcopy(model), reference["input_ids"][None, :24]
    with torch.no_grad():
        before = own(ids).logits

        def program(comm):
            with pytest.raises(KeyError):
                with dropin.context_parallel(own, [0, 24], comm):
                    raise KeyError

        cpx.run(1, program)
        assert torch.equal(own(ids).logits, before)
    attributes = {n: set(m.__dict__) for n, m in own.named_modules()}
    assert attributes == {n: set(m.__dict__) for n, m in model.named_modules()}
    assert own.config._attn_implementation == model.config._attn_implementation


@of_text
def test_gradient_checkpointing_changes_no_gradient(golden):
    model, reference = golden
    plain = cpx.run(2, train_step, model, reference, {})
    again = copy.deepcopy(model).train()
    again.gradient_checkpointing_enable({"use_reentrant": False})
    for (_, _, a), (_, _, b) in zip(plain, cpx.run(2, train_step, again, reference, {})):
        assert all(torch.equal(a[n], b[n]) for n in a)


@of_text
def test_behind_it_there_are_no_log_probabilities_and_no_backward(golden):
    """Both would be the model's own: what is asked then, and what a checkpoint computes again."""
    model, reference = golden
    behind = "expected within `with`, where the model is this rank's, got behind it"

    def of_log_probs(part):
        return part.log_probs(reference["input_ids"][part.rows])

    def of_hidden(part):  # of the language model by itself
        ids, at = reference["input_ids"][part.rows][None], torch.from_numpy(part.sharding.positions(part.comm.rank))
        return model_of[part].model(input_ids=ids, position_ids=at.expand(3, 1, -1), use_cache=False).last_hidden_state

    model_of = {}

    def program(comm, checkpoint, result_of):
        own = copy.deepcopy(model).train()
        if checkpoint is not None:
            own.gradient_checkpointing_enable({"use_reentrant": checkpoint})
        with dropin.context_parallel(own, reference["cu_seqlens"], comm) as part:
            model_of[part] = own
            if result_of is None:
                return part
            result = result_of(part)
        with pytest.raises(cpx.Error, match=f"backward: {behind}"):
            result.sum().backward()
        assert all(p.grad is None for n, p in own.named_parameters() if "layers" in n)

    for checkpoint in (None, True, False):
        for result_of in (of_log_probs, of_hidden):
            cpx.run(2, program, checkpoint, result_of, deadline=60)
    for part in cpx.run(2, program, None, None):
        with pytest.raises(cpx.Error, match=f"log_probs: {behind}"):
            of_log_probs(part)


@of_text
def test_a_model_is_in_one_context_at_a_time(golden):
    model, reference = golden
    taken = "model: expected one of no other context; each rank that is a thread takes a copy of the model, got one "

    def program(comm):
        own = copy.deepcopy(model)
        before = {n: set(m.__dict__) for n, m in own.named_modules()}

        def context():
            return dropin.context_parallel(own, reference["cu_seqlens"], comm)

        def log_probs(part):
            return part.log_probs(reference["input_ids"][part.rows])

        with torch.no_grad(), context() as outer:
            right = log_probs(outer)
            with pytest.raises(cpx.Error, match=taken + "within that of rank 0 of 1"):
                context().__enter__()
            assert torch.equal(log_probs(outer), right)
        with torch.no_grad(), context() as again:  # one behind another
            assert torch.equal(log_probs(again), right)
        assert before == {n: set(m.__dict__) for n, m in own.named_modules()}
        assert own.config._attn_implementation == model.config._attn_implementation

    cpx.run(1, program)

    def shares(comm):
        with dropin.context_parallel(shared, reference["cu_seqlens"], comm):
            cpx.torch.sum_over_ranks(torch.ones(1), cpx.torch.communicator(comm))

    shared = copy.deepcopy(model)
    with pytest.raises(cpx.Error, match=taken):
        cpx.run(2, shares, deadline=20)


@of_text
def test_models_of_one_config_are_in_contexts_of_their_own(golden):
    model, reference = golden
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    assert other.config is model.config
    ids = reference["input_ids"]

    def program(comm):
        with torch.no_grad():
            right = other(ids[None, :24], use_cache=False).logits
            first = dropin.context_parallel(model, reference["cu_seqlens"], comm)
            part = first.__enter__()
            assert torch.equal(other(ids[None, :24], use_cache=False).logits, right)
            with dropin.context_parallel(other, reference["cu_seqlens"], comm) as second:
                wanted = second.log_probs(ids[second.rows])
                assert torch.equal(part.log_probs(ids[part.rows]), wanted)
                first.__exit__(None, None, None)
                assert torch.equal(second.log_probs(ids[second.rows]), wanted)
            assert torch.equal(model(ids[None, :24], use_cache=False).logits, right)

    cpx.run(1, program)


@of_text
def test_a_model_in_bfloat16_is_as_near_as_transformers_itself(golden):
    model, reference = golden
    half = copy.deepcopy(model).bfloat16()
    wanted = reference["logprobs"]
    with torch.no_grad():
        alone = []
        for ids in reference["input_ids"].split(reference["cu_seqlens"].diff().tolist()):
            logits = half(input_ids=ids[None], use_cache=False).logits[0].float()
            alone += [logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0], torch.zeros(1)]
    own = (torch.cat(alone).double() - wanted).abs().mean()
    found, _ = gathered(cpx.run(2, train_step, half, reference, {}), reference)
    assert 0 < own and (found - wanted).abs().mean() < 1.5 * own


@of_text
def test_padding_has_no_log_probability_and_changes_none(golden):
    model, reference = golden
    ids, wanted = reference["input_ids"], reference["logprobs"].float()
    lengths = reference["cu_seqlens"].diff().tolist()
    batch = cpx.pad_to_multiple(cpx.thd.from_lengths(lengths), 18)
    buffer, right, at = torch.zeros(batch.tokens, dtype=torch.int64), torch.zeros(batch.tokens), 0
    for s, n in enumerate(lengths):
        buffer[batch.offset(s) : batch.offset(s) + n] = ids[at : at + n]
        right[batch.offset(s) : batch.offset(s) + n] = wanted[at : at + n]
        at += n

    def program(comm):
        with dropin.context_parallel(copy.deepcopy(model), batch, comm) as part, torch.no_grad():
            assert part.predicted == len(ids) - len(lengths)
            torch.testing.assert_close(part.log_probs(buffer[part.rows]), right[part.rows], rtol=0, atol=1e-3)

    cpx.run(3, program)


@of_text
def test_what_does_not_fit_is_named(golden):
    model, reference = golden

    def program(comm):
        with pytest.raises(cpx.Error, match='linear: expected "sequential" or "in_place"'):
            with dropin.context_parallel(model, [0, 24], comm, linear="other"):
                pass
        with pytest.raises(cpx.Error, match="model: expected one for causal or conditional generation, got Linear"):
            with dropin.context_parallel(torch.nn.Linear(1, 1), [0, 24], comm):
                pass
        other = torch.nn.Module()
        other.model = other.lm_head = torch.nn.Embedding(2, 2)
        other.get_input_embeddings = lambda: other.model
        with pytest.raises(cpx.Error, match="model: expected one with attention"):
            with dropin.context_parallel(other, [0, 24], comm):
                pass
        with dropin.context_parallel(copy.deepcopy(model), [0, 24], comm) as part:
            with pytest.raises(cpx.Error, match="shape of input_ids"):
                part.log_probs(torch.zeros(7, dtype=torch.int64))
            ids = reference["input_ids"][:24]
            for text, given, more in (
                ("input_ids: expected a torch.Tensor, got NoneType", None, {}),
                ("dtype of input_ids: expected torch.int64 or torch.int32, got torch.float32", ids.float(), {}),
                ("inputs: expected some of .*, got labels, use_cache", ids, {"use_cache": True, "labels": ids}),
                (r"shape of position_ids: expected \(3, 24\), got \(3, 2\)", ids, {"position_ids": ids.new_ones(3, 2)}),
            ):
                with pytest.raises(cpx.Error, match=text):
                    part.log_probs(given, **more)
        with pytest.raises(cpx.Error, match="cu_seqlens: expected whole numbers"):
            dropin.context_parallel(model, None, comm).__enter__()
        with pytest.raises(cpx.Error, match='carry: expected "scan" or "serial", got \'both\''):
            dropin.context_parallel(model, [0, 24], comm, carry="both").__enter__()

    cpx.run(1, program)


@of_text
@pytest.mark.parametrize("linear, carry", [("sequential", "scan"), ("in_place", "scan"), ("sequential", "serial")])
def test_a_linear_attention_layer_has_the_gradients_of_one_rank(golden, linear, carry):
    model, reference = golden
    tokens, hidden = len(reference["input_ids"]), model.config.hidden_size
    x, up = (torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(s)) for s in (1, 2))

    def program(comm):
        layer = copy.deepcopy(model)
        with dropin.context_parallel(layer, reference["cu_seqlens"], comm, linear=linear, carry=carry) as part:
            net, mine = layer.model.layers[0].linear_attn, x[part.rows][None].requires_grad_()
            y = net(mine)
            y.backward(up[part.rows][None])
        return part.rows, y.detach()[0], mine.grad[0], [p.grad for p in net.parameters()]

    def whole(results):
        rows = torch.cat([r[0] for r in results]).argsort()
        of_rows = [torch.cat([r[i] for r in results])[rows] for i in (1, 2)]
        return of_rows + [sum(g) for g in zip(*(r[3] for r in results))]

    wanted = whole(cpx.run(1, program))
    for ranks in (2, 3):
        errors = [(a - b).norm() / b.norm() for a, b in zip(whole(cpx.run(ranks, program)), wanted)]
        print(f"{ranks} ranks: {max(errors):.1e}")
        assert max(errors) < 1e-5
