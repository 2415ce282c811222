"""The operations as PyTorch's dispatcher knows them: schemas, kernels, shapes and gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import DispatchKey, DispatchKeySet, _any_requires_grad

from . import _products, _scaled
from ._groups import world_of
from ._products import check, refused
from ._scaled import check_lists, output_type, rows_scaling, scattered_shape

_SCHEMAS = {
    "fused_all_gather_matmul": (
        "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A = True) -> (Tensor?, Tensor[])"
    ),
    "fused_all_gather_scaled_matmul": (
        "(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim, str group_name, Tensor?[] biases, "
        "Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum) -> (Tensor, Tensor[])"
    ),
    "fused_matmul_reduce_scatter": ("(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor"),
    "fused_scaled_matmul_reduce_scatter": (
        "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, int orig_scatter_dim, "
        "int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, Tensor? bias = None, "
        "Tensor? result_scale = None, ScalarType? out_dtype = None, bool use_fast_accum = False) -> Tensor"
    ),
    # For gradients of the gathered A.
    "_reduce_scatter": "(Tensor A, int dim, str group_name) -> Tensor",
}

_LIBRARY: Any = torch.library.Library("gemmesh", "DEF")  # type: ignore[no-untyped-call]


def register() -> None:
    """Makes the operations. Called once."""
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    for name, schema in _SCHEMAS.items():
        _LIBRARY.define(name + schema, tags=tags)
    # Kernels of the dispatcher cost less than torch.library.custom_op and register_autograd, by 10 µs a call and more.
    for name, kernel, fake, gradients in (
        ("fused_all_gather_matmul", _products.all_gather_matmul, _fake_gather, _with_gradients_of_gather),
        ("fused_matmul_reduce_scatter", _products.matmul_reduce_scatter, _fake_scatter, _with_gradients_of_scatter),
        (
            "fused_all_gather_scaled_matmul",
            _scaled.all_gather_scaled_matmul,
            _fake_scaled_gather,
            _without_gradients("fused_all_gather_scaled_matmul", _scaled.all_gather_scaled_matmul),
        ),
        (
            "fused_scaled_matmul_reduce_scatter",
            _scaled.scaled_matmul_reduce_scatter,
            _fake_scaled_scatter,
            _without_gradients("fused_scaled_matmul_reduce_scatter", _scaled.scaled_matmul_reduce_scatter),
        ),
        ("_reduce_scatter", _products.reduce_scatter, _fake_reduce_scatter, None),
    ):
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, kernel, device)
            if gradients is not None:
                _LIBRARY.impl(name, gradients, f"Autograd{device}", with_keyset=True)
        torch.library.register_fake(f"gemmesh::{name}", fake, lib=_LIBRARY)


# Shapes and strides.


def _ranks(group_name: str) -> int:
    """The number of ranks of a program that is traced.

    PyTorch keeps compiled programs on disk by their code, which says the group's name and not its size. It is added to
    what they are kept by. A program that is then compiled for other ranks does not find one with other shapes.
    """
    world = world_of(group_name)
    tag = torch.compiler.config.cache_key_tag
    before = re.sub(rf"gemmesh: {re.escape(group_name)} has \d+ ranks;", "", tag)
    now = f"{before}gemmesh: {group_name} has {world} ranks;"
    if now != tag:
        torch.compiler.config.cache_key_tag = now
    return world


def _new(like: Tensor, shape: Sequence[Any], dtype: torch.dtype, dim: int = 0) -> Tensor:
    made = like.new_empty(list(shape), dtype=dtype)
    return made.movedim(0, dim) if dim else made


def _fake_gather(
    A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    world = _ranks(group_name)
    check("fused_all_gather_matmul", A, Bs, gather_dim, "gather_dim", world)
    if gather_dim == A.dim() - 1:
        shape, dim = [*A.shape[:-1], A.shape[-1] * world], 0
    else:
        moved = A.movedim(gather_dim, 0)
        shape, dim = [moved.shape[0] * world, *moved.shape[1:]], gather_dim
    products = [_new(A, [*shape[:-1], B.shape[1]], A.dtype, dim) for B in Bs]
    return (_new(A, shape, A.dtype, dim) if return_A else None), products


def _fake_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    check("fused_matmul_reduce_scatter", A, [B], scatter_dim, "scatter_dim")
    shape = [*A.shape[:-1], B.shape[1]]
    shape[scatter_dim] = shape[scatter_dim] // _ranks(group_name)
    return _new(A, shape, A.dtype)


def _fake_scaled_gather(
    A: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | int | None],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    call = "fused_all_gather_scaled_matmul"
    check(call, A, Bs, gather_dim, "gather_dim")
    check_lists(call, Bs, B_scales=B_scales, biases=biases, result_scales=result_scales, out_dtypes=out_dtypes)
    world = _ranks(group_name)
    rows_scaling(call, A, A_scale, gather_dim, world)
    moved = A.movedim(gather_dim, 0)
    shape = [moved.shape[0] * world, *moved.shape[1:]]
    products = [
        _new(A, [*shape[:-1], B.shape[1]], output_type(call, dtype), gather_dim)
        for B, dtype in zip(Bs, out_dtypes, strict=True)
    ]
    return _new(A, shape, A.dtype, gather_dim), products


def _fake_scaled_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
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
    call = "fused_scaled_matmul_reduce_scatter"
    check(call, A, [B], scatter_dim_after_maybe_reshape, "scatter_dim_after_maybe_reshape")
    shape = scattered_shape(call, A, B, orig_scatter_dim, output_shape)
    shape[orig_scatter_dim] = shape[orig_scatter_dim] // _ranks(group_name)
    return _new(A, [*shape[:-1], B.shape[1]], output_type(call, out_dtype))


def _fake_reduce_scatter(A: Tensor, dim: int, group_name: str) -> Tensor:
    shape = list(A.shape)
    shape[dim] = shape[dim] // _ranks(group_name)
    return _new(A, shape, A.dtype)


# Gradients. The formulas call the operations, so that compilers trace them.

#: True for the sets of keys with which an operation goes straight to its kernel: nothing traces or transforms it, and
#: its tensors are what their memory says.
_straight: dict[int, bool] = {}

_TRACED = (DispatchKey.Python, DispatchKey.Functionalize, DispatchKey.Negative)


def _is_straight(keys: DispatchKeySet) -> bool:
    number: int = keys.raw_repr()
    known = _straight.get(number)
    if known is None:
        known = _straight[number] = not any(keys.has(key) for key in _TRACED)
    return known


def _below(keys: DispatchKeySet, name: str, *args: Any, **options: Any) -> Any:
    """Calls an operation as if there were no gradients."""
    operation = getattr(torch.ops.gemmesh, name).default
    with torch._C._AutoDispatchBelowAutograd():
        return operation.redispatch(keys & torch._C._after_autograd_keyset, *args, **options)


class _GatherMatmul(torch.autograd.Function):
    """A's gradient is a product whose sums are scattered. Those of the weights need all rows of A."""

    @staticmethod
    def forward(
        ctx: Any, keys: DispatchKeySet, dim: int, name: str, return_a: bool, a: Tensor, *bs: Tensor
    ) -> tuple[Tensor | None, ...]:
        full, products = _below(keys, "fused_all_gather_matmul", a, list(bs), dim, name, return_A=return_a)
        ctx.set_materialize_grads(False)
        # Without a gathered A the rows are gathered again, because keeping them takes W times the memory.
        ctx.save_for_backward(full if return_a else a, *bs)
        ctx.dim, ctx.name, ctx.return_a = dim, name, return_a
        return (full, *products)

    @staticmethod
    def backward(ctx: Any, of_full: Tensor | None, *of_products: Tensor | None) -> tuple[Any, ...]:
        a, *bs = ctx.saved_tensors
        dim, name = ctx.dim, ctx.name
        known = [(gradient, b) for gradient, b in zip(of_products, bs, strict=True) if gradient is not None]
        of_a: Tensor | None = None
        if ctx.needs_input_grad[4]:
            if known:
                of_all, weights = known[0]
                if len(known) > 1:
                    # One product whose K is that of all weights' gradients together sums over the weights, too.
                    of_all = torch.cat([gradient for gradient, _ in known], -1)
                    weights = torch.cat([b for _, b in known], 1)
                of_a = torch.ops.gemmesh.fused_matmul_reduce_scatter(of_all, weights.t(), "sum", dim, name)
            if of_full is not None:
                scattered = torch.ops.gemmesh._reduce_scatter(of_full, dim, name)
                of_a = scattered if of_a is None else of_a + scattered
        of_bs: list[Tensor | None] = [None] * len(bs)
        if known and any(ctx.needs_input_grad[5:]):
            full = a if ctx.return_a else torch.ops.gemmesh.fused_all_gather_matmul(a, [], dim, name)[0]
            for index, gradient in enumerate(of_products):
                if gradient is not None and ctx.needs_input_grad[5 + index]:
                    of_bs[index] = full.flatten(0, -2).t() @ gradient.flatten(0, -2)
        return (None, None, None, None, of_a, *of_bs)


class _MatmulScatter(torch.autograd.Function):
    """A's gradient is a product of gathered rows, which the gradient of the weight takes, too."""

    @staticmethod
    def forward(ctx: Any, keys: DispatchKeySet, reduce_op: str, dim: int, name: str, a: Tensor, b: Tensor) -> Tensor:
        product: Tensor = _below(keys, "fused_matmul_reduce_scatter", a, b, reduce_op, dim, name)
        ctx.save_for_backward(a, b)
        ctx.reduce_op, ctx.dim, ctx.name = reduce_op, dim, name
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad[4:]
        if ctx.reduce_op == "avg":
            gradient = gradient / world_of(ctx.name)
        weights = [b.t()] if needs_a else []
        full, products = torch.ops.gemmesh.fused_all_gather_matmul(
            gradient, weights, ctx.dim, ctx.name, return_A=needs_b
        )
        of_b = a.flatten(0, -2).t() @ full.flatten(0, -2) if needs_b else None
        return (None, None, None, None, products[0] if needs_a else None, of_b)


def _with_gradients_of_gather(
    keys: DispatchKeySet, A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    if is_grad_enabled() and _any_requires_grad(A, Bs):
        full, *products = _GatherMatmul.apply(keys, gather_dim, group_name, return_A, A, *Bs)
        return full, products
    if _is_straight(keys):
        return _products.all_gather_matmul(A, Bs, gather_dim, group_name, return_A=return_A)
    below: tuple[Tensor | None, list[Tensor]] = _below(
        keys, "fused_all_gather_matmul", A, Bs, gather_dim, group_name, return_A=return_A
    )
    return below


def _with_gradients_of_scatter(
    keys: DispatchKeySet, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    if is_grad_enabled() and (A.requires_grad or B.requires_grad):
        product: Tensor = _MatmulScatter.apply(keys, reduce_op, scatter_dim, group_name, A, B)
        return product
    if _is_straight(keys):
        return _products.matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
    below: Tensor = _below(keys, "fused_matmul_reduce_scatter", A, B, reduce_op, scatter_dim, group_name)
    return below


def _without_gradients(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that refuses tensors that require gradients."""

    def checked(keys: DispatchKeySet, *args: Any) -> Any:
        if is_grad_enabled() and _any_requires_grad(*args):
            raise refused(name, "a tensor requires a gradient, and products of fp8 have none; detach it")
        return kernel(*args) if _is_straight(keys) else _below(keys, name, *args)

    return checked
