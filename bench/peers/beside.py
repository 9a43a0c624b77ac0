# SPDX-License-Identifier: Apache-2.0
"""What programs share that time peers on PyTorch's tensors, most of them beside libcpx_peers.so (see library.cu)."""

import ctypes
import importlib.metadata
import os
import statistics
import sys
import time


def usage(program, library=True):
    if not library:
        return f"usage: python3 bench/peers/{program} (no arguments)"
    return f"""usage: python3 bench/peers/{program} LIBRARY
  LIBRARY  build/gpu/bench/libcpx_peers.so, of: cmake --preset gpu && cmake --build --preset gpu --target cpx_peers"""


def stop(code, *lines):
    print(*lines, sep="\n", file=sys.stderr if code else sys.stdout)
    sys.exit(code)


def begin(program, library=True):
    """Returns PyTorch, for a command line that names a library, or nothing if the program wants none; ends the program
    with how to call it otherwise."""
    if len(sys.argv) != 1 + library or (library and sys.argv[1].startswith("-")):
        stop(2, usage(program, library))
    if library and not os.path.isfile(sys.argv[1]):
        stop(2, usage(program), f"no such file: {sys.argv[1]}")
    # One file of this folder has the name of a peer's package, which flash-linear-attention imports, too.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [p for p in sys.path if os.path.abspath(p) != here]
    try:
        import torch
    except ImportError as e:
        stop(2, usage(program, library), f"needs PyTorch: {e}")
    return torch


def name_gpu():
    """Prints on what the program runs; ends it, as skipped, if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        stop(0, "cpx: skipped, GPUs: 1 wanted, 0 found")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}")


def load(program, functions):
    """Returns the library that the command line names, with these functions: (name, result, arguments) of each. Ends
    the program if it is another file, or, as skipped, if there is no GPU."""
    try:
        library = ctypes.CDLL(os.path.abspath(sys.argv[1]))  # a name without / is looked for in the system's folders
        for name, result, arguments in functions:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as e:
        stop(2, usage(program), f"not that library: {e}")
    name_gpu()
    return library


def rest():
    """Lets the GPU rest for a second. At its power's limit a GPU slows down, some 0.1 s after it has begun to draw so
    much: without rest a figure would depend on what was timed, or compiled, before it."""
    import torch

    torch.cuda.synchronize()
    time.sleep(1)


def median_ms(functions, calls, rounds):
    """Returns the milliseconds that a call of each takes on the GPU, one after the other in every round, of which the
    first does not count: medians of rounds between two events. As many calls again come before the first event, for the
    host to be ahead and the GPU at work, as in training."""
    import torch

    times = [[] for _ in functions]
    for number in range(rounds + 1):
        for function, of in zip(functions, times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for call in range(2 * calls):
                if call == calls:
                    begin.record()
                function()
            end.record()
            end.synchronize()
            if number > 0:
                of.append(begin.elapsed_time(end) / calls)
    return [statistics.median(of) for of in times]


def must(done):
    if not done:
        stop(1, "cpx failed; the line above says why")


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
