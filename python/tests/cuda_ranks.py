"""The ranks of test_cuda.py: `cuda_ranks.py PROMISE WORLD`."""

from __future__ import annotations

import sys

import numpy as np

import gemmesh

M, N, K = 96, 64, 128


def filled(group: gemmesh.Group, values: np.ndarray) -> gemmesh.Matrix:
    """A matrix of float16 or float32 with these values."""
    dtype = {"float16": "f16", "float32": "f32"}[str(values.dtype)]
    matrix = group.zeros(*values.shape, dtype)
    matrix.frombytes(np.ascontiguousarray(values).tobytes())
    return matrix


def values(matrix: gemmesh.Matrix) -> np.ndarray:
    dtype = {"f16": np.float16, "f32": np.float32}[matrix.dtype]
    return np.frombuffer(matrix.tobytes(), dtype).reshape(matrix.shape)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    error = np.abs(found.astype(np.float64) - expected).max()
    assert error <= 2e-2 * np.abs(expected).max(), error


def operands(world: int) -> tuple[np.ndarray, np.ndarray]:
    """The same on all ranks."""
    draw = np.random.default_rng(42 + world)
    return draw.standard_normal((M, K)).astype(np.float16), draw.standard_normal((N, K)).astype(np.float16)


def products(group: gemmesh.Group) -> None:
    x, w = operands(group.world_size)
    expected = x.astype(np.float64) @ w.astype(np.float64).T
    a = group.sharded(M, K, "f16")
    a.copy_from(filled(group, x[a.rows.start : a.rows.stop]))
    out = filled(group, np.full((M, N), np.nan, np.float32))
    assert group.all_gather_matmul(a, filled(group, w), out) is out
    close(values(out), expected)
    close(values(a.whole), x)
    out = filled(group, np.full((M, N), np.nan, np.float32))
    prepared = group.prepare("all_gather_matmul", a, filled(group, w), out)
    prepared(a, filled(group, w), out)
    close(values(out), expected)
    close(values(group.matmul(filled(group, x), filled(group, w), activation="relu")), np.maximum(expected, 0))


def several_groups(group: gemmesh.Group) -> None:
    part = group.split(0, group.world_size - group.rank)
    assert part.rank == group.world_size - 1 - group.rank
    x = part.sharded(part.world_size, 4, "f32")
    x.copy_from(filled(part, np.full((1, 4), part.rank, np.float32)))
    part.all_gather(x)
    assert (values(x.whole)[:, 0] == np.arange(part.world_size)).all()
    assert part.all_gather_bytes(b"%d" % part.rank) == [b"%d" % rank for rank in range(part.world_size)]


def chunks(group: gemmesh.Group) -> None:
    a = group.sharded(M, K, "f16")
    seen = []

    def consume(chunk: gemmesh.Chunk) -> None:
        assert chunk.matrix.shape == (len(chunk.rows), K)
        assert chunk.stream != 0
        seen.extend(chunk.rows)

    group.all_gather_and_consume(a, consume)
    group.synchronize()
    assert sorted(seen) == list(range(M))


def bytes_of_chunks(group: gemmesh.Group) -> None:
    x, _ = operands(group.world_size)
    a = group.sharded(M, K, "f16")
    a.copy_from(filled(group, x[a.rows.start : a.rows.stop]))

    def consume(chunk: gemmesh.Chunk) -> None:
        assert chunk.matrix.tobytes() == x[chunk.rows.start : chunk.rows.stop].tobytes()

    group.all_gather_and_consume(a, consume, chunks=2)
    mine = x + np.float16(group.rank)
    rows = M // group.world_size

    def produce(chunk: gemmesh.Chunk) -> None:
        chunk.matrix.frombytes(mine[chunk.rows.start : chunk.rows.stop].tobytes())

    group.produce_and_all_to_all(a, produce, chunks=2)
    assert values(a.whole).tobytes() == b"".join(
        (x + np.float16(rank))[:rows].tobytes() for rank in range(group.world_size)
    )
    out = filled(group, np.full((rows, K), np.nan, np.float16))
    group.produce_and_reduce_scatter(M, out, produce, chunks=2)
    total = sum(x.astype(np.float64) + rank for rank in range(group.world_size))
    close(values(out), total[group.rank * rows : (group.rank + 1) * rows])


def errors(group: gemmesh.Group) -> None:
    x, w = operands(group.world_size)
    try:
        group.matmul(x, filled(group, w))
    except gemmesh.ArgumentError as error:
        assert "the device of a is the host and must be GPU" in str(error), error
        assert error.call == "matmul" and error.rank == group.rank and error.peer is None
    else:
        raise AssertionError("a matrix of the host was taken")
    try:
        group.matmul(filled(group, x[:, :96]), filled(group, w))
    except gemmesh.ArgumentError as error:
        assert "b [N, K] is [64, 128] and must be [64, 96]" in str(error), error
    else:
        raise AssertionError("operands of different K were taken")


def main() -> None:
    promise, world = sys.argv[1], int(sys.argv[2])
    if not gemmesh.is_rank():
        return gemmesh.launch(world)
    with gemmesh.Group.from_env(backend="cuda", timeout=60.0) as group:
        globals()[promise](group)
        group.barrier()
    print("kept", flush=True)


if __name__ == "__main__":
    main()
