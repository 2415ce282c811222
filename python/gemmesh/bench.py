"""Times a gather and a product, one after the other and fused, on every rank at once::

    python -m gemmesh.bench --backend host --ranks 2
    torchrun --nproc-per-node 8 -m gemmesh.bench --backend cuda

Each rank has [M / ranks, K] of the rows and a weight [N, K]. On GPUs with PyTorch, times are those of CUDA events, and
the products beside gemmesh's are cuBLAS's and NCCL's. Else they are those of a clock on the host. Every product is
compared with float64 before it is timed. A time is the median of the rounds, in which the rows take turns; the slowest
rank counts.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import gemmesh

#: What the defaults are for a backend: M, N, K.
SHAPES = {"cuda": (4096, 6656, 16384), "host": (1024, 1024, 1024)}
#: The bits of a significand behind the first.
BITS = {"bf16": 7, "f16": 10}
#: Seconds for which the threads of NumPy's BLAS may spin after a product.
SPINNING = 0.1
#: More than the caches of a GPU.
FLUSHED_BYTES = 256 << 20

Run = Callable[[], Any]


class Side(Protocol):
    """The matrices of a rank, the ways to multiply them, and a clock."""

    #: Labels and calls. The last two are what is compared: one after the other, and fused.
    ways: dict[str, Run]
    fused: tuple[Any, Any, Any]

    def forget(self) -> None:
        """Overwrites the output, and the rows of other ranks."""

    def error(self) -> float:
        """The output's greatest error, as a part of what one rounding and sums in f32 allow."""

    def time(self, run: Run) -> float:
        """Runs it, and returns its seconds."""

    def close(self) -> None:
        """Ends what was begun."""


class WithNumpy:
    """Matrices of gemmesh on any backend; float64 is NumPy's."""

    def __init__(self, group: gemmesh.Group, m: int, n: int, k: int, dtype: str) -> None:
        # NumPy's BLAS reads it when it is loaded. The ranks share the cores.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // group.world_size)))
        import numpy as np

        self.group, self.dtype = group, dtype
        # All ranks know all rows.
        x = self.rounded(np.random.default_rng(0).standard_normal((m, k), np.float32))
        w = self.rounded(np.random.default_rng(1 + group.rank).standard_normal((n, k), np.float32))
        self.exact = x.astype(np.float64) @ w.astype(np.float64).T
        self.scale = np.sqrt(k)
        a, b, out = group.sharded(m, k, dtype), self.matrix(w), group.zeros(m, n, dtype)
        self.own = self.matrix(x[a.rows.start : a.rows.stop])
        self.fused = (a, b, out)

        def one_after_the_other() -> None:
            group.all_gather(a)
            group.matmul(a.whole, b, out)

        self.ways: dict[str, Run] = {
            "gemmesh mm only": lambda: group.matmul(a.whole, b, out),
            "gather + mm": one_after_the_other,
            "fused": lambda: group.all_gather_matmul(a, b, out),
        }
        if group.backend == "host":
            result = np.empty((m, n), np.float32)
            self.ways = {"numpy mm only": lambda: np.matmul(x, w.T, out=result), **self.ways}

    def rounded(self, values: Any) -> Any:
        """The nearest values of the type, as float32."""
        import numpy as np

        if self.dtype == "f16":
            return values.astype(np.float16).astype(np.float32)
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)

    def matrix(self, values: Any) -> gemmesh.Matrix:
        import numpy as np

        rows, columns = values.shape
        made = self.group.zeros(rows, columns, self.dtype)
        bits = values.astype(np.float16) if self.dtype == "f16" else (values.view(np.uint32) >> 16).astype(np.uint16)
        made.frombytes(bits.tobytes())
        return made

    def forget(self) -> None:
        a, _, out = self.fused
        for matrix in (a.whole, out):
            matrix.frombytes(b"\xff" * (2 * matrix.shape[0] * matrix.shape[1]))
        a.copy_from(self.own)

    def error(self) -> float:
        import numpy as np

        _, _, out = self.fused
        bits = np.frombuffer(out.tobytes(), np.float16 if self.dtype == "f16" else np.uint16).reshape(out.shape)
        found = bits if self.dtype == "f16" else (bits.astype(np.uint32) << 16).view(np.float32)
        allowed = 2.0 ** -(BITS[self.dtype] + 1) * np.abs(self.exact) + 2.0**-16 * self.scale
        return float(np.max(np.abs(found.astype(np.float64) - self.exact) / allowed))

    def time(self, run: Run) -> float:
        began = time.perf_counter()
        run()
        self.group.synchronize()
        seconds = time.perf_counter() - began
        if run is self.ways.get("numpy mm only"):
            time.sleep(SPINNING)  # not beside the next product
        return seconds

    def close(self) -> None:
        pass


class WithTorch:
    """PyTorch's tensors on a GPU; gemmesh's operations are on PyTorch's stream."""

    def __init__(self, group: gemmesh.Group, m: int, n: int, k: int, dtype: str) -> None:
        # It need not be there, nor its annotations.
        torch: Any = importlib.import_module("torch")
        dist: Any = importlib.import_module("torch.distributed")
        torch.cuda.set_device(group.device[1])
        device, kind = torch.device("cuda", group.device[1]), {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        # A store of its own: under torchrun, PyTorch would connect to the agent's store instead of making one.
        store = None
        if group.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        mine = struct.pack("<I", store.port if store is not None else 0)
        (port,) = struct.unpack("<I", group.all_gather_bytes(mine)[0])
        if store is None:
            store = dist.TCPStore("127.0.0.1", port, None, False)
        dist.init_process_group("nccl", store=store, rank=group.rank, world_size=group.world_size)
        self.torch, self.dist, self.group = torch, dist, group
        # All ranks know all rows.
        torch.manual_seed(0)
        self.x = torch.randn(m, k, device=device, dtype=kind)
        torch.manual_seed(1 + group.rank)
        b = torch.randn(n, k, device=device, dtype=kind)
        self.exact = self.x.double() @ b.double().T
        self.scale, self.bits = k**0.5, BITS[dtype]
        a, self.out = group.sharded(m, k, dtype), torch.empty(m, n, device=device, dtype=kind)
        self.shard, self.gathered = self.x[a.rows.start : a.rows.stop].clone(), torch.empty_like(self.x)
        self.flushed = torch.empty(FLUSHED_BYTES, device=device, dtype=torch.uint8)
        self.one = torch.ones(1, device=device)
        # Matrices of gemmesh: calls take less time on the host than with tensors.
        out, self.fused = group.matrix(self.out), (a, group.matrix(b), group.matrix(self.out))

        def one_after_the_other() -> None:
            dist.all_gather_into_tensor(self.gathered, self.shard)
            torch.matmul(self.gathered, b.T, out=self.out)

        whole, weight = a.whole, self.fused[1]
        self.ways = {
            "cublas mm only": lambda: torch.matmul(self.x, b.T, out=self.out),
            "gemmesh mm only": lambda: group.matmul(whole, weight, out),
            "cublas + nccl": one_after_the_other,
            "fused": lambda: group.all_gather_matmul(a, weight, out),
        }

    def forget(self) -> None:
        a, _, _ = self.fused
        nan = float("nan")
        self.out.fill_(nan)
        self.gathered.fill_(nan)
        a.whole.copy_from(self.torch.full_like(self.x, nan))
        a.copy_from(self.shard)

    def error(self) -> float:
        # Tensor cores truncate sums of f32, of which there are K / 16.
        allowed = 2.0 ** -(self.bits + 1) * self.exact.abs() + 2.0**-13 * self.scale
        return float(((self.out.double() - self.exact).abs() / allowed).nan_to_num(float("inf")).max())

    def time(self, run: Run) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.zero_()
        # The GPUs begin together.
        self.dist.all_reduce(self.one)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def close(self) -> None:
        self.dist.destroy_process_group()


def verify(side: Side, group: gemmesh.Group) -> None:
    """Makes each product once, after its output and the rows of other ranks have been overwritten."""
    for label, run in side.ways.items():
        side.forget()
        group.synchronize()
        group.barrier()
        if label.endswith("mm only"):
            if not label.startswith("gemmesh"):
                continue  # not ours
            group.all_gather(side.fused[0])
        run()
        group.synchronize()
        error = side.error()
        if not error <= 1.01:
            raise ArithmeticError(f"{label}: the error is {error:.3g} of what is allowed")


def medians(side: Side, group: gemmesh.Group, iterations: int) -> dict[str, float]:
    """The median time of each way on the slowest rank, in seconds."""
    times: dict[str, list[float]] = {label: [] for label in side.ways}
    for iteration in range(iterations + 1):
        for label, run in side.ways.items():
            group.barrier()
            seconds = side.time(run)
            # The first is for caches and plans.
            if iteration > 0:
                times[label].append(seconds)
    own = [statistics.median(of_way) for of_way in times.values()]
    packed = group.all_gather_bytes(struct.pack(f"<{len(own)}d", *own))
    of_ranks = [struct.unpack(f"<{len(own)}d", bytes_of_rank) for bytes_of_rank in packed]
    return {label: max(of_way) for label, of_way in zip(times, zip(*of_ranks))}


def draw(side: Side, group: gemmesh.Group, path: str, title: str) -> None:
    a, b, out = side.fused
    prepared = group.prepare("all_gather_matmul", a, b, out)
    prepared(a, b, out)
    group.barrier()
    group.write_timeline(prepared.traced(a, b, out), path, title)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)


def writable(text: str) -> str:
    directory = Path(text).absolute().parent
    if Path(text).is_dir() or not os.access(directory, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; give a file in a directory that can be")
    return text


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gemmesh.bench", description="Times a gather and a product.")
    parser.add_argument("--backend", choices=["cuda", "host"], default="cuda" if gemmesh.HAS_CUDA else "host")
    parser.add_argument("-m", type=positive, help="rows of all ranks (4096 on GPUs, else 1024)")
    parser.add_argument("-n", type=positive, help="columns of each rank (6656 on GPUs, else 1024)")
    parser.add_argument("-k", type=positive, help="columns of the rows (16384 on GPUs, else 1024)")
    parser.add_argument("--dtype", choices=list(BITS), default="bf16")
    parser.add_argument("--ranks", type=positive, default=2, help="ranks to launch, if no launcher has started this (2)")
    parser.add_argument("--iterations", type=positive, default=15, help="timed rounds (15)")
    parser.add_argument("--profile", type=writable, metavar="FILE", help="draw a fused product: .svg, or .json for Perfetto")
    return parser.parse_args()


def has_torch(arguments: argparse.Namespace) -> bool:
    return arguments.backend == "cuda" and importlib.util.find_spec("torch") is not None


def main() -> int:
    arguments = parsed()
    if not has_torch(arguments) and importlib.util.find_spec("numpy") is None:
        print("the benchmark needs NumPy, or PyTorch on GPUs", file=sys.stderr)
        return 1
    try:
        if gemmesh.is_rank():
            measure(arguments)
        else:
            gemmesh.launch(arguments.ranks)
    except gemmesh.Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def measure(arguments: argparse.Namespace) -> None:
    m, n, k = (
        given or default
        for given, default in zip((arguments.m, arguments.n, arguments.k), SHAPES[arguments.backend])
    )
    with gemmesh.Group.from_env(backend=arguments.backend) as group:
        side: Side = (WithTorch if has_torch(arguments) else WithNumpy)(group, m, n, k, arguments.dtype)
        verify(side, group)
        found = medians(side, group, arguments.iterations)
        if arguments.profile:
            draw(side, group, arguments.profile, f"all_gather_matmul {m} x {n} x {k}, {arguments.dtype}")
        if group.rank == 0:
            print(f"{m} x {n} x {k}, {arguments.dtype}, {group.world_size} ranks on {arguments.backend}; verified")
            for label, seconds in found.items():
                print(f"{label + ':':17}{seconds * 1e6:10.0f} us")
            *_, apart, fused = found.values()
            print(f"{'speed-up:':17}{apart / fused:10.2f} x")
        group.barrier()
        side.close()


if __name__ == "__main__":
    sys.exit(main())
