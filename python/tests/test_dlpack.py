"""Tensors of other libraries, both ways."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import gemmesh
from ranks import Matrices, check, outcomes, ranks, sharded


def alone(body: Any) -> Any:
    return ranks(1, body)[0]


def name_of(capsule: Any) -> bytes:
    get = ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_char_p, [ctypes.py_object]
    name: bytes = get(capsule)
    return name


class Given:
    """A tensor whose library is of before version 1 of DLPack, or records what it is asked for."""

    def __init__(self, array: Any, legacy: bool = False) -> None:
        self.array, self.legacy, self.asked = array, legacy, []

    def __dlpack__(self, **options: Any) -> Any:
        if self.legacy and set(options) - {"stream"}:
            raise TypeError("unexpected argument")
        self.asked.append(options)
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Once:
    """A tensor that gives the same capsule each time."""

    def __init__(self, array: Any) -> None:
        self.capsule = array.__dlpack__(max_version=(1, 0))

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule


def test_a_matrix_is_read_and_written_without_a_copy() -> None:
    def body(group: gemmesh.Group) -> None:
        made = group.zeros(4, 6, "f32")
        array = np.from_dlpack(made)
        assert array.ctypes.data == made.address
        assert array.strides[0] == made.pitch
        array[:] = 7
        assert np.frombuffer(made.tobytes(), np.float32).tolist() == [7] * 24
        whole = group.sharded(4, 6, "f32").whole
        assert np.from_dlpack(whole).ctypes.data == whole.address

    alone(body)


def test_a_tensor_becomes_a_matrix_without_a_copy() -> None:
    def body(group: gemmesh.Group) -> None:
        array = np.arange(24, dtype=np.float32).reshape(4, 6)
        made = group.matrix(array)
        assert (made.address, made.shape, made.dtype, made.pitch) == (array.ctypes.data, (4, 6), "f32", 24)
        part = group.matrix(array[1:3, 2:5])
        assert (part.address, part.shape, part.pitch) == (array.ctypes.data + 32, (2, 3), 24)
        assert part.tobytes() == array[1:3, 2:5].tobytes()

    alone(body)


def test_a_matrix_keeps_the_tensor_and_a_tensor_keeps_the_matrix() -> None:
    def body(group: gemmesh.Group) -> Any:
        array = np.ones((4, 6), np.float32)
        alive = weakref.ref(array)
        made = group.matrix(array)
        del array
        gc.collect()
        assert alive() is not None and made.tobytes() == np.ones(24, np.float32).tobytes()
        del made
        gc.collect()
        assert alive() is None
        kept = np.from_dlpack(group.zeros(300, 300, "f32"))
        gc.collect()
        return kept

    # The group is closed by now.
    kept = alone(body)
    kept += 1
    assert kept.sum() == 90000


def test_capsules_are_of_the_version_that_is_asked_for() -> None:
    def body(group: gemmesh.Group) -> None:
        made = group.zeros(2, 3, "f16")
        assert name_of(made.__dlpack__()) == b"dltensor"
        assert name_of(made.__dlpack__(max_version=(0, 8))) == b"dltensor"
        assert name_of(made.__dlpack__(max_version=(1, 1))) == b"dltensor_versioned"
        assert name_of(made.__dlpack__(max_version=(2, 0))) == b"dltensor_versioned"
        assert made.__dlpack_device__() == group.device == (1, 0)

    alone(body)


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_of_both_versions_are_taken(legacy: bool) -> None:
    def body(group: gemmesh.Group) -> None:
        values = Matrices(1, "f16")
        a, b, out = values(5, 16), values(8, 16), np.full((5, 8), np.nan, np.float16)
        given = [Given(array, legacy) for array in (a, b, out)]
        assert group.matmul(*given) is given[2]
        check(out, a.astype(float) @ b.astype(float).T, 16.0, "f16")
        for tensor in given:
            assert tensor.asked == [{"stream": None} if legacy else {"stream": None, "max_version": (1, 1)}]

    alone(body)


def test_a_capsule_that_nobody_takes_frees_its_tensor() -> None:
    def body(group: gemmesh.Group) -> None:
        array = np.ones((4, 6), np.float32)
        references = sys.getrefcount(array)
        for version in (None, (1, 0)):
            made = group.matrix(array)
            capsule = made.__dlpack__(max_version=version)
            del made
            assert sys.getrefcount(array) > references
            del capsule
            gc.collect()
            assert sys.getrefcount(array) == references

    alone(body)


def test_a_capsule_is_taken_once() -> None:
    def body(group: gemmesh.Group) -> None:
        tensor = Once(np.ones((4, 6), np.float32))
        assert group.matrix(tensor).shape == (4, 6)
        with pytest.raises(BufferError, match="taken before"):
            group.matrix(tensor)

    alone(body)


def test_a_copy_and_another_device_are_refused() -> None:
    def body(group: gemmesh.Group) -> None:
        made = group.zeros(2, 3, "f32")
        assert np.from_dlpack(made, copy=False).ctypes.data == made.address
        for options in ({"copy": True}, {"dl_device": (2, 0)}):
            with pytest.raises(BufferError):
                made.__dlpack__(**options)  # type: ignore[arg-type]
        for stream in (0, 1, 7):
            with pytest.raises(ValueError, match="no stream"):
                made.__dlpack__(stream=stream)
        made.__dlpack__(stream=-1, dl_device=(1, 0), copy=False)

    alone(body)


def test_a_matrix_is_an_array_of_numpy_or_says_why_not() -> None:
    def body(group: gemmesh.Group) -> None:
        made = group.zeros(2, 3, "f32")
        array = np.asarray(made)
        array[:] = np.arange(6).reshape(2, 3)
        assert np.frombuffer(made.tobytes(), np.float32).tolist() == [0, 1, 2, 3, 4, 5]
        copied = np.array(made, dtype=np.float64)
        assert (copied.dtype, copied[1, 2]) == (np.float64, 5)
        copied[:] = 7
        assert array[1, 2] == 5
        with pytest.raises(gemmesh.ArgumentError, match="NumPy has no type bf16; use torch.from_dlpack"):
            np.asarray(group.zeros(2, 3, "bf16"))
        with pytest.raises(gemmesh.ArgumentError, match="take its shard"):
            np.asarray(group.sharded(4, 3, "f32"))

    alone(body)


def test_what_is_read_only_is_read_and_never_written() -> None:
    def body(group: gemmesh.Group) -> None:
        values = Matrices(2, "f16")
        a, b, out = values(5, 16), values(8, 16), np.zeros((5, 8), np.float16)
        for array in (a, b, out):
            array.flags.writeable = False
        with pytest.raises(gemmesh.ArgumentError, match="out is read-only") as refused:
            group.matmul(a, b, out)
        assert (refused.value.call, refused.value.rank) == ("matmul", 0)
        assert not out.any()
        check(group.matmul(a, b), a.astype(float) @ b.astype(float).T, 16.0, "f16")
        # A matrix of it is for reading too.
        kept = group.matrix(out)
        writes: list[Any] = [
            lambda: group.matmul(a, b, kept),
            lambda: kept.copy_from(np.ones_like(out)),
            lambda: kept.frombytes(bytes(80)),
        ]
        for write in writes:
            with pytest.raises(gemmesh.ArgumentError, match="read-only"):
                write()
        assert not out.any()
        exported = np.from_dlpack(kept)
        assert not exported.flags.writeable
        with pytest.raises(BufferError, match="read-only"):
            kept.__dlpack__()

    alone(body)


@pytest.mark.parametrize(
    "tensor",
    [
        np.ones((16, 5), np.float16).T,
        np.ones((5, 32), np.float16)[:, ::2],
        np.ones((5, 16), np.float64),
        np.ones((5, 16), np.int32),
        np.ones((2, 5, 16), np.float16)[:, ::2],
        np.ones((5, 16), np.float16)[::-1],
        np.broadcast_to(np.ones(16, np.float16), (5, 16)),
        np.ones((), np.float16),
    ],
    ids=["transposed", "strided", "f64", "i32", "3-d with gaps", "backwards", "broadcast", "0-d"],
)
def test_what_is_no_row_major_matrix_of_a_known_type_is_refused(tensor: Any) -> None:
    def body(group: gemmesh.Group) -> None:
        with pytest.raises(gemmesh.ArgumentError):
            group.matmul(tensor, np.ones((8, 16), np.float16))
        with pytest.raises(gemmesh.ArgumentError):
            group.matrix(tensor)

    alone(body)


def test_a_vector_is_a_row() -> None:
    def body(group: gemmesh.Group) -> None:
        assert group.matrix(np.ones(7, np.float32)).shape == (1, 7)
        bias = np.arange(8, dtype=np.float16)
        out = group.matmul(np.zeros((5, 16), np.float16), np.ones((8, 16), np.float16), bias=bias)
        assert (np.from_dlpack(out) == bias).all()

    alone(body)


def test_leading_dimensions_are_rows() -> None:
    def body(group: gemmesh.Group) -> None:
        x = Matrices(5, "f16")(2, 5, 16)
        b = Matrices(6, "f16")(8, 16)
        out = group.matmul(x, b)
        check(out, x.astype(float).reshape(10, 16) @ b.astype(float).T, 16.0, "f16")
        given = np.full((2, 5, 8), np.nan, np.float16)
        assert group.matmul(x, b, given) is given
        assert given.tobytes() == out.tobytes()

    alone(body)


@pytest.mark.parametrize("rows", [0, 1])
def test_matrices_of_few_rows_are_exported(rows: int) -> None:
    def body(group: gemmesh.Group) -> None:
        made = group.zeros(rows, 5, "f32")
        assert np.from_dlpack(made).shape == (rows, 5)
        assert group.matrix(np.ones((rows, 5), np.float32)).shape == (rows, 5)

    alone(body)


def test_what_has_no_dlpack_is_refused_by_its_name() -> None:
    def body(group: gemmesh.Group) -> None:
        wrong: Any = [[1.0]]
        made = group.zeros(4, 4, "f32")
        for call, words in (
            (lambda: group.matmul(wrong[0][0], made), "a is a float and must be a gemmesh.Matrix or have __dlpack__"),
            (lambda: group.matmul(made, [made, wrong]), "b is a list and must be"),
            (lambda: group.matmul(made, made, bias=wrong), "bias is a list and must be"),
            (lambda: group.matrix(wrong), "the tensor is a list and must be"),
        ):
            with pytest.raises(gemmesh.ArgumentError, match=f"rank 0: .*: {words}") as refused:
                call()
            assert refused.value.rank == 0 and refused.value.call is not None

    alone(body)


def test_an_exception_of_the_tensor_s_library_comes_through_unless_the_device_is_wrong() -> None:
    class Broken:
        def __init__(self, *device: int) -> None:
            self.device = device

        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("this tensor needs a gradient")

        def __dlpack_device__(self) -> Any:
            return self.device

    def body(group: gemmesh.Group) -> None:
        with pytest.raises(BufferError, match="needs a gradient"):
            group.matrix(Broken(*group.device))
        with pytest.raises(gemmesh.ArgumentError, match="the device of out is GPU 3 and must be the host") as refused:
            group.matmul(group.zeros(8, 8, "f16"), group.zeros(8, 8, "f16"), Broken(2, 3))
        assert refused.value.call == "matmul"

    alone(body)


def test_rows_are_copied_from_tensors_and_matrices() -> None:
    x = Matrices(3, "f16")(8, 6)

    def body(group: gemmesh.Group) -> None:
        a = group.sharded(8, 6, "f16")
        a.copy_from(x[a.rows.start : a.rows.stop])
        group.all_gather(a)
        assert a.whole.tobytes() == x.tobytes()
        made = group.zeros(8, 6, "f16")
        made.copy_from(a.whole)
        assert made.tobytes() == x.tobytes()
        with pytest.raises(gemmesh.ArgumentError):
            a.copy_from(x)
        with pytest.raises(gemmesh.ArgumentError):
            made.copy_from(x.astype(np.float32))

    ranks(2, body)


def test_a_shard_s_memory_outlives_the_names_for_it() -> None:
    x = Matrices(4, "f32")(8, 6)

    def body(group: gemmesh.Group) -> Any:
        a = sharded(group, x)
        group.all_gather(a)
        return np.from_dlpack(a.whole)

    for whole in outcomes(2, body):
        gc.collect()
        assert np.array_equal(whole, x)


def test_of_tensors_without_elements_strides_say_nothing() -> None:
    x = np.zeros((4, 4, 16), np.float16)

    def body(group: gemmesh.Group) -> None:
        b = group.zeros(8, 8, "f16")
        strange = np.lib.stride_tricks.as_strided(np.empty(0, np.float16), (0, 8), (14, 6))
        for a, shape in (
            (x[:, :0, :8], (4, 0, 8)),
            (x[:0, :, :8], (0, 4, 8)),
            (x[0, :0, 8:], (0, 8)),
            (strange, (0, 8)),
            (np.empty((8, 0), np.float16).T, (0, 8)),
        ):
            assert a.shape == shape
            out = np.empty((*shape[:-1], 8), np.float16)
            assert group.matmul(a, b, out) is out
            group.matmul_reduce_scatter(a, b, out)
            assert group.matrix(a).shape == (0, 8)

    ranks(1, body)
