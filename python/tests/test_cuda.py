"""The CUDA backend: on GPUs, or on the driver of the repository's tests, which runs on the CPU.

With GEMMESH_REQUIRE_GPU=1 the tests fail if there is no GPU. Without it they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gemmesh
from ranks import LONG

RANKS = Path(__file__).with_name("cuda_ranks.py")


def find_gpu() -> str | None:
    """Why the tests can't run, or None."""
    if not gemmesh.HAS_CUDA:
        return "this build has no CUDA backend"
    try:
        gemmesh.Group.connect(0, 1, f"find a GPU {os.getpid()}", backend="cuda").close()
    except gemmesh.DeviceError as error:
        return str(error)
    return None


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    reason = find_gpu()
    if reason and os.environ.get("GEMMESH_REQUIRE_GPU") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("promise", ["products", "several_groups", "chunks", "bytes_of_chunks", "errors"])
def test_on_gpus(promise: str, world: int) -> None:
    done = subprocess.run(
        [sys.executable, str(RANKS), promise, str(world)],
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kept") == world, done.stdout
