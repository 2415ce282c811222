"""gemmesh.torch on GPUs: all promises of torch_ranks.py, then graphs, streams, compilers and times.

    python python/tests/gpu_torch.py [RANKS] [CASE ...]

There are 2 ranks unless it says otherwise. They share a GPU if there are too few. gloo connects them, because NCCL has
no ranks that share a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

HERE = Path(__file__).parent
os.environ["GEMMESH_TORCH_DEVICE"] = "cuda"
sys.path[:0] = [str(HERE), str(HERE.parent)]

import gemmesh  # noqa: E402
import gemmesh.torch  # noqa: E402
import torch_ranks as ranks  # noqa: E402
from torch_ranks import OPS, alone, case, made, name, near, rank, refuses, weight, world  # noqa: E402


def say(words: str) -> None:
    if rank() == 0:
        print(words, flush=True)


def layers(x: Tensor, up: Tensor, down: Tensor, group: str) -> Tensor:
    """x [rows, K], up [H, K], down [K, H]"""
    _, (h,) = OPS.fused_all_gather_matmul(x, [up.t()], 0, group, return_A=False)
    y: Tensor = OPS.fused_matmul_reduce_scatter(torch.relu(h), down.t(), "sum", 0, group)
    return y


def weights(k: int = 512, h: int = 256) -> tuple[Tensor, Tensor]:
    return made(h, k, of=rank(), seed=1) / k**0.5, made(k, h, of=rank(), seed=2) / h**0.5


@case
def operations_follow_the_current_stream() -> None:
    x, (up, down) = made(64, 512, of=rank()), weights()
    expected = layers(x, up, down, name())
    torch.cuda.synchronize()
    later = torch.zeros_like(x)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            later.zero_()
            # The input is there late: an operation on a different stream would read zeros.
            torch.cuda._sleep(20_000_000)
            later.copy_(x)
            found = layers(later, up, down, name())
            total = found.float().sum()
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(found, expected) and total.isfinite()
    assert gemmesh.torch.group_of(None, "cuda").stream == torch.cuda.current_stream().cuda_stream


@case
def operations_follow_the_current_stream_when_another_was_set() -> None:
    """Also where they gather without a product: of no weights, and of the last dimension."""
    process_group = dist.new_group(list(range(world())))
    group, hand = process_group.group_name, torch.cuda.Stream()
    own = gemmesh.torch.group_of(group, "cuda")
    own.set_stream(hand.cuda_stream)
    b, shape = weight(512, 256, seed=1), (64, 512 // world())
    cases: list[tuple[int, list[Tensor]]] = [(0, []), (1, [b]), (0, []), (1, [b])]
    for seed, (gather_dim, bs) in enumerate(cases, 2):
        a, expected = made(*shape, of=rank(), seed=seed), ranks.gathered(*shape, dim=gather_dim, seed=seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            later = torch.zeros_like(a)
            torch.cuda._sleep(100_000_000)
            later.copy_(a)
            full, _ = gemmesh.torch.fused_all_gather_matmul(later, bs, gather_dim, group)
            assert torch.equal(full, expected), (gather_dim, full, expected)
        torch.cuda.synchronize()
    assert own.stream == hand.cuda_stream


@case
def threads_have_streams_of_their_own() -> None:
    group, b = alone(), weight(512, 256)
    inputs = [made(64, 512, of=each) for each in range(2)]
    expected = [OPS.fused_matmul_reduce_scatter(each, b, "sum", 0, group) for each in inputs]
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def multiply(x: Tensor, of_x: Tensor) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(200):
                    later = torch.zeros_like(x)
                    # The input is there late, and the output is read at once: both are wrong on a different stream.
                    torch.cuda._sleep(200_000)
                    later.copy_(x)
                    for module in (OPS, gemmesh.torch):
                        found = module.fused_matmul_reduce_scatter(later, b, "sum", 0, group)
                        assert torch.equal(found, of_x)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=multiply, args=each) for each in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def multiplies(seed: int, stream: torch.cuda.Stream, failed: list[str]) -> Callable[[], None]:
    """Calls with one thread's rows on a stream. What is wrong is added to a list."""
    group, a, b = alone(), made(512, 2048, seed=seed), weight(2048, 256, seed=seed + 1)
    lent = gemmesh.torch.empty((512, 2048), torch.bfloat16, group, "cuda")
    lent.copy_(a)
    calls = [(module, rows) for module in (gemmesh.torch, OPS) for rows in (a, lent, a.t().contiguous().t())]
    _, (c,) = OPS.fused_all_gather_matmul(a, [b], 0, group)
    # Tensor cores round sums over K in f32.
    near(c, a.double() @ b.double(), 2**-12 * (a.double().abs() @ b.double().abs()))
    torch.cuda.synchronize()

    def run() -> None:
        with torch.cuda.stream(stream):
            for _ in range(60):
                # The stream is late, so the calls of several threads are in its queue, or in several streams' queues.
                torch.cuda._sleep(500_000)
                found = [module.fused_all_gather_matmul(rows, [b], 0, group) for module, rows in calls]
                for full, (product,) in found:
                    failed.extend(
                        what
                        for what, is_right in (("A", torch.equal(full, a)), ("C", torch.equal(product, c)))
                        if not is_right
                    )

    return run


@case
def threads_have_gathered_rows_of_their_own() -> None:
    for streams in ([torch.cuda.Stream()] * 3, [torch.cuda.Stream() for _ in range(3)]):
        failed: list[str] = []
        ranks.in_threads([multiplies(10 * thread, stream, failed) for thread, stream in enumerate(streams)])
        counts = {what: failed.count(what) for what in ("A", "C")}
        assert not failed, f"wrong of {3 * 60 * 6} calls on {len(set(streams))} streams: {counts}"


@case
def graphs_capture_what_has_run() -> None:
    (up, down), x = weights(), torch.zeros(64, 512, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layers(x, up, down, name())
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            y = layers(x, up, down, name())
    except gemmesh.Error as error:
        say(f"  not captured: {error}")
        return
    for seed in range(3):
        # A live call between the replays, which changes M and grows the matrix that rows are copied to.
        grown = layers(made(64 * (seed + 2), 512, of=rank(), seed=seed), up, down, name())
        expected = layers(made(64, 512, of=rank(), seed=seed), up, down, name())
        x.copy_(made(64, 512, of=rank(), seed=seed))
        torch.cuda.synchronize()
        dist.barrier()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected) and grown.isfinite().all()
    say("  captured and replayed")


@case
def graphs_refuse_what_has_not_run() -> None:
    (up, down), x = weights(), made(24, 512, of=rank())
    layers(made(8, 512, of=rank()), up, down, name())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            layers(x, up, down, name())

    refuses(gemmesh.MisuseError, "run it once", capture)
    torch.cuda.synchronize()
    assert torch.equal(layers(x, up, down, name()), layers(x, up, down, name()))


@case
def inductor_compiles() -> None:
    group = name()
    inputs = [each.requires_grad_() for each in (made(64, 512, of=rank()), *weights())]
    again = [each.detach().clone().requires_grad_() for each in inputs]
    compiled = torch.compile(lambda x, up, down: layers(x, up, down, group), fullgraph=True)
    y, z = layers(*inputs, group), compiled(*again)
    of_y = made(*y.shape, of=rank(), seed=5)
    y.backward(of_y)
    z.backward(of_y)
    assert torch.allclose(y, z, rtol=2e-2, atol=1e-2)
    for one, other in zip(inputs, again, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=2e-2, atol=5e-2)


@case
def lent_memory_is_freed_behind_its_operations() -> None:
    b = weight(4096, 64)
    for _ in range(20):
        x = gemmesh.torch.empty((512, 4096), torch.bfloat16, name(), "cuda")
        x.copy_(made(1, 4096, of=rank()).expand(512, 4096))
        _, (c,) = OPS.fused_all_gather_matmul(x, [b], 0, name(), return_A=False)
        del x
        near(c[:1], made(1, 4096, of=0).double() @ b.double())


def host_time(call: Callable[[], object]) -> float:
    """µs that the host takes to enqueue a call."""
    best = float("inf")
    for _ in range(30):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(50):
            call()
        best = min(best, (time.perf_counter() - begin) / 50)
    torch.cuda.synchronize()
    return best * 1e6


@case
def host_times_are_short() -> None:
    group = gemmesh.torch.group_of(None, "cuda")
    m, k, n = 16 * world(), 512, 256
    x, lent = made(16, k, of=rank()), gemmesh.torch.empty((16, k), torch.bfloat16, name(), "cuda")
    lent.copy_(x)
    w, b = made(n, k, of=rank()), weight(k, n)
    sharded = group.sharded(m, k, torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    wide = made(m, k, of=rank())
    sums = torch.empty(16, n, device="cuda", dtype=torch.bfloat16)
    gather = group.prepare("all_gather_matmul", sharded, w, out)
    scatter = group.prepare("matmul_reduce_scatter", wide, w, sums)
    matrices = [group.matrix(each) for each in (w, out, wide, sums)]
    gather_op, scatter_op = OPS.fused_all_gather_matmul.default, OPS.fused_matmul_reduce_scatter.default
    times = {
        "Prepared gather, matrices": host_time(lambda: gather(sharded, matrices[0], matrices[1])),
        "Prepared gather, tensors": host_time(lambda: gather(sharded, w, out)),
        "op gather, lent rows": host_time(lambda: gather_op(lent, [b], 0, name(), return_A=False)),
        "op gather, copied rows": host_time(lambda: gather_op(x, [b], 0, name(), return_A=False)),
        "Prepared scatter, matrices": host_time(lambda: scatter(matrices[2], matrices[0], matrices[3])),
        "Prepared scatter, tensors": host_time(lambda: scatter(wide, w, sums)),
        "op scatter": host_time(lambda: scatter_op(wide, b, "sum", 0, name())),
        "torch.mm": host_time(lambda: torch.mm(wide, b)),
    }
    for what, microseconds in times.items():
        say(f"  {what:28} {microseconds:6.1f} µs")


def main() -> None:
    arguments = sys.argv[1:]
    if len(arguments) > 3 and Path(arguments[3]).is_dir():
        ranks.main()
        return
    count = int(arguments[0]) if arguments and arguments[0].isdigit() else 2
    only = [each for each in arguments if not each.isdigit()]
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen([sys.executable, __file__, str(each), str(count), f"{folder}/store", folder, *only])
            for each in range(count)
        ]
        end = time.monotonic() + 400
        for each in started:
            try:
                each.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.kill()
        failed = 0
        for each in range(count):
            said = Path(folder, f"{each}.json")
            told: dict[str, str] = json.loads(said.read_text()) if said.exists() else {}
            for what in only or ranks.CASES:
                words = told.get(what, "it did not come to this")
                failed += bool(words)
                if words:
                    print(f"rank {each}: {what}: {words}")
        print(f"{count} ranks on {torch.cuda.device_count()} GPUs: {failed} failures")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
