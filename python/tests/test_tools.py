"""The doctor, the benchmark, the example and the README's program."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import gemmesh
from ranks import ended
from test_groups import unlaunched

PYTHON = Path(__file__).parent.parent


def tool(*arguments: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = {**unlaunched(), **(variables or {})}
    return ended(subprocess.Popen([sys.executable, *arguments], text=True, env=env, cwd=cwd, **pipes))


def test_the_doctor_multiplies_on_the_host_and_says_what_it_found() -> None:
    status, out, err = tool("-m", "gemmesh.doctor", "--backend", "host")
    assert (status, err) == (0, "")
    assert f"ok       version: gemmesh {gemmesh.__version__}" in out
    assert "ok       host: two ranks" in out
    assert "problem" not in out


def test_the_doctor_shows_no_secret() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    torchrun["MASTER_PORT"] = "1"
    launched = {"GEMMESH_RANK": "0", "GEMMESH_WORLD_SIZE": "2"}
    # Python keeps a byte that is not UTF-8 as a surrogate.
    for variables in (
        {**torchrun, "GEMMESH_KEY": "a sesame that is \udcff not UTF-8"},
        {**torchrun, "GEMMESH_KEY": "sesame"},
        {**launched, "GEMMESH_ADDRESS": "a sesame \udcff"},
    ):
        status, out, err = tool("-m", "gemmesh.doctor", "--backend", "host", variables=variables)
        assert status == 1
        assert "problem  launcher: environment variable GEMMESH_" in out
        assert "sesame" not in out + err


@pytest.mark.skipif(gemmesh.HAS_CUDA, reason="this build has the CUDA backend")
def test_the_doctor_fails_if_the_backend_is_missing() -> None:
    status, out, _ = tool("-m", "gemmesh.doctor", "--backend", "cuda")
    assert status == 1
    assert "problem  cuda: this build has no CUDA backend\n         Build with" in out


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_benchmark_verifies_and_prints_the_rows(tmp_path: Path, dtype: str) -> None:
    sizes = ["-m", "66", "-n", "32", "-k", "64", "--ranks", "2", "--iterations", "3", "--dtype", dtype]
    status, out, err = tool("-m", "gemmesh.bench", "--backend", "host", *sizes, "--profile", "drawn.svg", cwd=tmp_path)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"[0] 66 x 32 x 64, {dtype}, 2 ranks on host; verified"
    assert [re.sub(r": +[\d.]+ ", ": ", line) for line in lines[1:]] == [
        "[0] numpy mm only: us",
        "[0] gemmesh mm only: us",
        "[0] gather + mm: us",
        "[0] fused: us",
        "[0] speed-up: x",
    ]
    assert "<svg" in (tmp_path / "drawn.svg").read_text()


def test_the_benchmark_refuses_numbers_below_one() -> None:
    for option in ("-m", "-n", "-k", "--ranks", "--iterations"):
        for text in ("0", "many"):
            status, _, err = tool("-m", "gemmesh.bench", "--backend", "host", option, text)
            assert status == 2
            assert f"{text} is no number from 1 on" in err


def test_the_benchmark_says_what_is_wrong_in_a_sentence() -> None:
    status, _, err = tool("-m", "gemmesh.bench", "--backend", "host", "--ranks", "1000")
    assert status == 1
    assert "ArgumentError" not in err and "Traceback" not in err and "1000" in err


@pytest.mark.parametrize("path", [".", "nowhere/drawn.svg"])
def test_the_benchmark_refuses_a_picture_that_cannot_be_written_at_once(tmp_path: Path, path: str) -> None:
    status, _, err = tool("-m", "gemmesh.bench", "--backend", "host", "--profile", path, cwd=tmp_path)
    assert status == 2
    assert f"{path} cannot be written" in err


def test_the_example_agrees_with_float64() -> None:
    status, out, err = tool(str(PYTHON / "examples" / "mlp.py"))
    assert (status, err) == (0, "")
    assert out.count("error") == 4


def test_the_readme_s_program_runs(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", (PYTHON / "README.md").read_text(), re.DOTALL)
    assert program
    path = tmp_path / "program.py"
    path.write_text(program[1])
    status, out, err = tool(str(path))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}] Matrix([512, 128], f16, host) is right" for rank in range(4)]
