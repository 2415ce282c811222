"""What each rank of test_torch.py does: a function for each promise of gemmesh.torch.

Run as a program, it does all of them as one rank: `torch_ranks.py RANK WORLD STORE RESULTS [CASE ...]`. On GPUs if
GEMMESH_TORCH_DEVICE is cuda.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deadlines import stretched
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gemmesh
import gemmesh.torch
from gemmesh.torch import _groups, _operations, _products, _shards

OPS = torch.ops.gemmesh
CASES: dict[str, Callable[[], None]] = {}
DEVICE = os.environ.get("GEMMESH_TORCH_DEVICE", "cpu")


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


# What all ranks know: their inputs are made of seeds.


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def name() -> str:
    return dist.group.WORLD.group_name


def made(*shape: int, of: int = 0, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values of rank `of`."""
    generator = torch.Generator().manual_seed(1000 * seed + of)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def gathered(*shape: int, dim: int = 0, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values that all ranks have made."""
    return torch.cat([made(*shape, of=of, seed=seed, dtype=dtype) for of in range(world())], dim)


def weight(k: int, n: int, seed: int = 9, of: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A column-major weight [K, N]."""
    return made(n, k, of=rank() if of is None else of, seed=seed, dtype=dtype).t()


def scalar(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, device=DEVICE)


def joined() -> _groups.Joined:
    """What gemmesh.torch keeps for all ranks."""
    gemmesh.torch.group_of(None, DEVICE)
    return (_groups._ON_CUDA if DEVICE == "cuda" else _groups._ON_HOST)[name()]


def unit(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}[dtype]


def near(found: Tensor, expected: Tensor, partials: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
    """Checks that values were rounded once, and their partial sums once."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    u = unit(dtype or found.dtype)
    size = expected.abs() + (partials if partials is not None else 0)
    excess = (found.double() - expected).abs() - 1.1 * u * size - 1e-4
    assert excess.max().item() <= 0 if excess.numel() else True, excess.max().item()


def refuses(exception: type[Exception], words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except exception as error:
        assert words in str(error), f"{words!r} is not in {error}"
        return
    raise AssertionError(f"nothing was raised; expected {exception.__name__} with {words!r}")


def scattered(whole: Tensor, dim: int) -> Tensor:
    return whole.chunk(world(), dim)[rank()]


# Values.


@case
def gathers_and_multiplies() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        a, full = made(6, 32, of=rank(), dtype=dtype), gathered(6, 32, dtype=dtype)
        b = weight(32, 24, dtype=dtype)
        found, (c,) = OPS.fused_all_gather_matmul(a, [b], 0, name())
        assert torch.equal(found, full) and found.is_contiguous()
        assert c.dtype == dtype and c.is_contiguous()
        near(c, full.double() @ b.double())


@case
def multiplies_by_several_weights() -> None:
    a, full = made(4, 32, of=rank()), gathered(4, 32)
    # Column-major, row-major, a part of a larger matrix, neither, and more than one product takes.
    bs = [weight(32, 8, seed) for seed in range(5)]
    bs += [weight(32, 16).contiguous(), weight(64, 16)[:32], weight(64, 16)[::2]]
    none, cs = OPS.fused_all_gather_matmul(a, bs, 0, name(), return_A=False)
    assert none is None and len(cs) == len(bs)
    for c, b in zip(cs, bs, strict=True):
        near(c, full.double() @ b.double())


@case
def gathers_any_dimension() -> None:
    b = weight(32, 16)
    for shape, dim in (((4, 3, 32), 1), ((1, 4, 32), 1), ((2, 4, 2, 32), 2), ((4, 3, 32), 0)):
        a, full = made(*shape, of=rank()), gathered(*shape, dim=dim)
        found, (c,) = OPS.fused_all_gather_matmul(a, [b], dim, name())
        assert torch.equal(found, full)
        near(c, full.double() @ b.double())
    wide = weight(32 * world(), 16)
    a, full = made(4, 3, 32, of=rank()), gathered(4, 3, 32, dim=2)
    found, (c,) = OPS.fused_all_gather_matmul(a, [wide], 2, name())
    assert torch.equal(found, full)
    near(c, full.double() @ wide.double())


@case
def gathers_without_a_weight() -> None:
    a, full = made(4, 32, of=rank()), gathered(4, 32)
    found, none = OPS.fused_all_gather_matmul(a, [], 0, name())
    assert torch.equal(found, full) and none == []


@case
def scatters_sums_and_averages() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for shape, dim in (((4 * world(), 32), 0), ((2, world(), 32), 1), ((3, 2, 32), 2)):
            partials = [
                made(*shape, of=of, dtype=dtype).double() @ weight(32, 8 * world(), of=of, dtype=dtype).double()
                for of in range(world())
            ]
            total, size = sum(partials), sum(partial.abs() for partial in partials)
            assert isinstance(total, Tensor) and isinstance(size, Tensor)
            a, b = made(*shape, of=rank(), dtype=dtype), weight(32, 8 * world(), dtype=dtype)
            for op, divisor in (("sum", 1), ("avg", world())):
                for each in (b, b.contiguous()):
                    c = OPS.fused_matmul_reduce_scatter(a, each, op, dim, name())
                    assert c.dtype == dtype and c.is_contiguous()
                    near(c, scattered(total, dim) / divisor, scattered(size, dim) / divisor)


@case
def takes_strided_rows() -> None:
    b = weight(32, 16)
    whole = made(4 * world(), 64, seed=3)
    for a in (whole[:, :32], whole[:, ::2], made(32, 4 * world(), seed=3).t()):
        same = OPS.fused_matmul_reduce_scatter(a.contiguous(), b, "sum", 0, name())
        assert torch.equal(OPS.fused_matmul_reduce_scatter(a, b, "sum", 0, name()), same)
        _, (same,) = OPS.fused_all_gather_matmul(a.contiguous(), [b], 0, name())
        _, (found,) = OPS.fused_all_gather_matmul(a, [b], 0, name())
        assert torch.equal(found, same)


@case
def takes_no_rows() -> None:
    b, n, k = weight(32, 16), 16, 32
    # Views whose strides say nothing, also of a tensor with rows.
    whole = made(4 * world(), 4, 64)
    for shape, a in (
        ((0, k), made(0, k)),
        ((0, k), whole[0, :0, :k]),
        ((4 * world(), 0, k), whole[:, :0, :k]),
        ((0, 4 * world(), k), torch.empty_strided((0, 4 * world(), k), (1, 0, 9), dtype=whole.dtype, device=DEVICE)),
        ((0, k), made(k, 0).t()),
    ):
        for dim in range(len(shape) - 1):
            grown = [extent * world() if axis == dim else extent for axis, extent in enumerate(shape)]
            for module in (OPS, gemmesh.torch, OPS, gemmesh.torch):
                found, (c,) = module.fused_all_gather_matmul(a, [b], dim, name())
                assert list(found.shape) == grown and list(c.shape) == [*grown[:-1], n]
                less = [extent // world() if axis == dim else extent for axis, extent in enumerate(shape)]
                for op in ("sum", "avg"):
                    d = module.fused_matmul_reduce_scatter(a, b, op, dim, name())
                    assert list(d.shape) == [*less[:-1], n]
        last = len(shape) - 1
        found, (c,) = OPS.fused_all_gather_matmul(a, [weight(k * world(), n)], last, name())
        assert list(found.shape) == [*shape[:-1], k * world()] and list(c.shape) == [*shape[:-1], n]
        for op in ("sum", "avg"):
            d = OPS.fused_matmul_reduce_scatter(a, weight(k, 8 * world()), op, last, name())
            assert list(d.shape) == [*shape[:-1], 8]
        assert OPS._reduce_scatter(a, 0, name()).shape[1:] == a.shape[1:]
    x = made(0, k).requires_grad_()
    _, (c,) = OPS.fused_all_gather_matmul(x, [b], 0, name())
    OPS.fused_matmul_reduce_scatter(c, weight(n, k), "sum", 0, name()).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, k)


@case
def takes_every_scale_of_no_rows() -> None:
    k, n = 32, 16
    b, one, of_columns = fp8(weight(k, n).t()).t(), scalar(0.5, 1), scalar(0.5, 1, n)
    for a in (fp8(made(0, k)), fp8(made(4 * world(), 4, 2 * k))[:, :0, :k]):
        rows = [*a.shape[:-1], 1]
        for of_b in (one, of_columns):
            for dim in range(a.dim() - 1):
                grown = [extent * world() if axis == dim else extent for axis, extent in enumerate(a.shape)]
                less = [extent // world() if axis == dim else extent for axis, extent in enumerate(a.shape)]
                of_as = [one, scalar(0.5), scalar(0.5, *rows), scalar(0.5, *grown[:-1], 1)]
                of_as.append(torch.empty_strided(rows, [3] * len(rows), device=DEVICE))
                for of_a in of_as:
                    full, c = scaled_gather(a, [b], of_a, [of_b], dim, name())
                    assert list(full.shape) == grown and list(c.shape) == [*grown[:-1], n]
                for of_a in (one, scalar(0.5, *rows)):
                    for bias in (None, made(n)):
                        d = scaled_scatter(a, b, of_a, of_b, [*a.shape[:-1], n], dim, name(), bias)
                        assert list(d.shape) == [*less[:-1], n]


@case
def grows() -> None:
    b = weight(40, 16)
    for rows in (1, 64, 2, 0, 96, 64):
        a, full = made(rows, 40, of=rank(), seed=rows), gathered(rows, 40, seed=rows)
        found, (c,) = OPS.fused_all_gather_matmul(a, [b], 0, name())
        assert torch.equal(found, full)
        near(c, full.double() @ b.double())
    kept = joined().shards[torch.bfloat16, 40]
    assert kept._capacity == 96 * world()


@case
def results_are_fresh() -> None:
    a, b = made(4, 32, of=rank()), weight(32, 16)
    first, (c,) = OPS.fused_all_gather_matmul(a, [b], 0, name())
    before = first.clone(), c.clone()
    OPS.fused_all_gather_matmul(-a, [b], 0, name())
    assert torch.equal(first, before[0]) and torch.equal(c, before[1])


@case
def lent_rows_are_not_copied() -> None:
    x = gemmesh.torch.empty((2, 3, 32), torch.bfloat16, name(), DEVICE)
    x.copy_(made(2, 3, 32, of=rank()))
    b, full = weight(32, 16), gathered(2, 3, 32)
    before = x.data_ptr()
    put, copies = _shards.Own.put, []
    _shards.Own.put = lambda *given: copies.append(given) or put(*given)
    try:
        for rows in (x, x.view(6, 32)):
            found, (c,) = OPS.fused_all_gather_matmul(rows, [b], 0, name())
            assert not copies
            assert torch.equal(found.view_as(full), full)
            near(c.view(*full.shape[:-1], 16), full.double() @ b.double())
        OPS.fused_all_gather_matmul(x.view(6, 32)[:2], [b], 0, name())  # a part: it is copied
        assert len(copies) == 1
    finally:
        _shards.Own.put = put
    assert x.data_ptr() == before and before in _shards.LENT
    freed = weakref.ref(x.untyped_storage())
    view = x[1]
    del x, rows
    copies.clear()
    gc.collect()
    assert freed() is not None and before in _shards.LENT
    del view
    gc.collect()
    assert freed() is None and before not in _shards.LENT


@contextlib.contextmanager
def without_planning() -> Iterator[None]:
    """Operations that are not found among the calls that need no Python fail."""
    gather, scatter = _products._gather, _products._scatter

    def fail(*_: object) -> NoReturn:
        raise AssertionError("the call was planned in Python")

    _products._gather = _products._scatter = fail
    try:
        yield
    finally:
        _products._gather, _products._scatter = gather, scatter


@case
def planned_products_need_no_python() -> None:
    b, b2 = weight(48, 16), weight(48, 24, seed=10)
    wide = made(7 * world(), 48, of=rank())
    lent = gemmesh.torch.empty((7, 48), torch.bfloat16, name(), DEVICE)

    def products(a: Tensor) -> list[Tensor]:
        full, (c, c2) = OPS.fused_all_gather_matmul(a, [b, b2], 0, name())
        _, (d,) = OPS.fused_all_gather_matmul(a, [b.contiguous()], 0, name(), return_A=False)
        return [full, c, c2, d, OPS.fused_matmul_reduce_scatter(wide, b, "sum", 0, name())]

    for seed in range(3):
        a = made(7, 48, of=rank(), seed=seed)
        # Rows of a wider matrix, too, and memory that is gathered where it lies.
        strided = made(7, 64, of=rank(), seed=seed)[:, :48].copy_(a)
        lent.copy_(a)
        if seed == 0:
            products(a), products(strided), products(lent)
        with without_planning():
            for rows in (a, strided, lent):
                full, c, c2, d, _ = products(rows)
                assert torch.equal(full, gathered(7, 48, seed=seed)) and torch.equal(c, d)
                near(c, full.double() @ b.double())
                near(c2, full.double() @ b2.double())
    # A different M of the same matrix, and a larger one, which is a new matrix.
    for rows in (3, 7, 500, 7):
        a, full = made(rows, 48, of=rank()), gathered(rows, 48)
        near(OPS.fused_all_gather_matmul(a, [b], 0, name())[1][0], full.double() @ b.double())


@functools.cache
def alone() -> str:
    """The name of a process group of this rank alone."""
    groups = [dist.new_group([each]) for each in range(world())]
    return str(groups[rank()].group_name)


@case
def averages_and_sums_have_plans_of_their_own() -> None:
    a, b = made(4, 32, dtype=torch.float16), weight(32, 16, dtype=torch.float16)
    for reduce_op in ("avg", "sum", "avg", "sum"):
        found = OPS.fused_matmul_reduce_scatter(a, b, reduce_op, 0, alone())
        assert found.dtype == torch.float16
        near(found, a.double() @ b.double(), dtype=torch.float16)


@case
def negated_views_are_multiplied_as_such() -> None:
    a, b = made(4, 32, of=rank()), weight(32, 16)
    _, (expected,) = OPS.fused_all_gather_matmul(-a, [b], 0, name())
    for module in (OPS, gemmesh.torch, OPS, gemmesh.torch):
        _, (found,) = module.fused_all_gather_matmul(torch._neg_view(a), [b], 0, name())
        assert torch.equal(found, expected)
        _, (found,) = module.fused_all_gather_matmul(a, [torch._neg_view(b)], 0, name())
        assert torch.equal(found, expected)


@case
def matrices_grow_beside_calls_of_other_threads() -> None:
    a, b = made(4, 8), weight(8, 16)
    ends = threading.Event()
    failed: list[BaseException] = []

    def gather() -> None:
        try:
            while not ends.is_set():
                OPS.fused_all_gather_matmul(a, [b], 0, alone())
        except BaseException as error:
            failed.append(error)

    OPS.fused_all_gather_matmul(a, [b], 0, alone())
    thread = threading.Thread(target=gather)
    thread.start()
    for k in range(16, 528, 8):
        for rows in (4, 40):
            x, w = made(rows, k), weight(k, 16)
            near(OPS.fused_all_gather_matmul(x, [w], 0, alone())[1][0], x.double() @ w.double())
    ends.set()
    thread.join()
    assert not failed, failed


def scaled_gather(a: Tensor, bs: list[Tensor], of_a: Tensor, of_bs: list[Tensor], dim: int, group: str) -> list[Tensor]:
    """The gathered rows and their products with weights of fp8."""
    count, none = len(bs), [None] * len(bs)
    full, products = OPS.fused_all_gather_scaled_matmul(
        a, bs, of_a, of_bs, dim, group, none, none, [torch.bfloat16] * count, [False] * count
    )
    return [full.view(torch.uint8), *products]


def scaled_scatter(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, shape: list[int], dim: int, group: str, bias: Tensor | None = None
) -> Tensor:
    """This rank's rows of the sum of products of fp8."""
    sums: Tensor = OPS.fused_scaled_matmul_reduce_scatter(
        a, b, of_a, of_b, "sum", dim, 0, group, shape, bias, None, torch.bfloat16
    )
    return sums


Operation = Callable[[], list[Tensor]]


def each_operation(group: str, seed: int) -> dict[str, Operation]:
    """Each operation, with inputs of its own for each seed. All have the same shapes."""
    ours, m, k, n = gemmesh.torch, 8 * world(), 32, 16 * world()
    a, b = made(4, k, of=rank(), seed=seed), weight(k, n, seed=seed + 1)
    more = [b, weight(k, n, seed=seed + 2).contiguous(), weight(2 * k, n, seed=seed + 3)[::2]]
    wide, long = made(m, k, of=rank(), seed=seed + 4), weight(k * world(), n, seed=seed + 5)
    ranks = dist.get_world_size(torch._C._distributed_c10d._resolve_process_group(group))
    long = long[: k * ranks]
    a8, b8 = fp8(a), fp8(b.t()).t()
    of_rows = made(4, 1, of=rank(), seed=seed + 6, dtype=torch.float32).abs() + 0.1
    of_wide = made(m, 1, of=rank(), seed=seed + 7, dtype=torch.float32).abs() + 0.1
    one, bias = scalar(0.5, 1), made(n, of=rank(), seed=seed + 8)
    lent = ours.empty((4, k), torch.bfloat16, group, DEVICE)
    lent.copy_(a)

    def gather(module: Any, bs: list[Tensor], dim: int, a: Tensor = a) -> list[Tensor]:
        full, products = module.fused_all_gather_matmul(a, bs, dim, group)
        return [full, *products]

    def scatter(module: Any, op: str, dim: int) -> list[Tensor]:
        return [module.fused_matmul_reduce_scatter(wide, b, op, dim, group)]

    return {
        "gather": lambda: gather(ours, [b], 0),
        "gather of the dispatcher": lambda: gather(OPS, [b], 0),
        "gather of lent rows": lambda: gather(ours, [b], 0, lent),
        "gather, several weights": lambda: gather(OPS, more, 0),
        "gather, no weight": lambda: gather(OPS, [], 0),
        "gather, dimension 1": lambda: gather(OPS, [b], 1, a.view(2, 2, k)),
        "gather, last dimension": lambda: gather(OPS, [long], 1),
        "scatter": lambda: scatter(ours, "sum", 0),
        "scatter of the dispatcher": lambda: scatter(OPS, "avg", 0),
        "scatter, last dimension": lambda: scatter(OPS, "sum", 1),
        "scaled gather": lambda: scaled_gather(a8, [b8], of_rows, [one], 0, group),
        "scaled gather, a scale": lambda: scaled_gather(a8, [b8, b8], one, [one, one], 0, group),
        "scaled scatter": lambda: [scaled_scatter(fp8(wide), b8, of_wide, one, [m, n], 0, group)],
        "scaled scatter, bias": lambda: [scaled_scatter(fp8(wide), b8, of_wide, one, [m, n], 0, group, bias)],
        "sums of a gradient": lambda: [OPS._reduce_scatter(wide, 0, group)],
    }


def in_threads(programs: list[Callable[[], None]]) -> None:
    """Runs programs at once. Raises the first error. If one hangs, so does the case."""
    failed: list[BaseException] = []
    begin = threading.Barrier(len(programs))

    def run(program: Callable[[], None]) -> None:
        try:
            begin.wait()
            program()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def repeats(operations: dict[str, Operation], calls: int) -> Callable[[], None]:
    """Calls the operations in turn, again and again, and compares their results with those of the first call."""
    expected = {what: operation() for what, operation in operations.items()}

    def run() -> None:
        for call in range(calls):
            for what, operation in operations.items():
                for index, (found, first) in enumerate(zip(operation(), expected[what], strict=True)):
                    assert torch.equal(found, first), f"call {call} of {what}: result {index} is wrong"

    return run


#: Threads of a rank that call one group.
THREADS = 3


@case
def threads_of_a_rank_have_results_of_their_own() -> None:
    # Each thread has inputs of its own, in a group of this rank alone: the order of the calls does not matter there.
    inputs = [each_operation(alone(), 100 * thread) for thread in range(THREADS)]
    for what in inputs[0]:
        in_threads([repeats({what: operations[what]}, 5) for operations in inputs])
    orders = [list(operations.items()) for operations in inputs]
    turned = [dict(order[3 * thread :] + order[: 3 * thread]) for thread, order in enumerate(orders)]
    in_threads([repeats(operations, 2) for operations in turned])


@case
def threads_of_all_ranks_call_each_operation() -> None:
    # Each rank's threads make the same calls with the same inputs, so any order of them is the same on all ranks.
    for operation in each_operation(name(), 0).items():
        in_threads([repeats(dict([operation]), 3) for _ in range(THREADS)])
        dist.barrier()


@case
def functions_are_the_operations() -> None:
    ours = gemmesh.torch
    a, b = made(4, 32, of=rank()), weight(32, 16)
    wide = made(4 * world(), 32, of=rank())

    def both(module: Any, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        full, (c,) = module.fused_all_gather_matmul(a, [b], 0, name())
        return full, c, module.fused_matmul_reduce_scatter(wide, b, "avg", 0, name())

    expected = both(OPS, a, b)
    for found in (both(ours, a, b), both(ours, torch.nn.Parameter(a, False), b)):
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
    # A gradient, a compiler, a mode and a profile see the operations.
    a.requires_grad_()
    both(ours, a, b)[1].sum().backward()
    assert a.grad is not None
    a = a.detach()
    compiled = torch.compile(lambda a, b: both(ours, a, b), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(*each) for each in zip(compiled(a, b), expected, strict=True))
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Seen():
        both(ours, a, b)
    assert {"gemmesh.fused_all_gather_matmul.default", "gemmesh.fused_matmul_reduce_scatter.default"} <= set(seen)
    with torch.profiler.profile() as profile:
        both(ours, a, b)
    assert "gemmesh::fused_all_gather_matmul" in {event.key for event in profile.key_averages()}
    refuses(Exception, "fused_all_gather_matmul", lambda: ours.fused_all_gather_matmul(a.to("meta"), [b], 0, name()))
    refuses(Exception, "fused_all_gather_matmul", lambda: ours.fused_all_gather_matmul(a, b, 0, name()))


# fp8.


def fp8(x: Tensor) -> Tensor:
    return x.float().clamp(-400, 400).to(torch.float8_e4m3fn)


@case
def gathers_fp8_with_any_scales() -> None:
    k, n, rows = 64, 32, 4
    full, a = fp8(gathered(rows, k)), fp8(made(rows, k, of=rank()))
    every = gathered(rows, 1, seed=5, dtype=torch.float32).abs() + 0.1
    b, b2 = fp8(weight(k, n).t()).t(), fp8(weight(k, n, 8).t()).t()
    of_b, of_b2 = scalar(0.5, 1), made(1, n, seed=7, of=rank(), dtype=torch.float32).abs() + 0.1
    bias = made(n, seed=6, of=rank())
    for of_a, factor in (
        (scalar(0.25), scalar(0.25)),
        (scalar(0.25, 1), scalar(0.25)),
        (scattered(every, 0), every),
        (every, every),
    ):
        found, (c, d, e) = OPS.fused_all_gather_scaled_matmul(
            a,
            [b, b2, b],
            of_a,
            [of_b, of_b2, of_b],
            0,
            name(),
            [None, bias, None],
            [None] * 3,
            [torch.bfloat16, torch.float32, torch.float16],
            [False, True, False],
        )
        assert torch.equal(found.view(torch.uint8), full.view(torch.uint8))
        product = factor.double() * full.double() @ b.double() * of_b.double()
        # Tensor cores add fp8 with about 13 bits.
        size = factor.double() * full.double().abs() @ b.double().abs() / 8
        assert (c.dtype, d.dtype, e.dtype) == (torch.bfloat16, torch.float32, torch.float16)
        near(c, product, size)
        near(e, product, 8 * size)
        near(d, factor.double() * full.double() @ b2.double() * of_b2.double() + bias.double(), size, torch.bfloat16)
    # Along a middle dimension, with a scale for each row.
    a3 = a.view(2, 2, k)
    found, (c,) = OPS.fused_all_gather_scaled_matmul(
        a3, [b], scattered(every, 0).view(2, 2, 1), [of_b2], 1, name(), [None], [None], [torch.bfloat16], [False]
    )
    parts = [(fp8(made(rows, k, of=of)).double() * every.chunk(world())[of]).view(2, 2, k) for of in range(world())]
    rows3 = torch.cat(parts, 1)
    near(c, rows3 @ b.double() * of_b2.double(), rows3.abs() @ b.double().abs() / 8)


@case
def scatters_fp8() -> None:
    k, n = 64, 32
    shape = (2, 2 * world(), n)

    def inputs(of: int) -> tuple[Tensor, ...]:
        a = fp8(made(math.prod(shape[:-1]), k, of=of))
        b = fp8(weight(k, n, of=of).t()).t()
        of_a = made(math.prod(shape[:-1]), 1, seed=5, of=of, dtype=torch.float32).abs() + 0.1
        of_b = made(1, n, seed=7, of=of, dtype=torch.float32).abs() + 0.1
        return a, b, of_a, of_b, made(n, seed=6, of=of)

    for by_rows in (True, False):
        for op, divisor in (("sum", 1), ("avg", world())):
            for with_bias in (True, False):
                # A partial and a bias are rounded each.
                partials, sizes = [], []
                for of in range(world()):
                    a, b, of_a, of_b, bias = inputs(of)
                    if not by_rows:
                        of_a, of_b = of_a[:1, 0], of_b[0, :1]
                    product = of_a.double() * a.double() @ b.double() * of_b.double()
                    added = bias.double() if with_bias else torch.zeros(n, dtype=torch.float64, device=DEVICE)
                    partials.append((product + added).view(shape))
                    sizes.append((product.abs() + added.abs()).view(shape))
                    if of == rank():
                        mine = (a, b, of_a, of_b, bias)
                total, size = sum(partials), sum(sizes)
                assert isinstance(total, Tensor) and isinstance(size, Tensor)
                a, b, of_a, of_b, bias = mine
                for dim in (0, 1):
                    c = (
                        OPS.fused_scaled_matmul_reduce_scatter(
                            a,
                            b,
                            of_a,
                            of_b,
                            op,
                            dim,
                            0,
                            name(),
                            list(shape),
                            bias if with_bias else None,
                            None,
                            torch.bfloat16,
                        )
                        if shape[dim] % world() == 0
                        else None
                    )
                    if c is not None:
                        near(c, scattered(total, dim) / divisor, scattered(size, dim) / divisor)


# Gradients and compilers.


@case
def gathers_have_gradients() -> None:
    for shape, dim, count, return_a in (
        ((4, 32), 0, 1, False),
        ((4, 32), 0, 3, True),
        ((2, 4, 32), 1, 2, True),
        ((4, 32), 1, 1, True),
    ):
        k = 32 * (world() if dim == len(shape) - 1 else 1)
        a = made(*shape, of=rank()).requires_grad_()
        bs = [weight(k, 16, seed).requires_grad_() for seed in range(count)]
        full, cs = OPS.fused_all_gather_matmul(a, bs, dim, name(), return_A=return_a)
        of_cs = [made(*c.shape, seed=20 + index, of=rank()) for index, c in enumerate(cs)]
        outputs, gradients = list(cs), list(of_cs)
        if return_a:
            outputs.append(full)
            gradients.append(made(*full.shape, seed=30, of=rank()))
        torch.autograd.backward(outputs, gradients)
        whole = gathered(*shape, dim=dim).double()
        total, size = torch.zeros_like(whole), torch.zeros_like(whole)
        for of in range(world()):
            for index, c in enumerate(cs):
                part = made(*c.shape, seed=20 + index, of=of).double() @ weight(k, 16, index, of=of).double().t()
                total, size = total + part, size + part.abs()
            if return_a:
                part = made(*whole.shape, seed=30, of=of).double()
                total, size = total + part, size + part.abs()
        assert a.grad is not None and a.grad.dtype == torch.bfloat16
        near(a.grad, scattered(total, dim), 3 * scattered(size, dim))
        for b, of_c in zip(bs, of_cs, strict=True):
            assert b.grad is not None
            near(b.grad, whole.flatten(0, -2).t() @ of_c.double().flatten(0, -2))


@case
def scatters_have_gradients() -> None:
    for shape, dim, op in (((2 * world(), 32), 0, "sum"), ((2, world(), 32), 1, "avg"), ((3, 32), 1, "sum")):
        a, b = made(*shape, of=rank()).requires_grad_(), weight(32, 8 * world()).requires_grad_()
        c = OPS.fused_matmul_reduce_scatter(a, b, op, dim, name())
        c.backward(made(*c.shape, seed=20, of=rank()))
        of_c = gathered(*c.shape, dim=dim, seed=20).double() / (world() if op == "avg" else 1)
        assert a.grad is not None and b.grad is not None
        near(a.grad, of_c @ b.detach().double().t())
        near(b.grad, a.detach().double().flatten(0, -2).t() @ of_c.flatten(0, -2))
        # One of both.
        for alone, other in ((a, b.detach()), (b, a.detach())):
            before = alone.grad
            alone.grad = None
            given = (alone, other) if alone is a else (other, alone)
            OPS.fused_matmul_reduce_scatter(*given, op, dim, name()).backward(made(*c.shape, seed=20, of=rank()))
            assert alone.grad is not None and before is not None and torch.equal(alone.grad, before)


@case
def operations_pass_opcheck() -> None:
    a, b = made(4, 32, of=rank()), weight(32, 8 * world())
    tests = (OPS.fused_all_gather_matmul.default, OPS.fused_matmul_reduce_scatter.default)
    for grad in (False, True):
        x, w = a.clone().requires_grad_(grad), b.clone().requires_grad_(grad)
        torch.library.opcheck(tests[0], (x, [w, w.contiguous()], 0, name()))
        torch.library.opcheck(tests[0], (x.view(2, 2, 32), [w], 1, name()), {"return_A": False})
        torch.library.opcheck(tests[1], (x, w, "sum", 0, name())) if 4 % world() == 0 else None
        torch.library.opcheck(tests[1], (x.view(1, 4, 32), w, "avg", 1, name()))
    a8, b8 = fp8(made(4, 32, of=rank())), fp8(weight(32, 32).t()).t()
    one = scalar(0.5, 1)
    # The other checks compare values of fp8, which PyTorch cannot do on the host.
    comparing_nothing = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        OPS.fused_all_gather_scaled_matmul.default,
        (a8, [b8], one, [one], 0, name(), [None], [None], [torch.bfloat16], [False]),
        test_utils=comparing_nothing,
    )
    torch.library.opcheck(
        OPS.fused_scaled_matmul_reduce_scatter.default,
        (a8, b8, one, one, "sum", 0, 0, name(), [4, 32], None, None, torch.bfloat16),
        test_utils=comparing_nothing,
    )


@case
def programs_compile_without_graph_breaks() -> None:
    group_name = name()

    def layers(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        _, (h,) = OPS.fused_all_gather_matmul(x, [w1.t()], 0, group_name, return_A=False)
        return OPS.fused_matmul_reduce_scatter(torch.relu(h), w2.t(), "sum", 0, group_name)

    def inputs() -> tuple[Tensor, ...]:
        made_here = made(4, 32, of=rank()), made(24, 32, of=rank(), seed=1), made(32, 24, of=rank(), seed=2)
        return tuple(each.requires_grad_() for each in made_here)

    eager, compiled = inputs(), inputs()
    y = layers(*eager)
    z = torch.compile(layers, fullgraph=True, backend="aot_eager")(*compiled)
    assert torch.equal(y, z)
    of_y = made(*y.shape, seed=3, of=rank())
    y.backward(of_y)
    z.backward(of_y)
    for one, other in zip(eager, compiled, strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


@case
def programs_that_are_kept_on_disk_are_those_for_as_many_ranks() -> None:
    # test_torch.py lets 2 ranks and 4 ranks keep theirs in one folder. Without a kernel of PyTorch, nothing is compiled.
    group_name, (a, b) = name(), (made(4, 32, of=rank()), weight(32, 16))
    compiled = torch.compile(lambda a, b: OPS.fused_all_gather_matmul(a, [b], 0, group_name)[1][0], fullgraph=True)
    near(compiled(a, b), gathered(4, 32).double() @ b.double())
    assert torch.compiler.config.cache_key_tag.count(f"gemmesh: {group_name} has {world()} ranks;") == 1
    # The name of a group that had another number of ranks.
    tag = torch.compiler.config.cache_key_tag.replace(f"{group_name} has {world()} ranks", f"{group_name} has 99 ranks")
    torch.compiler.config.cache_key_tag = tag
    assert _operations._ranks(group_name) == world()
    assert "99" not in torch.compiler.config.cache_key_tag


@case
def a_pass_swaps_the_namespace() -> None:
    import torch.distributed._symmetric_memory  # noqa: F401  It makes the operations of symm_mem.

    theirs = torch.ops.symm_mem
    for operation in (
        "all_gather_matmul",
        "all_gather_scaled_matmul",
        "matmul_reduce_scatter",
        "scaled_matmul_reduce_scatter",
    ):
        one, other = getattr(OPS, f"fused_{operation}").default, getattr(theirs, f"fused_{operation}").default
        assert str(one._schema) == str(other._schema).replace("symm_mem::", "gemmesh::"), operation
    # Their shapes, without values.
    for shape, dim in (((4, 32), 0), ((2, 4, 32), 1), ((2, 4, 32), 0), ((3, 32), 1)):
        k = 32 * (world() if dim == len(shape) - 1 else 1)
        a, b = torch.empty(shape, device="meta"), torch.empty(8 * world(), k, device="meta").t()
        full, (c,) = OPS.fused_all_gather_matmul(a, [b], dim, name())
        their_full, (their_c,) = theirs.fused_all_gather_matmul(a, [b], dim, name())
        assert (full.shape, c.shape) == (their_full.shape, their_c.shape)
        assert (full.stride(), c.stride()) == (their_full.stride(), their_c.stride())
        whole, b = torch.empty([each * world() for each in shape], device="meta"), b[: 32 * world()]
        if b.shape[0] == whole.shape[-1]:
            d = OPS.fused_matmul_reduce_scatter(whole, b, "sum", dim, name())
            their_d = theirs.fused_matmul_reduce_scatter(whole, b, "sum", dim, name())
            assert (d.shape, d.stride()) == (their_d.shape, their_d.stride())


# Modes and kinds of tensors.


@case
def modes_do_not_matter() -> None:
    a, b = made(3, 48, of=rank()), weight(48, 16)
    with torch.inference_mode():
        _, (first,) = OPS.fused_all_gather_matmul(a, [b], 0, name())
    _, (second,) = OPS.fused_all_gather_matmul(a, [b], 0, name())
    with torch.no_grad():
        _, (third,) = OPS.fused_all_gather_matmul(torch.nn.Parameter(a), [torch.nn.Parameter(b)], 0, name())
    assert torch.equal(first, second) and torch.equal(second, third)
    assert not third.requires_grad


class Named(torch.Tensor):
    """A subclass without a dispatch of its own: it is a tensor like any other."""


@case
def subclasses_are_taken_or_refused() -> None:
    a, b = made(3, 48, of=rank()), weight(48, 16)
    _, (expected,) = OPS.fused_all_gather_matmul(a, [b], 0, name())
    _, (found,) = OPS.fused_all_gather_matmul(a.as_subclass(Named), [b], 0, name())
    assert torch.equal(found.as_subclass(Tensor), expected)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(DEVICE, (world(),))
    spread = distribute_tensor(gathered(3, 48), mesh, [Shard(0)])
    refuses(Exception, "gemmesh", lambda: OPS.fused_all_gather_matmul(spread, [b], 0, name()))


# Groups.


@case
def groups_follow_process_groups() -> None:
    everyone = list(range(world()))
    one = dist.new_group(everyone)
    ours = gemmesh.torch.group_of(one, DEVICE)
    assert gemmesh.torch.group_of(one.group_name, DEVICE) is ours and (ours.rank, ours.world_size) == (rank(), world())
    a, b = made(2, 32, of=rank()), weight(32, 16)
    _, (c,) = OPS.fused_all_gather_matmul(a, [b], 0, one.group_name)
    known = one.group_name
    dist.destroy_process_group(one)
    refuses(gemmesh.MisuseError, "destroyed", lambda: OPS.fused_all_gather_matmul(a, [b], 0, known))
    # A process group of the same name is a different one.
    torch._C._distributed_c10d._register_process_group(known, dist.group.WORLD)
    try:
        again = gemmesh.torch.group_of(known, DEVICE)
        assert again is not ours
        _, (d,) = OPS.fused_all_gather_matmul(a, [b], 0, known)
        assert torch.equal(c, d) and gemmesh.torch.group_of(known, DEVICE) is again
    finally:
        torch._C._distributed_c10d._unregister_process_group(known)
    refuses(gemmesh.MisuseError, "no process group", lambda: gemmesh.torch.group_of("nobody"))
    refuses(ValueError, "no process group", lambda: gemmesh.torch.group_of(dist.GroupMember.NON_GROUP_MEMBER))


@case
def process_groups_are_not_kept_alive() -> None:
    one = dist.new_group(list(range(world())))
    known, ended = one.group_name, weakref.ref(one)
    ours = gemmesh.torch.group_of(one, DEVICE)
    for operation in each_operation(known, 0).values():
        operation()
    left = weakref.ref(ours)
    dist.barrier()
    gc.disable()
    try:
        dist.destroy_process_group(one)
        del one, ours, operation
        assert ended() is None, gc.get_referrers(ended())
        assert left() is None, gc.get_referrers(left())
    finally:
        gc.enable()
    tables = (_groups._ON_HOST, _groups._ON_CUDA, {of for of, _ in _groups._JOINING})
    assert not any(known in table for table in tables)


@case
def threads_join_a_process_group_once() -> None:
    one, found = dist.new_group(list(range(world()))), []
    in_threads([lambda: found.append(gemmesh.torch.group_of(one, DEVICE)) for _ in range(THREADS)])
    assert all(group is found[0] for group in found)
    found[0].barrier()


@case
def forks_refuse_operations_while_a_thread_is_in_one() -> None:
    if DEVICE == "cuda":
        return  # A fork cannot use CUDA.
    found, held, forked = joined(), threading.Event(), threading.Event()

    def hold() -> None:
        with found.turn:
            held.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        try:
            OPS.fused_all_gather_matmul(made(4, 32), [weight(32, 16, of=0)], 0, name())
        except gemmesh.MisuseError:
            os._exit(0)
        finally:
            os._exit(1)
    forked.set()
    thread.join()
    deadline = time.monotonic() + stretched(30)
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended and status == 0, f"the fork's status is {status}" if ended else "the fork hangs"


@case
def parts_of_a_job_have_their_own() -> None:
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world(), 2)]
    pair = pairs[rank() // 2]
    a, b = made(2, 32, of=rank()), weight(32, 16)
    full = torch.cat([made(2, 32, of=rank() // 2 * 2 + of) for of in range(2)])
    found, (c,) = OPS.fused_all_gather_matmul(a, [b], 0, pair.group_name)
    assert torch.equal(found, full)
    near(c, full.double() @ b.double())


@case
def own_groups_have_names() -> None:
    mine = gemmesh.torch.group_of(None, DEVICE).split(0, rank())
    gemmesh.torch.use("mine", mine)
    gemmesh.torch.use("mine", mine)
    a, b = made(2, 32, of=rank()), weight(32, 16)
    _, (c,) = OPS.fused_all_gather_matmul(a, [b], 0, "mine")
    near(c, gathered(2, 32).double() @ b.double())
    assert gemmesh.torch.group_of("mine", DEVICE) is mine
    refuses(gemmesh.MisuseError, "different name", lambda: gemmesh.torch.use("mine", mine.split(0, rank())))
    half = mine.split(rank() % 2, rank())
    another = dist.new_group(list(range(world())))
    refuses(gemmesh.ArgumentError, "must have the same ranks", lambda: gemmesh.torch.use(another.group_name, half))


# Errors.


@case
def bad_arguments_are_refused() -> None:
    a, b = made(4, 32, of=rank()), weight(32, 16)
    gather, scatter = OPS.fused_all_gather_matmul, OPS.fused_matmul_reduce_scatter
    wrong = gemmesh.ArgumentError
    refuses(wrong, "two dimensions", lambda: gather(a[0], [b], 0, name()))
    refuses(wrong, "matrix [K, N]", lambda: gather(a, [a[0]], 0, name()))
    refuses(wrong, "[16, 32] and must have K = 32, as A does; for a weight", lambda: gather(a, [b.t()], 0, name()))
    refuses(wrong, "pass weight.t()", lambda: scatter(a, b.t(), "sum", 0, name()))
    refuses(wrong, f"must have K = {32 * world()}", lambda: gather(a, [b], 1, name()))
    refuses(wrong, "gather_dim is 2", lambda: gather(a, [b], 2, name()))
    refuses(wrong, "gather_dim is -1", lambda: gather(a, [b], -1, name()))
    refuses(wrong, "scatter_dim is 3", lambda: scatter(a, b, "sum", 3, name()))
    refuses(wrong, "'sum' or 'avg'", lambda: scatter(a, b, "max", 0, name()))
    refuses(wrong, "multiple of", lambda: scatter(a[:3], b, "sum", 0, name()))
    refuses(wrong, "dtype", lambda: gather(a.float(), [b.float()], 0, name()))
    refuses(wrong, "dtype", lambda: scatter(a.float(), b.float(), "sum", 0, name()))
    refuses(wrong, "weights of f16", lambda: gather(a, [b.half()], 0, name()))
    refuses(wrong, "must have K = 32, as A does", lambda: gather(a, [weight(16, 16)], 0, name()))
    refuses(wrong, "must have K = 32, as A does", lambda: scatter(a, weight(16, 16), "sum", 0, name()))
    refuses(wrong, "scaled products", lambda: gather(fp8(a), [fp8(b.t()).t()], 0, name()))
    refuses(wrong, "scaled products", lambda: scatter(fp8(a), fp8(b.t()).t(), "sum", 0, name()))
    refuses(Exception, "meta", lambda: scatter(a, b.to("meta"), "sum", 0, name()))
    refuses(gemmesh.MisuseError, "no process group", lambda: gather(a, [b], 0, "nobody"))
    # The group goes on.
    near(gather(a, [b], 0, name())[1][0], gathered(4, 32).double() @ b.double())


@case
def bad_scales_are_refused() -> None:
    a, b, one = fp8(made(4, 32, of=rank())), fp8(weight(32, 16).t()).t(), scalar(0.5, 1)
    wrong = gemmesh.ArgumentError

    def gather(**changed: Any) -> object:
        given: dict[str, Any] = {
            "A": a, "Bs": [b], "A_scale": one, "B_scales": [one], "gather_dim": 0, "group_name": name(),
            "biases": [None], "result_scales": [None], "out_dtypes": [torch.bfloat16], "use_fast_accum": [False],
            **changed,
        }  # fmt: skip
        return OPS.fused_all_gather_scaled_matmul(**given)

    refuses(wrong, "A_scale has the shape [3, 1]", lambda: gather(A_scale=scalar(1, 3, 1)))
    refuses(wrong, "result_scales must be None", lambda: gather(result_scales=[one]))
    refuses(wrong, "out_dtype", lambda: gather(out_dtypes=[None]))
    refuses(wrong, "out_dtype", lambda: gather(out_dtypes=[torch.float64]))
    refuses(wrong, "biases has 0 elements", lambda: gather(biases=[]))
    refuses(wrong, "B_scales has 2 elements", lambda: gather(B_scales=[one, one]))
    refuses(wrong, "scales of b", lambda: gather(B_scales=[scalar(1, 1, 8)]))
    refuses(wrong, "last one", lambda: gather(gather_dim=1, A_scale=one))
    refuses(wrong, "float32", lambda: gather(A_scale=one.double()))
    refuses(wrong, "float32", lambda: gather(A_scale=scalar(1, 4, 1).double()))
    refuses(wrong, "", lambda: gather(Bs=[b.contiguous()]))
    refuses(wrong, "have none", lambda: gather(A_scale=one.clone().requires_grad_()))

    def scatter(*changed: Any, shape: Any = None, **options: Any) -> object:
        given = [a, b, one, one, "sum", 0, 0, name(), shape]
        for index, value in zip(changed[::2], changed[1::2], strict=True):
            given[index] = value
        return OPS.fused_scaled_matmul_reduce_scatter(*given, **{"out_dtype": torch.bfloat16, **options})

    refuses(wrong, "A_scale has the shape [2]", lambda: scatter(2, scalar(1, 2)))
    refuses(wrong, "orig_scatter_dim is 1", lambda: scatter(5, 1))
    refuses(wrong, "output_shape", lambda: scatter(shape=[5, 16]))
    refuses(wrong, "must end in 16", lambda: scatter(shape=[4, 15]))
    refuses(wrong, "result_scale", lambda: scatter(result_scale=one))
    refuses(wrong, "out_dtype", lambda: scatter(out_dtype=None))
    refuses(wrong, "'sum' or 'avg'", lambda: scatter(4, "max"))
    refuses(wrong, "have none", lambda: scatter(2, one.clone().requires_grad_()))


@case
def ranks_with_different_shapes_all_fail() -> None:
    # It fails the group, so it has one of its own.
    own = dist.new_group(list(range(world())))
    gemmesh.torch.group_of(own, DEVICE)
    a, b = made(4 + rank(), 32, of=rank()), weight(32, 16)
    refuses(gemmesh.Error, "", lambda: OPS.fused_all_gather_matmul(a, [b], 0, own.group_name))
    dist.barrier()
    # The name gets a group that works.
    another = dist.new_group(list(range(world())))
    gemmesh.torch.use(own.group_name, gemmesh.torch.group_of(another, DEVICE))
    product = OPS.fused_all_gather_matmul(made(4, 32, of=rank()), [b], 0, own.group_name)[1][0]
    near(product, gathered(4, 32).double() @ b.double())


@case
def one_ranks_refusal_reaches_all() -> None:
    for operation in (
        lambda b, group: OPS.fused_all_gather_matmul(made(4, 32), [b], 0, group),
        lambda b, group: OPS.fused_matmul_reduce_scatter(made(4, 32), b, "sum", 0, group),
    ):
        # The first is refused by gemmesh, the others before it is called.
        for bad in (weight(32, 16).half(), weight(16, 16), weight(32, 16)[0]):
            # It fails the group, so it has one of its own.
            own = dist.new_group(list(range(world()))).group_name
            gemmesh.torch.group_of(own, DEVICE)
            b = bad if rank() == 1 else weight(32, 16)

            def call() -> None:
                operation(b, own)  # noqa: B023
                # On GPUs a rank that waits learns of it here.
                gemmesh.torch.group_of(own, DEVICE).synchronize()  # noqa: B023

            refuses(gemmesh.Error, "rank 1", call)


@case
def plans_are_limited() -> None:
    before = _products._MAX_PLANS
    found = joined()
    _products._MAX_PLANS = 2
    try:
        found.gathers.clear()
        for rows in (1, 2, 3, 1):
            OPS.fused_all_gather_matmul(made(rows, 32, of=rank()), [weight(32, 16)], 0, name())
            assert len(found.gathers) <= 2
    finally:
        _products._MAX_PLANS = before


def main(backend: str = "gloo") -> None:
    number, count, store, results = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    dist.init_process_group(backend, init_method=f"file://{store}", rank=number, world_size=count)
    only = sys.argv[5:] or list(CASES)
    told: dict[str, str] = {}
    for each in only:
        try:
            CASES[each]()
            told[each] = ""
        except BaseException:
            told[each] = traceback.format_exc()
        # test_torch.py may read it at any time.
        written = results / f"{number}.new"
        written.write_text(json.dumps(told))
        written.replace(results / f"{number}.json")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
