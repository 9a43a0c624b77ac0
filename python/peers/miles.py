# SPDX-License-Identifier: Apache-2.0
"""Runs miles' tests of its relayout and of mRoPE under context parallelism with cpx in its place:

    python3 python/peers/miles.py CHECKOUT

and compares the relayout with miles' own functions, in bits, on every rank, with its gradient. Megatron-LM is not
needed: what miles imports of it is empty. Between GPUs, the test of the relayout alone:

    torchrun --nproc-per-node 2 python/peers/miles.py CHECKOUT
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

import common
import torch
import torch.distributed as dist

import cpx.dropin.miles as dropin

relayout_test = "tests/e2e/precision/test_hf_attention_cp_relayout.py"
positions_test = "tests/fast/test_qwen3_vl_cp_mrope.py"
left_out = {"tests/e2e/precision/test_qwen3_5_cp_correctness.py": "needs a GPU and what miles is installed with"}


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of megatron whose every name is an empty class."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {})
        return module

    def exec_module(self, module):
        pass


def stand_in(**names):
    module = types.ModuleType("stand_in")
    module.__dict__.update(names)
    return module


def relayout(ranks):
    """The peer's test, of ranks that are threads. It looks at rank 0."""
    module = common.load(checkout / relayout_test, "peer_relayout")
    module.torch = common.TorchOnCpu()
    common.in_threads(ranks, lambda rank: module.test_relayout(rank, ranks))


def compare(ranks, lengths):
    """cpx and the peer's own functions on the same rows."""
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)

    def program(rank):
        made = torch.Generator().manual_seed(rank)
        x, up = (torch.randn(int(cu[-1]) // ranks, 1, 5, generator=made) for _ in range(2))
        group = cu, dist.group.WORLD, rank, ranks
        for ours, its in (
            (dropin.zigzag_to_packed_shard, theirs._zigzag_to_packed_shard),
            (dropin.packed_shard_to_zigzag, theirs._packed_shard_to_zigzag),
        ):
            results = []
            for f in (ours, its):
                leaf = x.clone().requires_grad_()
                y = f(leaf, *group)
                results.append((y.detach(), *torch.autograd.grad(y, leaf, up)))
            for a, b in zip(*results):
                if not torch.equal(a, b):
                    raise AssertionError(f"rank {rank}: {int((a != b).sum())} elements differ in {ours.__name__}")

    common.in_threads(ranks, program)


if __name__ == "__main__":
    checkout = common.checkout_of_arguments(__doc__.split("\n")[0])
    sys.meta_path.insert(0, Empty())
    sys.modules["miles.utils.hf_config"] = stand_in(load_hf_config=None)
    theirs = common.load(checkout / "miles_plugins/models/hf_attention.py", "peer_attention")
    sys.modules["miles_plugins.models.hf_attention"] = stand_in(
        _zigzag_to_packed_shard=dropin.zigzag_to_packed_shard, _packed_shard_to_zigzag=dropin.packed_shard_to_zigzag
    )
    sys.modules["miles_plugins.models.qwen3_vl"] = stand_in(
        _reassemble_full_row=dropin.reassemble_full_row, _natural_to_zigzag_slice=dropin.natural_to_zigzag_slice
    )
    if "RANK" in os.environ:
        sys.exit(common.load(checkout / relayout_test, "peer_relayout").main())
    failed = 0
    for ranks in (2, 4):
        failed += common.report(f"{relayout_test} of {ranks} ranks", lambda: relayout(ranks))
    batches = (2, [12, 20, 6]), (2, [4, 8, 4, 12]), (3, [18, 30, 9]), (4, [24, 40, 12]), (8, [16] * 32 + [24])
    for ranks, lengths in batches:
        name = f"bitwise miles' own, {ranks} ranks, {len(lengths)} sequences"
        failed += common.report(name, lambda: compare(ranks, lengths))
    failed += common.run(checkout, [positions_test], lambda module: None)
    for name, why in left_out.items():
        print(f"left out {name}: {why}")
    sys.exit(failed > 0)
