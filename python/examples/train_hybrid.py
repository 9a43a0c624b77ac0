# SPDX-License-Identifier: Apache-2.0
"""Trains a small hybrid language model, of gated delta nets and causal attention, on the text beside this file.

    python train_hybrid.py                      # on the CPU: 1 rank, then 2 that are threads, and a plot of both
    torchrun --nproc-per-node 2 train_hybrid.py # on CUDA devices, a process a rank

Every step has a packing of its own. Rows are sharded in zigzag all the way: the delta net runs on them in place, its
convolution by a halo and its recurrence by a carry; attention has them exchanged to whole sequences of some heads, and
back. All else, from embedding to loss, works on rows alone and is plain torch.

Losses are the same but for the order in which gradients are summed. Training multiplies any such difference, so it is
seen best in float64: below 1e-9 after 200 steps. In float32 it begins at 1e-7 and ends below 0.02.
"""

import argparse
import copy
import math
import os
import pathlib

if "RANK" not in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks are threads

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import cpx  # noqa: E402
import cpx.torch as ct  # noqa: E402

hidden, heads, dim, taps = 64, 4, 16, 4
layers = ["delta", "delta", "attention", "delta"]
ignored = -100  # a label that does not count
rate = 1e-3
wide = heads * dim


class Plans:
    """What one packing needs on one rank; all layers share it."""

    def __init__(self, batch, comm):
        rows = self.rows = cpx.shard(batch, cpx.zigzag(comm.ranks))
        qkv = cpx.head_sharded(comm.ranks, batch, [(heads, dim)] * 3)  # every rank: whole sequences of some heads
        out = cpx.head_sharded(comm.ranks, batch, [(heads, dim)])
        self.batch, self.comm = batch, comm
        self.before, self.carry = ct.halo(rows, comm, taps - 1), ct.carry(rows, comm)
        self.to_heads, self.to_rows = ct.relayout(rows, qkv, comm), ct.relayout(out, rows, comm)


class GatedDeltaNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.gate = nn.Linear(hidden, 3 * wide, bias=False), nn.Linear(hidden, wide, bias=False)
        self.decay, self.beta = nn.Linear(hidden, heads), nn.Linear(hidden, heads, bias=False)
        self.conv = nn.Parameter(torch.randn(3 * wide, taps) / 2)
        self.log_a = nn.Parameter(torch.linspace(-3, 1, heads))
        self.norm, self.out = nn.RMSNorm(dim, eps=1e-6), nn.Linear(wide, hidden, bias=False)

    def forward(self, x, at):
        qkv = ct.causal_conv1d(self.qkv(x), self.conv, at.before, at.comm, activation="silu")
        q, k, v = qkv.view(-1, 3, heads, dim).unbind(1)
        g = -self.log_a.exp() * F.softplus(self.decay(x))
        o = ct.gated_delta_rule(
            q.contiguous(), k.contiguous(), v.contiguous(), g, self.beta(x).sigmoid(), at.carry, at.comm
        )
        return self.out((self.norm(o) * F.silu(self.gate(x)).view_as(o)).flatten(1))


def rotated(x, positions):
    """Rotary embedding of x: (tokens, heads, dim)."""
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * wide, bias=False), nn.Linear(wide, hidden, bias=False)

    def forward(self, x, at):
        qkv = ct.exchange(self.qkv(x), at.to_heads, at.comm).view(at.batch.tokens, 3, -1, dim)
        parts = []
        for q, k, v in (part.unbind(1) for part in qkv.split(list(at.batch.valid_lengths))):
            positions = torch.arange(len(q), device=x.device)
            q, k = rotated(q, positions), rotated(k, positions)
            o = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True)
            parts.append(o[0].transpose(0, 1).flatten(1))
        return self.out(ct.exchange(torch.cat(parts), at.to_rows, at.comm))


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.mixer = GatedDeltaNet() if kind == "delta" else Attention()
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(2 * hidden, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-6) for _ in range(2))

    def forward(self, x, at):
        x = x + self.mixer(self.norms[0](x), at)
        a, b = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(a) * b)


class Hybrid(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.layers = nn.ModuleList(Layer(kind) for kind in layers)
        self.norm, self.head = nn.RMSNorm(hidden, eps=1e-6), nn.Linear(hidden, words, bias=False)

    def forward(self, tokens, at):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, at)
        return self.head(self.norm(x))


def packings(text, steps, tokens=320):
    """Yields, a step, a batch and its tokens: passages of the text, of other lengths each time."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        cuts = torch.randint(32, tokens - 32, (3,), generator=draw).sort().values.tolist()
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens]) if b > a]
        starts = torch.randint(len(text) - tokens, (len(lengths),), generator=draw).tolist()
        yield cpx.thd.from_lengths(lengths), torch.cat([text[s : s + n] for s, n in zip(starts, lengths)])


def labels_of(whole, batch):
    """Returns the token that follows each of a batch, and `ignored` behind the last one of a sequence."""
    labels = whole.roll(-1)
    labels[torch.from_numpy(batch.offsets[1:] - 1)] = ignored
    return labels


def train(comm, model, text, steps):
    """Returns the loss of every step, the same on all ranks."""
    comm = ct.communicator(comm)
    model = copy.deepcopy(model).to(comm.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    losses = []
    for step, (batch, whole) in enumerate(packings(text, steps)):
        at = Plans(batch, comm)
        own = torch.from_numpy(at.rows.global_rows(comm.rank))
        tokens, labels = (x[own].to(comm.device) for x in (whole, labels_of(whole, batch)))
        loss = F.cross_entropy(model(tokens, at), labels, ignore_index=ignored, reduction="sum")
        loss = loss / (batch.tokens - batch.sequences)  # every rank has its share of the mean
        optimizer.zero_grad()
        loss.backward()
        losses.append(summed(loss.detach(), list(model.parameters()), comm))
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 20, 1 - step / steps)
        optimizer.step()
    return losses


def summed(loss, parameters, comm):
    """Sums gradients over the ranks, and the loss, which it returns."""
    sums = ct.sum_over_ranks(torch.cat([loss.view(1), *(p.grad.flatten() for p in parameters)]), comm)
    loss, *parts = sums.split([1, *(p.numel() for p in parameters)])
    for p, gradient in zip(parameters, parts):
        p.grad.copy_(gradient.view_as(p))
    return loss.item()


def polyline(values, low, high, place, style):
    x, y, width, height = place
    points = " ".join(
        f"{x + i * width / max(1, len(values) - 1):.1f},{y + (high - v) * height / (high - low):.1f}"
        for i, v in enumerate(values)
    )
    return f'<polyline fill="none" {style} points="{points}"/>'


def text_at(x, y, text, anchor="start"):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def plot(runs, path):
    """Writes a picture of losses, {name: losses}: all of them above, how far others are from the first below."""
    top, below = (60, 40, 560, 240), (60, 330, 560, 110)
    (first, losses), *others = runs.items()
    steps, high = len(losses), math.ceil(max(map(max, runs.values())))
    styles = ['stroke="#9ecae1" stroke-width="6"', 'stroke="#08306b" stroke-width="1.5"', 'stroke="#d94801"']
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 490" font-family="sans-serif" font-size="12">',
        '<rect width="660" height="490" fill="white"/>',
        text_at(60, 24, "Loss of a small hybrid language model, nats a character"),
        *(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="none" stroke="#bbb"/>' for x, y, w, h in (top, below)),
    ]
    for v in range(high + 1):
        parts.append(text_at(52, 284 - v * 240 / high, v, "end"))
    for (name, values), style, y in zip(runs.items(), styles, (62, 82, 102)):
        parts += [polyline(values, 0, high, top, style), f'<path d="M470 {y - 4}h40" {style}/>', text_at(520, y, name)]
    parts.append(text_at(60, 320, f"Difference from {first}"))
    lowest = -17
    for exponent in range(lowest + 2, 0, 5):
        parts.append(text_at(52, 334 + exponent * 110 / lowest, f"1e{exponent}", "end"))
    for (_, values), style in zip(others, styles[1:]):
        apart = [max(lowest, math.log10(abs(a - b) or 1e-99)) for a, b in zip(values, losses)]
        parts.append(polyline(apart, lowest, 0, below, style))
    for step in (0, steps // 2, steps):
        parts.append(text_at(60 + 560 * step / steps, 458, step, "middle"))
    parts += [text_at(340, 478, "step", "middle"), "</svg>"]
    path.write_text("\n".join(parts) + "\n")


def named(ranks):
    return f"{ranks} rank{'s' * (ranks > 1)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of threads, a run of each")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "float64"], help="float64 on the CPU, float32 on devices")
    parser.add_argument("--plot", type=pathlib.Path, default="train_hybrid.svg")
    args = parser.parse_args()
    on_devices = "RANK" in os.environ

    written = pathlib.Path(__file__).with_name("text.txt").read_text()
    letters = sorted(set(written))
    text = torch.tensor([letters.index(letter) for letter in written])
    torch.manual_seed(0)
    model = Hybrid(len(letters)).to(getattr(torch, args.dtype or ("float32" if on_devices else "float64")))
    if on_devices:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
        comm = ct.communicator()
        runs = {named(comm.ranks): train(comm, model, text, args.steps)}
        comm.of.leave()
        torch.distributed.destroy_process_group()
        if comm.rank > 0:
            return
    else:
        runs = {named(n): cpx.run(n, train, model, text, args.steps)[0] for n in args.ranks}
    for name, losses in runs.items():
        print(f"{name}: loss {losses[0]:.6f} at first, {losses[-1]:.6f} after {args.steps} steps")
    first = next(iter(runs.values()))
    print(f"largest difference of any step: {max(abs(a - b) for r in runs.values() for a, b in zip(r, first)):.2g}")
    plot(runs, args.plot)


if __name__ == "__main__":
    main()
