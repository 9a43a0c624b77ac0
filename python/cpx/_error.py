# SPDX-License-Identifier: Apache-2.0
"""The one exception of cpx."""

import functools
import os
import sys

_package = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _place() -> str:
    """Returns "file.py:12: " of the innermost caller that is not of this package, nor of torch; or nothing."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    between = (_package, os.path.dirname(torch) + os.sep) if torch else (_package,)
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(between):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}: "


class Error(ValueError):
    """What is wrong, where, what was expected and what was found.

    Its text reads "file.py:12: WHERE: WHAT: expected E, got G", with the line of the caller in Python; the parts are
    also attributes.
    """

    def __init__(self, where: str, problem: str = "", expected: str = "", got: str = ""):
        self.where, self.problem, self.expected, self.got = where, problem, expected, got
        text = f"{where}: {problem}" if problem else where
        if expected:
            text += f": expected {expected}, got {got}"
        super().__init__(_place() + text)

    def message(self) -> str:
        """Returns the text without file and line."""
        text = f"{self.where}: {self.problem}" if self.problem else self.where
        return text + (f": expected {self.expected}, got {self.got}" if self.expected else "")

    def __reduce__(self):
        return _restored, (self.args[0], self.where, self.problem, self.expected, self.got)


def _restored(text, where, problem, expected, got):
    error = Error(where, problem, expected, got)
    error.args = (text,)
    return error


def require(holds: bool, where: str, problem: str, expected, got) -> None:
    """Raises Error unless it holds."""
    if not holds:
        raise Error(where, problem, str(expected), str(got))


def told(function):
    """Returns a function of the extension that raises Error, not TypeError, where objects are of other kinds."""

    @functools.wraps(function)
    def call(*args, **named):
        try:
            return function(*args, **named)
        except TypeError as e:
            name, text = function.__name__, str(e)
            if not text.startswith(f"{name}(): incompatible function arguments"):
                raise
            wanted, got = text.replace("cpx._ext.", "cpx.").split("\n\nInvoked with types: ")
            wanted = [line.split(name, 1)[1].rpartition(" -> ")[0] for line in wanted.splitlines()[1:]]
        raise Error(name, "arguments", " or ".join(wanted), got)

    return call
