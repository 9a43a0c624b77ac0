# SPDX-License-Identifier: Apache-2.0
"""A Qwen3.5 (dense or mixture) or Qwen3-VL of Hugging Face transformers under context parallelism, its code untouched.

    from cpx.dropin.transformers import context_parallel

    with context_parallel(model, cu_seqlens, group) as part:    # this rank's rows of a packed batch, zigzag
        logp = part.log_probs(ids[part.rows])                   # of every row's next token
        (-logp.sum() / part.predicted).backward()               # weights' gradients are this rank's share: sum them

Full attention sees the keys and values of all ranks, by one exchange a layer; linear attention runs on sequential rows,
or in place on the zigzag ones; everything else in these models is of one token. Within `with`, which also holds the
backward, the model is this rank's, of one `with` at a time: ranks that are threads have a copy each. Behind it, it is
as it was, and log-probabilities and backward raise cpx.Error: what a checkpoint computes again would be the model's.
"""

import collections.abc
import contextlib
import copy
import functools

import numpy
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface

import cpx
import cpx.torch

from ._common import causal_conv1d, communicator, gated_delta_rule, integers, move, packed, tensors

_where = "context_parallel"
_pixels = {"image": "pixel_values", "video": "pixel_values_videos"}
_inputs = {"position_ids", "mm_encoder_outputs", "image_grid_thw", "video_grid_thw", *_pixels.values()}


@contextlib.contextmanager
def _instead(attributes):
    """Gives modules attributes, {module: {name: value}}, and then what they had in their place before."""
    before = {module: {n: module.__dict__[n] for n in of if n in module.__dict__} for module, of in attributes.items()}
    try:
        for module, values in attributes.items():
            module.__dict__.update(values)
        yield
    finally:
        for module, values in attributes.items():
            for name in values:
                module.__dict__.pop(name, None)
            module.__dict__.update(before[module])


class Part:
    """One rank's part of a packed batch.

    rows: the global row of each local one, int64 on the model's device. predicted: the tokens of the whole batch that
    another one of their sequence precedes, padding aside: what a mean of log-probabilities is divided by.
    """
    rows: torch.Tensor
    predicted: int
    batch: cpx.thd
    sharding: cpx.Sharding
    linear: cpx.Sharding
    everything: cpx.Sharding
    comm: cpx.torch.Communicator
    device: torch.device
    carry: str
    model: torch.nn.Module
    offsets: list[int]
    segments: list[list[int]]
    known: torch.Tensor

    def __init__(
        self, model: torch.nn.Module, language: torch.nn.Module, batch: cpx.thd, comm: cpx.torch.Communicator,
        layout: cpx.Layout, linear: str, carry: str
    ):
        if carry not in ("scan", "serial"):
            raise cpx.Error(_where, "carry", '"scan" or "serial"', repr(carry))
        self.carry, self.language = carry, language
        self.model, self.comm, self.batch = model, comm, batch
        rank = comm.rank
        self.sharding = cpx.shard(batch, layout)
        self.device = model.get_input_embeddings().weight.device
        self.rows = self._tensor(self.sharding.global_rows(rank))
        self.offsets, valid = batch.offsets.tolist(), batch.valid_lengths
        self.predicted = int((valid - 1).clip(0).sum())
        segments = self.sharding.segments(rank)
        self.segments = segments.tolist()
        length = numpy.repeat(valid[segments[:, 0]], segments[:, 3])  # of the sequence of each local row
        known = numpy.nonzero(self.sharding.positions(rank) + 1 < length)[0]
        self.known = self._tensor(known)  # local rows whose next token is known
        self.everything = cpx.replicated(comm.ranks, batch)
        if linear not in ("sequential", "in_place"):
            raise cpx.Error(_where, "linear", '"sequential" or "in_place"', repr(linear))
        if linear == "in_place":
            self.linear = self.sharding
        elif carry == "serial":
            self.linear = cpx.shard(batch, cpx.sequential(comm.ranks), cut=cpx.aligned(64))
        else:
            self.linear = packed(batch, comm.ranks)

    def _tensor(self, array):
        return torch.from_numpy(array).to(self.device)

    def _check_active(self, what):
        if self.language.__dict__.get("_cpx_part") is not self:
            raise cpx.Error(_where, what, "within `with`, where the model is this rank's", "behind it")

    def _watch(self, result):
        """Lets the backward of a result raise cpx.Error behind `with`: what a checkpoint has dropped would be computed
        by the model as it is then, and no gradient right."""
        if result.requires_grad:
            result.register_hook(lambda _: self._check_active("backward"))
        return result

    def log_probs(self, input_ids: torch.Tensor, **inputs: object) -> torch.Tensor:
        """Returns the log-probability of every local row's next token, 0 at the last of a sequence: (rows,) float32.

        input_ids: (rows,) of this rank. inputs: what the model takes beside: pixel_values with image_grid_thw,
        pixel_values_videos with video_grid_thw, or mm_encoder_outputs with the grids, all of the whole batch, in its
        order; each rank runs the tower and uses its own rows of the result. position_ids: (3, rows), if not the
        model's own. Float64 of a model in float64. Collective. It and its backward belong within `with`.
        """
        self._check_active("log_probs")
        unknown = sorted(inputs.keys() - _inputs)
        if unknown:
            raise cpx.Error(_where, "inputs", f"some of {', '.join(sorted(_inputs))}", ", ".join(unknown))
        tensors(_where, self.device, input_ids=input_ids)
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise cpx.Error(_where, "dtype of input_ids", "torch.int64 or torch.int32", input_ids.dtype)
        if tuple(input_ids.shape) != tuple(self.rows.shape):
            raise cpx.Error(_where, "shape of input_ids", tuple(self.rows.shape), tuple(input_ids.shape))
        positions = inputs.pop("position_ids", None)
        tensors(_where, self.device, ("position_ids",), position_ids=positions)
        if positions is not None and tuple(positions.shape) != (3, len(self.rows)):
            raise cpx.Error(_where, "shape of position_ids", (3, len(self.rows)), tuple(positions.shape))
        whole = move(input_ids[:, None], self.sharding, self.everything, self.comm)[:, 0]  # 8 bytes a token
        tower, towers = self.model.model, {}
        if hasattr(tower, "get_image_features"):
            if positions is None:
                positions = self._positions(whole, inputs.get("image_grid_thw"), inputs.get("video_grid_thw"))
            features = self._features(whole, inputs)
            towers = {f"get_{kind}_features": lambda *a, of=of, **k: of for kind, of in features.items()}
            inputs |= {_pixels[kind]: of.pooler_output[0] for kind, of in features.items()}  # that it is there, no more
        elif positions is None:
            positions = self._tensor(self.sharding.positions(self.comm.rank)).expand(3, -1)
        with _instead({tower: towers}):
            out = self.model(input_ids=input_ids[None], position_ids=positions[:, None], use_cache=False, **inputs)
        logits = self._watch(out.logits).squeeze(0)  # without a copy in the backward
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        following = whole[self.rows[self.known] + 1]
        logp = logits[self.known].log_softmax(-1).gather(1, following[:, None])[:, 0]
        return logits.new_zeros(len(self.rows)).index_copy(0, self.known, logp)

    def _kinds(self, ids):
        config = self.model.config
        return {kind: ids == getattr(config, f"{kind}_token_id") for kind in ("image", "video")}

    def _positions(self, whole, image_grid, video_grid):
        """Returns what the model's own get_rope_index says of every sequence by itself: (3, rows)."""
        whole = whole.cpu()  # what follows reads single numbers
        types = sum(n * mask for n, mask in enumerate(self._kinds(whole).values(), 1)).int()
        merge = self.model.config.vision_config.spatial_merge_size
        grids = {"image_grid_thw": image_grid, "video_grid_thw": video_grid}
        grids = {name: None if grid is None else grid.cpu() for name, grid in grids.items()}
        left = {name: 0 if grid is None else len(grid) for name, grid in grids.items()}
        begin = {name: 0 for name in grids}
        result = []
        for first, last in zip(self.offsets, self.offsets[1:]):
            if first == last:
                continue
            own = {}
            for kind, (name, grid) in enumerate(grids.items(), 1):
                tokens, end = int((types[first:last] == kind).sum()), begin[name]
                while tokens > 0 and end < left[name]:
                    tokens -= int(grid[end].prod()) // merge**2
                    end += 1
                if tokens != 0:
                    expected = "grids of as many rows as placeholders in each sequence"
                    raise cpx.Error(_where, name, expected, f"{-tokens} more")
                own[name] = grid[begin[name] : end] if end > begin[name] else None
                begin[name] = end
            positions, _ = self.model.model.get_rope_index(whole[None, first:last], types[None, first:last], **own)
            result.append(positions[:, 0])
        return torch.cat(result, 1).to(self.device)[:, self.rows]

    def _features(self, whole, inputs):
        """Returns the tower's results, of the rows that are placeholders here; their order is that of the batch."""
        tower = self.model.model
        given, local_of = inputs.pop("mm_encoder_outputs", None) or {}, {}
        for kind, mask in self._kinds(whole).items():
            whole_of, pixels = given.get(kind), inputs.get(_pixels[kind])
            if whole_of is None and pixels is not None:
                run = getattr(tower, f"get_{kind}_features")
                whole_of = run(pixels, inputs.get(f"{kind}_grid_thw"), return_dict=True)
            if whole_of is None:
                continue
            rows = (mask.cumsum(0) - 1)[self.rows[mask[self.rows]]]
            count = int(mask.sum())

            def mine(given):  # a tensor, or a tuple of one an image, as this version of transformers has it
                blocks = given if isinstance(given, torch.Tensor) else torch.cat(list(given))
                if len(blocks) != count:
                    raise cpx.Error(_where, f"rows of {kind} features", f"{count}, a placeholder each", len(blocks))
                return blocks[rows] if blocks is given else (blocks[rows],)

            local = local_of[kind] = copy.copy(whole_of)
            local.pooler_output = mine(local.pooler_output)
            if getattr(local, "deepstack_features", None) is not None:
                local.deepstack_features = [mine(f) for f in local.deepstack_features]
        return local_of

    def attention(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        scaling: float | None, dropout: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention of the local rows to the keys of all ranks; (1, heads, rows, dim) each."""
        if dropout or window is not None:
            got = f"dropout {dropout}, window {window}"
            raise cpx.Error(_where, "attention", "no dropout and no sliding window", got)
        pair = torch.cat((key, value)).permute(2, 0, 1, 3)  # rows, 2, heads, dim
        keys, values = move(pair, self.sharding, self.everything, self.comm).permute(1, 2, 0, 3)
        outs = []
        for sequence, token, row, count in self.segments:
            first = self.offsets[sequence]
            seen = slice(first, first + token + count)
            outs.append(
                F.scaled_dot_product_attention(
                    query[:, :, row : row + count], keys[None, :, seen], values[None, :, seen],
                    attn_mask=causal_lower_right(count, token + count), scale=scaling, enable_gqa=True,
                )
            )
        # No row of everything: where a rank has none, its backward still takes part in the exchange.
        groups = query.shape[1] // keys.shape[0]
        outs.append(values[None, :, :0].repeat_interleave(groups, 1))
        return torch.cat(outs, 2).transpose(1, 2)

    def linear_attention(self, layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """A gated delta net on hidden states (1, rows, hidden)."""
        x = hidden.squeeze(0)
        if self.linear is not self.sharding:
            x = move(x, self.sharding, self.linear, self.comm)
        weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
        mixed = causal_conv1d(layer.in_proj_qkv(x), weight, bias, "silu", self.linear, self.comm)
        q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], 1)
        q, k = (y.unflatten(1, (-1, layer.head_k_dim)) for y in (q, k))  # also of no rows
        v, z = (y.unflatten(1, (-1, layer.head_v_dim)) for y in (v, layer.in_proj_z(x)))
        g = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(x).float() + layer.dt_bias)
        o = gated_delta_rule(q, k, v, g, layer.in_proj_b(x).sigmoid(), self.linear, self.comm, self.carry)
        y = layer.out_proj(layer.norm(o.flatten(0, 1), z.flatten(0, 1)).reshape(len(x), layer.value_dim))
        return (y if self.linear is self.sharding else move(y, self.linear, self.sharding, self.comm))[None]


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, **kwargs):
    part = module.__dict__.get("_cpx_part")
    if part is None:
        raise cpx.Error(_where, "attention", "a module within context_parallel", type(module).__name__)
    return part.attention(module, query, key, value, scaling, dropout, sliding_window), None


AttentionInterface.register("cpx", _attention)
AttentionMaskInterface.register("cpx", lambda *args, **kwargs: None)  # what a row sees is said by its sequence


def _linear_attention(part, layer):
    def forward(hidden_states, cache_params=None, attention_mask=None, **kwargs):
        if cache_params is not None or attention_mask is not None:
            raise cpx.Error(_where, "linear attention", "neither cache nor mask", "one of them")
        return part.linear_attention(layer, hidden_states)

    return forward


def _watched(part, language):
    run = language.forward

    @functools.wraps(run)
    def forward(*args, **kwargs):
        out = run(*args, **kwargs)
        if not torch.compiler.is_compiling():  # which computes nothing again by modules
            part._watch(out[0])
        return out

    return forward


_gated_delta_net = (
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "A_log", "dt_bias", "norm", "out_proj"
)


@contextlib.contextmanager
def context_parallel(
    model: torch.nn.Module, cu_seqlens: torch.Tensor | collections.abc.Sequence[int] | cpx.thd, group: object, *,
    layout: cpx.Layout | None = None, linear: str = "sequential", carry: str = "scan"
) -> collections.abc.Iterator[Part]:
    """Puts a model with its language model's head under context parallelism, for one packed batch. Yields a `Part`.

    model: ForCausalLM or ForConditionalGeneration of Qwen3.5, its mixture or Qwen3-VL, the same on every rank.
    Of a model within another raises cpx.Error: where ranks are threads each takes a copy of the model.
    cu_seqlens: offsets of the batch's sequences, of any lengths, or a cpx.thd. group: a torch.distributed.ProcessGroup
    or cpx.Communicator. layout: by default cpx.zigzag of its ranks. linear: "sequential", linear attention's rows are
    relaid, or "in_place", its states and halos cross zigzag's cuts. carry: "scan", or "serial":
    states are handed on one behind another, and rows relaid so that each rank's begin at chunks of 64 tokens, by which
    the delta rule is bitwise that of one rank; as of cpx.carry.
    """
    comm = communicator(group)
    batch = cu_seqlens
    if not isinstance(batch, cpx.thd):
        batch = cpx.thd(list(integers(_where, "cu_seqlens", cu_seqlens)))
    layout = cpx.zigzag(comm.ranks) if layout is None else layout
    inner = getattr(model, "model", None)
    language = getattr(inner, "language_model", inner)
    if language is None or not hasattr(model, "lm_head"):
        raise cpx.Error(_where, "model", "one for causal or conditional generation", type(model).__name__)
    part = Part(model, language, batch, comm, layout, linear, carry)
    attributes = {}
    for module in language.modules():
        name = type(module).__name__
        if name.endswith("GatedDeltaNet"):
            missing = [n for n in _gated_delta_net if not hasattr(module, n)]
            if missing or module.activation not in ("silu", "swish"):
                got = "none of " + ", ".join(missing) if missing else module.activation
                raise cpx.Error(_where, name, "the projections and silu of Qwen3.5", got)
            attributes[module] = {"forward": _linear_attention(part, module)}
        elif hasattr(module, "q_proj"):
            attributes[module] = {"_cpx_part": part}
    if not attributes:
        expected = "one with attention of transformers' Qwen3.5 or Qwen3-VL"
        raise cpx.Error(_where, "model", expected, type(model).__name__)
    attributes[language] = {"forward": _watched(part, language)}
    own = copy.copy(language.config)  # models may share one
    own._attn_implementation = "cpx"
    for values in attributes.values():
        values["config"] = own
    holds = language.__dict__.setdefault("_cpx_part", part)  # of threads, too, one alone sets it
    if holds is not part:
        expected = "one of no other context; each rank that is a thread takes a copy of the model"
        raise cpx.Error(_where, "model", expected, f"one within that of rank {holds.comm.rank} of {holds.comm.ranks}")
    try:
        with _instead(attributes):
            yield part
    finally:
        del language.__dict__["_cpx_part"]
