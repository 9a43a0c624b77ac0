# SPDX-License-Identifier: Apache-2.0
"""Runs flash-linear-attention's tests of context parallelism with cpx in its place:

    python3 python/peers/fla.py CHECKOUT [-k EXPRESSION]

The reference, of one rank, is the peer's: its kernels on a GPU, its functions of plain torch elsewhere. But on GPUs
that of the delta rule is cpx's of one rank: the peer's test allows 3e-3 between its own results, and a kernel that
rounds to bfloat16 is as far from float32, so that two kernels differ by more. On GPUs its tests start processes, which
this file enters again to put cpx there too.
"""

import sys
import types

import common
import torch
import torch.distributed as dist

import cpx.dropin.fla as dropin

directory = "tests/context_parallel"
files = ["test_cp_context.py", "test_cp_conv.py", "test_cp_gdn.py"]
left_out = {
    "test_cp_kda.py": "cpx.torch has the operator, the drop-in not yet",
    "test_cp_dplr.py, test_cp_rwkv7.py": "cpx has no such recurrence",
    "test_cp_token_shift.py": "cpx.torch.shift_rows moves the tokens, the drop-in has no such function",
    "test_cp_bwd_gk_offset.py": "a test of one of the peer's kernels",
}
differs = {"rejects_": "cpx takes any number of tokens on any number of ranks"}


def convolution_in_torch(x, weight, bias, activation=None, cu_seqlens=None, **_):
    """The peer's reference of its tests of the convolution, a sequence at a time."""
    one = common.load(checkout / "tests/modules/test_conv.py", "peer_convolution").causal_conv1d_ref_torch
    cu = cu_seqlens.tolist()
    parts = [one(x[:, a:b].transpose(1, 2), weight, bias, activation=activation) for a, b in zip(cu, cu[1:])]
    return torch.cat(parts, 2).transpose(1, 2), None


def rule_in_torch(q, k, v, g, beta, cu_seqlens=None, **_):
    """The peer's delta rule in torch, a sequence at a time, 1024 tokens a call: its time grows with their square."""
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule as rule

    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    cu, parts = cu_seqlens.tolist(), []
    for first, last in zip(cu, cu[1:]):
        state = None
        for begin in range(first, last, 1024):
            part = slice(begin, min(begin + 1024, last))
            o, state = rule(*(x[:, part] for x in (q, k, v, g, beta)), initial_state=state, output_final_state=True)
            parts.append(o)
    return torch.cat(parts, 1).to(v.dtype), None


def rule_of_one_rank(*args, cu_seqlens=None, **options):
    """cpx's, of a group of this rank alone."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    context = dropin.build_cp_context(cu_seqlens, alone)
    return dropin.chunk_gated_delta_rule(*args, cp_context=context, **options)


def put(module):
    """Puts cpx into a module of tests, where they give a context; without one they are the reference."""
    if common.has_gpus():
        convolution, rule = getattr(module, "causal_conv1d", None), rule_of_one_rank
    else:
        convolution, rule = convolution_in_torch, rule_in_torch
    reference = {"causal_conv1d": convolution, "chunk_gated_delta_rule": rule}
    for name in ("get_cp_cu_seqlens", "build_cp_context", "causal_conv1d", "chunk_gated_delta_rule"):
        if not hasattr(module, name):
            continue
        ours = getattr(dropin, name)
        if name in reference:

            def either(*args, ours=ours, other=reference[name], cp_context=None, **options):
                return other(*args, **options) if cp_context is None else ours(*args, cp_context=cp_context, **options)

            setattr(module, name, either)
        else:
            setattr(module, name, ours)
    if not common.has_gpus():
        common.on_cpu(module)
    elif hasattr(module, "mp"):
        start = module.mp.start_processes

        def start_with_cpx(worker, args=(), **options):
            start(member, args=(str(checkout), module.__file__, worker.__name__, args), **options)

        module.mp = types.SimpleNamespace(start_processes=start_with_cpx)


def member(rank, checkout, file, worker, args):
    """A process of a test: one rank."""
    sys.path.insert(0, checkout)
    module = common.load(file, "peer_test")
    put(module)
    getattr(module, worker)(rank, *args)


if __name__ == "__main__":
    checkout = common.checkout_of_arguments(__doc__.split("\n")[0])
    failed = common.run(checkout / directory, files, put, differs)
    for name, why in left_out.items():
        print(f"left out {name}: {why}")
    sys.exit(failed > 0)
