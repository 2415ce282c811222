"""Types of arguments, for annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Union

if TYPE_CHECKING:
    from ._native import Quantized, Scaled


class SupportsDLPack(Protocol):
    """A matrix of gemmesh, or a tensor of a library that speaks DLPack: NumPy, PyTorch, JAX, CuPy."""

    def __dlpack__(self, *, stream: None = ...) -> Any: ...


class GroupOptions(TypedDict, total=False):
    """Options of a group. Those that are not given, or None, have the library's defaults."""

    #: Seconds for a rank that stops in a call that all ranks have begun. 30 by default.
    timeout: float | None
    #: Seconds for a rank that has not begun a call. There is no such deadline by default.
    arrival_timeout: float | None
    #: Seconds for which the system of another host may acknowledge nothing before the host is lost. 1.25 by default;
    #: less than 0.5 is taken for 0.5.
    host_timeout: float | None
    #: Threads of a rank on the host backend.
    workers: int | None
    #: The ordinal of this rank's GPU.
    device: int | None
    #: The most parts of a GPU that a product may take.
    max_ctas: int | None
    #: "invariant": the bits of a row do not depend on how many rows there are.
    numerics: Literal["fast", "invariant"] | None
    #: The group's name in errors.
    name: str | None


Backend = Literal["cuda", "host"]
Operation = Literal["matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
WeightLayout = Literal["nk", "kn"]
Accumulation = Literal["promoted", "fast"]
Route = Literal["pull", "push", "store"]
ScalingName = Literal["tensor", "rows", "blocks", "transposed_blocks"]
QuantizationName = Literal["tensor", "blocks", "transposed_blocks"]

#: A name such as "bf16" or "float16", or a dtype of NumPy, ml_dtypes or PyTorch.
DType = Any

# Names in quotes: the native module need not be there.
Operand = Union[SupportsDLPack, "Scaled"]
Operands = Union[Operand, Sequence[Operand]]
Output = Union[SupportsDLPack, "Quantized"]
