"""Programs of test_ending.py that end while a thread is about to call into Python: `ending_ranks.py PROGRAM`."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

#: What runs after the library's hook at the interpreter's end.
AFTER_THE_HOOK: list[Callable[[], object]] = []
# Hooks run in the opposite order.
atexit.register(lambda: [each() for each in AFTER_THE_HOOK])

import gemmesh  # noqa: E402

M, K = 16, 64
#: What lives until the interpreter ends.
KEPT: list[Any] = []


class Described(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def give_back(_: int) -> None:
    """A deleter that takes the GIL, as CuPy's does, and lets it go meanwhile."""
    time.sleep(0.001)


class Tensor:
    """A matrix as a tensor of a library whose deleter takes the GIL."""

    def __init__(self, matrix: gemmesh.Matrix) -> None:
        self.matrix = matrix

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> Any:
        shape = (ctypes.c_int64 * 2)(*self.matrix.shape)
        deleter = ctypes.cast(give_back, ctypes.c_void_p)
        f16 = (ctypes.c_uint8 * 4)(2, 16, 1, 0)
        device = (ctypes.c_int32 * 2)(*self.matrix.__dlpack_device__())
        tensor = Described(
            self.matrix.address, device, 2, f16, ctypes.addressof(shape), None, 0, None, deleter.value
        )
        KEPT.extend((shape, tensor))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.matrix.__dlpack_device__()


def tensors(group: gemmesh.Group, calls: int) -> None:
    """Calls whose tensors wait to be given back."""
    from late import Stream, bind

    bind(group)
    stream = Stream()
    assert stream.ptr is not None
    group.set_stream(stream.ptr)
    a = group.zeros(M, K, "f16")
    out = group.zeros(M, M, "f16")
    group.matmul(a, a, out)
    stream.sleep(0.02)
    for _ in range(calls):
        group.matmul(Tensor(a), Tensor(a), out)


def on_a_gpu() -> gemmesh.Group:
    KEPT.append(gemmesh.Group.connect(0, 1, f"the end {os.getpid()}", backend="cuda"))
    group: gemmesh.Group = KEPT[-1]
    return group


def after_a_call() -> None:
    tensors(on_a_gpu(), 300)


def after_synchronize() -> None:
    group = on_a_gpu()
    tensors(group, 300)
    group.synchronize()


def after_close() -> None:
    group = on_a_gpu()
    tensors(group, 300)
    group.close()


def with_matrices_of_tensors() -> None:
    group = on_a_gpu()
    tensors(group, 1)
    KEPT.append([group.matrix(Tensor(group.zeros(M, K, "f16"))) for _ in range(100)])


def with_a_group_that_ends_late() -> None:
    """A thread drops a group, which would wait for its operations, when the library calls into Python no more."""
    from late import Gate, Stream, bind

    group = gemmesh.Group.connect(0, 1, f"the end {os.getpid()}", backend="cuda", timeout=1000.0)
    bind(group)
    stream = Stream()
    assert stream.ptr is not None
    group.set_stream(stream.ptr)
    a = group.zeros(M, K, "f16")
    group.matmul(a, a, group.zeros(M, M, "f16"))
    gate = Gate(stream)
    group.matmul(a, a, group.zeros(M, M, "f16"))
    held = [group, a]
    del group, a

    may_drop, dropped = threading.Event(), threading.Event()

    def drop() -> None:
        may_drop.wait()
        held.clear()
        dropped.set()

    def goes_on() -> None:
        may_drop.set()
        dropped.wait()
        gate.open()

    threading.Thread(target=drop, daemon=True).start()
    AFTER_THE_HOOK.append(goes_on)


def in_a_callback() -> None:
    """A thread that Python does not wait for is in a function that an operation calls."""
    group = gemmesh.Group.connect(0, 1, f"the end {os.getpid()}", backend="host")
    x, begun = group.sharded(M, K, "f16"), threading.Event()

    def consume(_: gemmesh.Chunk) -> None:
        begun.set()
        while True:
            time.sleep(0.001)

    threading.Thread(target=lambda: group.all_gather_and_consume(x, consume), daemon=True).start()
    begun.wait()


def in_a_call() -> None:
    """A thread that Python does not wait for is in a call, which returns about when the interpreter ends."""
    group = gemmesh.Group.connect(0, 1, f"the end {os.getpid()}", backend="host")

    def calls() -> None:
        while True:
            group.barrier()

    threading.Thread(target=calls, daemon=True).start()
    time.sleep(0.05)


def while_joining() -> None:
    """Ctrl-C has ended the program's wait for the ranks, and the library's thread still gathers."""

    def gather(mine: bytes) -> list[bytes]:
        signal.raise_signal(signal.SIGINT)
        while True:
            time.sleep(0.001)

    try:
        gemmesh.Group.from_callback(gather, 0, 2, backend="host")
    except KeyboardInterrupt:
        pass


def in_a_fork(program: Callable[[], None]) -> None:
    """The program is a fork of this process, which has imported the package."""
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    program()


if __name__ == "__main__":
    program = globals()[sys.argv[1]]
    in_a_fork(program) if sys.argv[2:] == ["fork"] else program()
    print("ended", flush=True)
