"""Products of tensors: what is planned for each shape, and what a call does."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ArgumentError, Group, MisuseError, Prepared, Scaled, Sharded
from .._native import TensorCalls
from ..types import Operation, ScalingName
from ._groups import Joined, joined, known, refuse_capture
from ._shards import Own, lent, shards_of

#: How many weights one product takes.
_MAX_WEIGHTS = 4
#: How many planned calls a group keeps. The oldest go first.
_MAX_PLANS = 1024


def refused(call: str, sentence: str) -> ArgumentError:
    return ArgumentError(f"{call}: {sentence}", call=call)


def check_halves(call: str, a: Tensor) -> None:
    """Refuses fp8, whose products have scales."""
    if a.dtype.itemsize == 1 and a.dtype.is_floating_point:
        raise refused(call, f"A is of {a.dtype}, which the operation of scaled products takes")


def check(call: str, a: Tensor, bs: Sequence[Tensor], dim: int, named: str, gathered_by: int = 1) -> None:
    """Refuses what no operation takes. `gathered_by`: the ranks by which `dim` grows before A is multiplied."""
    if a.dim() < 2:
        raise refused(call, f"A has the shape {list(a.shape)} and must have two dimensions or more")
    if not 0 <= dim < a.dim():
        raise refused(call, f"{named} is {dim} and must be from 0 to {a.dim() - 1}")
    for b in bs:
        if b.dim() != 2:
            raise refused(call, f"B has the shape {list(b.shape)} and must be a matrix [K, N]")
        if b.device != a.device:
            raise refused(call, f"B is on {b.device} and A on {a.device}; both must be on one device")
        k = a.shape[-1] * (gathered_by if dim == a.dim() - 1 else 1)
        if b.shape[0] != k:
            hint = "; for a weight [N, K], pass weight.t()" if b.shape[1] == k else ""
            raise refused(call, f"B [K, N] has the shape {list(b.shape)} and must have K = {k}, as A does{hint}")


def remember(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: object) -> None:
    if len(plans) >= _MAX_PLANS:
        del plans[next(iter(plans))]
    plans[key] = plan


def prepare(group: Group, operation: Operation, a: Any, b: Any, out: Any, options: dict[str, Any]) -> Prepared:
    """As `Group.prepare`. If this rank's arguments are refused, the other ranks learn it."""
    try:
        return group.prepare(operation, a, b, out, **options)
    except ArgumentError:
        # The call is refused for the same reason, and the ranks that wait for it are told.
        getattr(group, operation)(a, b, out, **options)
        raise


class Output:
    """A contiguous tensor of a given shape, without values."""

    __slots__ = ("extents", "is_padded", "options")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        shape = tuple(shape)
        columns = shape[-1]
        # Rows on GPUs begin at multiples of 16 bytes.
        whole = 16 // dtype.itemsize if device.type == "cuda" else 1
        pitch = -(-columns // whole) * whole
        self.is_padded = pitch != columns and math.prod(shape[:-1]) > 1
        laid = (*shape[:-1], pitch) if self.is_padded else shape
        strides = tuple(max(1, math.prod(laid[axis + 1 :])) for axis in range(len(laid)))
        #: Shape and strides: with the options, the arguments of torch.empty_strided, which takes less time than
        #: torch.empty.
        self.extents = (shape, strides)
        self.options: dict[str, Any] = {"dtype": dtype, "device": device}

    def make(self) -> Tensor:
        """Memory for a product."""
        return torch.empty_strided(*self.extents, **self.options)

    def made(self, out: Tensor) -> Tensor:
        """What the operation returns of the memory."""
        return out.contiguous() if self.is_padded else out


def _layout_of(b: Tensor) -> str | None:
    """The layout of a weight [K, N] in memory: "nk" if its columns are contiguous, "kn" if its rows are, else None."""
    (k, n), (along_k, along_n) = b.shape, b.stride()
    if along_k == 1 and (along_n >= k or n == 1):
        return "nk"
    if along_n == 1 and (along_k >= n or k == 1):
        return "kn"
    return None


class Weight:
    """How a weight [K, N] of a given layout becomes an operand."""

    __slots__ = ("is_dense", "is_transposed", "layout")

    def __init__(self, b: Tensor) -> None:
        layout = _layout_of(b)
        self.is_dense = layout is not None
        self.layout = layout or "kn"
        self.is_transposed = layout == "nk"

    def of(self, b: Tensor) -> Tensor:
        if self.is_transposed:
            return b.t()
        return b if self.is_dense else b.contiguous()


def keep(
    calls: TensorCalls,
    operands: tuple[Tensor, Sequence[Tensor]],
    prepared: Prepared,
    rows: Sharded | None,
    weights: Sequence[Weight],
    outputs: Sequence[Output],
) -> None:
    """Lets later calls with tensors like these need no Python, if the tensors are operands and results as they are."""
    if all(weight.is_dense for weight in weights) and not any(output.is_padded for output in outputs):
        calls.add(
            *operands,
            prepared,
            rows=rows,
            transposed=weights[0].is_transposed,
            new=torch.empty_strided,
            outputs=[(output.extents, output.options) for output in outputs],
        )


def copy_of(whole: Tensor, m: int, shape: Sequence[int], dim: int) -> Tensor:
    """A copy of the m rows that have been gathered, of a shape whose first dimension then moves to `dim`."""
    full = whole[:m].clone().view(shape)
    return full.movedim(0, dim) if dim else full


def strided_rows(a: Tensor) -> bool:
    """True if gemmesh takes the tensor: its rows are contiguous and lie a fixed distance apart."""
    if a.is_contiguous():
        return True
    return a.dim() == 2 and a.stride(1) == 1 and a.stride(0) >= a.shape[1]


class Scales(NamedTuple):
    """The scales of a gathered product of fp8, and what is added to it."""

    #: Those of A, as the gather takes them.
    rows: Tensor | Sharded
    scaling: ScalingName
    #: Makes those of all rows of A, behind the gather.
    every: Callable[[], Tensor]
    #: Those of each weight.
    weights: Sequence[tuple[Tensor, ScalingName]]
    biases: Sequence[Tensor | None]


class Gather:
    """Products of gathered rows and weights, planned for one list of shapes.

    Weights that don't fit into the first product multiply the gathered rows on this rank alone, behind it.
    """

    __slots__ = (
        "_alone",
        "_captured",
        "_dim",
        "_fused",
        "_joined",
        "_options",
        "_outputs",
        "_own",
        "_prepared",
        "_shape",
        "_weights",
    )

    def __init__(
        self,
        joined: Joined,
        a: Tensor,
        bs: Sequence[Tensor],
        dim: int,
        dtypes: Sequence[torch.dtype],
        options: Sequence[Any],
    ) -> None:
        moved = a.movedim(dim, 0)
        self._joined = joined
        self._dim = dim
        #: [W * d, ..., K], with the gathered dimension in front.
        self._shape = (moved.shape[0] * joined.world, *moved.shape[1:])
        rows = math.prod(moved.shape[:-1])
        shards = shards_of(joined, a.dtype, moved.shape[-1], rows * joined.world)
        self._own = Own(shards, moved.shape)
        self._weights = [Weight(b) for b in bs]
        self._outputs = [
            Output((*self._shape[:-1], b.shape[1]), dtype, a.device) for b, dtype in zip(bs, dtypes, strict=True)
        ]
        #: What the weights of one product have in common.
        self._options = list(options)
        alike = [
            index
            for index, b in enumerate(bs)
            if self._options[index] == self._options[0]
            and (self._weights[index].layout, b.dtype, dtypes[index])
            == (self._weights[0].layout, bs[0].dtype, dtypes[0])
        ]
        takes_bias = bool(options) and bool(options[0].get("bias"))
        self._fused = alike[: 1 if takes_bias else _MAX_WEIGHTS]
        self._alone = [index for index in range(len(bs)) if index not in self._fused]
        self._prepared: Prepared | None = None
        #: For graphs: the same, or one that can be captured.
        self._captured: Prepared | None = None

    def __call__(
        self, a: Tensor, bs: Sequence[Tensor], return_a: bool, scales: Scales | None = None
    ) -> tuple[Tensor | None, list[Tensor]]:
        sharded, whole, is_captured = self._place(a)
        rows: Any = sharded
        weights: list[Any] = [weight.of(b) for weight, b in zip(self._weights, bs, strict=True)]
        outputs = [output.make() for output in self._outputs]
        biases: Sequence[Tensor | None] = [None] * len(bs)
        if scales is not None:
            rows = Scaled(sharded, scales.rows, scales.scaling)
            weights = [Scaled(weight, *of) for weight, of in zip(weights, scales.weights, strict=True)]
            biases = scales.biases
        if self._fused:
            self._multiply_arriving(rows, weights, outputs, biases[self._fused[0]], is_captured)
        else:
            self._joined.all_gather(sharded)
        if self._alone:
            rows = whole[: self._own.m]
            if scales is not None:
                rows = Scaled(rows, scales.every(), scales.scaling)
            for index in self._alone:
                words = self._words(index)
                self._joined.group.matmul(rows, weights[index], outputs[index], bias=biases[index], **words)
        elif self._prepared is not None and scales is None and self._dim == 0 and not is_captured and strided_rows(a):
            calls, into = self._joined.gather_calls, self._own.shards.sharded
            keep(calls, (a, bs), self._prepared, into, self._weights, self._outputs)
        outputs = [output.made(out) for output, out in zip(self._outputs, outputs, strict=True)]
        if self._dim:
            outputs = [output.movedim(0, self._dim) for output in outputs]
        return (copy_of(whole, self._own.m, self._shape, self._dim) if return_a else None), outputs

    def _place(self, a: Tensor) -> tuple[Sharded, Tensor, bool]:
        """The sharded matrix that has these rows, the memory of all its rows, and whether a graph is captured."""
        own = self._own
        if self._dim:
            a = a.movedim(self._dim, 0)
        found = lent(self._joined, a)
        is_captured = self._joined.cuda and self._joined.enter(self, own.shards.sharded, found)
        if found is not None:
            return found.sharded, found.whole, is_captured
        return own.put(a), own.shards.whole, is_captured

    def _multiply_arriving(
        self, rows: Any, weights: Sequence[Any], outputs: Sequence[Tensor], bias: Tensor | None, is_captured: bool
    ) -> None:
        """Gathers the rows and multiplies them by the weights of the first product."""
        fused = self._fused
        b: Any = weights[fused[0]]
        out: Any = outputs[fused[0]]
        if len(fused) > 1:
            b, out = [weights[index] for index in fused], [outputs[index] for index in fused]
        prepared = self._prepared
        if prepared is None:
            refuse_capture("plan a product")
            words = self._words(fused[0])
            prepared = prepare(self._joined.group, "all_gather_matmul", rows, b, out, words)
            self._prepared = self._captured = prepared
            if self._joined.cuda and prepared.route == "pull":
                # Rows that are pulled can't be captured. Where nothing else works, neither can the operation.
                with contextlib.suppress(ArgumentError, MisuseError):
                    words["route"] = "push"
                    self._captured = self._joined.group.prepare("all_gather_matmul", rows, b, out, **words)
        if is_captured:
            prepared = self._capturable()
        prepared(rows, b, out, bias=bias)

    def _capturable(self) -> Prepared:
        assert self._captured is not None
        return self._captured

    def _words(self, index: int) -> dict[str, Any]:
        options = {key: value for key, value in self._options[index].items() if key == "accumulation"}
        return {"weight_layout": self._weights[index].layout, **options}


NO_OPTIONS: dict[str, Any] = {}


def all_gather_matmul(
    a: Tensor, bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    result = direct_gather(a, bs, gather_dim, group_name, return_A)
    return _gather(a, bs, gather_dim, group_name, return_A) if result is None else result


def direct_gather(
    a: Tensor, bs: Sequence[Tensor], dim: int, name: str, return_a: bool
) -> tuple[Tensor | None, list[Tensor]] | None:
    """As `all_gather_matmul`, if the product has been planned and needs no Python."""
    found = known(name, a)
    if dim != 0 or found is None or found.is_captured():
        return None
    with found.turn:
        products: list[Tensor] | None = found.gather_calls.run(a, bs)
        if products is None:
            return None
        return (_copy_of_all(found, a) if return_a else None), products


def _copy_of_all(joined: Joined, a: Tensor) -> Tensor:
    """A copy of all ranks' rows, which have been gathered."""
    own = lent(joined, a)
    whole = own.whole if own is not None else joined.shards[a.dtype, a.shape[-1]].whole
    shape = (a.shape[0] * joined.world, *a.shape[1:])
    return copy_of(whole, math.prod(shape[:-1]), shape, 0)


def _gather(
    a: Tensor, bs: Sequence[Tensor], gather_dim: int, group_name: str, return_a: bool
) -> tuple[Tensor | None, list[Tensor]]:
    found = joined(group_name, a)
    key = (gather_dim, a.shape, a.dtype, *((b.shape, b.stride(), b.dtype) for b in bs))
    with found.turn:
        plan = found.gathers.get(key)
        if plan is None:
            with found.planning():
                check("fused_all_gather_matmul", a, bs, gather_dim, "gather_dim", found.world)
                check_halves("fused_all_gather_matmul", a)
                if gather_dim == a.dim() - 1:
                    return _gather_columns(found, a, bs, return_a)
                refuse_capture("plan a product")
                plan = Gather(found, a, bs, gather_dim, [a.dtype] * len(bs), [NO_OPTIONS] * len(bs))
            remember(found.gathers, key, plan)
        return plan(a, bs, return_a)


def _gather_columns(
    joined: Joined, a: Tensor, bs: Sequence[Tensor], return_a: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Gathers the last dimension, K. Only rows are multiplied as they arrive, so the product follows the gather."""
    world = joined.world
    rows, columns = math.prod(a.shape[:-1]), a.shape[-1]
    own = Own(shards_of(joined, a.dtype, columns, rows * world), (rows, columns))
    if joined.cuda:
        joined.enter(own.shards.sharded)
    joined.all_gather(own.put(a.reshape(rows, columns)))
    parts = own.shards.whole[: own.m].view(world, rows, columns)
    full = parts.movedim(0, 1).reshape(*a.shape[:-1], world * columns).contiguous()
    if full.data_ptr() == parts.data_ptr():
        full = full.clone()
    products = [torch.matmul(full, b) for b in bs]
    return (full if return_a else None), products


class Scatter:
    """A product whose sums are scattered, planned for one shape."""

    __slots__ = ("_dense", "_dim", "_dtype", "_joined", "_options", "_out", "_prepared", "_divisor", "_weight")

    def __init__(
        self,
        joined: Joined,
        a: Tensor,
        b: Tensor,
        dim: int,
        average: bool,
        dtype: torch.dtype,
        options: dict[str, Any],
    ) -> None:
        moved = a.movedim(dim, 0)
        average = average and joined.world > 1
        self._joined = joined
        self._dim = dim
        self._dense = strided_rows(moved)
        self._dtype = dtype
        self._divisor = joined.world if average else 1
        # A sum of bf16 is divided by a power of two without rounding. One of f16 might be too large before that.
        exact = dtype != torch.float16 and joined.world & (joined.world - 1) == 0
        # [d / W, ..., N], with the scattered dimension in front.
        shape = (moved.shape[0] // joined.world, *moved.shape[1:-1], b.shape[1])
        self._out = Output(shape, dtype if exact or not average else torch.float32, a.device)
        self._weight = Weight(b)
        self._options = options
        self._prepared: Prepared | None = None

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scales: tuple[tuple[Tensor, ScalingName], tuple[Tensor, ScalingName]] | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        joined = self._joined
        is_captured = joined.cuda and joined.enter(self)
        dim = self._dim
        rows: Any = a.movedim(dim, 0) if dim else a
        if not self._dense:
            rows = rows.contiguous()
        weight: Any = self._weight.of(b)
        if scales is not None:
            rows, weight = Scaled(rows, *scales[0]), Scaled(weight, *scales[1])
        out = self._out.make()
        prepared = self._prepared
        if prepared is None:
            refuse_capture("plan a product")
            options = {"weight_layout": self._weight.layout, **self._options}
            prepared = prepare(joined.group, "matmul_reduce_scatter", rows, weight, out, options)
            self._prepared = prepared
        prepared(rows, weight, out, bias=bias)
        if scales is None and self._dense and dim == 0 and self._divisor == 1 and not is_captured:
            keep(joined.scatter_calls, (a, (b,)), prepared, None, (self._weight,), (self._out,))
        out = self._out.made(out)
        if self._divisor != 1:
            out = out.div_(self._divisor).to(self._dtype)
        return out.movedim(0, dim).contiguous() if dim else out


def check_scatter(call: str, joined: Joined, extent: int, dim: int, reduce_op: str, named: str) -> None:
    if reduce_op not in ("sum", "avg"):
        raise refused(call, f"reduce_op is {reduce_op!r} and must be 'sum' or 'avg'")
    if extent % joined.world:
        raise refused(
            call, f"dimension {dim} ({named}) has {extent} elements and must be a multiple of the {joined.world} ranks"
        )


def matmul_reduce_scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    result = direct_scatter(a, b, reduce_op, scatter_dim, group_name)
    return _scatter(a, b, reduce_op, scatter_dim, group_name) if result is None else result


def direct_scatter(a: Tensor, b: Tensor, reduce_op: str, dim: int, name: str) -> Tensor | None:
    """As `matmul_reduce_scatter`, if the sum has been planned and needs no Python."""
    found = known(name, a)
    if dim != 0 or reduce_op != "sum" or found is None or found.is_captured():
        return None
    with found.turn:
        sums: list[Tensor] | None = found.scatter_calls.run(a, (b,))
    return None if sums is None else sums[0]


def _scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    found = joined(group_name, a)
    key = (scatter_dim, reduce_op, a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype)
    with found.turn:
        plan = found.scatters.get(key)
        if plan is None:
            call = "fused_matmul_reduce_scatter"
            with found.planning():
                check(call, a, [b], scatter_dim, "scatter_dim")
                check_halves(call, a)
                last = scatter_dim == a.dim() - 1
                extent = b.shape[1] if last else a.shape[scatter_dim]
                check_scatter(call, found, extent, scatter_dim, reduce_op, "scatter_dim")
                if last:
                    return _scatter_columns(found, a, b, reduce_op)
                refuse_capture("plan a product")
                plan = Scatter(found, a, b, scatter_dim, reduce_op == "avg", a.dtype, NO_OPTIONS)
            remember(found.scatters, key, plan)
        return plan(a, b)


def _scatter_columns(joined: Joined, a: Tensor, b: Tensor, reduce_op: str) -> Tensor:
    """Scatters the last dimension, N. Columns of a product are rows of the transposed one: Bᵀ [N, K] times A [M, K]."""
    rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    shape = (*a.shape[:-1], b.shape[1] // joined.world)
    if rows.shape[0] == 0:
        # A is no weight then. The ranks make the product that has no rows.
        matmul_reduce_scatter(rows, b, "sum", 0, joined.name)
        return a.new_empty(shape)
    columns = matmul_reduce_scatter(b.t(), rows.t(), reduce_op, 0, joined.name)
    return columns.t().contiguous().view(shape)


def reduce_scatter(a: Tensor, dim: int, group_name: str) -> Tensor:
    """This rank's part, along a dimension, of the sum of the ranks' tensors."""
    found = joined(group_name, a)
    moved = a.movedim(dim, 0)
    extent = moved.shape[0]
    with found.turn:
        if found.cuda:
            found.enter()
        with found.planning():
            check_scatter("reduce_scatter", found, extent, dim, "sum", "dim")
        addends, sums = (
            Output((rows, *moved.shape[1:]), a.dtype, a.device) for rows in (extent, extent // found.world)
        )
        out = sums.make()
        found.group.reduce_scatter(addends.make().copy_(moved), out)
        return sums.made(out).movedim(0, dim).contiguous()
