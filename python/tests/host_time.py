"""What a call of all_gather_matmul takes on the host, through Rust and through Python: medians in microseconds.

It needs two GPUs and a build with the feature `timing`. Calls of all kinds are timed in one process, by turns, because a
process's place among the cores changes all its times.
"""

from __future__ import annotations

import statistics
import time
from typing import Callable

import gemmesh
from gemmesh import _native

M, N, K = 128, 1792, 4096
FLIGHT, FLIGHTS = 8, 256


def python_calls(group: gemmesh.Group) -> dict[str, Callable[[], object]]:
    a, b, out = group.sharded(M, K, "bf16"), group.zeros(N, K, "bf16"), group.zeros(M, N, "bf16")
    prepared = group.prepare("all_gather_matmul", a, b, out)
    calls = {
        "Python, prepared": lambda: prepared(a, b, out),
        "Python": lambda: group.all_gather_matmul(a, b, out),
    }
    try:
        import torch
    except ImportError:
        return calls
    device = torch.device("cuda", group.device[1])
    torch.cuda.set_device(device)
    tb = torch.zeros(N, K, device=device, dtype=torch.bfloat16)
    tout = torch.zeros(M, N, device=device, dtype=torch.bfloat16)
    calls["Python, prepared, tensors of torch"] = lambda: prepared(a, tb, tout)
    calls["Python, tensors of torch"] = lambda: group.all_gather_matmul(a, tb, tout)
    # Whoever uses torch is on its stream.
    group.set_stream(torch.cuda.current_stream().cuda_stream)
    return calls


def main() -> None:
    if not gemmesh.is_rank():
        return gemmesh.launch(2)
    with gemmesh.Group.from_env() as group:
        address = group.all_gather_bytes(b"host_time %d" % time.time_ns())[0].decode()
        rust = _native.RustCalls(group.rank, group.world_size, address, [M, N, K])
        calls = python_calls(group)
        times: dict[str, list[int]] = {"Rust, prepared": [], "Rust": []} | {name: [] for name in calls}
        clock = time.perf_counter_ns
        for _ in range(FLIGHTS):
            times["Rust, prepared"] += rust.flight(True, FLIGHT)
            times["Rust"] += rust.flight(False, FLIGHT)
            for name, call in calls.items():
                # The device's queues are empty, and the ranks begin together.
                group.synchronize()
                group.barrier()
                for _ in range(FLIGHT):
                    begin = clock()
                    call()
                    times[name].append(clock() - begin)
        group.synchronize()
        for name, nanoseconds in times.items() if group.rank == 0 else ():
            # The first half warms up.
            print(f"{name}: {statistics.median(nanoseconds[FLIGHT * FLIGHTS // 2 :]) / 1000:.2f}")
        group.barrier()


if __name__ == "__main__":
    main()
