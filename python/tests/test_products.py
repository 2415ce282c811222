"""Every product against float64, on random values, with outputs that held NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmesh
from ranks import Matrices, activated, check, matrix, outcomes, poisoned, ranks, sharded, wide

ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]


def product(a: Any, b: Any) -> tuple[Any, Any]:
    """a b^T in float64, and the sums of the absolute values."""
    return wide(a) @ wide(b).T, np.abs(wide(a)) @ np.abs(wide(b)).T


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matmul_adds_the_bias_then_activates_then_adds_the_residual(dtype: str, activation: Any) -> None:
    def body(group: gemmesh.Group) -> None:
        values = Matrices(1, dtype)
        a, b, bias, residual = values(13, 72), values(40, 72), values(40), values(13, 40)
        out = poisoned(group, 13, 40, dtype)
        same = group.matmul(
            matrix(group, a),
            matrix(group, b),
            out,
            bias=matrix(group, bias),
            residual=matrix(group, residual),
            activation=activation,
        )
        assert same is out
        sums, summed = product(a, b)
        expected = activated(activation, sums + wide(bias)) + wide(residual)
        check(out, expected, summed + np.abs(wide(bias)) + np.abs(wide(residual)), dtype)

    ranks(1, body)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_gathered_rows_are_multiplied_and_stay(world: int, dtype: str) -> None:
    m, n, k = 26, 24, 40
    x = Matrices(2, dtype)(m, k)

    def body(group: gemmesh.Group) -> None:
        values = Matrices(10 + group.rank, dtype)
        # N differs between ranks.
        b, bias = values(n + 8 * group.rank, k), values(n + 8 * group.rank)
        a = sharded(group, x)
        out = poisoned(group, m, len(b), dtype)
        returned = group.all_gather_matmul(a, matrix(group, b), out, bias=matrix(group, bias), activation="silu")
        assert returned is out
        sums, summed = product(x, b)
        check(out, activated("silu", sums + wide(bias)), summed + np.abs(wide(bias)), dtype)
        assert np.array_equal(wide(a.whole), wide(x))

    ranks(world, body)


@pytest.mark.parametrize("stages", [None, 2, 4])
def test_a_staged_gather_gives_the_same_product(stages: int | None) -> None:
    m, n, k, world = 32, 16, 24, 2
    x = Matrices(3)(m, k)

    def body(group: gemmesh.Group) -> None:
        a = group.sharded(m, k, "bf16", stages=stages)
        # The rows of a rank: a block of each stage.
        own = x.reshape(stages or 1, world, -1, k)[:, group.rank].reshape(-1, k)
        a.copy_from(matrix(group, own))
        b = Matrices(4)(n, k)
        out = group.all_gather_matmul(a, matrix(group, b), poisoned(group, m, n, "bf16"), stages=stages)
        check(out, *product(x, b), "bf16")
        assert a.whole.tobytes() == x.tobytes()
        with pytest.raises(gemmesh.ArgumentError, match="copy_from"):
            a.copy_from(matrix(group, own[1:]))

    ranks(world, body)


@pytest.mark.parametrize("rows", [[5, 0, 11], [0, 0, 7], [4, 4, 4]])
def test_rows_may_be_uneven(rows: list[int]) -> None:
    m, n, k = sum(rows), 12, 16
    x = Matrices(5)(m, k)

    def body(group: gemmesh.Group) -> None:
        a = sharded(group, x, rows=rows)
        assert [len(a.rows_of(rank)) for rank in range(3)] == rows
        b = Matrices(6)(n, k)
        out = group.all_gather_matmul(a, matrix(group, b), poisoned(group, m, n, "bf16"))
        check(out, *product(x, b), "bf16")

    ranks(3, body)


def test_rows_change_within_the_capacity() -> None:
    k, n, capacity = 16, 8, 24

    def body(group: gemmesh.Group) -> None:
        a = group.sharded(capacity, k, "bf16", capacity=True)
        assert a.capacity >= capacity
        b = Matrices(7)(n, k)
        weight = matrix(group, b)
        for step, rows in enumerate([[1, 0], [7, 3], [12, 12]]):
            x = Matrices(100 + step)(sum(rows), k)
            a.set_rows(rows)
            assert (a.shape, len(a.rows)) == ((sum(rows), k), rows[group.rank])
            a.shard.frombytes(x[a.rows.start : a.rows.stop].tobytes())
            check(group.all_gather_matmul(a, weight), *product(x, b), "bf16")
        with pytest.raises(gemmesh.ArgumentError):
            a.set_rows([capacity, capacity])

    ranks(2, body)


@pytest.mark.parametrize("gathers", [False, True])
def test_several_weights_have_an_output_each(gathers: bool) -> None:
    m, k = 10, 32
    x = Matrices(8)(m, k)

    def body(group: gemmesh.Group) -> None:
        values = Matrices(9)
        weights = [values(n, k) for n in (24, 8, 16)]
        given = [matrix(group, weight) for weight in weights]
        outputs = [poisoned(group, m, len(weight), "bf16") for weight in weights]
        call: Any = group.all_gather_matmul if gathers else group.matmul
        a = sharded(group, x) if gathers else matrix(group, x)
        for found in (call(a, given, outputs), call(a, tuple(given))):
            for out, weight in zip(found, weights, strict=True):
                check(out, *product(x, weight), "bf16")
        [only] = call(a, given[:1])
        check(only, *product(x, weights[0]), "bf16")

    ranks(2, body)


@pytest.mark.parametrize("gathers", [False, True])
def test_a_gate_multiplies_its_up_projection(gathers: bool) -> None:
    m, n, k = 10, 16, 32
    x = Matrices(11)(m, k)

    def body(group: gemmesh.Group) -> None:
        values = Matrices(12)
        gate, up = values(n, k), values(n, k)
        call: Any = group.all_gather_matmul if gathers else group.matmul
        a = sharded(group, x) if gathers else matrix(group, x)
        out = call(a, [matrix(group, gate), matrix(group, up)], gated=True, activation="silu")
        (g, gs), (u, us) = product(x, gate), product(x, up)
        check(out, activated("silu", g) * u, gs * us, "bf16")

    ranks(2, body)


@pytest.mark.parametrize("operation", ["matmul", "all_gather_matmul", "matmul_reduce_scatter"])
def test_weights_may_be_kn_and_outputs_f32(operation: str) -> None:
    m, n, k, world = 12, 16, 24, 2
    x = Matrices(13)(m, k)

    def body(group: gemmesh.Group) -> None:
        b = Matrices(14)(k, n)
        a = sharded(group, x) if operation == "all_gather_matmul" else matrix(group, x)
        sums, summed = product(x, b.T)
        if operation == "matmul_reduce_scatter":
            rows = slice(group.rank * m // world, (group.rank + 1) * m // world)
            # Each rank's part is rounded to bf16 before it is added.
            sums, summed = world * sums[rows], 2**8 * summed[rows]
        out = poisoned(group, len(sums), n, "f32")
        getattr(group, operation)(a, matrix(group, b), out, weight_layout="kn")
        check(out, sums, summed, "f32")
        made = getattr(group, operation)(a, matrix(group, b), weight_layout="kn", dtype="f32")
        assert made.dtype == "f32" and made.tobytes() == out.tobytes()

    ranks(world, body)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("rows", [None, [7, 1, 0]])
@pytest.mark.parametrize("into", ["matrix", "new", "sharded"])
def test_sums_are_scattered(dtype: str, rows: list[int] | None, into: str) -> None:
    world, m, n = 3, 8, 24
    widths = [16 + 8 * rank for rank in range(world)]
    parts = [(Matrices(20 + k, dtype)(m, k), Matrices(30 + k, dtype)(n, k)) for k in widths]
    bias, residual = Matrices(40, dtype)(n), Matrices(41, dtype)(m, n)
    sums = sum(product(*part)[0] for part in parts)
    summed = sum(product(*part)[1] for part in parts)

    def body(group: gemmesh.Group) -> None:
        owned = rows or group.even_rows(m)
        first = sum(owned[: group.rank])
        own = slice(first, first + owned[group.rank])
        out: Any = None
        options: dict[str, Any] = {"rows": rows}
        if into == "matrix":
            out = poisoned(group, owned[group.rank], n, dtype)
        elif into == "sharded":
            out = group.sharded(None if rows else m, n, dtype, rows=rows)
            options = {}
        a, b = parts[group.rank]
        found = group.matmul_reduce_scatter(
            matrix(group, a),
            matrix(group, b),
            out,
            bias=matrix(group, bias),
            residual=matrix(group, residual[own]),
            activation="relu",
            **options,
        )
        expected = activated("relu", sums[own] + wide(bias)) + wide(residual[own])
        # Each rank's part is rounded once.
        rounded = summed[own] * (2.0**8 if dtype == "bf16" else 2.0**6)
        check(found.shard if into == "sharded" else found, expected, rounded, dtype)

    ranks(world, body)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_every_rank_gets_all_sums(dtype: str) -> None:
    world, m, n, k = 3, 7, 16, 24
    parts = [(Matrices(50 + rank, dtype)(m, k), Matrices(60 + rank, dtype)(n, k)) for rank in range(world)]
    bias, residual = Matrices(42, dtype)(n), Matrices(43, dtype)(m, n)
    sums = sum(product(*part)[0] for part in parts)
    summed = sum(product(*part)[1] for part in parts)

    def body(group: gemmesh.Group) -> bytes:
        a, b = parts[group.rank]
        out = group.sharded(m, n, dtype)
        found = group.matmul_all_reduce(
            matrix(group, a),
            matrix(group, b),
            out,
            bias=matrix(group, bias),
            residual=matrix(group, residual),
            activation="gelu",
        )
        assert found is out
        rounded = summed * (2.0**8 if dtype == "bf16" else 2.0**6)
        check(out.whole, activated("gelu", sums + wide(bias)) + wide(residual), rounded, dtype)
        return out.whole.tobytes()

    found = ranks(world, body)
    assert len(set(found)) == 1, "ranks have different bits"


def test_prepared_products_give_the_bits_of_planned_ones() -> None:
    m, n, k, world = 16, 24, 32, 2
    x = Matrices(70)(m, k)

    def body(group: gemmesh.Group) -> None:
        b, bias = matrix(group, Matrices(71)(n, k)), matrix(group, Matrices(72)(n))
        own, a, sums = matrix(group, x), sharded(group, x), group.sharded(m, n, "bf16")
        arguments: dict[str, tuple[Any, Any, Any]] = {
            "matmul": (own, b, poisoned(group, m, n, "bf16")),
            "all_gather_matmul": (a, b, poisoned(group, m, n, "bf16")),
            "matmul_reduce_scatter": (own, b, poisoned(group, m // world, n, "bf16")),
            "matmul_all_reduce": (own, b, sums),
        }
        for operation, (rows, weight, out) in arguments.items():
            prepared = group.prepare(operation, rows, weight, out, activation="relu")
            assert operation in repr(prepared)
            assert prepared.explain()
            assert prepared(rows, weight, out, bias=bias) is out
            other = group.sharded(m, n, "bf16") if out is sums else None
            planned = getattr(group, operation)(rows, weight, other, bias=bias, activation="relu")
            values = [made.whole if isinstance(made, gemmesh.Sharded) else made for made in (out, planned)]
            assert values[0].tobytes() == values[1].tobytes(), operation

    ranks(world, body)


@pytest.mark.parametrize("ending", ["svg", "json"])
def test_a_traced_call_can_be_drawn(tmp_path: Any, ending: str) -> None:
    m, n, k = 16, 24, 32
    x, path = Matrices(73)(m, k), tmp_path / f"timeline.{ending}"

    def body(group: gemmesh.Group) -> None:
        a, b, out = sharded(group, x), matrix(group, Matrices(74)(n, k)), poisoned(group, m, n, "bf16")
        prepared = group.prepare("all_gather_matmul", a, b, out)
        trace = prepared.traced(a, b, out)
        check(out, *product(x, b), "bf16")
        group.write_timeline(trace, path, "a title")

    ranks(2, body)
    text = path.read_text()
    assert ("<svg" in text and "a title" in text) if ending == "svg" else text.lstrip()[0] in "[{"


def test_support_is_known_before_a_matrix_is_made() -> None:
    def body(group: gemmesh.Group) -> None:
        group.check_support("all_gather_matmul", 64, 32, [16, 8], np.float16, stages=2)
        group.check_support("matmul_reduce_scatter", 64, 32, 16, rows=[40, 24])
        blocks: dict[str, Any] = {"a_scaling": "blocks", "b_scaling": "blocks", "quantization": "blocks"}
        group.check_support("matmul", 64, 256, 16, "f8e4m3", **blocks)
        with pytest.raises(gemmesh.ArgumentError) as refused:
            group.check_support("matmul", 64, 32, 16, "u8")
        assert refused.value.call == "matmul"
        with pytest.raises(ValueError, match="all_gather_matmul"):
            group.check_support("matmull", 64, 32, 16)  # type: ignore[arg-type]

    ranks(2, body)


def test_an_argument_that_does_not_fit_is_refused_before_anything_is_done() -> None:
    x = Matrices(75)(8, 16)

    def body(group: gemmesh.Group) -> None:
        a, out = sharded(group, x), poisoned(group, 8, 4, "bf16")
        before = out.tobytes()
        with pytest.raises(gemmesh.ArgumentError, match="all_gather_matmul") as refused:
            group.all_gather_matmul(a, matrix(group, Matrices(1)(4, 15)), out)
        assert (refused.value.rank, refused.value.call) == (group.rank, "all_gather_matmul")
        with pytest.raises(gemmesh.ArgumentError, match="Sharded"):
            group.all_gather_matmul(out, out)  # type: ignore[call-overload]
        with pytest.raises(gemmesh.ArgumentError, match="Sharded"):
            group.matmul(a, out)  # type: ignore[call-overload]
        with pytest.raises(gemmesh.ArgumentError, match="sharded"):
            group.matmul_all_reduce(out, out, out)  # type: ignore[arg-type]
        assert out.tobytes() == before
        # The group goes on.
        b = Matrices(76)(4, 16)
        check(group.all_gather_matmul(a, matrix(group, b), out), *product(x, b), "bf16")

    ranks(2, body)


def test_matrices_of_another_group_are_refused() -> None:
    def body(group: gemmesh.Group) -> None:
        part = group.split(group.rank)
        with part:
            a = part.sharded(8, 16, "bf16")
            with pytest.raises(gemmesh.ArgumentError):
                group.all_gather(a)

    found = outcomes(2, body)
    assert found == [None, None]


@pytest.mark.parametrize(
    ("option", "value"),
    [("activation", "tanh"), ("weight_layout", "mn"), ("accumulation", "slow"), ("dtype", "f64")],
)
def test_a_word_that_is_not_known_is_refused_by_a_list_of_the_known_ones(option: str, value: str) -> None:
    def body(group: gemmesh.Group) -> None:
        a = group.zeros(8, 16, "bf16")
        call: Any = group.matmul
        with pytest.raises(gemmesh.ArgumentError, match=f'{option} is "{value}" and must be one of') as refused:
            call(a, a, **{option: value})
        assert (refused.value.rank, refused.value.call) == (0, "matmul")

    ranks(1, body)


def test_a_number_that_does_not_fit_is_refused_by_its_name() -> None:
    def body(group: gemmesh.Group) -> None:
        a, weight = group.sharded(8, 16, "bf16"), group.zeros(4, 16, "bf16")
        calls: list[tuple[str, str, Callable[[], object]]] = [
            ("Group.zeros", "columns", lambda: group.zeros(4, -1, "bf16")),
            ("Group.sharded", "m", lambda: group.sharded(-1, 16, "bf16")),
            ("Group.sharded", "rows", lambda: group.sharded(None, 16, "bf16", rows=[4, -4])),
            ("Group.even_rows", "m", lambda: group.even_rows(-1)),
            ("Group.split", "color", lambda: group.split(-1)),
            ("Group.prepare", "stages", lambda: group.prepare("all_gather_matmul", a, weight, stages=-1)),
            ("Group.check_support", "n", lambda: group.check_support("matmul", 8, 16, [4, -4])),
            ("all_gather_matmul", "stages", lambda: group.all_gather_matmul(a, weight, stages=-2)),
            ("broadcast", "root", lambda: group.broadcast(a, -1)),
            ("all_gather_and_consume", "chunks", lambda: group.all_gather_and_consume(a, print, chunks=-1)),
            ("Sharded.rows_of", "rank", lambda: a.rows_of(-1)),
            ("Sharded.set_rows", "rows", lambda: a.set_rows([9, -1])),
        ]
        for name, argument, call in calls:
            with pytest.raises(gemmesh.ArgumentError, match=f"{argument} is -[0-9] and must not be negative") as refused:
                call()
            assert (refused.value.rank, refused.value.call) == (0, name)
        with pytest.raises(gemmesh.ArgumentError, match="rows is 18446744073709551616, which is too large"):
            group.zeros(1 << 64, 4, "bf16")
        with pytest.raises(gemmesh.ArgumentError, match="gemmesh.Scaled: first_row is -1"):
            gemmesh.Scaled(weight, weight, "blocks", first_row=-1)
        with pytest.raises(TypeError, match="float"):
            group.zeros(1.5, 4, "bf16")  # type: ignore[arg-type]

    ranks(1, body)


def test_errors_in_a_part_of_a_job_name_ranks_by_the_job_s_numbers() -> None:
    def body(group: gemmesh.Group) -> None:
        with group.split(group.rank // 2) as part:
            with pytest.raises(gemmesh.ArgumentError, match=f": rank {group.rank}: Group.zeros: rows is -1") as refused:
                part.zeros(-1, 4, "bf16")
            assert (refused.value.rank, refused.value.at_fault) == (group.rank, (group.rank,))
            part.barrier()
            if group.rank == 3:
                part.fail("there is no more data")
            if group.rank >= 2:
                for _ in range(2):
                    with pytest.raises(gemmesh.RankError, match="rank 3 failed in its own program") as failed:
                        part.barrier()
                    assert (failed.value.rank, failed.value.at_fault) == (group.rank, (3,))

    ranks(4, body)


def test_support_names_the_option_that_is_wrong() -> None:
    def body(group: gemmesh.Group) -> None:
        for option, value in (("weight_dtype", "f64"), ("a_scaling", "columns"), ("quantization", "rows")):
            options: Any = {option: value}
            with pytest.raises(gemmesh.ArgumentError, match=f'{option} is "{value}"'):
                group.check_support("matmul", 8, 16, 4, **options)

    ranks(1, body)


def test_ranks_that_wait_learn_which_word_another_rank_was_refused() -> None:
    def body(group: gemmesh.Group) -> None:
        a, b = sharded(group, Matrices(75)(8, 16)), matrix(group, Matrices(76)(4, 16))
        activation: Any = ["relu", "swish"][group.rank]
        kind = [gemmesh.RankError, gemmesh.ArgumentError][group.rank]
        words = '^rank 1: all_gather_matmul: activation is "swish" and must be one of'
        with pytest.raises(kind, match=words) as refused:
            group.all_gather_matmul(a, b, activation=activation)
        assert (refused.value.rank, refused.value.at_fault) == (group.rank, (1,))
        if group.rank == 0:
            # It has waited for rank 1, so the group is over.
            with pytest.raises(gemmesh.RankError, match="the group has failed: rank 1"):
                group.barrier()

    ranks(2, body)
