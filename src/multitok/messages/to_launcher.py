"""Messages from a child to the launcher, over its channel."""

from __future__ import annotations

import msgspec


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


ToLauncher = Hello | Ready | Failed | Drained | Forked
