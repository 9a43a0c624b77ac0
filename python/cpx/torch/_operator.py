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
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform, _traced = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_profiled = torch._C._autograd._profiler_enabled
_plain = {torch.Tensor, torch.nn.Parameter}
_described = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # torch 2.10 and later: without a look at gradients


def array(x):
    """Returns x as package cpx reads it, for its values alone."""
    if x is None:
        return None
    if x.requires_grad and not _described:
        x = x.detach()
    return x.resolve_neg() if x.is_neg() else x


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
        if not isinstance(x, torch.Tensor):
            raise Error(where, name, "a torch.Tensor", type(x).__name__)
        if x.layout is not torch.strided:
            raise Error(where, f"layout of {name}", "torch.strided", str(x.layout))
        if x.device != device:
            raise Error(where, f"device of {name}", f"{device}, as of the call", str(x.device))
        if first is None:
            first = x.dtype
        elif name in _sums and not x.is_cpu:
            require(x.dtype is torch.float32, where, f"dtype of {name}", "torch.float32, on devices", x.dtype)
        elif x.dtype is not first:
            raise Error(where, f"dtype of {name}", f"{first}, as of the others", str(x.dtype))


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


def _watched():
    """Whether torch looks at calls beside running them: it traces, profiles, or is in a mode or a transform."""
    return (
        torch.compiler.is_compiling() or _modes() > 0 or _function_modes() > 0 or _transform() is not None
        or _profiled() or _traced() is not None
    )


def operator(schema, kernel, fake, save, backward, alone=None, seen=None):
    """Registers an operator and returns what calls it.

    save(ctx, args, results) keeps what backward(ctx, *gradients of results) needs, which returns one gradient, or
    None, for every argument. alone: the kernel where the dispatcher is left out, if None may stand for a result there.
    seen: so many results come back there from a call that is recorded, for all others are for the gradient.
    """

    def recorded(run, seen):
        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *args):
                results = run(*args)
                save(ctx, args, results)
                return results if seen is None else results[:seen]

            @staticmethod
            def backward(ctx, *gradients):
                return backward(ctx, *gradients)

        return Node

    return _register(schema, kernel, fake, recorded, alone or kernel, seen)


def backward_operator(schema, kernel, fake, alone=None):
    """The same of an operator that computes gradients, and has none itself: a double backward raises cpx.Error."""

    def recorded(run, seen):
        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *args):
                return run(*args)

            @staticmethod
            def backward(ctx, *gradients):
                raise Error(name.removesuffix("_backward"), "double backward", "a gradient that is taken once",
                            "a gradient of its gradient")

        return Node

    name = schema.partition("(")[0]
    return _register(schema, kernel, fake, recorded, alone or kernel, None)


def _register(schema, kernel, fake, recorded, alone, seen):
    """Registers an operator, whose tensors are its first arguments; recorded(run, seen) returns its node of autograd.

    What calls it leaves the dispatcher out where that would only run the kernel, which takes half of a call's time.
    """
    name, _, arguments = schema.partition("(")
    _operators.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _operators.impl(name, kernel, "CompositeExplicitAutograd")
    registry.register_fake("cpx::" + name, fake, lib=_operators)
    op = getattr(torch.ops.cpx, name).default
    tensors = arguments.partition(")")[0].count("Tensor")

    def dispatched(*args):
        with _below_autograd():
            return op(*args)

    node, node_alone = recorded(dispatched, None), recorded(alone, seen)
    for made in node, node_alone:
        made.__name__ = made.__qualname__ = name
    record = super(torch.autograd.Function, node_alone).apply  # Function's own looks for transforms: there are none

    def autograd(*args):
        return node.apply(*args) if wants_gradient(args) else dispatched(*args)

    def call(*args):
        if _watched():
            return op(*args)
        wanted = False
        for x in args[:tensors]:
            if x is not None:
                if type(x) not in _plain:
                    return op(*args)
                wanted = wanted or x.requires_grad
        return record(*args) if wanted and torch.is_grad_enabled() else alone(*args)

    _operators.impl(name, autograd, "Autograd")
    return call
