"""The streams that calls are put on: on GPUs, or on the driver of the repository's tests, which runs on the CPU.

With GEMMESH_REQUIRE_GPU=1 the tests fail if there is no GPU. Without it they are skipped. With GEMMESH_TEST_LIBRARIES=1
PyTorch, CuPy and JAX are used, and the tests fail if they are not there. Without it, modules stand in their place.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LONG
from test_cuda import gpu  # noqa: F401

RANKS = Path(__file__).with_name("stream_ranks.py")
PROMISES = [
    "calls_follow_pytorch",
    "calls_follow_cupy",
    "arrays_of_cupy_put_calls_on_its_stream",
    "arrays_without_a_stream_come_in_any_order",
    "bytes_follow_the_current_stream",
    "calls_go_on_while_bytes_are_read",
    "matrices_of_arrays_are_ready_on_later_streams",
    "a_stream_that_was_set_stays",
    "operations_on_a_stream_leave_the_one_that_was_set",
    "operations_end_before_what_comes_next",
    "graphs_have_calls_without_tensors",
    "threads_have_streams_of_their_own",
    "functions_of_operations_are_refused_calls",
    "ranks_learn_that_a_call_has_no_turn",
]
OF_LIBRARIES = [
    "graphs_of_pytorch_have_calls_without_tensors",
    "tensors_of_pytorch_are_written_late",
    "jax_orders_its_arrays",
]


@pytest.mark.parametrize("promise", PROMISES)
def test_streams(promise: str) -> None:
    is_kept(promise)


@pytest.mark.skipif(os.environ.get("GEMMESH_TEST_LIBRARIES") != "1", reason="needs GEMMESH_TEST_LIBRARIES=1")
@pytest.mark.parametrize("promise", OF_LIBRARIES)
def test_libraries(promise: str) -> None:
    is_kept(promise)


def is_kept(promise: str) -> None:
    done = subprocess.run(
        [sys.executable, str(RANKS), promise, "2"],
        capture_output=True,
        text=True,
        timeout=LONG,
        # JAX would take most of the GPU's memory.
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kept") == 2, done.stdout
