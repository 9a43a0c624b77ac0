# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of cpx beside its peers', on the same tensors in the same process.

python3 bench/peers/gated_delta_rule.py build/gpu/bench/libcpx_peers.so     (needs PyTorch; see library.cu)

Peers, each skipped where it is not installed:
    FlashQLA                  pip install flash-qla
    flash-linear-attention    pip install flash-linear-attention (its own kernels)

First the errors of all against the recurrence token by token in float64, then times, each line after a second of rest:
one after the other, some rounds of calls as users make them, a round between two events; of the backward after a
forward that has saved what it saves.
Exit code 1 if an error of cpx is more than 1.05 times FlashQLA's with mild gates, or more than 2^-7.
"""

import ctypes
import os
import sys

from beside import begin, load, median_ms, must, rest, version

PROGRAM = "gated_delta_rule.py"
torch = begin(PROGRAM)

DIM = 128
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")


class DeltaRule(ctypes.Structure):
    """As in library.cu."""

    _fields_ = ([(name, ctypes.c_void_p) for name in ("q", "k", "v", "g", "beta", "offsets")]
                + [(name, ctypes.c_int64)
                   for name in ("tokens", "sequences", "key_heads", "value_heads", "dim", "scan")]
                + [(name, ctypes.c_void_p) for name in ("saved", "workspace", "stream")])


class Problem:
    """Tensors (tokens, heads, channels), q and k normalised; gates (tokens, value heads). `scan`: cpx does."""

    def __init__(self, lengths, key_heads, value_heads, gates, scan=False):
        torch.manual_seed(3)
        self.lengths, self.scan, tokens = lengths, scan, sum(lengths)
        self.offsets = torch.tensor([0] + lengths).cumsum(0).cuda()
        random = lambda *shape: torch.randn(*shape, device="cuda")
        normalised = lambda x: torch.nn.functional.normalize(x, dim=-1).bfloat16()
        self.q, self.k = normalised(random(tokens, key_heads, DIM)), normalised(random(tokens, key_heads, DIM))
        self.v, self.do = random(tokens, value_heads, DIM).bfloat16(), random(tokens, value_heads, DIM).bfloat16()
        self.beta = random(tokens, value_heads).sigmoid()
        g = torch.nn.functional.logsigmoid(random(tokens, value_heads))
        self.g = {"mild": g / 16, "strong": 10 * g, "none": 0 * g}[gates]

    def inputs(self):
        return self.q, self.k, self.v, self.g, self.beta


def exact(p):
    """Returns o and the gradients, by the recurrence token by token in float64."""
    q, k, v, g, beta = inputs = [x.double().requires_grad_() for x in p.inputs()]
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    out, begin = [], 0
    for length in p.lengths:
        state = torch.zeros(v.shape[1], DIM, DIM, dtype=torch.float64, device="cuda")  # (heads, keys, values)
        for t in range(begin, begin + length):
            state = state * g[t].exp()[:, None, None]
            read = (state * k[t][:, :, None]).sum(1)
            state = state + k[t][:, :, None] * (beta[t][:, None] * (v[t] - read))[:, None, :]
            out.append((state * q[t][:, :, None]).sum(1) * DIM**-0.5)
        begin += length
    o = torch.stack(out)
    return [o.detach(), *torch.autograd.grad(o, inputs, p.do.double())]


def ours(library):
    """Returns a function that makes those that compute o, and the gradients, by cpx."""

    def make(p):
        tokens, key_heads, value_heads = p.q.shape[0], p.q.shape[1], p.v.shape[1]
        sizes = (ctypes.c_int64 * 3)()
        must(library.cpx_delta_rule_bytes(tokens, len(p.lengths), key_heads, value_heads, DIM, p.scan, sizes) == 0)
        room = lambda size: torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        workspace, saved = room(max(sizes[0], sizes[1])), room(sizes[2])
        results = [torch.full_like(x, float("nan")) for x in (p.v, p.q, p.k, p.v, p.g, p.beta)]
        pointer = torch.Tensor.data_ptr
        of = DeltaRule(*(pointer(x) for x in (*p.inputs(), p.offsets)), tokens, len(p.lengths), key_heads, value_heads,
                       DIM, p.scan, None, pointer(workspace), torch.cuda.current_stream().cuda_stream)
        keeping = DeltaRule.from_buffer_copy(of)
        keeping.saved = pointer(saved) if sizes[2] else None
        held = workspace, saved  # as long as what is returned

        def forward(keep=False):
            must(library.cpx_delta_rule_forward(ctypes.byref(keeping if keep else of), pointer(results[0])) == 0)
            return results[0]

        def backward():
            must(library.cpx_delta_rule_backward(ctypes.byref(keeping), pointer(p.do), *map(pointer, results[1:])) == 0)
            return held and results[1:]

        forward(True)
        return forward, backward

    return make


def theirs(function):
    """The same by a peer's function, which all of them have by one signature."""

    def make(p):
        inputs = [x[None].clone().requires_grad_() for x in p.inputs()]
        call = lambda: function(*inputs, cu_seqlens=p.offsets)[0]

        def forward():
            with torch.no_grad():
                return call()[0]

        o = call()
        backward = lambda: [x[0] for x in torch.autograd.grad(o, inputs, p.do[None], retain_graph=True)]
        return forward, backward

    return make


def flash_qla():
    from flash_qla import chunk_gated_delta_rule

    return theirs(chunk_gated_delta_rule)


def fla():
    os.environ["FLA_FLASH_QLA"] = "0"  # its own kernels, not those of FlashQLA, which it calls where that is installed
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return theirs(chunk_gated_delta_rule)


def compare_errors(members):
    """Prints the relative errors of all, takes peers that fail off the list, and returns whether those of cpx are small
    enough, and which peers have no backward."""
    right, forward_alone = True, set()
    print(f"{'error':30s}" + "".join(f"{name:>10s}" for name in NAMES))
    for gates in ("mild", "strong", "none"):
        p = Problem([200, 311, 513], 2, 4, gates)
        expected, errors = exact(p), {}
        for name, make in list(members.items()):
            results = []
            try:
                forward, backward = make(p)
                results.append(forward())
                if name not in forward_alone:
                    results.extend(backward())
            except Exception as e:  # a peer may refuse the versions of what it is built on
                if name == "cpx":
                    raise
                print(f"{name}{', backward,' if results else ''} left out: {e}")
                if not results:
                    del members[name]
                    continue
                forward_alone.add(name)
            errors[name] = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, expected)]
            print(f"{name:22s}{gates:8s}" + "".join(f"{e:10.1e}" for e in errors[name]))
        right = right and all(e <= 2**-7 for e in errors["cpx"])  # NaN is not
        if gates == "mild" and "FlashQLA" in errors:
            right = right and all(a <= 1.05 * b for a, b in zip(errors["cpx"], errors["FlashQLA"]))
    return right, forward_alone


def main():
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library = load(PROGRAM, (("cpx_delta_rule_bytes", integer, [size] * 6 + [pointer]),
                             ("cpx_delta_rule_forward", integer, [pointer] * 2),
                             ("cpx_delta_rule_backward", integer, [pointer] * 7)))
    members = {"cpx": ours(library)}
    for name, package, peer in (("FlashQLA", "flash-qla", flash_qla), ("fla", "flash-linear-attention", fla)):
        try:
            members[name] = peer()
            print(f"{name}: {package} {version(package)}")
        except (ImportError, OSError) as e:  # of a library that it wants
            print(f"{name} skipped: {package}: {e}")
    right, forward_alone = compare_errors(members)
    print(f"\n{'ms, heads of 128':36s}" + "".join(f"{name:>10s}" for name in members))
    for lengths, heads, scan in (([32768], (16, 32), False), ([8192] * 4, (16, 32), False), ([8192], (16, 32), False),
                                 ([131072], (16, 32), False), ([32768], (2, 8), True)):
        for gates in ("mild", "strong", "none"):
            p = Problem(lengths, *heads, gates, scan)
            made = {name: make(p) for name, make in members.items()}
            for direction, what in enumerate(("forward",) if scan else ("forward", "backward")):
                taking_part = [name for name in made if direction == 0 or name not in forward_alone]
                calls = 2 if sum(lengths) > 100000 else 5
                rest()
                times = dict(zip(taking_part, median_ms([made[name][direction] for name in taking_part], calls, 9)))
                work = f"{what} {len(lengths)} x {lengths[0]}, {heads[0]}/{heads[1]}, {gates}"
                columns = (f"{times[name]:10.3f}" if name in times else f"{'-':>10s}" for name in made)
                print(f"{work:36s}" + "".join(columns), flush=True)
            del p, made
            torch.cuda.empty_cache()
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
