"""Matrix products over several GPUs that hide communication behind arithmetic.

The rows of a sharded matrix are multiplied while they arrive::

    import gemmesh

    with gemmesh.Group.from_env() as group:       # torchrun, mpirun, srun, or gemmesh.launch
        a = group.sharded(m, k, "bf16")           # [M, K]; this rank owns the rows a.rows
        a.copy_from(own_rows)                     # a tensor [rows, K]
        out = group.all_gather_matmul(a, weight)  # out[M, N] = gather(a) @ weight[N, K].T

Arguments are matrices of the group, or tensors of any library that speaks DLPack: PyTorch, JAX, CuPy, and NumPy with
``backend="host"``, which runs on any machine. Results are matrices, which those libraries read by DLPack without a
copy. ``gemmesh.torch`` has the operations of PyTorch's ``symm_mem`` under their names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import errors
from ._native import (
    HAS_CUDA,
    VERSION,
    Group,
    Matrix,
    Prepared,
    Quantized,
    Scaled,
    Sharded,
    Trace,
    is_rank,
    launch,
    nvcc_release,
    rank_environment,
)
from .errors import (
    ArgumentError,
    CallMismatchError,
    DeadlineError,
    DeviceError,
    Error,
    HostError,
    InternalError,
    LaunchError,
    MisuseError,
    OutOfMemoryError,
    RankError,
    RendezvousError,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .types import Backend, GroupOptions

__version__: str = VERSION


class Chunk(NamedTuple):
    """Rows for a function that an operation calls."""

    #: The rows, as a matrix. The function reads or makes them; it must not keep the matrix.
    matrix: Matrix
    #: Their numbers.
    rows: range
    #: The rank that owns or gets them.
    rank: int
    #: The CUstream on which the function puts its work, as a number. 0 on the host.
    stream: int


def from_store(
    store: Any, rank: int, world: int, *, backend: Backend = "cuda", **options: Unpack[GroupOptions]
) -> Group:
    """Joins, as `rank`, a group of `world` ranks that share a `torch.distributed.Store`.

    A job may make several groups with one store: each rank makes them in the same order. Backend and options are those
    of `Group.from_env`.
    """
    name = options.get("name") or ""
    number = store.add(f"gemmesh/{name}/{rank}", 1)

    def gather(mine: bytes) -> list[bytes]:
        # Only the bytes of rank 0 say something.
        key = f"gemmesh/{name}/{number}/address"
        if rank == 0:
            store.set(key, mine)
        return [bytes(store.get(key))] * world

    return Group.from_callback(gather, rank, world, backend=backend, **options)


__all__ = [
    "HAS_CUDA",
    "ArgumentError",
    "CallMismatchError",
    "Chunk",
    "DeadlineError",
    "DeviceError",
    "Error",
    "Group",
    "HostError",
    "InternalError",
    "LaunchError",
    "Matrix",
    "MisuseError",
    "OutOfMemoryError",
    "Prepared",
    "Quantized",
    "RankError",
    "RendezvousError",
    "Scaled",
    "Sharded",
    "Trace",
    "errors",
    "from_store",
    "is_rank",
    "launch",
    "nvcc_release",
    "rank_environment",
]
