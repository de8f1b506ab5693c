"""Messages from a child to the launcher, over its channel."""

from __future__ import annotations

import msgspec

from multitok.messages.control import ControlOperation


class Hello(msgspec.Struct, array_like=True, tag=1, gc=False):
    """First word of a child: which protocol it speaks.

    Attributes
    ----------
    protocol_hash : str
        `protocol.protocol_hash` as the child computes it.
    version : str
        Its multitok version.
    """

    protocol_hash: str
    version: str


class Ready(msgspec.Struct, array_like=True, tag=2, gc=False):
    """The child does its work from now on; `info` is a scheduler's `EngineInfo` as msgpack."""

    info: bytes | None = None


class Failed(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The child can't start or go on, and why; `exit_status` is what the launcher should exit with."""

    message: str
    exit_status: int = 1


class Drained(msgspec.Struct, array_like=True, tag=4, gc=False):
    """An HTTP worker has no request left: how many finished since the drain began, how many were cut."""

    finished: int
    cut: int


class Forked(msgspec.Struct, array_like=True, tag=5, gc=False):
    """From the fork server: the HTTP worker `index`, life `life`, is process `pid`, a child of the launcher."""

    index: int
    life: int
    pid: int


class ControlReq(msgspec.Struct, array_like=True, tag=6, gc=False):
    """From an HTTP worker: an operator wants this, and waits so many seconds for it.

    Attributes
    ----------
    number : int
        Identifies the question among this worker's.
    operation : ControlOperation
        What to do.
    timeout : float
        Seconds; then `ControlReqOutput` names the parts that have not answered.
    """

    number: int
    operation: ControlOperation
    timeout: float


class OperationAck(msgspec.Struct, array_like=True, tag=7, gc=False):
    """A part has done an operation, or why it has not.

    Attributes
    ----------
    id : int
        The operation.
    status : int
        HTTP status: 200; 409 where another operation came in between; or a refusal's, which takes the operation back.
    problem : str
        Why it was not done, in words meant for the operator.
    count : int
        How many requests it has ended.
    """

    id: int
    status: int = 200
    problem: str = ""
    count: int = 0


ToLauncher = Hello | Ready | Failed | Drained | Forked | ControlReq | OperationAck
