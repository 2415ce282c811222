"""Gathers bytes by a key-value store."""

from __future__ import annotations

from typing import Callable, Protocol


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


def gather_by(store: Store, rank: int, world: int) -> Callable[[bytes], list[bytes]]:
    """A function for `Group.from_callback`."""
    # Each rank counts its own groups, so that all ranks of a group have the same number.
    number = store.add(f"gemmesh/groups of rank {rank}", 1)
    key = f"gemmesh/group {number}"

    def gather(mine: bytes) -> list[bytes]:
        store.set(f"{key}/{rank}", mine)
        return [bytes(store.get(f"{key}/{other}")) for other in range(world)]

    return gather
