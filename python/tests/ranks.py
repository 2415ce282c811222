"""Ranks as threads and as processes, and what they compute beside float64."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from deadlines import LONG as LONG
from deadlines import stretched as stretched

import gemmesh


_numbers = itertools.count()

DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "f8e4m3": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2,
}


def address() -> str:
    """An address that no other test uses."""
    return f"test-{os.getpid()}-{next(_numbers)}"


def join(rank: int, world: int, at: str, **options: Any) -> gemmesh.Group:
    """Joins a group on the host, which does not wait for ever."""
    options = {"arrival_timeout": LONG, "workers": 1, **options}
    return gemmesh.Group.connect(rank, world, at, backend="host", **options)


def threads(world: int, body: Callable[[int], Any]) -> list[Any]:
    """Calls body(rank) in a thread for each rank. Returns what each returned or raised."""
    outcomes: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(rank)
        except BaseException as error:
            outcomes[rank] = error

    running = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(2 * LONG)
    assert not any(thread.is_alive() for thread in running), "a rank hangs"
    return outcomes


def outcomes(world: int, body: Callable[[gemmesh.Group], Any], **options: Any) -> list[Any]:
    """Calls body(group) on each rank of a group of threads. Returns what each returned or raised."""
    at = address()

    def rank_body(rank: int) -> Any:
        with join(rank, world, at, **options) as group:
            return body(group)

    return threads(world, rank_body)


def ranks(world: int, body: Callable[[gemmesh.Group], Any], **options: Any) -> list[Any]:
    """As `outcomes`, where no rank may raise."""
    found = outcomes(world, body, **options)
    # An error that names no other rank is the first.
    errors = [error for error in found if isinstance(error, BaseException)]
    errors.sort(key=lambda error: isinstance(error, gemmesh.RankError))
    if errors:
        raise errors[0]
    return found


def program(source: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts Python on a source text."""
    command = [sys.executable, "-c", source, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **options})


def ended(process: subprocess.Popen[str], seconds: float = LONG) -> tuple[int, str, str]:
    """The exit status and the outputs of a process, which must end in time."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the process still runs after {seconds} s; it printed {out!r} and {err!r}")
    return process.returncode, out, err


class Matrices:
    """Random matrices of a type: as the library takes them, and as float64."""

    def __init__(self, seed: int, dtype: str = "bf16") -> None:
        self.random = np.random.default_rng(seed)
        self.dtype = dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> np.ndarray[Any, Any]:
        """Random values that the type can hold."""
        values = self.random.uniform(-scale, scale, shape)
        return values.astype(DTYPES[self.dtype])


def wide(values: Any) -> np.ndarray[Any, Any]:
    """The values of a matrix or an array as float64."""
    if isinstance(values, gemmesh.Matrix):
        values = np.frombuffer(values.tobytes(), DTYPES[values.dtype]).reshape(values.shape)
    return values.astype(np.float64)


def matrix(group: gemmesh.Group, values: np.ndarray[Any, Any]) -> gemmesh.Matrix:
    """A matrix of the group with these values."""
    values = np.atleast_2d(values)
    made = group.zeros(*values.shape, values.dtype)
    made.frombytes(np.ascontiguousarray(values).tobytes())
    return made


def poisoned(group: gemmesh.Group, rows: int, columns: int, dtype: str) -> gemmesh.Matrix:
    """A matrix of NaN."""
    made = group.zeros(rows, columns, dtype)
    made.frombytes(b"\xff" * (rows * columns * np.dtype(DTYPES[dtype]).itemsize))
    return made


def sharded(group: gemmesh.Group, values: np.ndarray[Any, Any], **options: Any) -> gemmesh.Sharded:
    """A sharded matrix of which this rank has written its own rows only."""
    m, k = values.shape
    a = group.sharded(None if "rows" in options else m, k, values.dtype, **options)
    a.shard.frombytes(np.ascontiguousarray(values[a.rows.start : a.rows.stop]).tobytes())
    return a


#: Half a unit in the last place.
ROUNDING = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24, "f8e4m3": 2.0**-4, "f8e5m2": 2.0**-3}


def check(found: Any, expected: np.ndarray[Any, Any], summed: np.ndarray[Any, Any] | float, dtype: str) -> None:
    """Compares a result with float64. `summed`: the absolute values of what was added, before any rounding."""
    found = wide(found)
    assert found.shape == expected.shape
    # One rounding of the result, and f32 sums. What is below the normal numbers is exact to their last place.
    allowed = ROUNDING[dtype] * np.abs(expected) * 1.01 + 2.0**-16 * (np.abs(summed) + 2.0**-8)
    wrong = ~(np.abs(found - expected) <= allowed)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} are wrong, first at {np.argwhere(wrong)[0]}"


_erf = np.vectorize(math.erf, otypes=[float])


def activated(name: str | None, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The activation functions in float64."""
    if name is None:
        return x
    return {
        "relu": lambda x: np.maximum(x, 0),
        "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        "silu": lambda x: x / (1 + np.exp(-x)),
    }[name](x)
