"""Which arguments of a call may share memory: every operation, with outputs that overlap its operands in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmesh
from ranks import ranks, wide

N = 8


class Arena:
    """Memory, of which matrices of 16 bits are parts that may overlap."""

    def __init__(self) -> None:
        self.values = np.zeros(16 * N * N, np.float16)

    def __call__(self, first: int, rows: int = N, columns: int = N, pitch: int = N) -> Any:
        part = self.values[first:]
        size = part.itemsize
        return np.lib.stride_tricks.as_strided(part, (rows, columns), (pitch * size, size))


def refused(call: Callable[[], Any], argument: str, other: str) -> None:
    """Checks that a call is refused because of two arguments."""
    with pytest.raises(gemmesh.ArgumentError) as raised:
        call()
    expected = f"the memory of {argument} is partly that of {other} and must be apart from it"
    assert str(raised.value).endswith(expected), raised.value


#: First elements of outputs that overlap a matrix [N, N] at 0: in all, but for a row, but for an element, in one.
SHIFTS = [0, N, 1, N * N - 1]


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("prepared", [False, True])
def test_an_output_of_a_product_lies_apart_from_each_operand(shift: int, prepared: bool) -> None:
    def body(group: gemmesh.Group) -> None:
        arena = Arena()
        # Out is in the middle, so that operands can lie before and behind.
        out, far = arena(4 * N * N), arena(8 * N * N)
        call: Any = group.prepare("matmul", far, far, out) if prepared else group.matmul
        for near in (arena(4 * N * N + shift), arena(4 * N * N - shift)):
            refused(lambda: call(near, far, out), "out", "a")
            refused(lambda: call(far, near, out), "out", "b")
            if shift:
                refused(lambda: call(far, far, out, residual=near), "out", "residual")
        refused(lambda: call(far, far, out, bias=arena(4 * N * N + shift, 1)), "out", "bias")
        # The group goes on.
        arena.values[:] = 1
        call(far, far, out)
        assert (out == N).all()

    ranks(1, body)


def test_a_residual_may_be_the_output() -> None:
    def body(group: gemmesh.Group) -> None:
        arena = Arena()
        arena.values[:] = 1
        ones, y = arena(4 * N * N), arena(0)
        group.matmul(ones, ones, y, residual=y)
        assert (y == N + 1).all()
        own = arena(N * N, N // 2)
        group.matmul_reduce_scatter(ones, ones, own, residual=own)
        assert (own == 2 * N + 1).all()
        sums = group.sharded(N, N, "f16")
        sums.whole.copy_from(ones)
        group.matmul_all_reduce(ones, ones, sums, residual=sums.whole)
        assert (wide(sums.whole) == 2 * N + 1).all()
        # Not if the elements are others.
        wider = arena(0, N, N, 2 * N)
        refused(lambda: group.matmul(ones, ones, y, residual=wider), "out", "residual")
        part = arena(N * N + 1, N // 2)
        call = group.matmul_reduce_scatter
        refused(lambda: call(ones, ones, own, residual=part), "out", "residual")

    ranks(2, body)


def test_columns_of_one_matrix_are_apart() -> None:
    def body(group: gemmesh.Group) -> None:
        arena = Arena()
        arena.values[:] = 1
        ones = arena(8 * N * N)
        parts = [arena(column, N, N, 3 * N) for column in (0, N, 2 * N)]
        group.matmul(ones, [ones] * 3, parts)
        assert (arena.values[: 3 * N * N] == N).all()
        # Operands may be the columns between, and rows of a different pitch.
        group.matmul(parts[0], parts[2], parts[1])
        every_second = arena(2 * N, N // 2, N, 6 * N)
        group.matmul(every_second, ones, arena(0, N // 2, N, 3 * N))
        names = ["out (output 1 of 3)", "out (output 2 of 3)"]
        parts[1] = arena(N - 1, N, N, 3 * N)
        refused(lambda: group.matmul(ones, [ones] * 3, parts), *names)
        refused(lambda: group.matmul(ones, [ones] * 3, [parts[0]] * 3), *names)
        weights = [ones, parts[0], ones]
        apart = [arena(column, N, N, 3 * N) for column in (3 * N * N, 0, 4 * N * N)]
        refused(lambda: group.matmul(ones, weights, apart), names[1], "b (weight 2 of 3)")

    ranks(1, body)


@pytest.mark.parametrize("world", [1, 2])
def test_a_gather_writes_the_other_ranks_rows(world: int) -> None:
    def body(group: gemmesh.Group) -> None:
        arena = Arena()
        arena.values[:] = 1
        weight = arena(0)
        x = group.sharded(world * N, N, "f16")
        x.shard.copy_from(arena(2 * N * N))
        group.all_gather(x)
        rows = world * N
        out = arena(4 * N * N, rows)
        refused(lambda: group.all_gather_matmul(x, weight, x.whole), "out", "a")
        refused(lambda: group.all_gather_matmul(x, out[:N], out), "out", "b")
        refused(lambda: group.all_gather_matmul(x, weight, out, bias=arena(4 * N * N, 1)), "out", "bias")
        # Own rows are only read.
        group.all_gather_matmul(x, x.shard, out)
        assert (out == N).all()
        if world > 1:
            gathered = "the rows of a that are gathered"
            refused(lambda: group.all_gather_matmul(x, x.whole, arena(4 * N * N, rows, rows, rows)), "b", gathered)
            first = np.from_dlpack(x.whole)[(1 - group.rank) * N :][:1]
            refused(lambda: group.all_gather_matmul(x, weight, out, bias=first), "bias", gathered)
        else:
            refused(lambda: group.all_gather_matmul(x, weight, x.shard), "out", "a")
        # The group goes on.
        group.all_gather_matmul(x, weight, out)

    ranks(world, body)


@pytest.mark.parametrize("shift", SHIFTS)
def test_sums_lie_apart_from_what_is_added(shift: int) -> None:
    def body(group: gemmesh.Group) -> None:
        arena = Arena()
        arena.values[:] = 1
        a, far = arena(4 * N * N), arena(8 * N * N)
        sums = group.sharded(N, N, "f16")
        whole = sums.whole
        of_sums = np.from_dlpack(whole)
        own = arena(4 * N * N + min(shift, N * N - 1), N // 2)
        refused(lambda: group.reduce_scatter(a, own), "out", "a")
        refused(lambda: group.matmul_reduce_scatter(a, far, own), "out", "a")
        refused(lambda: group.matmul_reduce_scatter(far, a, own), "out", "b")
        if shift == 0:
            refused(lambda: group.all_reduce(whole, sums), "out", "a")
            refused(lambda: group.all_to_all(whole, sums), "out", "a")
            refused(lambda: group.matmul_all_reduce(whole, far, sums), "out", "a")
            refused(lambda: group.matmul_all_reduce(far, whole, sums), "out", "b")
            refused(lambda: group.matmul_all_reduce(far, far, sums, bias=of_sums[-1:]), "out", "bias")
            # A sum into own rows leaves the others', so these may be an operand.
            other = of_sums[(1 - group.rank) * N // 2 :][: N // 2]
            other[:] = 1
            group.matmul_reduce_scatter(far, far, sums, residual=np.ascontiguousarray(other))
            refused(lambda: group.matmul_reduce_scatter(whole, far, sums), "out", "a")
        group.all_reduce(a, sums)
        assert (wide(sums.whole) == 2).all()
        group.reduce_scatter(a, arena(0, N // 2))

    ranks(2, body)


def test_scales_lie_apart_from_numbers() -> None:
    def body(group: gemmesh.Group) -> None:
        whole = group.zeros(1, 4096, "u8")
        every = np.from_dlpack(whole)[0]
        x = every[:1024].view(np.float16).reshape(4, 128)
        scales = every[2048:2064].view(np.float32).reshape(4, 1)
        numbers = group.zeros(4, 128, "f8e4m3")
        group.quantize(x, gemmesh.Quantized(numbers, scales))
        inside = every[16:32].view(np.float32).reshape(4, 1)
        refused(lambda: group.quantize(x, gemmesh.Quantized(numbers, inside)), "scales of out", "x")
        # A scale that is given is only read.
        group.quantize(x, gemmesh.Quantized(numbers, inside[:1], "tensor"))
        a = gemmesh.Scaled(numbers, scales, "blocks")
        weight = group.zeros(16, 128, "f8e4m3")
        of_weight = every[2064:2068].view(np.float32).reshape(1, 1)
        b = gemmesh.Scaled(weight, of_weight, "blocks")
        for argument, first in (("scales of a", 1936), ("scales of b", 2064)):
            out = every[first:][:128].view(np.float16).reshape(4, 16)
            refused(lambda: group.matmul(a, b, out, dtype="f16"), "out", argument)

    ranks(1, body)


def test_copies_do_not_overlap() -> None:
    def body(group: gemmesh.Group) -> None:
        arena = Arena()
        matrix = group.matrix(arena(0))
        matrix.copy_from(arena(0))
        matrix.copy_from(arena(N * N))
        refused(lambda: matrix.copy_from(arena(1)), "the target", "the source")
        x = group.sharded(N, N, "f16")
        x.copy_from(x.shard)

    ranks(1, body)


def test_ranks_that_wait_are_told_of_the_overlap() -> None:
    def body(group: gemmesh.Group) -> None:
        arena = Arena()
        ones, out = arena(N * N), arena(0, N // 2)
        if group.rank == 1:
            refused(lambda: group.reduce_scatter(ones, ones[: N // 2]), "out", "a")
        else:
            words = "rank 1: reduce_scatter: the memory of out is partly that of a"
            with pytest.raises(gemmesh.RankError, match=words):
                group.reduce_scatter(ones, out)

    ranks(2, body)
