# SPDX-License-Identifier: Apache-2.0
"""How an operator of cpx becomes one of torch: `torch.ops.cpx.NAME`.

The kernels of the key Autograd are registered here, and not by torch's `register_autograd`, whose general one costs
twenty microseconds more a call.
"""

import functools

import torch
from torch import library as registry
from torch.autograd import forward_ad

from cpx import _ext
from cpx._error import Error, require

from ._objects import held

_operators = getattr(registry, "Library")("cpx", "DEF")
_below_autograd = torch._C._AutoDispatchBelowAutograd
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform, _traced = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_profiled, _any_autocast = torch._C._autograd._profiler_enabled, torch._C._is_any_autocast_enabled
_plain = {torch.Tensor, torch.nn.Parameter}
_optional = "bias", "beta", "initial"  # of the arguments of operators that are tensors, those that may be None
_described = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # torch 2.10 and later: without a look at gradients


def array(x):
    """Returns x as package cpx reads it, for its values alone. Kernels are given what has gone through this."""
    if x is None:
        return None
    if x.requires_grad and not _described:
        x = x.detach()
    return x.resolve_neg() if x.is_neg() else x


def contiguous_like(x, *_):
    if x.is_contiguous():  # saves torch to read a format
        return torch.empty_like(x)
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


@functools.cache
def _place(device):
    """Returns type and number of a device, as DLPack has them, or what no tensor has."""
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    return (2, index) if kind == "cuda" and index is not None else (int(kind == "cpu"), 0)


def check(where, device, _sums=(), **tensors):
    """Raises cpx.Error unless all are tensors of one dtype on that device; those that operators may lack may be None.

    _sums: those that are of `sums` of the others.
    Returns whether autograd records a call of these tensors, or None if torch must see it; see `_register`.
    """
    if not _watched():
        wanted = _ext.gradient_wanted_of(tensors, _plain, *_place(device), _sums, _optional)
        if wanted is not None:  # and all fits: what does not is named below
            return wanted and torch.is_grad_enabled()
    first = None
    for name, x in tensors.items():
        if x is None and name in _optional:
            continue
        check_tensor(where, device, name, x)
        if first is None:
            first = x.dtype
        elif name in _sums and not x.is_cpu:
            require(x.dtype is torch.float32, where, f"dtype of {name}", "torch.float32, on devices", x.dtype)
        elif x.dtype is not first:
            raise Error(where, f"dtype of {name}", f"{first}, as of the others", str(x.dtype))
    return None


def check_tensor(where, device, name, x):
    """Raises cpx.Error unless x is a tensor on that device."""
    if not isinstance(x, torch.Tensor):
        raise Error(where, name, "a torch.Tensor", type(x).__name__)
    if x.layout is not torch.strided:
        raise Error(where, f"layout of {name}", "torch.strided", str(x.layout))
    if x.device != device:
        raise Error(where, f"device of {name}", f"{device}, as of the call", str(x.device))


def autocast(x, *weights):
    """Returns x and weights as an operator takes them under torch.autocast, whose rule for convolutions this is: in its
    dtype, but for float64; on the host, where operators compute in 32 bits or more, in float32."""
    if not _any_autocast():  # as in most calls, of which this is the cheapest question
        return x, *weights
    device = x.device.type if isinstance(x, torch.Tensor) else None
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return x, *weights
    kind = torch.float32 if device == "cpu" else torch.get_autocast_dtype(device)
    return tuple(
        t.to(kind) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype is not torch.float64 else t
        for t in (x, *weights)
    )


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


def _forward_mode():
    return forward_ad._current_level >= 0


def _watched():
    """Whether torch looks at calls beside running them: it traces, profiles, or is in a mode or a transform."""
    return (
        torch.compiler.is_compiling() or _modes() > 0 or _function_modes() > 0 or _transform() is not None
        or _profiled() or _traced() is not None or _forward_mode()
    )


def _refuse_tangents(where, tensors):
    """Raises cpx.Error if a tensor has a tangent: torch would drop it, and say that the derivative is 0."""
    if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise Error(where, "forward-mode derivative", "gradients, by backward", "a tensor with a tangent")


def operator(schema, kernel, fake, save, backward, alone=None, seen=None):
    """Registers an operator and returns what calls it: call(recorded, *args), where `check` returned `recorded`.

    save(ctx, args, results) keeps what backward(ctx, *gradients of results) needs, which returns one gradient, or
    None, for every argument. alone: the kernel where the dispatcher is left out, if None may stand for a result there.
    seen: so many results come back there from a call that is recorded, for all others are for the gradient.
    """

    def forward(ctx, run, args):
        results = run(*args)
        save(ctx, args, results)
        return results

    return _register(schema, kernel, fake, forward, backward, alone or kernel, seen)


def backward_operator(schema, kernel, fake, alone=None):
    """The same of an operator that computes gradients, and has none itself: a double backward raises cpx.Error.

    Returns call(*args), which asks of its tensors itself.
    """
    name, tensors = schema.partition("(")[0], _tensors(schema)

    def backward(ctx, *gradients):
        raise Error(name.removesuffix("_backward"), "double backward", "a gradient that is taken once",
                    "a gradient of its gradient")

    call = _register(schema, kernel, fake, lambda ctx, run, args: run(*args), backward, alone or kernel, None)

    def ask_and_call(*args):
        wanted = None if _watched() else _ext.gradient_wanted(args[:tensors], _plain)
        return call(wanted and torch.is_grad_enabled(), *args)

    return ask_and_call


def _tensors(schema):
    """Returns how many tensors an operator takes, which are its first arguments."""
    return schema.partition("(")[2].partition(")")[0].count("Tensor")


def _register(schema, kernel, fake, forward, backward, alone, seen):
    """Registers an operator and returns what calls it: call(recorded, *args). forward(ctx, run, args) runs run(*args).

    A call leaves the dispatcher out, which takes half of its time, unless `recorded` is None: else that would only run
    the kernel, or the node of autograd.
    """
    name, tensors = schema.partition("(")[0], _tensors(schema)

    def of_values(run):
        return lambda *args: run(*map(array, args[:tensors]), *args[tensors:])

    if not _described:
        alone = of_values(alone)
    _operators.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _operators.impl(name, of_values(kernel), "CompositeExplicitAutograd")
    registry.register_fake("cpx::" + name, fake, lib=_operators)
    op = getattr(torch.ops.cpx, name).default

    def dispatched(*args):
        with _below_autograd():
            return op(*args)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            return forward(ctx, dispatched, args)

        @staticmethod
        def backward(ctx, *gradients):
            return backward(ctx, *gradients)

    class Alone(torch.autograd.Function):  # what are no tensors is one argument: torch looks at each
        @staticmethod
        def forward(ctx, *args):
            results = forward(ctx, alone, (*args[:-1], *args[-1]))
            return results if seen is None else results[:seen]

        @staticmethod
        def backward(ctx, *gradients):
            return *backward(ctx, *gradients)[:tensors], None

    for node in Node, Alone:
        node.__name__ = node.__qualname__ = name
    record = super(torch.autograd.Function, Alone).apply  # Function's own looks for transforms: there are none

    def autograd(*args):
        if _forward_mode():
            _refuse_tangents(name, args[:tensors])
        return Node.apply(*args) if wants_gradient(args) else dispatched(*args)

    def call(recorded, *args):
        if recorded is None:
            return op(*args)
        return record(*args[:tensors], args[tensors:]) if recorded else alone(*args)

    _operators.impl(name, autograd, "Autograd")
    return call
