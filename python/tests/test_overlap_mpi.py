"""The stage-parallel product of nvFuser's pull requests 3606 and 3923, on ranks that mpirun has started::

    mpirun -np 8 python -m pytest python/tests/test_overlap_mpi.py -vs --only-mpi

For each of S stages, the rows [M / S, K] are gathered over the D ranks, and multiplied while the next stage is
gathered.
The ranks are on the host, or on GPUs with GEMMESH_TEST_BACKEND=cuda.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gemmesh

pytest.importorskip("pytest_benchmark")

N_WARMUPS, N_ITERATIONS = 5, 15


def bf16(values: Any) -> Any:
    """The bits of the nearest bf16 numbers."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def wide(bits: Any) -> Any:
    """The values of bf16 bits as float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.fixture
def group() -> Iterator[gemmesh.Group]:
    backend: Any = os.environ.get("GEMMESH_TEST_BACKEND", "host")
    with gemmesh.Group.from_env(backend=backend) as joined:
        yield joined


def uploaded(group: gemmesh.Group, bits: Any) -> gemmesh.Matrix:
    made = group.zeros(*np.atleast_2d(bits).shape, "bf16")
    made.frombytes(bits.tobytes())
    return made


@pytest.mark.mpi
def test_overlap_allgather_matmul_stream_outermost(group: gemmesh.Group, benchmark: Any) -> None:
    m, k, n, s, d = 1024, 1024, 1024, 8, group.world_size
    # The same on all ranks.
    random = np.random.default_rng(0)
    x_unsharded = bf16(random.uniform(-1, 1, (s, d, m // (s * d), k)))
    weight, bias = bf16(random.uniform(-1, 1, (n, k))), bf16(random.uniform(-1, 1, n))
    out_ref = wide(x_unsharded).reshape(m, k) @ wide(weight).T + wide(bias)

    x = group.sharded(m, k, "bf16", stages=s)
    x.copy_from(uploaded(group, x_unsharded[:, group.rank].reshape(-1, k)))
    b, c, out = uploaded(group, weight), uploaded(group, bias), group.zeros(m, n, "bf16")

    def run() -> None:
        group.all_gather_matmul(x, b, out, bias=c, stages=s)
        group.synchronize()

    for _ in range(N_WARMUPS):
        out.frombytes(b"\xff" * (2 * m * n))
        run()
        found = wide(np.frombuffer(out.tobytes(), np.uint16)).reshape(m, n)
        # One rounding to bf16, of a sum in f32.
        assert (np.abs(found - out_ref) <= 2.0**-8 * 1.01 * np.abs(out_ref) + 2.0**-10).all()

    benchmark.pedantic(run, rounds=N_ITERATIONS)
