"""Programs that end soon after their last call: no thread of the library calls into Python when the interpreter ends.

Those of GPUs run on GPUs, or on the driver of the repository's tests, which runs on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LONG
from test_cuda import find_gpu

PROGRAMS = Path(__file__).with_name("ending_ranks.py")
ROUNDS = 8


def ends_well(*arguments: str) -> None:
    for _ in range(ROUNDS):
        done = subprocess.run([sys.executable, str(PROGRAMS), *arguments], capture_output=True, text=True, timeout=LONG)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


@pytest.mark.parametrize("program", ["in_a_callback", "in_a_call", "while_joining"])
def test_threads_at_the_end(program: str) -> None:
    ends_well(program)


def test_threads_of_a_fork_at_its_end() -> None:
    ends_well("in_a_callback", "fork")


TENSORS = [
    ["after_a_call"],
    ["after_synchronize"],
    ["after_close"],
    ["with_matrices_of_tensors"],
    ["with_a_group_that_ends_late"],
]


@pytest.mark.parametrize("arguments", [*TENSORS, ["after_a_call", "fork"]], ids=" in a ".join)
def test_tensors_at_the_end(arguments: list[str]) -> None:
    reason = find_gpu()
    if reason and os.environ.get("GEMMESH_REQUIRE_GPU") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    ends_well(*arguments)
