"""Collectives and pipelines against float64."""

from __future__ import annotations

import gc
import sys
from typing import Any, cast

import numpy as np
import pytest

import gemmesh
from ranks import Matrices, check, matrix, outcomes, poisoned, ranks, sharded, wide

WORLD, M, N = 3, 12, 8


def addends(dtype: str = "f16") -> list[Any]:
    return [Matrices(rank, dtype)(M, N) for rank in range(WORLD)]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f8e4m3"])
def test_rows_are_gathered(dtype: str) -> None:
    x = Matrices(1, dtype)(M, N)

    def body(group: gemmesh.Group) -> None:
        a = sharded(group, x)
        group.all_gather(a)
        assert a.whole.tobytes() == x.tobytes()

    ranks(WORLD, body)


def test_the_root_s_matrix_is_broadcast() -> None:
    x = addends()

    def body(group: gemmesh.Group) -> None:
        a = group.sharded(M, N, "f16")
        a.whole.frombytes(x[group.rank].tobytes())
        group.barrier()
        group.broadcast(a, 2)
        assert a.whole.tobytes() == x[2].tobytes()

    ranks(WORLD, body)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_sums_are_scattered_and_given_to_all(dtype: str) -> None:
    x = addends(dtype)
    total, summed = sum(map(wide, x)), sum(np.abs(wide(part)) for part in x)

    def body(group: gemmesh.Group) -> None:
        own = slice(group.rank * M // WORLD, (group.rank + 1) * M // WORLD)
        out = poisoned(group, M // WORLD, N, dtype)
        group.reduce_scatter(matrix(group, x[group.rank]), out)
        check(out, total[own], summed[own], dtype)
        everywhere = group.sharded(M, N, dtype)
        group.all_reduce(matrix(group, x[group.rank]), everywhere)
        check(everywhere.whole, total, summed, dtype)

    ranks(WORLD, body)


def test_blocks_are_exchanged() -> None:
    x = addends()
    rows = M // WORLD

    def body(group: gemmesh.Group) -> None:
        out = group.sharded(M, N, "f16")
        group.all_to_all(matrix(group, x[group.rank]), out)
        mine = slice(group.rank * rows, (group.rank + 1) * rows)
        assert out.whole.tobytes() == np.concatenate([part[mine] for part in x]).tobytes()

    ranks(WORLD, body)


@pytest.mark.parametrize("make", [list, np.array])
def test_ranks_get_as_many_rows_as_are_counted(make: Any) -> None:
    pairs = [[1, 0, 3], [2, 2, 0], [0, 1, 1]]
    counts = make(pairs)
    total = [sum(row) for row in pairs]
    sent = [[(100 * rank + row) for row in range(total[rank])] for rank in range(3)]

    def block(sender: int, receiver: int) -> list[int]:
        first = sum(pairs[sender][:receiver])
        return sent[sender][first : first + pairs[sender][receiver]]

    def body(group: gemmesh.Group) -> None:
        expected = [x for sender in range(3) for x in block(sender, group.rank)]
        expected += [7] * (6 - len(expected))
        a = group.zeros(total[group.rank], 1, "u32")
        np.from_dlpack(a)[:, 0] = sent[group.rank]
        out = group.sharded(6, 1, "u32")
        np.from_dlpack(out.whole)[:] = 7
        group.all_to_all(a, out, counts=counts)
        assert np.from_dlpack(out.whole)[:, 0].tolist() == expected

        def produce(chunk: gemmesh.Chunk) -> None:
            made = block(group.rank, chunk.rank)[chunk.rows.start : chunk.rows.stop]
            np.from_dlpack(chunk.matrix)[:, 0] = made

        np.from_dlpack(out.whole)[:] = 7
        group.produce_and_all_to_all(out, produce, counts=counts)
        assert np.from_dlpack(out.whole)[:, 0].tolist() == expected
        with pytest.raises(gemmesh.ArgumentError, match=r"counts has rows of \[3, 2\] numbers and must have 3 rows of 3"):
            group.all_to_all(a, out, counts=[[1, 2, 3], [4, 5]])
        with pytest.raises(gemmesh.ArgumentError, match="rows for rank 2"):
            group.all_to_all(a, out, counts=[[0, 0, 3], [0, 0, 3], [0, 0, 1]])

    ranks(3, body)


def test_bytes_are_gathered_by_rank() -> None:
    def body(group: gemmesh.Group) -> None:
        assert group.all_gather_bytes(b"x" * group.rank) == [b"", b"x", b"xx"]

    ranks(WORLD, body)


@pytest.mark.parametrize("chunks", [None, 2])
def test_each_row_is_consumed_once_when_it_is_there(chunks: int | None) -> None:
    x = Matrices(2, "f16")(M, N)

    def body(group: gemmesh.Group) -> None:
        a, seen = sharded(group, x), np.zeros(M, int)

        def consume(chunk: gemmesh.Chunk) -> None:
            rows = slice(chunk.rows.start, chunk.rows.stop)
            seen[rows] += 1
            assert chunk.stream == 0
            assert chunk.rows.start in a.rows_of(chunk.rank)
            assert np.array_equal(np.from_dlpack(chunk.matrix), x[rows])

        group.all_gather_and_consume(a, consume, chunks=chunks)
        assert (seen == 1).all()

    ranks(WORLD, body)


@pytest.mark.parametrize("rows", [None, [6, 6, 0]])
@pytest.mark.parametrize("chunks", [None, 2])
def test_rows_that_are_made_are_summed(rows: list[int] | None, chunks: int | None) -> None:
    x = addends("f32")
    total, summed = sum(map(wide, x)), sum(np.abs(wide(part)) for part in x)

    def body(group: gemmesh.Group) -> None:
        owned = rows or group.even_rows(M)
        first = sum(owned[: group.rank])
        out = poisoned(group, owned[group.rank], N, "f32")

        def produce(chunk: gemmesh.Chunk) -> None:
            np.from_dlpack(chunk.matrix)[:] = x[group.rank][chunk.rows.start : chunk.rows.stop]

        group.produce_and_reduce_scatter(M, out, produce, rows=rows, chunks=chunks)
        own = slice(first, first + owned[group.rank])
        check(out, total[own], summed[own], "f32")

    ranks(WORLD, body)


@pytest.mark.parametrize("chunks", [None, 2])
def test_rows_that_are_made_are_sent_to_their_rank(chunks: int | None) -> None:
    rows = M // WORLD

    def body(group: gemmesh.Group) -> None:
        out = group.sharded(M, N, "f32")

        def produce(chunk: gemmesh.Chunk) -> None:
            numbers = np.arange(chunk.rows.start, chunk.rows.stop)
            np.from_dlpack(chunk.matrix)[:] = (100 * group.rank + 10 * chunk.rank + numbers)[:, None]

        group.produce_and_all_to_all(out, produce, chunks=chunks)
        expected = [100 * sender + 10 * group.rank + row for sender in range(WORLD) for row in range(rows)]
        assert np.array_equal(np.from_dlpack(out.whole)[:, 0], expected)

    ranks(WORLD, body)


def part(x: Any, rows: range) -> Any:
    return x[rows.start : rows.stop]


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3", "f32"])
def test_functions_read_and_write_chunks_as_bytes(dtype: str) -> None:
    x = addends(dtype)

    def body(group: gemmesh.Group) -> None:
        a, mine = sharded(group, x[0]), x[group.rank]
        kept: list[gemmesh.Matrix] = []

        def consume(chunk: gemmesh.Chunk) -> None:
            assert chunk.matrix.tobytes() == part(x[0], chunk.rows).tobytes()
            kept.append(chunk.matrix)

        group.all_gather_and_consume(a, consume, chunks=2)
        # Afterwards they are matrices like others.
        assert sum(len(matrix.tobytes()) for matrix in kept) == x[0].nbytes

        def produce(chunk: gemmesh.Chunk) -> None:
            # These rows of the matrix, for each rank.
            chunk.matrix.frombytes(part(mine, chunk.rows).tobytes())
            assert chunk.matrix.tobytes() == part(mine, chunk.rows).tobytes()

        group.produce_and_all_to_all(a, produce, chunks=2)
        assert a.whole.tobytes() == np.concatenate([part(each, range(M // WORLD)) for each in x]).tobytes()

    ranks(WORLD, body)


@pytest.mark.parametrize("way", ["bytes", "a copy"])
def test_sums_are_made_of_bytes_and_of_copies(way: str) -> None:
    x = addends("f32")
    total, summed = sum(map(wide, x)), sum(np.abs(wide(part)) for part in x)

    def body(group: gemmesh.Group) -> None:
        out = poisoned(group, M // WORLD, N, "f32")

        def produce(chunk: gemmesh.Chunk) -> None:
            rows = part(x[group.rank], chunk.rows)
            if way == "bytes":
                chunk.matrix.frombytes(rows.tobytes())
            else:
                chunk.matrix.copy_from(rows)

        group.produce_and_reduce_scatter(M, out, produce, chunks=2)
        own = slice(group.rank * M // WORLD, (group.rank + 1) * M // WORLD)
        check(out, total[own], summed[own], "f32")

    ranks(WORLD, body)


def test_bytes_of_a_wrong_number_are_refused_in_a_function() -> None:
    def body(group: gemmesh.Group) -> None:
        refused: list[str] = []

        def consume(chunk: gemmesh.Chunk) -> None:
            with pytest.raises(gemmesh.ArgumentError, match="Matrix.frombytes"):
                chunk.matrix.frombytes(b"1234567")
            refused.append("one")

        group.all_gather_and_consume(group.sharded(M, N, "f32"), consume)
        assert refused
        group.barrier()

    ranks(2, body)


@pytest.mark.parametrize("call", ["consume", "reduce_scatter", "all_to_all"])
def test_an_exception_in_a_function_reaches_every_rank(call: str) -> None:
    original = KeyError("no such expert")

    def body(group: gemmesh.Group) -> None:
        def function(chunk: gemmesh.Chunk) -> None:
            if group.rank == 1:
                raise original
            np.from_dlpack(chunk.matrix)[:] = 0

        a = group.sharded(M, N, "f32")
        if call == "consume":
            group.all_gather_and_consume(a, lambda chunk: function(chunk) if group.rank == 1 else None)
            # A rank that only gets rows sees the failure in its next call.
            group.barrier()
        elif call == "reduce_scatter":
            group.produce_and_reduce_scatter(M, group.zeros(M // WORLD, N, "f32"), function)
        else:
            group.produce_and_all_to_all(a, function)

    found = outcomes(WORLD, body)
    for rank, error in enumerate(found):
        assert isinstance(error, gemmesh.RankError), error
        assert "no such expert" in str(error)
        assert (error.rank, error.at_fault, error.peer) == (rank, (1,), None if rank == 1 else 1)
    assert found[1].__cause__ is original
    assert found[0].__cause__ is None


@pytest.mark.parametrize("call", ["consume", "reduce_scatter", "all_to_all"])
def test_a_matrix_that_a_function_keeps_has_memory(call: str) -> None:
    def body(group: gemmesh.Group) -> None:
        kept: list[Any] = []

        def function(chunk: gemmesh.Chunk) -> None:
            kept.append(np.from_dlpack(chunk.matrix))
            kept[-1][:] = 1

        def run(m: int) -> None:
            if call == "consume":
                group.all_gather_and_consume(group.sharded(m, 1024, "f32"), function)
            elif call == "reduce_scatter":
                group.produce_and_reduce_scatter(m, group.zeros(m // 2, 1024, "f32"), function)
            else:
                group.produce_and_all_to_all(group.sharded(m, 1024, "f32"), function)

        run(64)
        # The matrix, or the memory for partials, is replaced.
        run(2048)
        gc.collect()
        assert all(np.isfinite(array).all() for array in kept)

    ranks(2, body)


def test_what_is_no_error_of_a_function_is_raised_itself() -> None:
    def body(group: gemmesh.Group) -> None:
        def leave(chunk: gemmesh.Chunk) -> None:
            sys.exit(3)

        with pytest.raises(SystemExit) as ended:
            group.all_gather_and_consume(group.sharded(M, N, "f32"), leave)
        assert ended.value.code == 3
        with pytest.raises(gemmesh.RankError):
            group.barrier()

    ranks(1, body)


def test_a_function_that_is_none_is_refused_before_the_call() -> None:
    def body(group: gemmesh.Group) -> None:
        a, nothing = group.sharded(M, N, "f32"), cast(Any, None)
        for name, call in (
            ("consume", lambda: group.all_gather_and_consume(a, nothing)),
            ("produce", lambda: group.produce_and_all_to_all(a, nothing)),
            ("produce", lambda: group.produce_and_reduce_scatter(M, group.zeros(M, N, "f32"), nothing)),
        ):
            with pytest.raises(gemmesh.ArgumentError, match=f"{name} is no function"):
                call()
        group.barrier()

    ranks(1, body)


def test_a_function_must_not_call_its_group() -> None:
    def body(group: gemmesh.Group) -> None:
        refused: list[BaseException] = []

        def consume(chunk: gemmesh.Chunk) -> None:
            try:
                group.barrier()
            except gemmesh.MisuseError as error:
                refused.append(error)

        group.all_gather_and_consume(group.sharded(M, N, "f32"), consume)
        assert refused

    ranks(2, body)
