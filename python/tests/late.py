"""Work that comes late: streams of the CUDA driver, without another library, and modules in the place of PyTorch and
CuPy, whose current stream is a stream of these."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import gemmesh

_driver = ctypes.CDLL("libcuda.so.1")
_c = ctypes.CDLL(None)
#: A function of C's that sleeps for as many microseconds as its argument says.
_sleep = ctypes.cast(_c.usleep, ctypes.c_void_p)
NON_BLOCKING = 1
RELAXED = 2
#: Two numbers 2 of f16.
TWOS = 0x40004000


def driver(name: str, *arguments: Any) -> None:
    """A call of the CUDA driver."""
    result = getattr(_driver, name)(*arguments)
    assert result == 0, f"{name} returns {result}"


def bind(group: gemmesh.Group) -> None:
    """Makes the context of the group's GPU this thread's."""
    context = ctypes.c_void_p()
    driver("cuInit", 0)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), group.device[1])
    driver("cuCtxSetCurrent", context)


class Stream:
    """A new stream, which lives as long as the process, or the one of this handle."""

    def __init__(self, ptr: int | None = None) -> None:
        stream = ctypes.c_void_p(ptr)
        if ptr is None:
            driver("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        self.ptr = stream.value

    def sleep(self, seconds: float = 0.1) -> None:
        """Puts a pause on the stream."""
        driver("cuLaunchHostFunc", ctypes.c_void_p(self.ptr), _sleep, ctypes.c_void_p(int(1e6 * seconds)))

    def fill(self, matrix: gemmesh.Matrix, word: int) -> None:
        """Fills a matrix without padding with a word of 32 bits."""
        rows, columns = matrix.shape
        words = rows * matrix.pitch // 4
        assert matrix.pitch == columns * {"f16": 2, "f32": 4}[matrix.dtype]
        driver("cuMemsetD32Async", ctypes.c_uint64(matrix.address), word, ctypes.c_size_t(words), self._as_parameter_)

    def fill_late(self, matrix: gemmesh.Matrix, word: int) -> None:
        self.sleep()
        self.fill(matrix, word)

    def copy(self, to: gemmesh.Matrix, first_row: int, of: gemmesh.Matrix) -> None:
        """Copies a matrix to rows of another."""
        size = ctypes.c_size_t(of.shape[0] * of.pitch)
        target = ctypes.c_uint64(to.address + first_row * to.pitch)
        driver("cuMemcpyDtoDAsync_v2", target, ctypes.c_uint64(of.address), size, self._as_parameter_)

    def synchronize(self) -> None:
        driver("cuStreamSynchronize", self._as_parameter_)

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.ptr)


class Gate:
    """Holds back what is put on a stream later, until it is opened. It must live until then."""

    def __init__(self, stream: Stream) -> None:
        # A semaphore of C's.
        self.semaphore = ctypes.create_string_buffer(64)
        assert _c.sem_init(self.semaphore, 0, 0) == 0
        place = ctypes.c_void_p(ctypes.addressof(self.semaphore))
        driver("cuLaunchHostFunc", stream._as_parameter_, ctypes.cast(_c.sem_wait, ctypes.c_void_p), place)

    def open(self) -> None:
        _c.sem_post(self.semaphore)


class Graph:
    """What is put on a stream within the block, to be launched later."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __enter__(self) -> Graph:
        driver("cuStreamBeginCapture_v2", self.stream._as_parameter_, RELAXED)
        return self

    def __exit__(self, *_: object) -> None:
        graph, self.executable = ctypes.c_void_p(), ctypes.c_void_p()
        driver("cuStreamEndCapture", self.stream._as_parameter_, ctypes.byref(graph))
        driver("cuGraphInstantiateWithFlags", ctypes.byref(self.executable), graph, ctypes.c_uint64(0))

    def launch(self) -> None:
        driver("cuGraphLaunch", self.executable, self.stream._as_parameter_)


#: If it is set, the libraries themselves are used.
INSTALLED = os.environ.get("GEMMESH_TEST_LIBRARIES") == "1"


class Current(threading.local):
    """Each thread's current stream, which modules in the place of libraries say."""

    stream: Any = None


class CurrentOf:
    """The current stream of a library that is installed."""

    def __init__(self, use: Callable[[int | None], object]) -> None:
        self.use, self.set = use, Current()

    @property
    def stream(self) -> Any:
        return self.set.stream

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self.set.stream = stream
        self.use(stream.ptr)


def as_torch(group: gemmesh.Group) -> Any:
    """PyTorch, or a module in its place. Returns what says the current stream, and is told it."""
    if INSTALLED:
        torch, device = importlib.import_module("torch"), group.device[1]
        return CurrentOf(lambda ptr: torch.cuda.set_stream(torch.cuda.ExternalStream(ptr, device=device)))
    current, torch = Current(), ModuleType("torch")
    torch.cuda = SimpleNamespace(is_initialized=lambda: current.stream is not None)  # type: ignore[attr-defined]
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda _: current.stream.ptr)  # type: ignore[attr-defined]
    sys.modules["torch"] = torch
    return current


def as_cupy(group: gemmesh.Group) -> Any:
    """As `as_torch`, for CuPy."""
    if INSTALLED:
        cupy, device = importlib.import_module("cupy"), group.device[1]
        cupy.cuda.Device(device).use()
        return CurrentOf(lambda ptr: cupy.cuda.ExternalStream(ptr, device).use())
    current, cupy = Current(), ModuleType("cupy")
    cupy.cuda = SimpleNamespace(get_current_stream=lambda _: current.stream)  # type: ignore[attr-defined]
    cupy.ndarray = Array  # type: ignore[attr-defined]
    sys.modules["cupy"] = cupy
    return current


class LateArray:
    """An array of a library that has no current stream. It is twos late, on the stream that the library is told."""

    def __init__(self, matrix: gemmesh.Matrix) -> None:
        self.matrix, self.told = matrix, list[int]()

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int]) -> Any:
        self.told.append(stream)
        Stream(stream).fill_late(self.matrix, TWOS)
        return self.matrix.__dlpack__(stream=-1, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.matrix.__dlpack_device__()


class ArrayWithoutStream:
    """An array in the place of JAX's."""

    def __init__(self, matrix: gemmesh.Matrix) -> None:
        self.matrix, self.told = matrix, list[Any]()

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int]) -> Any:
        self.told.append(stream)
        return self.matrix.__dlpack__(stream=-1, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.matrix.__dlpack_device__()


class Array(ArrayWithoutStream):
    """An array in the place of CuPy's."""


def array_of_cupy(matrix: gemmesh.Matrix, *, derived: bool = False) -> Any:
    """A matrix as an array of CuPy, without a copy. `derived`: of a class that is derived from CuPy's."""
    class_of_arrays = importlib.import_module("cupy").ndarray
    if derived:
        class_of_arrays = type("Derived", (class_of_arrays,), {})
    if not INSTALLED:
        return class_of_arrays(matrix)
    array = importlib.import_module("cupy").from_dlpack(matrix)
    return array.view(class_of_arrays) if derived else array
