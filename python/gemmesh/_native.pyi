# Docstrings are in the native module.
from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, TypeVar, final, overload

from typing_extensions import Self, Unpack

from . import Chunk
from ._store import Store
from .types import (
    Accumulation,
    Activation,
    Backend,
    DType,
    GroupOptions,
    Operand,
    Operands,
    Operation,
    Output,
    QuantizationName,
    Route,
    ScalingName,
    SupportsDLPack,
    WeightLayout,
)

_Out = TypeVar("_Out")

__all__ = [
    "Group",
    "Matrix",
    "Quantized",
    "Scaled",
    "Prepared",
    "Sharded",
    "TensorCalls",
    "Trace",
    "launch",
    "is_rank",
    "rank_environment",
    "nvcc_release",
    "HAS_CUDA",
    "VERSION",
]

HAS_CUDA: Final[bool]
VERSION: Final[str]

def launch(world: int, args: Sequence[str] | None = None, *, inherit_stdin: bool = False) -> None: ...
def is_rank() -> bool: ...
def rank_environment() -> tuple[str, int, int] | None: ...
def nvcc_release() -> str | None: ...
@final
class Matrix:
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def pitch(self) -> int: ...
    def copy_from(self, source: SupportsDLPack) -> None: ...
    def tobytes(self) -> bytes: ...
    def frombytes(self, bytes: bytes) -> None: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...

@final
class Sharded:
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def rows(self) -> range: ...
    @property
    def shard(self) -> Matrix: ...
    @property
    def whole(self) -> Matrix: ...
    def rows_of(self, rank: int) -> range: ...
    def set_rows(self, rows: Sequence[int]) -> None: ...
    def copy_from(self, source: SupportsDLPack) -> None: ...

@final
class Scaled:
    def __new__(
        cls,
        values: SupportsDLPack | Sharded,
        scales: SupportsDLPack | Sharded,
        scaling: ScalingName = "tensor",
        *,
        first_row: int | None = None,
        first_column: int | None = None,
    ) -> Self: ...
    @property
    def values(self) -> Any: ...
    @property
    def scales(self) -> Any: ...

@final
class Quantized:
    def __new__(
        cls,
        values: SupportsDLPack,
        scales: SupportsDLPack,
        scaling: QuantizationName = "blocks",
        *,
        power_of_two: bool = False,
        first_column: int | None = None,
    ) -> Self: ...
    @property
    def values(self) -> Any: ...
    @property
    def scales(self) -> Any: ...

@final
class Trace: ...

@final
class TensorCalls:
    def __new__(cls, group: Group) -> TensorCalls: ...
    def add(
        self,
        a: Any,
        b: Any,
        prepared: Prepared,
        *,
        rows: Sharded | None,
        transposed: bool,
        new: Callable[..., Any],
        outputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
    ) -> None: ...
    def clear(self) -> None: ...
    def lend(self, address: int, matrix: Sharded) -> None: ...
    def take_back(self, address: int) -> None: ...
    def run(self, a: Any, b: Any) -> list[Any] | None: ...

@final
class Prepared:
    @overload
    def __call__(
        self,
        a: Operand | Sharded,
        b: Operands,
        out: None = None,
        *,
        bias: SupportsDLPack | None = None,
        residual: SupportsDLPack | None = None,
    ) -> Any: ...
    @overload
    def __call__(
        self,
        a: Operand | Sharded,
        b: Operands,
        out: _Out,
        *,
        bias: SupportsDLPack | None = None,
        residual: SupportsDLPack | None = None,
    ) -> _Out: ...
    def traced(
        self,
        a: Operand | Sharded,
        b: Operands,
        out: Output | Sharded | Sequence[Output],
        *,
        bias: SupportsDLPack | None = None,
        residual: SupportsDLPack | None = None,
    ) -> Trace: ...
    @property
    def route(self) -> Route: ...
    def explain(self) -> str: ...

@final
class Group:
    # Joining, closing, waiting.
    @staticmethod
    def from_env(*, backend: Backend = "cuda", **options: Unpack[GroupOptions]) -> Group: ...
    @staticmethod
    def connect(
        rank: int, world: int, address: str, *, backend: Backend = "cuda", **options: Unpack[GroupOptions]
    ) -> Group: ...
    @staticmethod
    def from_store(
        store: Store, rank: int, world: int, *, backend: Backend = "cuda", **options: Unpack[GroupOptions]
    ) -> Group: ...
    @staticmethod
    def from_callback(
        gather: Callable[[bytes], Sequence[bytes]],
        rank: int,
        world: int,
        *,
        backend: Backend = "cuda",
        **options: Unpack[GroupOptions],
    ) -> Group: ...
    def split(self, color: int, key: int | None = None, **options: Unpack[GroupOptions]) -> Group: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, class_: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str | None: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def device(self) -> tuple[int, int]: ...
    @property
    def stream(self) -> int: ...
    def set_stream(self, stream: int) -> None: ...
    def synchronize(self) -> None: ...
    def barrier(self) -> None: ...
    def all_gather_bytes(self, data: bytes) -> list[bytes]: ...
    def wait_times(self) -> list[float]: ...
    def check(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def _put_on(self, stream: int, awaited: str | None = None) -> None: ...
    def _all_gather_on(self, a: Sharded, stream: int) -> None: ...
    def _refuse(self, call: str, what: str) -> NoReturn: ...
    def write_timeline(self, trace: Trace, path: str | PathLike[str], title: str = "") -> None: ...

    # Matrices.
    def zeros(self, rows: int, columns: int, dtype: DType) -> Matrix: ...
    def matrix(self, tensor: SupportsDLPack) -> Matrix: ...
    @overload
    def sharded(
        self, m: int, k: int, dtype: DType, *, rows: None = None, capacity: bool = False, stages: int | None = None
    ) -> Sharded: ...
    @overload
    def sharded(
        self,
        m: None,
        k: int,
        dtype: DType,
        *,
        rows: Sequence[int],
        capacity: Literal[False] = False,
        stages: None = None,
    ) -> Sharded: ...
    def even_rows(self, m: int) -> list[int]: ...

    # Products. Several weights have several outputs, unless they are gate and up.
    @overload
    def matmul(
        self,
        a: Operand,
        b: Operands,
        out: _Out,
        *,
        bias: SupportsDLPack | None = None,
        residual: SupportsDLPack | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        dtype: DType = None,
    ) -> _Out: ...
    @overload
    def matmul(
        self,
        a: Operand,
        b: Operand,
        out: None = None,
        *,
        bias: SupportsDLPack | None = None,
        residual: SupportsDLPack | None = None,
        activation: Activation | None = None,
        gated: Literal[False] = False,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        dtype: DType = None,
    ) -> Matrix: ...
    @overload
    def matmul(
        self,
        a: Operand,
        b: Sequence[Operand],
        out: None = None,
        *,
        bias: SupportsDLPack | None = None,
        residual: SupportsDLPack | None = None,
        activation: Activation | None = None,
        gated: Literal[True],
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        dtype: DType = None,
    ) -> Matrix: ...
    @overload
    def matmul(
        self,
        a: Operand,
        b: Sequence[Operand],
        out: None = None,
        *,
        bias: SupportsDLPack | None = None,
        residual: SupportsDLPack | None = None,
        activation: Activation | None = None,
        gated: Literal[False] = False,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        dtype: DType = None,
    ) -> list[Matrix]: ...
    @overload
    def all_gather_matmul(
        self,
        a: Sharded | Scaled,
        b: Operands,
        out: _Out,
        *,
        bias: SupportsDLPack | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        stages: int | None = None,
        dtype: DType = None,
    ) -> _Out: ...
    @overload
    def all_gather_matmul(
        self,
        a: Sharded | Scaled,
        b: Operand,
        out: None = None,
        *,
        bias: SupportsDLPack | None = None,
        activation: Activation | None = None,
        gated: Literal[False] = False,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        stages: int | None = None,
        dtype: DType = None,
    ) -> Matrix: ...
    @overload
    def all_gather_matmul(
        self,
        a: Sharded | Scaled,
        b: Sequence[Operand],
        out: None = None,
        *,
        bias: SupportsDLPack | None = None,
        activation: Activation | None = None,
        gated: Literal[True],
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        stages: int | None = None,
        dtype: DType = None,
    ) -> Matrix: ...
    @overload
    def all_gather_matmul(
        self,
        a: Sharded | Scaled,
        b: Sequence[Operand],
        out: None = None,
        *,
        bias: SupportsDLPack | None = None,
        activation: Activation | None = None,
        gated: Literal[False] = False,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        stages: int | None = None,
        dtype: DType = None,
    ) -> list[Matrix]: ...
    @overload
    def matmul_reduce_scatter(
        self,
        a: Operand,
        b: Operand,
        out: None = None,
        *,
        bias: SupportsDLPack | None = None,
        residual: SupportsDLPack | None = None,
        activation: Activation | None = None,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        rows: Sequence[int] | None = None,
        dtype: DType = None,
    ) -> Matrix: ...
    @overload
    def matmul_reduce_scatter(
        self,
        a: Operand,
        b: Operand,
        out: _Out,
        *,
        bias: SupportsDLPack | None = None,
        residual: SupportsDLPack | None = None,
        activation: Activation | None = None,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        rows: Sequence[int] | None = None,
        dtype: DType = None,
    ) -> _Out: ...
    def matmul_all_reduce(
        self,
        a: Operand,
        b: Operand,
        out: Sharded,
        *,
        bias: SupportsDLPack | None = None,
        residual: SupportsDLPack | None = None,
        activation: Activation | None = None,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
    ) -> Sharded: ...
    def prepare(
        self,
        operation: Operation,
        a: Operand | Sharded,
        b: Operands,
        out: Output | Sharded | Sequence[Output] | None = None,
        *,
        activation: Activation | None = None,
        gated: bool = False,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        constant_weights: bool = False,
        stages: int | None = None,
        rows: Sequence[int] | None = None,
        dtype: DType = None,
        route: Route | None = None,
    ) -> Prepared: ...
    def check_support(
        self,
        operation: Operation,
        m: int,
        k: int,
        n: int | Sequence[int],
        dtype: DType = None,
        *,
        weight_dtype: DType = None,
        out_dtype: DType = None,
        activation: Activation | None = None,
        gated: bool = False,
        weight_layout: WeightLayout = "nk",
        accumulation: Accumulation = "promoted",
        stages: int | None = None,
        rows: Sequence[int] | None = None,
        a_scaling: ScalingName | None = None,
        b_scaling: ScalingName | None = None,
        first_row: int | None = None,
        first_column: int | None = None,
        sharded_scales: bool = False,
        quantization: QuantizationName | None = None,
    ) -> None: ...
    def quantize(self, x: SupportsDLPack, out: Quantized) -> None: ...

    # Collectives and pipelines.
    def all_gather(self, a: Sharded) -> None: ...
    def broadcast(self, a: Sharded, root: int) -> None: ...
    def reduce_scatter(self, a: SupportsDLPack, out: SupportsDLPack) -> None: ...
    def all_reduce(self, a: SupportsDLPack, out: Sharded) -> None: ...
    def all_to_all(
        self, a: SupportsDLPack, out: Sharded, *, counts: Sequence[Sequence[int]] | None = None
    ) -> None: ...
    def all_gather_and_consume(
        self, a: Sharded, consume: Callable[[Chunk], object], *, chunks: int | None = None, stages: int | None = None
    ) -> None: ...
    def produce_and_reduce_scatter(
        self,
        m: int,
        out: SupportsDLPack,
        produce: Callable[[Chunk], object],
        *,
        rows: Sequence[int] | None = None,
        chunks: int | None = None,
    ) -> None: ...
    def produce_and_all_to_all(
        self,
        out: Sharded,
        produce: Callable[[Chunk], object],
        *,
        counts: Sequence[Sequence[int]] | None = None,
        chunks: int | None = None,
    ) -> None: ...
