"""fp8: products with each kind of scales, and outputs that are quantised, against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmesh
from ranks import Matrices, check, matrix, poisoned, ranks, sharded, wide

M, N, K, BLOCK = 12, 144, 256, 128


def blocks(x: Any, rows: int) -> Any:
    """Each value's scale, from the scales of blocks of `rows` x 128 values."""
    return np.repeat(np.repeat(x, rows, 0), BLOCK, 1)


def scales(random: np.random.Generator, *shape: int) -> Any:
    return random.uniform(0.01, 0.1, shape).astype(np.float32)


def scaled_operands(scaling: str, seed: int) -> tuple[Any, Any, Any, Any, Any, Any]:
    """a and its scales, b and its scales, and both as float64."""
    values = Matrices(seed, "f8e4m3")
    a, b, random = values(M, K, scale=4), values(N, K, scale=4), values.random
    if scaling == "tensor":
        a_scales, b_scales = scales(random, 1, 1), scales(random, 1, 1)
        return a, a_scales, b, b_scales, wide(a) * a_scales, wide(b) * b_scales
    if scaling == "rows":
        a_scales, b_scales = scales(random, 1, M), scales(random, 1, N)
        return a, a_scales, b, b_scales, wide(a) * a_scales.T, wide(b) * b_scales.T
    a_scales, b_scales = scales(random, M, K // BLOCK), scales(random, -(-N // BLOCK), K // BLOCK)
    wide_a, wide_b = wide(a) * blocks(a_scales, 1), wide(b) * blocks(b_scales, BLOCK)[:N]
    if scaling == "transposed_blocks":
        a_scales = np.ascontiguousarray(a_scales.T)
    return a, a_scales, b, b_scales, wide_a, wide_b


@pytest.mark.parametrize("scaling", ["tensor", "rows", "blocks", "transposed_blocks"])
@pytest.mark.parametrize("operation", ["matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_products_of_fp8_have_scales(scaling: Any, operation: str) -> None:
    world = 2
    a, a_scales, b, b_scales, wide_a, wide_b = scaled_operands(scaling, 1)
    of_b: Any = "blocks" if scaling == "transposed_blocks" else scaling

    def body(group: gemmesh.Group) -> None:
        weight = gemmesh.Scaled(matrix(group, b), matrix(group, b_scales), of_b)
        own = sharded(group, a) if operation == "all_gather_matmul" else matrix(group, a)
        rows = gemmesh.Scaled(own, matrix(group, a_scales), scaling)
        expected, summed = wide_a @ wide_b.T, np.abs(wide_a) @ np.abs(wide_b).T
        call: Any = getattr(group, operation)
        if operation == "matmul_all_reduce":
            found = call(rows, weight, group.sharded(M, N, "bf16")).whole
        elif operation == "matmul_reduce_scatter":
            found = call(rows, weight, poisoned(group, M // world, N, "bf16"))
            mine = slice(group.rank * M // world, (group.rank + 1) * M // world)
            expected, summed = expected[mine], summed[mine]
        else:
            found = call(rows, weight, poisoned(group, M, N, "bf16"))
        if "reduce" in operation:
            expected, summed = world * expected, summed * 2**8
        check(found, expected, summed, "bf16")

    ranks(world, body)


@pytest.mark.parametrize("scaling", ["tensor", "rows", "blocks", "transposed_blocks"])
@pytest.mark.parametrize("operation", ["matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_no_rows_have_scales(scaling: Any, operation: Any) -> None:
    of_b: Any = "blocks" if scaling == "transposed_blocks" else scaling
    shape = {"tensor": (1, 1), "rows": (1, 0), "blocks": (0, K // BLOCK), "transposed_blocks": (K // BLOCK, 0)}[scaling]
    b = np.zeros((N, K), ml_dtypes.float8_e4m3fn)
    b_scales = np.ones({"tensor": (1, 1), "rows": (1, N)}.get(scaling, (-(-N // BLOCK), K // BLOCK)), np.float32)
    # Without elements, strides and addresses say nothing.
    strange = np.lib.stride_tricks.as_strided(np.empty(0, np.float32), shape, (12, 28))

    def body(group: gemmesh.Group) -> None:
        weight = gemmesh.Scaled(matrix(group, b), matrix(group, b_scales), of_b)
        group.check_support(operation, 0, K, N, "f8e4m3", a_scaling=scaling, b_scaling=of_b)
        for of_a in (group.zeros(*shape, "f32"), np.empty(shape, np.float32), strange):
            if scaling == "tensor":
                of_a = np.ones((1, 1), np.float32)
            gathers = operation == "all_gather_matmul"
            own: Any = group.sharded(0, K, "f8e4m3") if gathers else group.zeros(0, K, "f8e4m3")
            out: Any = group.sharded(0, N, "bf16") if operation == "matmul_all_reduce" else group.zeros(0, N, "bf16")
            call: Any = getattr(group, operation)
            assert call(gemmesh.Scaled(own, of_a, scaling), weight, out) is out
            prepared = group.prepare(operation, gemmesh.Scaled(own, of_a, scaling), weight, out)
            prepared(gemmesh.Scaled(own, of_a, scaling), weight, out)

    ranks(2, body)


@pytest.mark.parametrize("scaling", ["tensor", "blocks", "transposed_blocks"])
def test_outputs_without_rows_have_scales(scaling: Any) -> None:
    shape = {"tensor": (1, 1), "blocks": (0, 2), "transposed_blocks": (2, 0)}[scaling]

    def body(group: gemmesh.Group) -> None:
        out = gemmesh.Quantized(group.zeros(0, 256, "f8e4m3"), group.zeros(*shape, "f32"), scaling)
        group.matmul(group.zeros(0, 64, "bf16"), group.zeros(256, 64, "bf16"), out)
        group.all_gather_matmul(group.sharded(0, 64, "bf16"), group.zeros(256, 64, "bf16"), out)
        group.quantize(group.zeros(0, 256, "bf16"), out)

    ranks(2, body)


@pytest.mark.parametrize("scaling", ["rows", "blocks"])
def test_sharded_scales_travel_with_their_rows(scaling: Any) -> None:
    a, a_scales, b, b_scales, wide_a, wide_b = scaled_operands(scaling, 2)
    rows_of_scales = a_scales.T if scaling == "rows" else a_scales

    def body(group: gemmesh.Group) -> None:
        rows = gemmesh.Scaled(sharded(group, a), sharded(group, np.ascontiguousarray(rows_of_scales)), scaling)
        weight = gemmesh.Scaled(matrix(group, b), matrix(group, b_scales), scaling)
        found = group.all_gather_matmul(rows, weight, poisoned(group, M, N, "bf16"))
        check(found, wide_a @ wide_b.T, np.abs(wide_a) @ np.abs(wide_b).T, "bf16")

    ranks(2, body)


def test_a_weight_may_begin_inside_a_block() -> None:
    a, a_scales, b, b_scales, wide_a, _ = scaled_operands("blocks", 3)
    first = 48
    wide_b = wide(b[first:]) * blocks(b_scales, BLOCK)[first:N]

    def body(group: gemmesh.Group) -> None:
        rows = gemmesh.Scaled(matrix(group, a), matrix(group, a_scales), "blocks")
        weight = gemmesh.Scaled(matrix(group, b[first:]), matrix(group, b_scales), "blocks", first_row=first)
        found = group.matmul(rows, weight, poisoned(group, M, N - first, "bf16"))
        check(found, wide_a @ wide_b.T, np.abs(wide_a) @ np.abs(wide_b).T, "bf16")

    ranks(1, body)


def test_parts_of_k_may_begin_inside_a_block() -> None:
    world, k = 2, 192
    x = np.full((M, k), 3, ml_dtypes.bfloat16)  # fp8 holds it exactly, by the scale 3 / 448
    values = Matrices(5, "f8e4m3")
    weights = [values(N, k, scale=4) for _ in range(world)]
    of_whole = scales(values.random, -(-N // BLOCK), world * k // BLOCK)
    whole = np.concatenate([wide(w) for w in weights], 1) * blocks(of_whole, BLOCK)[:N]
    expected, summed = 3 * whole.sum(1), 3 * np.abs(whole).sum(1)

    def body(group: gemmesh.Group) -> None:
        # Rank 1 begins with column 64 of a block.
        begin, end = group.rank * k, (group.rank + 1) * k
        first = begin % BLOCK
        own = np.ascontiguousarray(of_whole[:, begin // BLOCK : -(-end // BLOCK)])
        group.check_support(
            "matmul_all_reduce", M, k, N, "f8e4m3", a_scaling="blocks", b_scaling="blocks", first_column=first
        )
        rows, of_rows = poisoned(group, M, k, "f8e4m3"), poisoned(group, M, own.shape[1], "f32")
        group.quantize(matrix(group, x), gemmesh.Quantized(rows, of_rows, "blocks", first_column=first))
        a = gemmesh.Scaled(rows, of_rows, "blocks", first_column=first)
        b = gemmesh.Scaled(matrix(group, weights[group.rank]), matrix(group, own), "blocks", first_column=first)
        found = group.matmul_all_reduce(a, b, group.sharded(M, N, "bf16")).whole
        check(found, np.tile(expected, (M, 1)), np.tile(summed, (M, 1)) * 2**8, "bf16")
        message = "first_column is for scales of .blocks."
        with pytest.raises(gemmesh.ArgumentError, match=message):
            gemmesh.Scaled(rows, of_rows, "rows", first_column=64)
        with pytest.raises(gemmesh.ArgumentError, match="must be that of a, 0, not 64"):
            b = gemmesh.Scaled(matrix(group, weights[0]), matrix(group, own), "blocks", first_column=64)
            a = gemmesh.Scaled(rows, of_rows, "blocks")
            group.matmul(a, b, poisoned(group, M, N, "bf16"))

    ranks(world, body)


def quantised(values: Any, made: Any, scaling: str) -> Any:
    """fp8 values times their scales."""
    of_row = made.T if scaling == "transposed_blocks" else made
    return wide(values) * (of_row if scaling == "tensor" else blocks(of_row, 1)[:, : values.shape[1]])


@pytest.mark.parametrize(
    ("scaling", "power_of_two"),
    # The scale of a tensor is given.
    [("tensor", False), *((scaling, on) for scaling in ("blocks", "transposed_blocks") for on in (False, True))],
)
@pytest.mark.parametrize("call", ["quantize", "matmul", "all_gather_matmul"])
def test_outputs_are_quantised(scaling: Any, power_of_two: bool, call: str) -> None:
    m, n, k = 6, 256, 64
    values = Matrices(4)
    x, b = values(m, k), values(n, k)
    y = values(m, n, scale=3)

    def body(group: gemmesh.Group) -> None:
        shape = {"tensor": (1, 1), "blocks": (m, n // BLOCK), "transposed_blocks": (n // BLOCK, m)}[scaling]
        out = gemmesh.Quantized(
            poisoned(group, m, n, "f8e4m3"), poisoned(group, *shape, "f32"), scaling, power_of_two=power_of_two
        )
        if scaling == "tensor":
            out.scales.frombytes(np.float32(0.125).tobytes())
        if call == "quantize":
            group.quantize(matrix(group, y), out)
            expected, summed = wide(y), 0.0
        elif call == "matmul":
            group.matmul(matrix(group, x), matrix(group, b), out)
            expected, summed = wide(x) @ wide(b).T, np.abs(wide(x)) @ np.abs(wide(b)).T
        else:
            group.all_gather_matmul(sharded(group, x), matrix(group, b), out)
            expected, summed = wide(x) @ wide(b).T, np.abs(wide(x)) @ np.abs(wide(b)).T
        made = wide(out.scales)
        found = quantised(out.values, made, scaling)
        # e4m3 has 3 bits behind the leading one; the smallest numbers are multiples of 2^-9 of the scale.
        least = np.max(made) * 2.0**-10
        assert (np.abs(found - expected) <= 2.0**-4 * 1.01 * np.abs(expected) + least + 2.0**-16 * summed).all()
        if scaling != "tensor":
            of_row = made.T if scaling == "transposed_blocks" else made
            most = np.abs(expected).reshape(m, n // BLOCK, BLOCK).max(2) / 448
            if power_of_two:
                assert (np.log2(of_row) % 1 == 0).all()
                assert (of_row >= most * 0.999).all() and (of_row < 2.01 * most).all()
            else:
                assert np.allclose(of_row, most, rtol=0.01)

    ranks(1, body)


def test_bytes_are_those_of_ml_dtypes() -> None:
    def body(group: gemmesh.Group) -> None:
        types = {
            "bf16": ml_dtypes.bfloat16,
            "f8e4m3": ml_dtypes.float8_e4m3fn,
            "f8e5m2": ml_dtypes.float8_e5m2,
        }
        for name, dtype in types.items():
            values = Matrices(5, name)(3, 5)
            made = group.zeros(3, 5, np.dtype(dtype))
            assert (made.dtype, made.shape) == (name, (3, 5))
            made.frombytes(values.tobytes())
            assert made.tobytes() == values.tobytes()
            with pytest.raises(gemmesh.ArgumentError):
                made.frombytes(values.tobytes()[1:])

    ranks(1, body)


@pytest.mark.parametrize("kind", ["Scaled", "Quantized"])
def test_scales_of_another_type_are_refused(kind: str) -> None:
    def body(group: gemmesh.Group) -> None:
        x, half = group.zeros(8, 128, "f8e4m3"), group.zeros(1, 1, "bf16")
        a: Any = gemmesh.Scaled(x, half) if kind == "Scaled" else group.zeros(8, 128, "bf16")
        out: Any = gemmesh.Quantized(group.zeros(8, 8, "f8e4m3"), half, "tensor") if kind == "Quantized" else None
        b: Any = gemmesh.Scaled(x, half) if kind == "Scaled" else group.zeros(8, 128, "bf16")
        with pytest.raises(gemmesh.ArgumentError, match="scales"):
            group.matmul(a, b, out)

    ranks(1, body)
