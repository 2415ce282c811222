"""What a call takes on the host, through Rust, Python and PyTorch: medians in microseconds.

It needs two GPUs and a build with the feature `timing`. Calls of all kinds are timed in one process, by turns, because
a process's place among the cores changes all its times.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

import gemmesh
from gemmesh import _native

M, N, K = 128, 1792, 4096
FLIGHT, FLIGHTS = 8, 256


Calls = dict[str, Callable[[], object]]


def python_calls(group: gemmesh.Group) -> Calls:
    """Calls of Python, with matrices of gemmesh."""
    a, b, out = group.sharded(M, K, "bf16"), group.zeros(N, K, "bf16"), group.zeros(M, N, "bf16")
    wide, sums = group.zeros(M, K, "bf16"), group.zeros(M // group.world_size, N, "bf16")
    gather = group.prepare("all_gather_matmul", a, b, out)
    scatter = group.prepare("matmul_reduce_scatter", wide, b, sums)
    return {
        "gather, Python, prepared": lambda: gather(a, b, out),
        "gather, Python": lambda: group.all_gather_matmul(a, b, out),
        "scatter, Python, prepared": lambda: scatter(wide, b, sums),
        "scatter, Python": lambda: group.matmul_reduce_scatter(wide, b, sums),
    }


def torch_calls(group: gemmesh.Group) -> Calls:
    """Calls with tensors of PyTorch, and operations of PyTorch, which make their outputs."""
    import torch

    import gemmesh.torch as ours

    device = torch.device("cuda", group.device[1])
    torch.cuda.set_device(device)
    name = "host_time"
    ours.use(name, group)
    options = {"device": device, "dtype": torch.bfloat16}
    b, out, wide = torch.zeros(N, K, **options), torch.zeros(M, N, **options), torch.zeros(M, K, **options)
    rows = torch.zeros(M // group.world_size, K, **options)
    sharded, lent = group.sharded(M, K, "bf16"), ours.empty(rows.shape, rows.dtype, name, device)
    gather = group.prepare("all_gather_matmul", sharded, b, out)
    ops, weight, weights = torch.ops.gemmesh, b.t(), [b.t()]
    calls: Calls = {
        "gather, Python, tensors, prepared": lambda: gather(sharded, b, out),
        "gather, Python, tensors": lambda: group.all_gather_matmul(sharded, b, out),
    }
    for how, module in ("torch function", ours), ("torch op", ops):
        fused, scatter = module.fused_all_gather_matmul, module.fused_matmul_reduce_scatter
        calls[f"gather, {how}, own rows"] = lambda fused=fused: fused(lent, weights, 0, name, return_A=False)
        calls[f"gather, {how}, rows copied"] = lambda fused=fused: fused(rows, weights, 0, name, return_A=False)
        calls[f"scatter, {how}"] = lambda scatter=scatter: scatter(wide, weight, "sum", 0, name)
    # What PyTorch itself takes for an output, a copy and a product.
    calls["torch.empty_strided"] = lambda: torch.empty_strided((M, N), (N, 1), **options)
    calls["torch.Tensor.copy_"] = lambda: wide[: rows.shape[0]].copy_(rows)
    calls["torch.mm"] = lambda: torch.mm(wide, weight)
    return calls


def main() -> None:
    if not gemmesh.is_rank():
        return gemmesh.launch(2)
    with gemmesh.Group.from_env() as group:
        address = group.all_gather_bytes(b"host_time %d" % time.time_ns())[0].decode()
        rust = _native.RustCalls(group.rank, group.world_size, address, [M, N, K])
        calls = python_calls(group)
        with contextlib.suppress(ImportError):
            calls |= torch_calls(group)
        times: dict[str, list[int]] = {}
        for _ in range(FLIGHTS):
            for operation, short in ("all_gather_matmul", "gather"), ("matmul_reduce_scatter", "scatter"):
                for prepared, how in (True, "Rust, prepared"), (False, "Rust"):
                    times.setdefault(f"{short}, {how}", []).extend(rust.flight(operation, prepared, FLIGHT))
            for name, call in calls.items():
                times.setdefault(name, []).extend(flight(group, call))
        group.synchronize()
        for name, nanoseconds in times.items() if group.rank == 0 else ():
            # The first half warms up.
            print(f"{name}: {statistics.median(nanoseconds[FLIGHT * FLIGHTS // 2 :]) / 1000:.2f}", flush=True)
        group.barrier()


def flight(group: gemmesh.Group, call: Callable[[], object]) -> list[int]:
    """The nanoseconds of some calls. The device's queues are empty, and the ranks begin together."""
    clock, times = time.perf_counter_ns, []
    group.synchronize()
    group.barrier()
    for _ in range(FLIGHT):
        begin = clock()
        call()
        times.append(clock() - begin)
    return times


if __name__ == "__main__":
    main()
