"""`torch.ops.gemmesh` beside PyTorch's `torch.ops.symm_mem`: all-gather + product and product + reduce-scatter, bf16.

    torchrun --nproc-per-node 2 python/benches/symm_mem.py [RANDOM SHAPES]

Both are verified against float64 before they are timed, by turns: as eager calls, replayed from CUDA graphs, and, on
the models' shapes and on each third random one, compiled. A time is the median of nine on the slowest rank, in
microseconds. Caches are flushed and the ranks begin together. N of a gather and K of a sum are those of a rank.

Both copy the rows of a gather to symmetric memory. gemmesh is also timed with rows of `gemmesh.torch.empty`, which lie
there.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

import gemmesh.torch  # noqa: F401  It makes the operations torch.ops.gemmesh.

Call = Callable[[], Tensor]
#: N and K of a gather in models of 8, 70 and 405 billion parameters on two GPUs.
MODELS = [(m, n, k) for n, k in ((1792, 4096), (3584, 8192), (6656, 16384)) for m in (4096, 8192, 16384)]
ROUNDS, WARM = 9, 3


class Ranks:
    def __init__(self) -> None:
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.name = dist.group.WORLD.group_name
        symm_mem.enable_symm_mem_for_group(self.name)
        self.flushed = torch.empty(64 << 20, dtype=torch.int32, device=self.device)
        self.signals = symm_mem.rendezvous(symm_mem.empty(1024, dtype=torch.int32, device=self.device), self.name)

    def time(self, calls: dict[str, Call]) -> dict[str, float]:
        """The median time of each call on the slowest rank."""
        times: dict[str, list[float]] = {label: [] for label in calls}
        for turn in range(WARM + ROUNDS):
            for label, call in calls.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self.flushed.zero_()
                self.signals.barrier(0)
                start.record()
                call()
                end.record()
                end.synchronize()
                if turn >= WARM:
                    times[label].append(start.elapsed_time(end) * 1e3)
        medians = torch.tensor([statistics.median(each) for each in times.values()], device=self.device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        return dict(zip(times, medians.tolist(), strict=True))


def graphed(call: Call) -> Call:
    """The call, captured and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = call()
    torch.cuda.synchronize()
    dist.barrier()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def operations(ranks: Ranks, m: int, n: int, k: int) -> Iterator[tuple[str, dict[str, Call], Tensor]]:
    """Each operation by both libraries, and some rows of what is expected."""
    made = torch.Generator(ranks.device).manual_seed(17)
    draw = lambda *shape: torch.randn(*shape, generator=made, device=ranks.device, dtype=torch.bfloat16)  # noqa: E731
    rows, some = m // ranks.world, slice(0, 32)
    # All ranks draw the same, and multiply by weights of their own.
    whole, weights = draw(m, k), [draw(n, k) for _ in range(ranks.world)]
    b = weights[ranks.rank].t()
    shard = whole[ranks.rank * rows : (ranks.rank + 1) * rows].contiguous()

    own_rows = gemmesh.torch.empty(shard.shape, shard.dtype, ranks.name).copy_(shard)

    def gather(ops: Any, rows: Tensor) -> Call:
        return lambda: ops.fused_all_gather_matmul(rows, [b], 0, ranks.name, return_A=False)[1][0]

    libraries = {"symm_mem": torch.ops.symm_mem, "gemmesh": torch.ops.gemmesh}
    gathers = {label: gather(ops, shard) for label, ops in libraries.items()}
    gathers["gemmesh, own rows"] = gather(torch.ops.gemmesh, own_rows)
    yield "gather", gathers, whole[some].double() @ b.double()

    # The mirror: [M, N] times [K, N] of each rank, summed.
    parts = [draw(m, n) for _ in range(ranks.world)]
    own, back = parts[ranks.rank], weights[ranks.rank]

    def scatter(ops: Any) -> Call:
        return lambda: ops.fused_matmul_reduce_scatter(own, back, "sum", 0, ranks.name)

    first = slice(ranks.rank * rows, ranks.rank * rows + 32)
    sums = sum(part[first].double() @ weight.double() for part, weight in zip(parts, weights, strict=True))
    assert isinstance(sums, Tensor)
    yield "scatter", {label: scatter(ops) for label, ops in libraries.items()}, sums


def verify(label: str, call: Call, expected: Tensor) -> None:
    found = call()[: len(expected)].double()
    expected = expected[: len(found)]
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    assert error < 2e-2, f"{label}: {error}"


def compare(ranks: Ranks, shape: tuple[int, int, int], compiles: bool) -> dict[str, list[float]]:
    """Prints the times of a shape. Returns theirs / ours by operation and way."""
    ratios: dict[str, list[float]] = {}
    for operation, calls, expected in operations(ranks, *shape):
        ways = {"eager": dict(calls)}
        for label, call in calls.items():
            verify(f"{label}, {operation}", call, expected)
        if compiles:
            ways["compiled"] = {label: torch.compile(call, fullgraph=True) for label, call in calls.items()}
        ways["graph"] = {label: graphed(call) for label, call in calls.items()}
        words = []
        for way, of_way in ways.items():
            for label, call in of_way.items():
                verify(f"{label}, {operation}, {way}", call, expected)
            times = ranks.time(of_way)
            theirs = times.pop("symm_mem")
            for label, ours in times.items():
                ratio = theirs / ours
                ratios[f"{operation}, {way}{label.removeprefix('gemmesh')}"] = [ratio]
                words.append(f"{way}{label.removeprefix('gemmesh')} {ours:.0f} / {theirs:.0f} = {ratio:.2f}")
        if ranks.rank == 0:
            print(f"{'x'.join(map(str, shape))} {operation}: {'; '.join(words)}", flush=True)
    return ratios


def drawn(count: int, world: int) -> Iterator[tuple[int, int, int]]:
    """Shapes that nobody tuned for."""
    draw = random.Random(42)
    for _ in range(count):
        m = round(2 ** draw.uniform(7, 14)) // (8 * world) * 8 * world
        n, k = (round(2 ** draw.uniform(9, 13)) // 64 * 64 for _ in range(2))
        yield m, n, k


def main() -> None:
    ranks = Ranks()
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    for title, shapes, compiled in (("models", MODELS, 1), ("random", list(drawn(count, ranks.world)), 3)):
        ratios: dict[str, list[float]] = {}
        for index, shape in enumerate(shapes):
            for what, ratio in compare(ranks, shape, index % compiled == 0).items():
                ratios.setdefault(what, []).extend(ratio)
            torch._dynamo.reset()
        for what, all_of in ratios.items() if ranks.rank == 0 else ():
            behind = sum(ratio < 1 for ratio in all_of)
            mean = statistics.geometric_mean(all_of)
            print(f"{title}, {what}: {mean:.2f} x symm_mem, behind on {behind} of {len(all_of)}")
    dist.barrier()
    # Replays keep what they use.
    torch.cuda.synchronize()
    os._exit(0)


if __name__ == "__main__":
    main()
