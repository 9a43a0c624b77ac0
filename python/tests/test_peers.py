# SPDX-License-Identifier: Apache-2.0
"""What the programs that run peers' tests print of them."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("cpx.torch")

peers = pathlib.Path(__file__).parents[1] / "peers"
program = """
import pathlib, sys
import common
print(common.run(pathlib.Path(sys.argv[1]), sys.argv[2:], lambda module: None))
"""


def printed(checkout, **files):
    for name, text in files.items():
        (checkout / f"{name}.py").write_text(text)
    names = [f"{name}.py" for name in files]
    ran = subprocess.run(
        [sys.executable, "-c", program, str(checkout), *names], cwd=peers, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_file_of_tests_that_cannot_be_imported_says_why(tmp_path):
    lines = printed(
        tmp_path,
        test_wants="import no_such_module\n\ndef test_it():\n    pass\n",
        test_skips="import pytest\npytest.importorskip('no_such_module')\n",
        test_runs="def test_it():\n    pass\n",
    )
    assert lines[0] == "failed  test_wants.py: ModuleNotFoundError: No module named 'no_such_module'"
    assert lines[1].startswith("skipped test_skips.py: ") and "no_such_module" in lines[1]
    assert lines[2].startswith("passed  test_runs.py::test_it")
    assert lines[3:] == ["1"]


def test_files_without_tests_are_a_failure(tmp_path):
    assert printed(tmp_path, test_nothing="") == ["failed  no test was found", "1"]
