"""Checks whether gemmesh works on this machine, and says what to do about what does not::

    python -m gemmesh.doctor

The exit status is 1 if a problem keeps the backend from working. The backend is "cuda" in a build with it, else "host".
"""

from __future__ import annotations

import argparse
import ctypes
import json
import struct
import subprocess
import sys
import threading
from typing import NamedTuple

import gemmesh
from gemmesh.types import Backend

N, K = 24, 32
ROWS = 8  # of each rank
SECONDS = 60.0


class Report:
    """Prints findings, and knows if one was a problem."""

    def __init__(self) -> None:
        self.has_problem = False

    def ok(self, topic: str, what: str) -> None:
        print(f"ok       {topic}: {what}")

    def note(self, topic: str, what: str) -> None:
        print(f"note     {topic}: {what}", flush=True)

    def problem(self, topic: str, what: object, advice: str) -> None:
        self.has_problem = True
        print(f"problem  {topic}: {what}\n         {advice}")

    def missing(self, topic: str, what: str, advice: str, is_needed: bool) -> None:
        if is_needed:
            self.problem(topic, what, advice)
        else:
            self.note(topic, what)


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    #: The GPUs whose memory it can map.
    peers: list[int]


class Driver:
    """CUDA's driver, without a library of Python for it."""

    CAPABILITY = (75, 76)

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            words = ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(words))
            raise OSError(f"{name}: {(words.value or b'error').decode()}")

    def number(self, name: str, *arguments: object) -> int:
        found = ctypes.c_int()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value

    def gpus(self) -> list[Gpu]:
        devices = [self.number("cuDeviceGet", ordinal) for ordinal in range(self.number("cuDeviceGetCount"))]
        return [self.gpu(device, devices) for device in devices]

    def gpu(self, device: int, devices: list[int]) -> Gpu:
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, len(name), device)
        major, minor = (self.number("cuDeviceGetAttribute", what, device) for what in self.CAPABILITY)
        peers = [other for other in devices if other != device and self.number("cuDeviceCanAccessPeer", device, other)]
        return Gpu(name.value.decode(), (major, minor), peers)


def inspected() -> tuple[int, list[Gpu]]:
    """The driver's version and the GPUs, which a process of their own finds out: a driver may hang or crash."""
    command = [sys.executable, "-m", "gemmesh.doctor", "--inspect"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"the driver has not answered for {SECONDS:.0f} s") from None
    if found.returncode != 0:
        raise OSError((found.stderr.splitlines() or [f"exit status {found.returncode}"])[-1])
    version, gpus = json.loads(found.stdout)
    return version, [Gpu(name, (major, minor), peers) for name, (major, minor), peers in gpus]


def multiply(group: gemmesh.Group) -> None:
    """Multiplies gathered rows of whole numbers, and compares each element with the exact one."""
    m = ROWS * group.world_size
    rows = [[(i + 3 * k) % 5 - 2 for k in range(K)] for i in range(m)]
    columns = [[(2 * j + k * k) % 7 - 3 for k in range(K)] for j in range(N)]

    def f16(values: list[list[int]]) -> bytes:
        flat = [value for row in values for value in row]
        return struct.pack(f"<{len(flat)}e", *flat)

    a, b = group.sharded(m, K, "f16"), group.zeros(N, K, "f16")
    a.shard.frombytes(f16(rows[a.rows.start : a.rows.stop]))
    b.frombytes(f16(columns))
    out = group.zeros(m, N, "f16")
    out.frombytes(b"\xff" * (2 * m * N))
    group.all_gather_matmul(a, b, out)
    exact = [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in rows]
    if out.tobytes() != f16(exact):
        raise ArithmeticError("the product is wrong")
    group.barrier()


def check_build(report: Report) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    report.ok("version", f"gemmesh {gemmesh.__version__}, Python {python}")
    nvcc = gemmesh.nvcc_release()
    if not gemmesh.HAS_CUDA:
        report.ok("build", "the host backend")
    elif nvcc is None:
        advice = "Build without GEMMESH_NO_KERNELS, with nvcc 12.4 or later."
        report.problem("build", "the CUDA backend without kernels", advice)
    else:
        report.ok("build", f"the host backend, and the CUDA backend with kernels of nvcc {nvcc}")


def check_launcher(report: Report) -> int | None:
    """Meets the other ranks if a launcher has started this process. Returns its rank."""
    try:
        found = gemmesh.rank_environment()
        if found is None:
            report.ok("launcher", "none has started this process")
            return None
        launcher, rank, world = found
        report.note("launcher", f"waiting for the other ranks of {world}, {SECONDS:.0f} s at most")
        with gemmesh.Group.from_env(backend="host", arrival_timeout=SECONDS) as group:
            group.barrier()
        report.ok("launcher", f"{launcher}: rank {rank} has met the others of {world}")
        return rank
    except gemmesh.Error as error:
        advice = (
            "Start all ranks of the job (with GEMMESH_KEY if they are on several hosts),"
            " or unset the launcher's variables."
        )
        report.problem("launcher", error, advice)
        return 0


def check_host(report: Report) -> None:
    failures: list[Exception] = []

    def run(rank: int) -> None:
        try:
            address = f"gemmesh.doctor {id(failures)}"
            with gemmesh.Group.connect(rank, 2, address, backend="host", arrival_timeout=SECONDS) as group:
                multiply(group)
        except Exception as error:
            failures.append(error)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if failures:
        report.problem("host", failures[0], "Do as the message says; the host backend needs Linux and shared memory.")
    else:
        report.ok("host", "two ranks as threads have gathered and multiplied; each element is exact")


def check_gpus(report: Report, is_needed: bool, may_launch: bool) -> None:
    try:
        version, gpus = inspected()
    except OSError as error:
        advice = "Install NVIDIA's driver for CUDA 12.4 or later, and see that nvidia-smi lists the GPUs."
        report.missing("driver", f"no GPU can be used: {error}", advice, is_needed)
        return
    if version < 12040:
        report.missing("driver", f"it is for CUDA {cuda(version)}", "Install one for CUDA 12.4 or later.", is_needed)
    else:
        report.ok("driver", f"for CUDA {cuda(version)}")
    if not gpus:
        report.missing("GPUs", "the driver shows none", "See whether CUDA_VISIBLE_DEVICES hides them.", is_needed)
    fit = 0
    for ordinal, (name, (major, minor), peers) in enumerate(gpus):
        what = f"{name}, compute capability {major}.{minor}, peers {peers}"
        strangers = sorted(set(range(len(gpus))) - {ordinal, *peers})
        leave_out = "Leave one out with CUDA_VISIBLE_DEVICES."
        if major != 9:
            report.missing(f"GPU {ordinal}", what, f"The kernels are for 9.0 (H100, H200). {leave_out}", is_needed)
        elif strangers:
            report.missing(f"GPU {ordinal}", f"{what}: it cannot map the memory of {strangers}", leave_out, is_needed)
        else:
            fit += 1
            report.ok(f"GPU {ordinal}", what)
    if not gpus or fit < len(gpus) or not is_needed:
        return
    if not may_launch:
        report.note("cuda", "run the doctor without a launcher to multiply on the GPUs")
        return
    try:
        gemmesh.launch(len(gpus), ["-m", "gemmesh.doctor", "--multiply"])
        report.ok("cuda", f"{len(gpus)} ranks as processes have gathered and multiplied; each element is exact")
    except gemmesh.Error as error:
        report.problem("cuda", error, "See what the rank printed, and docs/gpus.md.")


def cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gemmesh.doctor", description="Checks whether gemmesh works here.")
    parser.add_argument("--backend", choices=["cuda", "host"], default="cuda" if gemmesh.HAS_CUDA else "host")
    parser.add_argument("--multiply", action="store_true", help=argparse.SUPPRESS)  # a rank of `check_gpus`
    parser.add_argument("--inspect", action="store_true", help=argparse.SUPPRESS)  # the process of `inspected`
    arguments = parser.parse_args()
    backend: Backend = arguments.backend
    if arguments.multiply:
        with gemmesh.Group.from_env(backend="cuda", arrival_timeout=SECONDS, timeout=SECONDS) as group:
            multiply(group)
        return 0
    if arguments.inspect:
        try:
            driver = Driver()
            print(json.dumps((driver.number("cuDriverGetVersion"), driver.gpus())))
        except OSError as error:
            sys.exit(str(error))
        return 0
    report = Report()
    check_build(report)
    rank = check_launcher(report)
    if not rank:
        check_host(report)
        if backend == "cuda" and not gemmesh.HAS_CUDA:
            advice = "Build with --features cuda; see python/README.md."
            report.problem("cuda", "this build has no CUDA backend", advice)
        check_gpus(report, backend == "cuda" and gemmesh.HAS_CUDA, rank is None)
    return int(report.has_problem)


if __name__ == "__main__":
    sys.exit(main())
