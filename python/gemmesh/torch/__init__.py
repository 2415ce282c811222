"""The operations of PyTorch's `symm_mem` under their names, on gemmesh.

Importing this module registers them. A program, or a pass of a compiler, says `torch.ops.gemmesh` instead of
`torch.ops.symm_mem`::

    import gemmesh.torch

    name = torch.distributed.group.WORLD.group_name
    x, (y,) = torch.ops.gemmesh.fused_all_gather_matmul(x, [w1.t()], 0, name)
    x = torch.ops.gemmesh.fused_matmul_reduce_scatter(y, w2.t(), "sum", 0, name)

W is the number of ranks of the process group that `group_name` names. The first operation of a group joins its ranks,
collectively. All ranks give the same shapes.

`fused_all_gather_matmul(A_shard, Bs, gather_dim, group_name, *, return_A=True) -> (A, [C, ...])`
    A is the ranks' A_shard [..., K], concatenated along gather_dim, and C is A @ B for each B [K, N]. A is None without
    return_A. It has gradients.
`fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name) -> C`
    C is this rank's part, along scatter_dim, of the sum or average of the ranks' A [..., K] @ B [K, N]. K may differ
    between ranks. It has gradients.
`fused_all_gather_scaled_matmul(A_shard, Bs, A_scale, B_scales, gather_dim, group_name, biases, result_scales,
out_dtypes, use_fast_accum) -> (A, [C, ...])`
    The same for fp8. A_scale has one element, or a scale for each row: of A_shard [..., 1] or of A [..., 1]. A scale of
    B has one element or is [1, N].
`fused_scaled_matmul_reduce_scatter(A, B, A_scale, B_scale, reduce_op, orig_scatter_dim,
scatter_dim_after_maybe_reshape, group_name, output_shape, bias=None, result_scale=None, out_dtype=None,
use_fast_accum=False) -> C`
    The same for fp8. output_shape is that of A @ B, and orig_scatter_dim one of its dimensions. out_dtype must be given:
    torch.bfloat16, torch.float16 or torch.float32. Each rank adds its bias [N] to its product, so the biases of all
    ranks are in the sum.

If this rank's arguments are refused, other ranks that wait learn it. They do not learn what is refused before an
operation begins: by PyTorch, such as a tensor that is no list; while a program is compiled; or because fp8 has no
gradients. A group that has failed is not used again: destroy the process group and make another, or give its name a new
group by `use`.

Several threads of a rank may call operations of one group, on one stream or on several. One operation follows the
other, from its first step to its last. As with PyTorch's collectives, all ranks must make a group's calls in the same
order: threads whose calls have no order use a process group each.

gemmesh keeps no process group alive. What it has made for one ends with it.

The operations take tensors of bf16 and f16, and the scaled ones those of fp8. Their numbers differ from `symm_mem`'s in
two ways. Sums over ranks are made in f32 and rounded once. An average is the sum, divided by W: in its own type if
that is bf16 and W is a power of two, because then the division is exact, and in f32 otherwise.

An eager call through PyTorch's dispatcher takes several microseconds more of the host's time than the functions
`gemmesh.torch.fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, which do the same.

Weights are best column-major, as `weight.t()` is. Weights of fp8 must be. Biases are of bf16. On GPUs K and N are
multiples of 8. For fp8 they are multiples of 16, everywhere. A CUDA graph may capture an operation that has run with
the same shapes before.
"""

from __future__ import annotations

from . import _operations
from ._functions import fused_all_gather_matmul, fused_matmul_reduce_scatter
from ._groups import group_of, use
from ._shards import empty

__all__ = ["empty", "fused_all_gather_matmul", "fused_matmul_reduce_scatter", "group_of", "use"]

_operations.register()
