# SPDX-License-Identifier: Apache-2.0
"""The Python that documents show runs as it is pasted, beside what only the reader has."""

import ast
import builtins
import json
import pathlib
import re
import threading
import types

import pytest

torch = pytest.importorskip("torch")

import cpx

ct = pytest.importorskip("cpx.torch")

try:
    import transformers
except ImportError:
    transformers = None

root = pathlib.Path(__file__).parents[2]
loading = threading.Lock()  # transformers imports a model's file when it is first asked for
batch, ids = cpx.thd([0, 7, 20]), torch.arange(20)
sharding = cpx.shard(batch, cpx.zigzag(2))


def blocks(file):
    """Returns the blocks of Python, with the lines where they begin."""
    text = (root / file).read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: block.start(1)].count("\n"), block[1]) for block in found]


def reader_of_layers(comm):
    comm = ct.communicator(comm)
    shapes = ct.gated_delta_net_plan(sharding, cpx.Heads(16, 32, 128, 128), comm).shapes(16)
    weights = {name: torch.ones(shape).requires_grad_() for name, shape in shapes.items()}
    own = torch.from_numpy(sharding.global_rows(comm.rank))
    return {
        "comm": comm, "sharding": sharding, "x": torch.ones(len(own), 16), "ids": ids[own], "loss": torch.tensor(1.0),
        "layer": types.SimpleNamespace(linear_attn=types.SimpleNamespace(named_parameters=lambda: weights.items())),
    }


def reader_of_models(comm):
    directory = root / "examples" / "data" / "tiny_qwen3_5_vl"
    config = json.loads((directory / "config.json").read_text())
    with loading:
        model = getattr(transformers, config["architectures"][0]).from_pretrained(directory, dtype=torch.float32)
    vision, grid = model.config.vision_config, torch.tensor([[1, 4, 4]])
    pixels = torch.randn(16, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    picture = [5, model.config.vision_start_token_id, *[model.config.image_token_id] * 4, 7, 8]
    return {
        "model": model, "cu_seqlens": torch.tensor([0, 8, 13]), "group": comm, "grid": grid, "pixels": pixels,
        "ids": torch.tensor([*picture, 1, 2, 3, 4, 5]),
    }


readers = {  # what is given to a block in which this stands, beside what the blocks before it have made
    "ct.gated_delta_net(": reader_of_layers, "context_parallel(model": reader_of_models,
}


def unknown(block, known):
    """Returns the names that a block reads, and neither it, Python nor what is known has."""
    nodes, read, made = list(ast.walk(ast.parse(block))), set(), set(dir(builtins)) | set(known)
    for node in nodes:
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
    return read - made


of_miles = {  # names under which it calls them
    "_zigzag_to_packed_shard", "_packed_shard_to_zigzag", "_reassemble_full_row", "_natural_to_zigzag_slice"
}


@pytest.mark.parametrize(
    "file, count, names", [("python/README.md", 3, {"program"}), ("docs/trainers.md", 6, of_miles)]
)
def test_the_python_of_a_document_runs_as_it_is_pasted(file, count, names):
    """Each block behind those before it, but those for GPUs, of which every name is there."""
    made, left_out, found = {}, [], blocks(file)
    assert len(found) == count
    for line, block in found:
        reader = next((reader for part, reader in readers.items() if part in block), None)
        if "dropin.transformers" in block and transformers is None:
            left_out.append(line)
        elif "communicator()" in block:
            assert unknown(block, made) == {"x"}  # the reader's tensor
        elif reader is None:
            assert unknown(block, made) == set()  # nor in functions that are not called
            exec(compile("\n" * line + block, str(root / file), "exec"), made)
        else:

            def program(comm):
                names = reader(comm)
                exec(compile("\n" * line + block, str(root / file), "exec"), names)

            cpx.run(2, program, deadline=60)
    assert names <= made.keys()
    if left_out:
        pytest.skip(f"without transformers, block of line {left_out[0]} only")
