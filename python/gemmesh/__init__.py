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

from typing import NamedTuple

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
    "is_rank",
    "launch",
    "nvcc_release",
    "rank_environment",
]
