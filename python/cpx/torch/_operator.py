# SPDX-License-Identifier: Apache-2.0
"""How an operator of cpx becomes one of torch: `torch.ops.cpx.NAME`.

The kernels of the key Autograd are registered here, and not by torch's `register_autograd`, whose general one costs
twenty microseconds more a call.
"""

import torch
from torch import library as registry

from cpx._error import Error, require

from ._objects import held

_operators = getattr(registry, "Library")("cpx", "DEF")
_below_autograd = torch._C._AutoDispatchBelowAutograd
_numpy_knows = {
    torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.bool,
}


def array(x):
    """Returns what package cpx reads and writes of a tensor: NumPy's view where there is one, which is cheap."""
    if x is None:
        return None
    if x.requires_grad:
        x = x.detach()
    return x.numpy() if x.is_cpu and x.dtype in _numpy_knows else x


def contiguous_like(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def moved(x):
    """Returns what can be sent: x, or a copy where the rows of a device's tensor are apart, or not aligned."""
    if x.is_cpu:
        return x
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def sums(x):
    """Returns the dtype in which gates, states and gradients of weights are: on devices float32, else that of x."""
    return x.dtype if x.is_cpu else torch.float32


def check(where, device, _sums=(), **tensors):
    """Raises cpx.Error unless all are tensors of one dtype on that device. None is none.

    _sums: those that are of `sums` of the others.
    """
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        require(isinstance(x, torch.Tensor), where, name, "a torch.Tensor", type(x).__name__)
        require(x.layout == torch.strided, where, f"layout of {name}", "torch.strided", x.layout)
        if x.device != device:
            raise Error(where, f"device of {name}", f"{device}, as of the call", str(x.device))
        if first is None:
            first = x
        elif name in _sums and not x.is_cpu:
            require(x.dtype == torch.float32, where, f"dtype of {name}", "torch.float32, on devices", x.dtype)
        elif x.dtype != first.dtype:
            raise Error(where, f"dtype of {name}", f"{first.dtype}, as of the others", str(x.dtype))


def keep(ctx, where, plan, comm):
    """Keeps the objects of a call for its backward. While torch traces, their handles may be symbols."""
    ctx.plan, ctx.comm = plan, comm
    if isinstance(plan, int) and isinstance(comm, int):
        ctx.held = held(where, "plan", plan), held(where, "communicator", comm)


def wants_gradient(args):
    """Whether a call with these arguments is one of those that autograd records."""
    if torch.is_grad_enabled():
        for a in args:  # any() of a generator costs microseconds
            if isinstance(a, torch.Tensor) and a.requires_grad:
                return True
    return False


def operator(schema, kernel, fake, save, backward):
    """Registers an operator and returns what calls it.

    save(ctx, args, results) keeps what backward(ctx, *gradients of results) needs, which returns one gradient, or
    None, for every argument.
    """
    op, name = _define(schema, kernel, fake)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            with _below_autograd():
                results = op(*args)
            save(ctx, args, results)
            return results

        @staticmethod
        def backward(ctx, *gradients):
            return backward(ctx, *gradients)

    return _register_autograd(op, name, Node)


def backward_operator(schema, kernel, fake):
    """The same of an operator that computes gradients, and has none itself: a double backward raises cpx.Error."""
    op, name = _define(schema, kernel, fake)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            with _below_autograd():
                return op(*args)

        @staticmethod
        def backward(ctx, *gradients):
            raise Error(name.removesuffix("_backward"), "double backward", "a gradient that is taken once",
                        "a gradient of its gradient")

    return _register_autograd(op, name, Node)


def _define(schema, kernel, fake):
    name = schema.partition("(")[0]
    _operators.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _operators.impl(name, kernel, "CompositeExplicitAutograd")
    registry.register_fake("cpx::" + name, fake, lib=_operators)
    return getattr(torch.ops.cpx, name).default, name


def _register_autograd(op, name, node):
    def autograd(*args):
        if wants_gradient(args):
            return node.apply(*args)
        with _below_autograd():
            return op(*args)

    def call(*args):
        return op(*args) if torch.compiler.is_compiling() else autograd(*args)  # the dispatcher would only come here

    node.__name__ = node.__qualname__ = name
    _operators.impl(name, autograd, "Autograd")
    return call
