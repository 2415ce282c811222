"""Groups of gemmesh for process groups of PyTorch."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from .. import ArgumentError, Error, Group, MisuseError, Sharded
from .._native import TensorCalls
from ..types import Backend

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ._products import Gather, Scatter
    from ._scaled import ScaledGather, ScaledScatter
    from ._shards import Shards


class Turn:
    """A thread's turn to make an operation of a group on a GPU.

    When it ends, the group is on PyTorch's current stream. So whatever comes next waits for the operation's last step,
    also if another thread has put the group on a different stream meanwhile, by a call of the group's own.
    """

    __slots__ = ("_group", "_index", "_lock")

    def __init__(self, group: Group, index: int) -> None:
        self._group = group
        #: The ordinal of the GPU.
        self._index = index
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None:
                self._group._put_on(torch._C._cuda_getCurrentRawStream(self._index))
        finally:
            self._lock.release()


class Joined:
    """A group, and what the operations keep for it."""

    #: Held by a thread from the first step of an operation to the last, because steps share memory of the group: rows
    #: are copied to it, and out of it. A thread that holds it may take it again.
    turn: contextlib.AbstractContextManager[object]

    __slots__ = (
        "cuda",
        "gather_calls",
        "gathers",
        "group",
        "index",
        "kept",
        "name",
        "process_group",
        "rank",
        "scaled_gathers",
        "scaled_scatters",
        "scatter_calls",
        "scatters",
        "shards",
        "turn",
        "world",
    )

    def __init__(self, name: str, group: Group, process_group: ProcessGroup | None) -> None:
        #: The name under which operations find it.
        self.name = name
        self.group = group
        #: The process group that had the name. None if there was none. It ends when the program drops it: the threads
        #: of its backend must not outlive the interpreter.
        self.process_group: weakref.ref[ProcessGroup] | None = None
        if process_group is not None:
            self.process_group = weakref.ref(process_group)
            weakref.finalize(process_group, _forget_if_gone, name).atexit = False
        self.world: int = group.world_size
        self.rank: int = group.rank
        self.cuda: bool = group.backend == "cuda"
        #: The ordinal of the GPU.
        self.index: int = group.device[1]
        self.renew_turn()
        #: Planned calls, by shapes, types and strides.
        self.gathers: dict[tuple[Any, ...], Gather] = {}
        self.scatters: dict[tuple[Any, ...], Scatter] = {}
        self.scaled_gathers: dict[tuple[Any, ...], ScaledGather] = {}
        self.scaled_scatters: dict[tuple[Any, ...], ScaledScatter] = {}
        #: Planned products without scales, run without Python.
        self.gather_calls = TensorCalls(group)
        self.scatter_calls = TensorCalls(group)
        #: Matrices that the rows of inputs are copied to, by type and K.
        self.shards: dict[tuple[torch.dtype, int], Shards] = {}
        #: What CUDA graphs use.
        self.kept: dict[int, object] = {}

    def renew_turn(self) -> None:
        """Makes the turn, which no thread has."""
        self.turn = Turn(self.group, self.index) if self.cuda else threading.RLock()

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """If arguments are refused within, the ranks that wait for this one are told."""
        try:
            yield
        except ArgumentError as error:
            if error.rank is not None:
                raise  # by the group, which has told them
            call = error.call or "gemmesh.torch"
            try:
                self.group._refuse(call, str(error).removeprefix(f"{call}: "))
            except ArgumentError as told:
                raise told from None

    def enter(self, *used: object) -> bool:
        """Puts the group on PyTorch's current stream, before the first step of an operation.

        So the steps come after those of an operation on another stream. If the stream is captured, keeps what later work
        uses, and returns true.
        """
        self.group._put_on(self.stream(), "gemmesh.torch")
        is_captured = self.is_captured()
        if is_captured:
            for each in used:
                self.kept[id(each)] = each
        return is_captured

    def stream(self) -> int:
        """PyTorch's current stream. 0 on the host."""
        return torch._C._cuda_getCurrentRawStream(self.index) if self.cuda else 0

    def all_gather(self, a: Sharded) -> None:
        """As the group's, on PyTorch's current stream: a call without tensors would follow one that was set by hand."""
        self.group._all_gather_on(a, self.stream())

    def is_captured(self) -> bool:
        """True if PyTorch captures its current stream."""
        return self.cuda and bool(torch._C._cuda_isCurrentStreamCapturing())

    def has_failed(self) -> bool:
        """True if the group can do nothing more."""
        try:
            self.group.check()
        except Error:
            return True
        return False

    def is_of_now(self) -> bool:
        """False if the process group that had the name is gone."""
        if self.process_group is None:
            return True
        process_group = self.process_group()
        return process_group is not None and _registered(self.name) is process_group

    def clear(self) -> None:
        """Forgets plans and matrices, which keep the group alive."""
        for kept in (self.gathers, self.scatters, self.scaled_gathers, self.scaled_scatters, self.shards, self.kept):
            kept.clear()
        self.gather_calls.clear()
        self.scatter_calls.clear()


#: The groups whose operations take tensors on the host, and those on GPUs, by name.
_ON_HOST: dict[str, Joined] = {}
_ON_CUDA: dict[str, Joined] = {}
#: Held by the thread that joins the ranks of a process group, by its name and the type of device. Two groups may be
#: joined at once: a lock for both would make ranks wait for each other that join them in different orders.
_JOINING: dict[tuple[str, str], threading.Lock] = {}


def _forget_if_gone(name: str) -> None:
    """Forgets the group of a process group that is gone."""
    for groups, device in ((_ON_HOST, "cpu"), (_ON_CUDA, "cuda")):
        found = groups.get(name)
        if found is not None and not found.is_of_now():
            groups.pop(name, None)
            _JOINING.pop((name, device), None)
            found.clear()


def _renew_locks() -> None:
    """In a fork, a thread that the fork lacks may hold a lock. Calls of the fork are refused, and must come to that."""
    for groups in (_ON_HOST, _ON_CUDA):
        for each in groups.values():
            each.renew_turn()
    _JOINING.clear()


os.register_at_fork(after_in_child=_renew_locks)


def known(name: str, tensor: torch.Tensor) -> Joined | None:
    """The group of an operation of `tensor`, if it is there."""
    return _known(name, "cuda" if tensor.is_cuda else "cpu")


def _known(name: str, device: str) -> Joined | None:
    found = (_ON_CUDA if device == "cuda" else _ON_HOST).get(name)
    return found if found is not None and found.is_of_now() else None


def joined(name: str, tensor: torch.Tensor) -> Joined:
    """As `known`, or made. Collective at its first use."""
    return known(name, tensor) or _join(name, tensor.device)


def world_of(name: str) -> int:
    """The number of ranks, without joining them."""
    process_group = _registered(name)
    if process_group is not None:
        return process_group.size()
    for groups in (_ON_HOST, _ON_CUDA):
        if name in groups and groups[name].process_group is None:
            return groups[name].world
    raise _unknown(name)


def group_of(group: ProcessGroup | str | None = None, device: torch.device | str | None = None) -> Group:
    """The gemmesh group of a process group, or of its name. None is the default process group.

    It is made at its first use, collectively. A group takes tensors of one kind of device, "cuda" or "cpu". The default
    is "cuda" if the process group has NCCL.
    """
    return joined_of(group, device).group


def joined_of(group: ProcessGroup | str | None, device: torch.device | str | None) -> Joined:
    """As `group_of`."""
    if group is None:
        group = dist.group.WORLD
    name = group if isinstance(group, str) else _name_of(group)
    if device is None:
        device = "cuda" if _on_cuda(name) else "cpu"
    on = torch.device(device)
    return _known(name, on.type) or _join(name, on)


def use(group_name: str, group: Group) -> None:
    """Makes operations of `group_name` run in `group`.

    The name may be that of a process group, which must then have as many ranks, numbered alike. Each rank calls this
    before its first operation of that name, or when the name's group has failed.
    """
    groups = _ON_CUDA if group.backend == "cuda" else _ON_HOST
    found = groups.get(group_name)
    if found is not None and found.is_of_now() and found.group is not group and not found.has_failed():
        raise MisuseError(f"gemmesh.torch.use: the name {group_name!r} has a group already; use a different name")
    process_group = _registered(group_name)
    if process_group is not None:
        theirs = (process_group.rank(), process_group.size())
        ours = (group.rank, group.world_size)
        if theirs != ours:
            raise ArgumentError(
                f"gemmesh.torch.use: the group's rank {ours[0]} of {ours[1]} is rank {theirs[0]} of {theirs[1]} in "
                f"process group {group_name!r}; both must have the same ranks",
                rank=ours[0],
                call="use",
            )
    groups[group_name] = Joined(group_name, group, process_group)


def refuse_capture(what: str) -> None:
    """Raises an error if PyTorch captures a CUDA graph."""
    # A program without CUDA must not get a context by this.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise MisuseError(
            f"a CUDA graph is being captured, and the operation would have to {what}; run it once with the same shapes "
            "before the capture"
        )


def _registered(name: str) -> ProcessGroup | None:
    """The process group that has the name now."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return None


def _name_of(process_group: ProcessGroup | None) -> str:
    name = getattr(process_group, "group_name", None)
    if not isinstance(name, str):
        raise ArgumentError(
            f"{process_group!r} is no process group of this rank; give a ProcessGroup of which this rank is a member, "
            "or its group_name"
        )
    return name


def _unknown(name: str) -> MisuseError:
    return MisuseError(
        f"no process group has the name {name!r}; it was never made or has been destroyed. Give the group_name of a "
        "process group, or name a group of your own by gemmesh.torch.use"
    )


def _on_cuda(name: str) -> bool:
    process_group = _registered(name)
    if process_group is None:
        return name in _ON_CUDA
    return "nccl" in dist.get_backend_config(process_group)


def _join(name: str, device: torch.device) -> Joined:
    """The group of a process group, which is made if there is none. Collective if it is."""
    if device.type not in ("cuda", "cpu"):
        raise ArgumentError(f"the tensor is on {device}; gemmesh has operations for cuda and cpu")
    for old in {*_ON_HOST, *_ON_CUDA}:
        _forget_if_gone(old)
    process_group = _registered(name)
    if process_group is None:
        raise _unknown(name)
    with _JOINING.setdefault((name, device.type), threading.Lock()):
        # Another thread may have made it.
        return _known(name, device.type) or _make(name, process_group, device)


def _make(name: str, process_group: ProcessGroup, device: torch.device) -> Joined:
    """Makes the group of a process group. Collective."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        refuse_capture("join the ranks of a process group")
    rank, world = process_group.rank(), process_group.size()
    index = device.index if device.index is not None else (torch.cuda.current_device() if on_cuda else 0)

    def gather(mine: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * world
        # The callback has a thread of its own, whose current GPU is the first one.
        with torch.cuda.device(index) if on_cuda else contextlib.nullcontext():
            dist.all_gather_object(gathered, mine, group=process_group)
        return gathered

    options: dict[str, Any] = {"device": index} if on_cuda else {}
    if process_group is not dist.group.WORLD:
        described = process_group.group_desc
        options["name"] = name if described == "undefined" else described
    backend: Backend = "cuda" if on_cuda else "host"
    group = Group.from_callback(gather, rank, world, backend=backend, **options)
    made = Joined(name, group, process_group)
    (_ON_CUDA if on_cuda else _ON_HOST)[name] = made
    return made
