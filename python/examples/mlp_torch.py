"""A tensor-parallel MLP with sequence parallelism, forward and backward, beside the same on PyTorch's `symm_mem`.

    torchrun --nproc-per-node 2 python/examples/mlp_torch.py

Each rank owns some tokens, and the same share of the hidden features. The program compares its output and its gradients
with float64. It runs on CPUs, where `symm_mem` has no kernels, and on GPUs.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

import gemmesh.torch  # noqa: F401  It makes the operations torch.ops.gemmesh.

TOKENS, MODEL, HIDDEN = 64, 128, 256


def mlp(x: Tensor, up: Tensor, down: Tensor, group: str) -> Tensor:
    """The own tokens x [tokens, MODEL] become those of the output. up [hidden, MODEL], down [MODEL, hidden]."""
    _, (h,) = torch.ops.gemmesh.fused_all_gather_matmul(x, [up.t()], 0, group, return_A=False)
    return torch.ops.gemmesh.fused_matmul_reduce_scatter(torch.relu(h), down.t(), "sum", 0, group)


def mlp_of_symm_mem(x: Tensor, up: Tensor, down: Tensor, group: str) -> Tensor:
    """The same. It has no gradients."""
    _, (h,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [up.t()], 0, group, return_A=False)
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(torch.relu(h), down.t(), "sum", 0, group)


def check(what: str, found: Tensor | None, expected: Tensor) -> None:
    """Values of bf16 must be near those of float64."""
    assert found is not None
    error = ((found.double() - expected).norm() / expected.norm()).item()
    print(f"[{dist.get_rank()}] {what}: relative error {error:.1e}")
    assert error < 1e-2, what


def main() -> None:
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    device = "cuda" if on_gpus else "cpu"

    # All ranks make the same values, and take their parts.
    torch.manual_seed(1)
    wholes = [torch.randn(shape, dtype=torch.float64) for shape in ((TOKENS, MODEL), (HIDDEN, MODEL), (MODEL, HIDDEN))]
    wholes = [(whole / whole.shape[1] ** 0.5).bfloat16().double().requires_grad_() for whole in wholes]
    parts = [whole.detach().chunk(world, axis)[rank] for whole, axis in zip(wholes, (0, 0, 1), strict=True)]
    x, up, down = (part.to(device, torch.bfloat16, copy=True).contiguous().requires_grad_() for part in parts)

    y = mlp(x, up, down, group)
    y.float().square().sum().backward()

    whole_x, whole_up, whole_down = wholes
    whole_y = torch.relu(whole_x @ whole_up.t()) @ whole_down.t()
    whole_y.square().sum().backward()
    check("output", y.cpu(), whole_y.chunk(world)[rank])
    for what, found, whole, axis in (
        ("gradient of x", x, whole_x, 0),
        ("gradient of up", up, whole_up, 0),
        ("gradient of down", down, whole_down, 1),
    ):
        assert whole.grad is not None and found.grad is not None
        check(what, found.grad.cpu(), whole.grad.chunk(world, axis)[rank])
    if on_gpus:
        from torch.distributed import _symmetric_memory  # It makes the operations torch.ops.symm_mem.

        _symmetric_memory.enable_symm_mem_for_group(group)
        with torch.no_grad():
            check("output of symm_mem", mlp_of_symm_mem(x, up, down, group).cpu(), whole_y.chunk(world)[rank])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
