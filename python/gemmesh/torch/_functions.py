"""The operations as functions, for calls that nobody traces or differentiates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_torch_function_mode_enabled, _is_tracing, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from ._products import direct_gather, direct_scatter

_TENSORS = (Tensor, torch.nn.Parameter)
_SEQUENCES = (list, tuple)


def fused_all_gather_matmul(
    A_shard: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """As `torch.ops.gemmesh.fused_all_gather_matmul`, in less of the host's time.

    A is the ranks' A_shard [..., K], concatenated along gather_dim, and C is A @ B for each B [K, N]. Returns
    (A, [C, ...]), with None for A without return_A.

    A call that has been planned leaves PyTorch's dispatcher out, unless it has something to do with the call: a
    gradient, a compiler's trace, a mode, a subclass, a transform or a profile.
    """
    if not is_compiling() and _is_plain(A_shard, Bs):
        result = direct_gather(A_shard, Bs, gather_dim, group_name, return_A)
        if result is not None:
            return result
    operation: Callable[..., tuple[Tensor | None, list[Tensor]]] = torch.ops.gemmesh.fused_all_gather_matmul
    return operation(A_shard, Bs, gather_dim, group_name, return_A=return_A)


def fused_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """As `torch.ops.gemmesh.fused_matmul_reduce_scatter`, in less of the host's time.

    Returns this rank's part, along scatter_dim, of the sum or average ("sum", "avg") of the ranks' A [..., K] @ B
    [K, N]. PyTorch's dispatcher is left out as by `fused_all_gather_matmul`.
    """
    if not is_compiling() and _is_plain(A, (B,)):
        result = direct_scatter(A, B, reduce_op, scatter_dim, group_name)
        if result is not None:
            return result
    operation: Callable[..., Tensor] = torch.ops.gemmesh.fused_matmul_reduce_scatter
    return operation(A, B, reduce_op, scatter_dim, group_name)


def _is_plain(a: Tensor, bs: Sequence[Tensor]) -> bool:
    """True if the dispatcher would only go to the operation's kernel."""
    if type(a) not in _TENSORS or type(bs) not in _SEQUENCES or a.is_neg():
        return False
    has_gradients = is_grad_enabled()
    if has_gradients and a.requires_grad:
        return False
    for b in bs:
        if type(b) not in _TENSORS or b.is_neg() or (has_gradients and b.requires_grad):
            return False
    return not (
        _len_torch_dispatch_stack()
        or _is_torch_function_mode_enabled()
        or _is_tracing()
        or _profiler_enabled()
        or peek_interpreter_stack() is not None
    )
