"""Rows that all ranks gather, as tensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .. import ArgumentError, Sharded
from ._groups import Joined, joined_of, refuse_capture

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Shards:
    """A sharded matrix of one type and K whose capacity grows. Every rank owns as many rows."""

    __slots__ = ("_capacity", "dtype", "joined", "k", "sharded", "whole")

    sharded: Sharded
    #: All rows of the capacity, [capacity, K]. A different tensor after the matrix has grown.
    whole: Tensor

    def __init__(self, joined: Joined, dtype: torch.dtype, k: int) -> None:
        self.joined = joined
        self.dtype = dtype
        self.k = k
        self._capacity = 0

    @property
    def m(self) -> int:
        """The rows of all ranks. -1 if there is no matrix yet."""
        return self.sharded.shape[0] if self._capacity else -1

    def resize(self, m: int) -> None:
        """Sets the rows of all ranks. Collective if they don't fit, and the contents are lost."""
        group, world = self.joined.group, self.joined.world
        if m > self._capacity or self._capacity == 0:
            refuse_capture("allocate symmetric memory")
            least = max(m, self._capacity * 3 // 2, world)
            capacity = -(-least // world) * world
            sharded = group.sharded(capacity, self.k, self.dtype, capacity=True)
            # Later operations may run in inference mode or not.
            with torch.inference_mode(False):
                self.whole = from_dlpack(sharded.whole)
            self.sharded, self._capacity = sharded, capacity
            # Planned calls still gather into the old matrix.
            self.joined.gather_calls.clear()
        self.sharded.set_rows([m // world] * world)


class Own:
    """This rank's rows of a matrix that grows, as a tensor of a given shape."""

    __slots__ = ("_place", "_rows", "_whole", "m", "shape", "shards")

    def __init__(self, shards: Shards, shape: Sequence[int]) -> None:
        self.shards = shards
        #: [..., columns] of this rank. The matrix may have more columns.
        self.shape = tuple(shape)
        rows = math.prod(self.shape[:-1])
        self.m = rows * shards.joined.world
        self._place = slice(rows * shards.joined.rank, rows * (shards.joined.rank + 1))
        self._whole: Tensor | None = None
        self._rows: Tensor | None = None

    def put(self, rows: Tensor) -> Sharded:
        """Copies rows of the shape to the matrix, and returns it."""
        shards = self.shards
        if shards.m != self.m:
            shards.resize(self.m)
        if self._whole is not shards.whole:
            self._bind(shards)
        assert self._rows is not None
        self._rows.copy_(rows)
        return shards.sharded

    def _bind(self, shards: Shards) -> None:
        with torch.inference_mode(False):
            self._rows = shards.whole[self._place, : self.shape[-1]].view(self.shape)
        self._whole = shards.whole


def shards_of(joined: Joined, dtype: torch.dtype, k: int, m: int) -> Shards:
    """The matrix that rows of a type and K are copied to, with m rows in all."""
    shards = joined.shards.get((dtype, k))
    if shards is None:
        shards = joined.shards[dtype, k] = Shards(joined, dtype, k)
    if shards.m != m:
        shards.resize(m)
    return shards


class Lent:
    """A sharded matrix whose own rows are a tensor of the program's."""

    __slots__ = ("dtype", "joined", "numel", "sharded", "whole")

    def __init__(self, joined: Joined, sharded: Sharded, whole: Tensor, own: Tensor) -> None:
        self.joined = joined
        self.sharded = sharded
        #: [M, K]
        self.whole = whole
        self.dtype = own.dtype
        self.numel = own.numel()

    def fits(self, joined: Joined, rows: Tensor) -> bool:
        """True if the rows, which begin where the own ones do, are the own ones."""
        return (
            self.joined is joined
            and rows.dtype is self.dtype
            and rows.numel() == self.numel
            and rows.shape[-1] == self.whole.shape[1]
            and rows.is_contiguous()
        )


#: The matrices of `empty`, by the address of their own rows.
LENT: dict[int, Lent] = {}


def lent(joined: Joined, rows: Tensor) -> Lent | None:
    """The matrix whose own rows these are."""
    found = LENT.get(rows.data_ptr()) if LENT else None
    return found if found is not None and found.fits(joined, rows) else None


def empty(
    shape: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    group: ProcessGroup | str | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """A tensor [..., K] that `fused_all_gather_matmul` gathers without copying it. Collective.

    It is this rank's own rows of a sharded matrix. All ranks give the same shape. It has no values yet. Operations
    recognise the tensor, and its views that have all its elements and the same K. The memory is freed with the last of
    them. Group and device are those of `group_of`.
    """
    if len(shape) < 2 or shape[-1] < 1:
        raise ArgumentError(
            f"gemmesh.torch.empty: the shape is {tuple(shape)} and must be [..., K], with K of 1 or more"
        )
    refuse_capture("allocate symmetric memory")
    joined = joined_of(group, device)
    rows, k = math.prod(shape[:-1]), shape[-1]
    sharded = joined.group.sharded(rows * joined.world, k, dtype)
    with torch.inference_mode(False):
        own = from_dlpack(sharded.shard)
        whole = from_dlpack(sharded.whole)
    if rows > 0:
        address = own.data_ptr()
        LENT[address] = Lent(joined, sharded, whole, own)
        joined.gather_calls.lend(address, sharded)
        # Views share the storage, which is freed when the last of them is.
        weakref.finalize(own.untyped_storage(), _take_back, address).atexit = False
    return own.view(tuple(shape))


def _take_back(address: int) -> None:
    LENT.pop(address).joined.gather_calls.take_back(address)
