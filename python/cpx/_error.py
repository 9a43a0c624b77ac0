# SPDX-License-Identifier: Apache-2.0
"""The one exception of cpx."""

import collections.abc
import functools
import inspect
import numbers
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

# Packages whose frames are between a call of cpx and who made it. Their generated code has names of theirs, or none.
_between = frozenset(("cpx", "torch", "transformers", "contextlib", "concurrent"))


def _place() -> str:
    """Returns "file.py:12: " of the nearest caller that is of none of those packages; of the outermost if all are."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__")
        if isinstance(name, str) and name.partition(".")[0] not in _between:
            break
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}: "


class Error(ValueError):
    """What is wrong, where, what was expected and what was found.

    Its text reads "file.py:12: WHERE: WHAT: expected E, got G", with the line of the caller in Python; the parts are
    also attributes.
    """

    where: str
    problem: str
    expected: str
    got: str

    def __init__(self, where: str, problem: str = "", expected: str = "", got: str = "") -> None:
        self.where, self.problem, self.expected, self.got = where, problem, expected, got
        text = f"{where}: {problem}" if problem else where
        if expected:
            text += f": expected {expected}, got {got}"
        super().__init__(_place() + text)

    def message(self) -> str:
        """Returns the text without file and line."""
        text = f"{self.where}: {self.problem}" if self.problem else self.where
        return text + (f": expected {self.expected}, got {self.got}" if self.expected else "")

    def __reduce__(self) -> Any:
        return _restored, (self.args[0], self.where, self.problem, self.expected, self.got)


def _restored(text, where, problem, expected, got):
    error = Error(where, problem, expected, got)
    error.args = (text,)
    return error


def require(holds: bool, where: str, problem: str, expected, got) -> None:
    """Raises Error unless it holds."""
    if not holds:
        raise Error(where, problem, str(expected), str(got))


def told(function, where: str, traced: Callable[[], bool] | None = None):
    """Returns a function that raises Error, and nothing else, where an argument is not what its annotation says.

    Of functions of the extension, which have none, where it says that its arguments are others. What arguments that
    are as annotated make it raise goes on. Arguments are looked at after a failure only, and not where `traced()`.
    """

    @functools.wraps(function)
    def call(*args, **named):
        if traced is not None and traced():
            return function(*args, **named)
        try:
            return function(*args, **named)
        except Error:
            raise
        except Exception as e:
            _tell(function, where, args, named, e)
            raise

    return call


def tell(names: dict[str, Any], classes: Iterable[type] = (), traced: Callable[[], bool] | None = None) -> None:
    """Makes the functions of a module, and methods of its classes, ones that are `told`: those of its __all__.

    classes: those that are made by calling them.
    """
    for name in names["__all__"]:
        thing = names[name]
        if _is_function(thing):
            names[name] = told(thing, name, traced)
            names[name].__module__ = names["__name__"]  # where pickle finds it
        elif isinstance(thing, type) and not issubclass(thing, (Error, tuple)):
            for of, method in list(vars(thing).items()):
                if _is_function(method) and (of == "__init__" and thing in classes or of == "__call__" or of[0] != "_"):
                    made = told(method, name if of[0] == "_" else f"{name}.{of}", traced)
                    setattr(thing, of, staticmethod(made) if type(method).__name__ == "nb_func" else made)


def _is_function(thing) -> bool:
    return isinstance(thing, types.FunctionType) or type(thing).__name__ in ("nb_func", "nb_method")


def _tell(function, where, args, named, e) -> None:
    """Raises Error if arguments are what made a function raise `e`."""
    if isinstance(function, types.FunctionType):
        hints = typing.get_type_hints(function)
        try:
            given = inspect.signature(function).bind(*args, **named).arguments
        except TypeError:  # too many, or too few
            return
        for name, value in given.items():
            if name in hints and inspect.signature(function).parameters[name].kind not in (
                inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
            ) and not _fits(value, hints[name]):
                raise Error(where, name, _text(hints[name]), type(value).__name__) from e
    if not isinstance(e, TypeError) or "(): incompatible function arguments" not in str(e):
        return
    wanted, got = str(e).replace("cpx._ext.", "cpx.").split("\n\nInvoked with types: ")
    wanted = [line[line.index("(") :].rpartition(" -> ")[0] for line in wanted.splitlines()[1:]]
    raise Error(where, "arguments", " or ".join(wanted), got) from None


def _fits(value, hint) -> bool:
    """Whether a value is what an annotation says; of one that this does not know, any."""
    if isinstance(hint, typing.TypeVar):
        hint = hint.__bound__ or Any
    if hint is Any:
        return True
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in of)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is not None:
        if not isinstance(value, origin) or isinstance(value, str):
            return False
        one = of[0] if of and issubclass(origin, collections.abc.Iterable) and not issubclass(
            origin, (tuple, collections.abc.Mapping)
        ) else Any
        return one is Any or all(_fits(x, one) for x in value)
    if hint is float:
        return isinstance(value, numbers.Real)
    if hint is int:
        return _is_integer(value)
    return not isinstance(hint, type) or isinstance(value, hint)


def _is_integer(value) -> bool:
    try:
        operator.index(value)
    except Exception:  # of a tensor, what torch raises
        return False
    return True


def _text(hint) -> str:
    """Returns an annotation as users know it."""
    if isinstance(hint, typing.TypeVar):
        hint = hint.__bound__ or Any
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(_text, typing.get_args(hint)))
    if hint is type(None):
        return "None"
    if getattr(hint, "_is_protocol", False):
        return "an array"
    return re.sub(r"collections\.abc\.|\._\w+", "", inspect.formatannotation(hint))


