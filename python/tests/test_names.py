# SPDX-License-Identifier: Apache-2.0
"""What a user's editor shows of every public name: its text, and its types."""

import importlib
import inspect
import pathlib
import pickle
import re

import pytest

import cpx


def text_of(thing):
    """Returns the docstring without the signatures that the extension writes."""
    return re.sub(r"(?m)^\w*\(.*\) -> .*$", "", inspect.getdoc(thing) or "").strip()


@pytest.mark.parametrize("name", ["cpx", "cpx.torch"])
def test_every_public_name_has_a_docstring(name):
    if name == "cpx.torch":
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    without = []
    for public in module.__all__:
        thing = getattr(module, public)
        if not text_of(thing):
            without.append(public)
        if not inspect.isclass(thing):
            continue
        for of in inspect.getmro(thing):
            members = vars(of).items() if of.__module__.startswith("cpx") else ()
            members = [(member, x) for member, x in members if callable(x) or inspect.isdatadescriptor(x)]
            without += [f"{public}.{member}" for member, x in members if member[0] != "_" and not text_of(x)]
    assert not without


@pytest.mark.parametrize("name", ["cpx", "cpx.torch"])
def test_functions_are_found_where_they_say_that_they_are(name):
    """Or pickle, and so a process that is started with one, would not find them."""
    if name == "cpx.torch":
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    for public in module.__all__:
        if inspect.isroutine(thing := getattr(module, public)):
            assert pickle.loads(pickle.dumps(thing)) is thing


def test_a_checker_of_types_finds_nothing_wrong_with_a_program():
    api = pytest.importorskip("mypy.api")
    program = pathlib.Path(__file__).with_name("typed.py")
    told, errors, status = api.run(["--strict", "--cache-dir=/dev/null", str(program)])
    assert status == 0, told + errors


def test_what_a_checker_of_types_is_shown_is_called():
    program = pathlib.Path(__file__).with_name("typed.py").read_text()
    functions = {name for name in cpx.__all__ if inspect.isfunction(getattr(cpx, name))}
    operators = {name for name in functions if hasattr(cpx._ops, name) or hasattr(cpx._local, name)}
    assert not {name for name in operators if f"cpx.{name}" not in program}
