# SPDX-License-Identifier: Apache-2.0
"""Causal attention by PyTorch, for the work that bench.cuda.attention times: run one after the other.

python3 bench/peers/attention.py

scaled_dot_product_attention by FlashAttention and by cuDNN, in bfloat16, query heads that share key heads, sequences of
one length as a batch; the backward of all three inputs. Medians of rounds between two events, and beside them the share
of what one product of 8192 x 8192 matrices reaches on the same GPU.
"""

from beside import begin, median_ms, name_gpu

torch = begin("attention.py", library=False)

PEERS = ("FLASH_ATTENTION", "CUDNN_ATTENTION")


def milliseconds(f, calls=2):
    return median_ms([f], calls, rounds=5)[0]


def attention(peer, sequences, length, query_heads, key_heads, dim):
    """Returns the milliseconds of a forward and of a backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(1)
    made = [torch.rand(sequences, length, heads, dim, device="cuda").mul_(2).sub_(1).bfloat16()
            for heads in (query_heads, key_heads, key_heads, query_heads)]
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in made[:3])
    dout = made[3].transpose(1, 2)

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(getattr(SDPBackend, peer)):
        with torch.no_grad():
            first = milliseconds(forward)
        o = forward()
        return first, milliseconds(lambda: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True))


def main():
    name_gpu()
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    reached = 2 * 8192**3 / milliseconds(lambda: a @ b, calls=10) * 1e-9
    print(f"cuDNN {torch.backends.cudnn.version()}; a product of 8192 x 8192 matrices reaches {reached:.0f} TFLOP/s")
    print(f"{'sequences':12s} {'heads':14s} {'by':17s} {'':9s} {'ms':>9s} {'TFLOP/s':>9s} {'of it':>6s}")
    for sequences, length in ((1, 8192), (4, 8192), (1, 32768)):
        for query_heads, key_heads, dim in ((16, 2, 256), (32, 8, 128)):
            flop = 2 * sequences * length * (length + 1) / 2 * query_heads * dim  # of a product of what is not masked
            for peer in PEERS:
                name = (f"{f'{sequences} x {length}':12s} {f'{query_heads}/{key_heads} of {dim}':14s} {peer:17s}")
                try:
                    times = attention(peer, sequences, length, query_heads, key_heads, dim)
                except RuntimeError as e:
                    print(name, "skipped:", str(e).splitlines()[0])
                    continue
                for ms, products, direction in zip(times, (2, 5), ("forward", "backward")):
                    rate = products * flop / ms * 1e-9
                    print(f"{name} {direction:9s} {ms:9.3f} {rate:9.1f} {rate / reached:6.1%}", flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
