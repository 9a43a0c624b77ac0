# SPDX-License-Identifier: Apache-2.0
"""The causal convolution of cpx beside that of flash-linear-attention, on the same tensors in the same process.

python3 bench/peers/causal_conv1d.py ./libcpx_peers.so     (see library.cu; needs torch, flash-linear-attention)
"""

import ctypes
import statistics
import sys

import torch


def median_us(f, calls=20, rounds=9):
    for _ in range(5):
        f()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            f()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return statistics.median(times)


def main():
    library = ctypes.CDLL(sys.argv[1])
    library.cpx_conv_plan.restype = ctypes.c_void_p
    library.cpx_conv_workspace.restype = ctypes.c_int64
    rows, channels, taps, lengths = 32768, 8192, 4, [12000, 9000, 11768]
    torch.manual_seed(1)
    x = torch.randn(rows, channels, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    weight = (torch.randn(channels, taps, device="cuda") / 2).bfloat16()
    offsets = torch.tensor([0] + lengths).cumsum(0)
    plan = ctypes.c_void_p(library.cpx_conv_plan(ctypes.c_void_p(offsets.data_ptr()), len(lengths), taps))
    size = library.cpx_conv_workspace(plan, ctypes.c_int64(channels))
    y, dx = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    dweight = torch.zeros(channels, taps, device="cuda")
    workspace = torch.empty(size, device="cuda")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    p = lambda t: ctypes.c_void_p(t.data_ptr())
    n, c, k = (ctypes.c_int64(v) for v in (rows, channels, taps))

    def forward():
        assert library.cpx_conv_forward(plan, p(x), p(weight), p(y), n, c, k, stream) == 0

    def backward():
        dweight.zero_()
        assert library.cpx_conv_backward(plan, p(x), p(weight), p(dy), p(dx), p(dweight), p(workspace),
                                         ctypes.c_int64(size), n, c, k, stream) == 0

    forward()
    backward()
    print(f"causal convolution, {rows} x {channels} bf16, {taps} taps, silu, {len(lengths)} sequences")
    copied = torch.empty_like(x)
    gb = x.numel() * 2 * 1e-9
    copy = 2 * gb / median_us(lambda: copied.copy_(x)) * 1e6
    ours, ours_back = median_us(forward), median_us(backward)
    print(f"copy {copy:6.0f} GB/s")
    print(f"cpx  forward {ours:8.1f} us, {2 * gb / ours * 1e6 / copy:5.1%} of copy; "
          f"backward {ours_back:8.1f} us, {3 * gb / ours_back * 1e6 / copy:5.1%}")

    from fla.modules.causal_conv1d import causal_conv1d

    cu = offsets.cuda()
    xg, wg = x[None].clone().requires_grad_(), weight.clone().requires_grad_()
    run = lambda: causal_conv1d(xg, wg, None, activation="silu", cu_seqlens=cu)
    out = run()
    out = out[0] if isinstance(out, tuple) else out
    grads = lambda: torch.autograd.grad(out, (xg, wg), dy[None], retain_graph=True)
    gx, gw = grads()
    error = lambda a, b: ((a.float() - b.float()).norm() / b.float().norm()).item()
    print(f"fla against cpx: y {error(out[0], y):.1e}, dx {error(gx[0], dx):.1e}, dweight {error(gw, dweight):.1e}")
    theirs, theirs_back = median_us(run), median_us(grads)
    print(f"fla  forward {theirs:8.1f} us, cpx is {theirs / ours:4.2f} times as fast; "
          f"backward {theirs_back:8.1f} us, {theirs_back / ours_back:4.2f} times")


main()
