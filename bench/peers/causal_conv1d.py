# SPDX-License-Identifier: Apache-2.0
"""The causal convolution of cpx beside its peers', on the same tensors in the same process.

python3 bench/peers/causal_conv1d.py build/gpu/bench/libcpx_peers.so     (needs PyTorch; see library.cu)

Peers, each skipped where it is not installed:
    flash-linear-attention    pip install flash-linear-attention
    Dao-AILab causal-conv1d   pip install causal-conv1d --no-build-isolation

A peer's result is ok if it is as far from cpx's, in the 2-norm, as two roundings to bf16 may be: 2^-7 of it. Exit code
1 if one is not.
"""

import ctypes
import sys

from beside import begin, load, median_ms, must, version

PROGRAM, TOLERANCE = "causal_conv1d.py", 2**-7
torch = begin(PROGRAM)


def median_us(f):
    return 1e3 * median_ms([f], calls=20, rounds=9)[0]


def compare(a, b):
    """Returns whether a is close to b, and how far it is, relative: in the 2-norm, and the largest, as text."""
    difference, b = a.float() - b.float(), b.float()
    norm, largest = (difference.norm() / b.norm()).item(), (difference.abs().max() / b.abs().max()).item()
    right = norm <= TOLERANCE  # NaN is not
    return right, f"{norm:.1e} (largest {largest:.1e}) {'ok' if right else 'WRONG'}"


def flash_linear_attention(x, weight, dy, lengths):
    """Returns functions that compute y, and dx and dweight, in Triton."""
    from fla.modules.causal_conv1d import causal_conv1d

    offsets = torch.tensor([0] + lengths).cumsum(0).cuda()
    x, weight = x[None].clone().requires_grad_(), weight.clone().requires_grad_()

    def forward():
        out = causal_conv1d(x, weight, None, activation="silu", cu_seqlens=offsets)
        return out[0] if isinstance(out, tuple) else out

    y = forward()
    backward = lambda: torch.autograd.grad(y, (x, weight), dy[None], retain_graph=True)
    return forward, backward


def dao(x, weight, dy, lengths):
    """Returns functions that compute y, and dx and dweight, in CUDA: a batch of 1, sequences told apart by seq_idx."""
    import causal_conv1d_cuda

    channel_last = lambda t: t[None].transpose(1, 2)  # (1, channels, rows)
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))[None].cuda()
    y, dx = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    dweight = torch.zeros(weight.shape, device="cuda")  # is added to

    def forward():
        causal_conv1d_cuda.causal_conv1d_fwd(channel_last(x), weight, None, seq_idx, None, channel_last(y), None, True)
        return y

    def backward():
        dweight.zero_()
        causal_conv1d_cuda.causal_conv1d_bwd(channel_last(x), weight, None, channel_last(dy), seq_idx, None, None,
                                             channel_last(dx), dweight, None, None, True)
        return dx, dweight

    return forward, backward


def main():
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library = load(PROGRAM, (("cpx_conv_plan", pointer, [pointer, integer, integer]),
                             ("cpx_conv_plan_free", None, [pointer]),
                             ("cpx_conv_workspace", size, [pointer, size]),
                             ("cpx_conv_forward", integer, [pointer] * 4 + [size] * 3 + [pointer]),
                             ("cpx_conv_backward", integer, [pointer] * 7 + [size] * 4 + [pointer])))
    rows, channels, taps, lengths = 32768, 8192, 4, [12000, 9000, 11768]
    torch.manual_seed(1)
    x = torch.randn(rows, channels, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    weight = (torch.randn(channels, taps, device="cuda") / 2).bfloat16()
    offsets = torch.tensor([0] + lengths).cumsum(0)
    plan = library.cpx_conv_plan(offsets.data_ptr(), len(lengths), taps)
    must(plan is not None)
    room = library.cpx_conv_workspace(plan, channels)
    must(room >= 0)
    y, dx = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    dweight = torch.zeros(channels, taps, device="cuda")
    workspace = torch.empty(room, device="cuda")
    shape, stream = (rows, channels, taps), torch.cuda.current_stream().cuda_stream
    p = torch.Tensor.data_ptr

    def forward():
        must(library.cpx_conv_forward(plan, p(x), p(weight), p(y), *shape, stream) == 0)

    def backward():
        dweight.zero_()
        must(library.cpx_conv_backward(plan, p(x), p(weight), p(dy), p(dx), p(dweight), p(workspace), room, *shape,
                                       stream) == 0)

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

    all_right = True
    for name, package, peer in (("fla", "flash-linear-attention", flash_linear_attention),
                                ("dao", "causal-conv1d", dao)):
        try:
            their_forward, their_backward = peer(x, weight, dy, lengths)
        except ImportError as e:
            print(f"{name:4s} skipped: {package}: {e}")
            continue
        their_y, (their_dx, their_dweight) = their_forward(), their_backward()
        results = [(what, *compare(theirs.view_as(ours_of_it), ours_of_it)) for what, theirs, ours_of_it in
                   (("y", their_y, y), ("dx", their_dx, dx), ("dweight", their_dweight, dweight))]
        all_right = all_right and all(right for _, right, _ in results)
        print(f"{name:4s} {package} {version(package)}, against cpx: "
              + ", ".join(f"{what} {text}" for what, _, text in results))
        theirs, theirs_back = median_us(their_forward), median_us(their_backward)
        print(f"{name:4s} forward {theirs:8.1f} us, cpx is {theirs / ours:4.2f} times as fast; "
              f"backward {theirs_back:8.1f} us, {theirs_back / ours_back:4.2f} times")
    library.cpx_conv_plan_free(plan)
    sys.exit(0 if all_right else 1)


if __name__ == "__main__":
    main()
