"""What can go wrong, and who is at fault."""

from __future__ import annotations

import builtins


class Error(RuntimeError):
    """An error of gemmesh. Its text is a sentence that names the rank, the call, the value, and what to do."""

    #: This process's rank. None if it had none yet.
    rank: int | None
    #: The ranks at fault, as far as they are known.
    at_fault: tuple[int, ...]
    #: The first rank at fault that is not this one. None if there is none.
    peer: int | None
    #: The call that was refused, if an argument is wrong.
    call: str | None

    def __init__(
        self,
        sentence: str,
        rank: int | None = None,
        at_fault: tuple[int, ...] = (),
        call: str | None = None,
    ) -> None:
        super().__init__(sentence)
        self.rank = rank
        self.at_fault = tuple(at_fault)
        self.peer = next((other for other in self.at_fault if other != rank), None)
        self.call = call

    def __reduce__(self) -> tuple[type[Error], tuple[object, ...]]:
        return type(self), (str(self), self.rank, self.at_fault, self.call)


class ArgumentError(Error, ValueError):
    """An argument does not fit, or asks for something that is not supported. Nothing has been done.

    Make the call again with other arguments. If it is collective and this rank does not, the ranks that wait for it get
    a RankError half a second later, and the group has failed.
    """


class MisuseError(Error):
    """The call may not be made here or now, such as in a fork or of a closed group. Nothing has been done."""


class LaunchError(Error):
    """The environment does not say who this rank is."""


class RendezvousError(Error):
    """The ranks did not find one another, or do not fit together."""


class CallMismatchError(Error):
    """The ranks made different calls."""


class OutOfMemoryError(Error, MemoryError):
    """There is no memory."""


class RankError(Error):
    """A rank died, left, was refused a call that others made, or its program failed."""


class DeadlineError(Error, builtins.TimeoutError):
    """A rank did not do its part in time."""


class DeviceError(Error):
    """A GPU or its driver lacks something or failed."""


class HostError(Error):
    """The operating system refused something."""


class InternalError(Error):
    """A bug of gemmesh."""
