# SPDX-License-Identifier: Apache-2.0
"""Prints how long flash-linear-attention's delta rule and convolution take with a context of context parallelism,
forward and backward, beside those of cpx.dropin.fla; milliseconds of the slowest rank.

torchrun --nproc-per-node RANKS python/bench/fla_cuda.py    (a GPU a rank, flash-linear-attention to import)
"""

import os

import torch
import torch.distributed as dist

import cpx
from cpx.dropin import fla as ours

from slowest import slowest_ms


def measure(name, of_ours, of_theirs, inputs):
    """Prints the times of both and how far results are from each other: the largest difference by the largest value."""
    up, results, times = None, [], []
    for call in (of_theirs, of_ours):
        wanted = [x.detach().requires_grad_() for x in inputs]
        y = call(*wanted)
        up = torch.randn_like(y) if up is None else up
        results.append([y.detach(), *torch.autograd.grad(y, wanted, up)])

        def both(call=call, wanted=wanted):
            torch.autograd.grad(call(*wanted), wanted, up)

        with torch.no_grad():
            times.append(slowest_ms(lambda: call(*inputs)))
        times.append(slowest_ms(both))
    off = max(((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in zip(*results))
    if dist.get_rank() == 0:
        forward, both, own, own_both = times
        print(
            f"{name:32} forward {forward:7.3f}, {own:7.3f}: {forward / own:5.2f} times as fast;  with backward "
            f"{both:7.3f}, {own_both:7.3f}: {both / own_both:5.2f};  at most {off:.1e} apart", flush=True
        )


def main():
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    from fla.modules.convolution import causal_conv1d
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}; bfloat16; theirs, then cpx's")
    torch.manual_seed(rank)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    for lengths in ([65536], [16384] * 4, [1000 + 24 * n for n in range(64)]):
        cu = [0]
        for n in lengths:
            cu.append(cu[-1] + n)
        cu[-1] += -cu[-1] % ranks
        rows, on_device = cu[-1] // ranks, torch.tensor(cu, dtype=torch.int32, device="cuda")
        on_host = on_device.cpu()
        about = f"{len(lengths)} of {lengths[0]}" + (" and more" if len(set(lengths)) > 1 else "")
        contexts = [
            by(on_device, dist.group.WORLD, conv1d_kernel_size=4, cu_seqlens_cpu=on_host)
            for by in (ours.build_cp_context, build_cp_context)
        ]
        unit = torch.nn.functional.normalize
        q, k = (unit(torch.randn(1, rows, 16, 128, device="cuda"), dim=-1).bfloat16() for _ in range(2))
        v = torch.randn(1, rows, 32, 128, **kind)
        g = -torch.rand(1, rows, 32, device="cuda") / 8
        beta = torch.rand(1, rows, 32, device="cuda")

        def rule(by, context):
            return lambda *x: by(*x, cp_context=context)[0]

        measure(
            f"delta rule, {about}", rule(ours.chunk_gated_delta_rule, contexts[0]),
            rule(chunk_gated_delta_rule, contexts[1]), [q, k, v, g, beta]
        )

        def convolve(by, context):
            return lambda x, w: by(x, w, activation="silu", cp_context=context)[0]

        x, w = torch.randn(1, rows, 8192, **kind), torch.randn(8192, 4, **kind) / 2
        dist.broadcast(w, 0)  # the peer gives tokens before a rank their gradients by the weights of the rank behind
        measure(
            f"convolution, {about}", convolve(ours.causal_conv1d, contexts[0]), convolve(causal_conv1d, contexts[1]),
            [x, w]
        )
    comm = cpx.torch.communicator()
    comm.wait()
    comm.of.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
