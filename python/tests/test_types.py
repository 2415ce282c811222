"""Stubs, signatures and docstrings."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import gemmesh
from gemmesh import _native

PUBLIC = [
    _native.Group,
    _native.Matrix,
    _native.Sharded,
    _native.Prepared,
    _native.Scaled,
    _native.Quantized,
    _native.Trace,
]


def test_help_says_the_signature_and_the_shapes() -> None:
    text = pydoc.plain(pydoc.render_doc(gemmesh.Group.all_gather_matmul))
    assert "all_gather_matmul(self, /, a, b, out=None, *, bias=None, activation=None, gated=False" in text
    assert "out[M, N] = act(gather(a)[M, K] @ b[N, K].T + bias)" in text


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_all_that_is_public_has_a_docstring_and_a_signature(public: type) -> None:
    assert public.__doc__
    for name, member in vars(public).items():
        if not name.startswith("_"):
            assert member.__doc__, name
            if callable(member):
                inspect.signature(getattr(public, name))


def test_stubs_and_module_agree() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy.stubtest", "gemmesh._native", "gemmesh.errors"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


USE = """
import gemmesh
import numpy as np

def use(group: gemmesh.Group, a: gemmesh.Sharded, x: np.ndarray) -> None:
    reveal_type(group.all_gather_matmul(a, x))
    reveal_type(group.all_gather_matmul(a, [x, x]))
    reveal_type(group.all_gather_matmul(a, [x, x], gated=True))
    reveal_type(group.matmul(x, x, x, activation="relu"))
    reveal_type(group.matmul_reduce_scatter(x, gemmesh.Scaled(x, x), a))
    group.matmul(x, x, activation="tanh")
    gemmesh.Group.from_env(time_out=1)
"""


def test_annotations_know_results_and_refuse_words_and_options(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    path = tmp_path / "use.py"
    path.write_text(USE)
    options = ["--strict", "--no-error-summary", "--disable-error-code=type-arg"]
    command = [sys.executable, "-m", "mypy", *options, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path).stdout
    revealed = [line.split('"')[1] for line in found.splitlines() if "Revealed" in line]
    array = next(line for line in revealed if "ndarray" in line)
    native = "gemmesh._native"
    expected = [f"{native}.Matrix", f"list[{native}.Matrix]", f"{native}.Matrix", array, f"{native}.Sharded"]
    assert [line.replace("builtins.", "") for line in revealed] == expected, found
    errors = [line for line in found.splitlines() if "error:" in line]
    assert len(errors) == 2, found
    assert "matmul" in errors[0] and "time_out" in errors[1]


def test_all_names_are_there() -> None:
    assert set(gemmesh.__all__) <= set(dir(gemmesh))
    assert gemmesh.__version__ == _native.VERSION
