"""Products of fp8, whose operands have scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import Sharded
from ..types import ScalingName
from ._groups import Joined, joined, refuse_capture
from ._products import Gather, Scales, Scatter, check, check_scatter, refused, remember
from ._shards import Own, shards_of

_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
#: The numbers by which the dispatcher passes lists of types.
_NUMBERED = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def output_type(call: str, dtype: torch.dtype | int | None) -> torch.dtype:
    """The type of a scaled product."""
    found = _NUMBERED.get(dtype) if isinstance(dtype, int) else dtype
    if found not in _OUTPUTS:
        raise refused(call, f"out_dtype is {dtype} and must be torch.bfloat16, torch.float16 or torch.float32")
    return found


def rows_scaling(call: str, shard: Tensor, scale: Tensor, dim: int, world: int) -> str:
    """Whose scales those of A are, as PyTorch tells by their shape: "sharded", "tensor" or "all" rows."""
    full = list(shard.shape)
    full[dim] *= world
    if scale.dim() and scale.shape[-1] == 1:
        leading = list(scale.shape[:-1])
        if leading == list(shard.shape[:-1]):
            return "sharded"
        if scale.numel() != 1 and leading == full[:-1]:
            return "all"
    if scale.numel() == 1:
        return "tensor"
    raise refused(
        call,
        f"A_scale has the shape {list(scale.shape)} and must have one element or be {[*shard.shape[:-1], 1]} or "
        f"{[*full[:-1], 1]}",
    )


def check_lists(call: str, bs: Sequence[Tensor], **lists: Sequence[object]) -> None:
    for name, values in lists.items():
        if len(values) != len(bs):
            raise refused(call, f"{name} has {len(values)} elements and Bs has {len(bs)}; they must be as many")


def scattered_shape(call: str, a: Tensor, b: Tensor, dim: int, output_shape: Sequence[int] | None) -> list[int]:
    """The shape of A @ B before it is scattered."""
    shape = list(output_shape) if output_shape is not None else [*a.shape[:-1], b.shape[1]]
    if not 0 <= dim < len(shape) - 1:
        raise refused(call, f"orig_scatter_dim is {dim} and must be from 0 to {len(shape) - 2}: a dimension of rows")
    if shape[-1] != b.shape[1]:
        raise refused(call, f"output_shape is {shape} and must end in {b.shape[1]}, the N of B")
    if math.prod(shape[:-1]) != math.prod(a.shape[:-1]):
        raise refused(call, f"output_shape is {shape}, and A has {math.prod(a.shape[:-1])} rows; they must be as many")
    return shape


def _row(scales: Tensor) -> Tensor:
    """Scales as one contiguous row, of one dimension or of two."""
    if scales.dim() == 1 and scales.is_contiguous():
        return scales
    if scales.dim() == 2 and scales.shape[0] == 1 and scales.is_contiguous():
        return scales
    return scales.reshape(1, scales.numel()).contiguous()


def _scaling_of(scale: Tensor) -> ScalingName:
    """How a weight's values share its scales."""
    return "tensor" if scale.numel() == 1 else "rows"


class ScaledGather:
    """Products of gathered rows of fp8, planned for one list of shapes."""

    __slots__ = ("_dim", "_gather", "_joined", "_own", "_scaling", "_scalings")

    def __init__(
        self, joined: Joined, gather: Gather, a_scale: Tensor, b_scales: Sequence[Tensor], dim: int, scaling: str
    ) -> None:
        self._joined = joined
        self._gather = gather
        self._dim = dim
        #: As `rows_scaling` says.
        self._scaling = scaling
        self._scalings = [_scaling_of(scale) for scale in b_scales]
        #: Where the scales of this rank's rows are put, if they are gathered.
        self._own: Own | None = None
        if scaling == "sharded":
            count = a_scale.numel()
            # Rows of sharded matrices are whole pieces of 16 bytes on GPUs. The other columns have no meaning.
            columns = 4 if joined.cuda else 1
            shards = shards_of(joined, torch.float32, columns, count * joined.world)
            self._own = Own(shards, (*a_scale.movedim(dim, 0).shape[:-1], 1))

    def __call__(
        self,
        a: Tensor,
        bs: Sequence[Tensor],
        a_scale: Tensor,
        b_scales: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> tuple[Tensor, list[Tensor]]:
        weights = [(_row(scale), scaling) for scale, scaling in zip(b_scales, self._scalings, strict=True)]
        own = self._own
        rows: Tensor | Sharded
        if own is not None:
            if self._joined.cuda:
                self._joined.enter(own.shards.sharded)
            rows = own.put(a_scale.movedim(self._dim, 0) if self._dim else a_scale)
        else:
            rows = _row(a_scale.movedim(self._dim, 0) if self._dim and self._scaling == "all" else a_scale)

        def every() -> Tensor:
            if own is not None:
                return _row(own.shards.whole[: own.m, 0])
            assert isinstance(rows, Tensor)
            return rows

        scaling: ScalingName = "tensor" if self._scaling == "tensor" else "rows"
        full, outputs = self._gather(a, bs, True, Scales(rows, scaling, every, weights, biases))
        assert full is not None
        return full, outputs


def all_gather_scaled_matmul(
    a: Tensor,
    bs: Sequence[Tensor],
    a_scale: Tensor,
    b_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | int | None],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    found = joined(group_name, a)
    key = (
        gather_dim,
        a.shape,
        a.dtype,
        a_scale.shape,
        a_scale.dtype,
        tuple([(b.shape, b.stride(), b.dtype) for b in bs]),
        tuple([scale.shape for scale in b_scales]),
        tuple([bias is None for bias in biases]),
        tuple([scale is None for scale in result_scales]),
        tuple(out_dtypes),
        tuple(use_fast_accum),
    )
    with found.turn:
        plan: ScaledGather | None = found.scaled_gathers.get(key)
        if plan is None:
            with found.planning():
                plan = _plan_gather(
                    found, a, bs, a_scale, b_scales, gather_dim, biases, result_scales, out_dtypes, use_fast_accum
                )
            remember(found.scaled_gathers, key, plan)
        return plan(a, bs, a_scale, b_scales, biases)


def _plan_gather(
    joined: Joined,
    a: Tensor,
    bs: Sequence[Tensor],
    a_scale: Tensor,
    b_scales: Sequence[Tensor],
    dim: int,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | int | None],
    use_fast_accum: Sequence[bool],
) -> ScaledGather:
    call = "fused_all_gather_scaled_matmul"
    check(call, a, bs, dim, "gather_dim")
    check_lists(
        call,
        bs,
        B_scales=b_scales,
        biases=biases,
        result_scales=result_scales,
        out_dtypes=out_dtypes,
        use_fast_accum=use_fast_accum,
    )
    if dim == a.dim() - 1:
        raise refused(call, "gather_dim is the last one, along which scaled rows cannot be gathered")
    if any(scale is not None for scale in result_scales):
        raise refused(call, "result_scales must be None")
    scaling = rows_scaling(call, a, a_scale, dim, joined.world)
    if a_scale.dtype != torch.float32:
        raise refused(call, f"A_scale is of {a_scale.dtype} and must be of torch.float32")
    dtypes = [output_type(call, dtype) for dtype in out_dtypes]
    refuse_capture("plan a product")
    options = [
        {"accumulation": "fast" if fast else "promoted", "bias": bias is not None, "scales": _scaling_of(scale)}
        for fast, bias, scale in zip(use_fast_accum, biases, b_scales, strict=True)
    ]
    gather = Gather(joined, a, bs, dim, dtypes, options)
    return ScaledGather(joined, gather, a_scale, b_scales, dim, scaling)


class ScaledScatter:
    """A product of fp8 whose sums are scattered, planned for one list of shapes."""

    __slots__ = ("_by_rows", "_dim", "_joined", "_leading", "_scaling", "_scatter")

    def __init__(
        self, joined: Joined, scatter: Scatter, leading: Sequence[int], dim: int, by_rows: bool, b_scale: Tensor
    ) -> None:
        self._joined = joined
        self._scatter = scatter
        #: The dimensions of A's rows in the output.
        self._leading = tuple(leading)
        self._dim = dim
        self._by_rows = by_rows
        self._scaling = _scaling_of(b_scale)

    def __call__(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
        if a.shape[:-1] != self._leading:
            a = a.reshape(*self._leading, a.shape[-1])
        if bias is not None:
            bias = _sum_of_biases(self._joined, bias)
        of_a: tuple[Tensor, ScalingName]
        if self._by_rows:
            of_a = _row(a_scale.reshape(*self._leading, 1).movedim(self._dim, 0)), "rows"
        else:
            of_a = _row(a_scale), "tensor"
        return self._scatter(a, b, (of_a, (_row(b_scale), self._scaling)), bias)


def scaled_matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    found = joined(group_name, a)
    key: tuple[Any, ...] = (
        reduce_op,
        orig_scatter_dim,
        scatter_dim_after_maybe_reshape,
        a.shape,
        a.stride(),
        a.dtype,
        b.shape,
        b.stride(),
        b.dtype,
        a_scale.shape,
        b_scale.shape,
        None if output_shape is None else tuple(output_shape),
        bias is None,
        result_scale is None,
        out_dtype,
        use_fast_accum,
    )
    with found.turn:
        plan: ScaledScatter | None = found.scaled_scatters.get(key)
        if plan is None:
            with found.planning():
                plan = _plan_scatter(
                    found, a, b, a_scale, b_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape,
                    output_shape, result_scale, out_dtype, use_fast_accum,
                )  # fmt: skip
            remember(found.scaled_scatters, key, plan)
        return plan(a, b, a_scale, b_scale, bias)


def _plan_scatter(
    joined: Joined,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    dim_of_a: int,
    output_shape: Sequence[int] | None,
    result_scale: Tensor | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> ScaledScatter:
    call = "fused_scaled_matmul_reduce_scatter"
    check(call, a, [b], dim_of_a, "scatter_dim_after_maybe_reshape")
    leading = scattered_shape(call, a, b, orig_scatter_dim, output_shape)[:-1]
    if result_scale is not None:
        raise refused(call, "result_scale must be None")
    dtype = output_type(call, out_dtype)
    by_rows = a_scale.numel() != 1
    rows = [*a.shape[:-1], 1]
    if by_rows and list(a_scale.shape) != rows:
        raise refused(call, f"A_scale has the shape {list(a_scale.shape)} and must have one element or be {rows}")
    check_scatter(call, joined, leading[orig_scatter_dim], orig_scatter_dim, reduce_op, "orig_scatter_dim")
    refuse_capture("plan a product")
    options = {"accumulation": "fast" if use_fast_accum else "promoted"}
    shaped = a.reshape(*leading, a.shape[-1])
    scatter = Scatter(joined, shaped, b, orig_scatter_dim, reduce_op == "avg", dtype, options)
    return ScaledScatter(joined, scatter, leading, orig_scatter_dim, by_rows, b_scale)


def _sum_of_biases(joined: Joined, bias: Tensor) -> Tensor:
    """The sum of the ranks' biases: each rank adds its own to its product."""
    n = bias.numel()
    own = Own(shards_of(joined, bias.dtype, n, joined.world), (1, n))
    if joined.cuda:
        joined.enter(own.shards.sharded)
    joined.all_gather(own.put(bias.reshape(1, n)))
    return own.shards.whole[: joined.world].sum(0, dtype=torch.float32).to(bias.dtype)
