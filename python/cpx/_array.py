# SPDX-License-Identifier: Apache-2.0
"""Memory for results: in the framework of the caller's arrays."""

from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from ._error import require


@runtime_checkable
class AnyArray(Protocol):
    """An array of NumPy, torch, JAX, CuPy or whatever speaks DLPack, or `Sharded`."""

    @property
    def shape(self) -> Any: ...


Array = TypeVar("Array", bound=AnyArray)  # whatever a result is like
Weight = TypeVar("Weight", bound=AnyArray)  # the same of another argument


def empty_like(x, shape, dtype=None, zeros=False):
    """Returns an array of `shape` in the framework and on the device of `x`, and of its dtype if none is told.

    NumPy's, torch's and CuPy's are made by these; of any other framework it is an array of NumPy, which `finish` hands
    over.
    """
    kind = type(x).__module__.partition(".")[0]
    if kind == "torch":
        import torch

        make = torch.zeros if zeros else torch.empty
        return make(tuple(shape), dtype=dtype or x.dtype, device=x.device)
    if kind == "cupy":
        import cupy

        return (cupy.zeros if zeros else cupy.empty)(tuple(shape), dtype=dtype or x.dtype)
    return (np.zeros if zeros else np.empty)(tuple(shape), dtype=dtype or x.dtype)


def finish(x, made):
    """Returns a result, made for `x` by `empty_like`, in the framework of `x`: without a copy, but for bfloat16."""
    if isinstance(made, np.ndarray) and not isinstance(x, np.ndarray) and hasattr(x, "__array_namespace__"):
        namespace = x.__array_namespace__()
        if made.dtype.kind == "V":  # of ml_dtypes, which NumPy does not hand over
            return namespace.asarray(made)
        return namespace.from_dlpack(made)
    return made


def shape_of(where, name, x):
    """Returns the shape of an array of rows. Raises cpx.Error if x is none."""
    shape = getattr(x, "shape", None)
    require(shape is not None and len(shape) > 0, where, name, "an array of rows", type(x).__name__)
    return tuple(shape)


def result(x, out, shape, dtype=None, zeros=False):
    """Returns `out`, or memory like x if it is None."""
    return empty_like(x, shape, dtype, zeros) if out is None else out
