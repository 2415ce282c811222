"""Numbers that no machine has, in every argument that is a number: an ArgumentError or Python's own, never a panic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmesh
from ranks import address, ranks

EXTREMES = [-(2**64), -(2**63), -1, 0, 1, 5, 2**31, 2**31 + 1, 2**32, 2**62 + 1, 2**63, 2**64 - 1, 2**64, 2**70]
TIMES = [math.nan, math.inf, -math.inf, -1.0, -0.0, 1e-300, 1e18, 1.8446744073709552e19, 1e300]


def told(call: Callable[[], Any]) -> bool:
    """Whether a call returns. If not, it raises what names its argument."""
    try:
        call()
    except (gemmesh.ArgumentError, gemmesh.OutOfMemoryError, TypeError, OverflowError) as error:
        assert str(error)
        return False
    return True


def test_shapes_are_checked() -> None:
    def body(group: gemmesh.Group) -> None:
        x = group.sharded(4, 8, "f16")
        a, b = np.ones((4, 8), np.float16), np.ones((16, 8), np.float16)
        f8, scale = group.zeros(16, 128, "f8e4m3"), group.zeros(1, 1, "f32")
        wide = group.zeros(16, 128, "bf16")
        for one in EXTREMES:
            for other in EXTREMES:
                told(lambda: group.zeros(one, other, "u8"))
                told(lambda: group.sharded(one, other, "u8"))
                told(lambda: group.sharded(one, other, "u8", capacity=True))
                told(lambda: group.sharded(one, 8, "u8", stages=other))
                told(lambda: group.sharded(None, 8, "u8", rows=[one, other]))
                told(lambda: group.check_support("matmul", one, other, one))
                told(lambda: group.check_support("matmul", 4, 8, [one, other], gated=True))
                told(lambda: group.check_support("all_gather_matmul", 4, 8, one, stages=other))
                told(lambda: group.check_support("matmul_reduce_scatter", 4, 8, 16, rows=[one, other]))
                told(lambda: group.check_support("matmul_all_reduce", one, 8, other))
            told(lambda: group.sharded(None, 8, "u8", rows=[one]))
            told(lambda: x.set_rows([one]))
            told(lambda: x.rows_of(one))
            told(lambda: group.even_rows(one))
            told(lambda: group.broadcast(x, one))
            x.set_rows([4])
            told(lambda: group.all_gather_matmul(x, b, stages=one))
            told(lambda: group.matmul_reduce_scatter(a, b, rows=[one]))
            told(lambda: group.prepare("all_gather_matmul", x, b, stages=one))
            told(lambda: group.prepare("matmul_reduce_scatter", a, b, rows=[one]))
            for first in ("first_row", "first_column"):
                told(lambda: group.matmul(f8, gemmesh.Scaled(f8, scale, "blocks", **{first: one})))
                options: dict[str, Any] = {"b_scaling": "blocks", "a_scaling": "blocks", first: one}
                told(lambda: group.check_support("matmul", 16, 128, 16, "f8e4m3", **options))
                told(lambda: group.matmul(gemmesh.Scaled(f8, scale, "blocks", **{first: one}), f8))
            told(lambda: group.quantize(wide, gemmesh.Quantized(f8, scale, first_column=one)))
            told(lambda: group.all_gather_and_consume(x, lambda _: None, chunks=one))
            told(lambda: group.all_gather_and_consume(x, lambda _: None, stages=one))
            out = np.ones((4, 8), np.float32)
            told(lambda: group.produce_and_reduce_scatter(one, out, lambda _: None))
            told(lambda: group.produce_and_reduce_scatter(4, out, lambda _: None, rows=[one]))
            told(lambda: group.produce_and_reduce_scatter(4, out, lambda _: None, chunks=one))
            told(lambda: group.produce_and_all_to_all(x, lambda _: None, chunks=one))
            told(lambda: group.split(one, one).close())
            told(lambda: group.split(0, one).close())
        # The group goes on.
        group.matmul(a, b)

    ranks(1, body)


@pytest.mark.parametrize("name", ["timeout", "arrival_timeout", "host_timeout"])
@pytest.mark.parametrize("seconds", TIMES)
def test_times_are_checked(name: str, seconds: float) -> None:
    def join() -> None:
        gemmesh.Group.connect(0, 1, address(), backend="host", **{name: seconds}).close()

    joined = told(join)
    # The longest times are cut, and those that are none are refused.
    assert joined or not 1.0 < seconds < 1e19
    assert not joined or seconds >= 0


@pytest.mark.parametrize("number", EXTREMES)
def test_options_and_numbers_of_ranks_are_checked(number: int) -> None:
    def join(rank: int = 0, world: int = 1, **options: Any) -> None:
        gemmesh.Group.connect(rank, world, address(), backend="host", **options).close()

    for name in ("workers", "device", "max_ctas"):
        told(lambda: join(**{name: number}))
    if number not in (0, 1, 5):
        assert not told(lambda: join(number, 1))
        assert not told(lambda: join(0, number))
        gathers: list[bytes] = []
        assert not told(lambda: gemmesh.Group.from_callback(lambda mine: gathers, 0, number, backend="host"))
        assert not told(lambda: gemmesh.Group.from_callback(lambda mine: gathers, number, 1, backend="host"))


def test_tensors_of_extreme_strides_are_refused() -> None:
    def body(group: gemmesh.Group) -> None:
        one, b = np.ones(16, np.float16), np.ones((16, 8), np.float16)
        for rows, columns, stride in [
            (2**31, 8, 0),
            (8, 2**31, 2),
            (2**40, 8, 2**20),
            (3, 8, 2**62),
            (2, 8, -16),
        ]:
            shape, strides = (rows, columns), (stride, 2)
            wrong = np.lib.stride_tricks.as_strided(one, shape, strides)
            assert not told(lambda: group.matmul(wrong, b))
            assert not told(lambda: group.matrix(wrong))

    ranks(1, body)
