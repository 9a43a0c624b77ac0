# SPDX-License-Identifier: Apache-2.0
# Writes head_decay, channel_decay and kimi_delta.safetensors beside itself: `python3 recurrences.py`, with NumPy.
#
# Everything is computed in float64, one token and one head at a time, from the formulas of the papers and the chain
# rule, and compared with a difference quotient before it is written.
import json
import pathlib

import numpy as np

LENGTHS = [70, 1, 0, 33]
KEY_HEADS, VALUE_HEADS, K, V = 2, 4, 6, 5
SCALE = K**-0.5


def run(x, kind, dout=None):
    """Returns o and the final states and, given the gradient of o, those of the inputs."""
    tokens, delta = sum(LENGTHS), kind == "kimi_delta"
    o = np.zeros((tokens, VALUE_HEADS, V))
    final = np.zeros((len(LENGTHS), VALUE_HEADS, K, V))
    d = {name: np.zeros_like(values) for name, values in x.items()}
    unit = {name: x[name] for name in ("q", "k")}
    if delta:  # rows of length 1, as in a layer
        rstd = {name: (np.square(x[name]).sum(-1, keepdims=True) + 1e-6) ** -0.5 for name in unit}
        unit = {name: x[name] * rstd[name] for name in unit}
    for head in range(VALUE_HEADS):
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        q, k, v = unit["q"][:, key_head], unit["k"][:, key_head], x["v"][:, head]
        decay = np.exp(x["g"][:, head]).reshape(tokens, -1)  # (tokens, 1 or K)
        beta = x["beta"][:, head] if delta else np.ones(tokens)
        first = 0
        for sequence, length in enumerate(LENGTHS):
            steps = []
            S = np.zeros((K, V))
            for t in range(first, first + length):
                faded = decay[t][:, None] * S
                rest = v[t] - faded.T @ k[t] if delta else v[t]
                S = faded + beta[t] * np.outer(k[t], rest)
                o[t, head] = SCALE * S.T @ q[t]
                steps.append((faded, rest, S))
            final[sequence, head] = S
            G = np.zeros((K, V))  # the gradient of the state after token t
            for t in reversed(range(first, first + length) if dout is not None else []):
                faded, rest, S = steps.pop()
                G += SCALE * np.outer(q[t], dout[t, head])
                d["q"][t, key_head] += SCALE * S @ dout[t, head]
                read = G.T @ k[t]
                d["v"][t, head] = beta[t] * read
                d["k"][t, key_head] += beta[t] * G @ rest
                if delta:
                    d["beta"][t, head] = rest @ read
                    d["k"][t, key_head] -= beta[t] * faded @ read
                    G = G - beta[t] * np.outer(k[t], read)
                by_channel = (faded * G).sum(1)
                d["g"][t, head] = by_channel if decay.shape[1] == K else by_channel.sum()
                G = decay[t][:, None] * G
            first += length
    if delta:
        for name in unit:
            inner = (d[name] * unit[name]).sum(-1, keepdims=True)
            d[name] = rstd[name] * (d[name] - unit[name] * inner)
    return o, final, d


def write(path, tensors, metadata):
    names = {"f": "F32", "d": "F64", "l": "I64"}
    header, data = {"__metadata__": metadata}, b""
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        header[name] = {
            "dtype": names[values.dtype.char],
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


for seed, kind in enumerate(("head_decay", "channel_decay", "kimi_delta")):
    random = np.random.default_rng(seed)
    tokens = sum(LENGTHS)
    normal = lambda *shape: random.standard_normal((tokens, *shape))
    x = {"q": normal(KEY_HEADS, K), "k": normal(KEY_HEADS, K), "v": normal(VALUE_HEADS, V)}
    channels = () if kind == "head_decay" else (K,)
    x["g"] = -0.05 * np.abs(normal(VALUE_HEADS, *channels))
    x["g"][7::11] *= 100  # an abrupt one among slow ones
    x["g"][19:22] = -500  # their product is 0 in float64, where none of them is
    x["g"][40, 0] = -np.inf
    if kind == "kimi_delta":
        x["beta"] = 1 / (1 + np.exp(-normal(VALUE_HEADS)))
    x = {name: values.astype(np.float32).astype(np.float64) for name, values in x.items()}
    dout = normal(VALUE_HEADS, V).astype(np.float32).astype(np.float64)
    o, final, d = run(x, kind, dout)

    for name in x:  # along one direction
        direction = random.standard_normal(x[name].shape)
        at = lambda step: (run({**x, name: x[name] + step * direction}, kind)[0] * dout).sum()
        slope, expected = (at(1e-6) - at(-1e-6)) / 2e-6, (d[name] * direction).sum()
        assert abs(slope - expected) <= 1e-7 * np.linalg.norm(d[name]) * np.linalg.norm(direction), (kind, name)

    single = {name: values.astype(np.float32) for name, values in {**x, "do": dout}.items()}
    results = {"o": o, "final_state": final, **{"d" + name: values for name, values in d.items()}}
    cu_seqlens = np.cumsum([0, *LENGTHS], dtype=np.int64)
    write(
        pathlib.Path(__file__).with_name(kind + ".safetensors"),
        {"cu_seqlens": cu_seqlens, **single, **results},
        {"kind": kind, "lens": json.dumps(LENGTHS), "scale": "K**-0.5", "qk_l2norm": str(kind == "kimi_delta")},
    )
