"""Messages from the launcher to a child, over its channel."""

from __future__ import annotations

import msgspec


class Start(msgspec.Struct, array_like=True, tag=1, gc=False):
    """To an HTTP worker: the schedulers are up.

    Attributes
    ----------
    block : str
        The shared block with `scheduler_info`.
    lives : list of int
        Which life of each scheduler was the last to be ready; of one that has died since, `PartDied` follows.
    """

    block: str
    lives: list[int]


class OwnerStarted(msgspec.Struct, array_like=True, tag=2, gc=False):
    """The owner at `address` is ready."""

    address: str


class OwnerDied(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The owner at `address` is gone for good."""

    address: str


class Drain(msgspec.Struct, array_like=True, tag=4, gc=False):
    """To an HTTP worker: stop accepting, finish what runs within `timeout` seconds, then exit.

    Attributes
    ----------
    timeout : float
        Seconds.
    rolling : bool
        Others go on serving: idle connections need not be ended in a hurry.
    """

    timeout: float
    rolling: bool = False


class Stop(msgspec.Struct, array_like=True, tag=5, gc=False):
    """Exit now, in order."""


class Fork(msgspec.Struct, array_like=True, tag=6, gc=False):
    """To the fork server: make an HTTP worker; its channel and the HTTP socket come with the packet.

    Attributes
    ----------
    index, life : int
        Which worker, and which life of it.
    slot : int
        Its place on the load board.
    """

    index: int
    life: int
    slot: int


class LauncherExited(msgspec.Struct, array_like=True, tag=7, gc=False):
    """From a child to itself: the channel has ended."""


class PartStarted(msgspec.Struct, array_like=True, tag=8, gc=False):
    """A scheduler, a detokenizer or the router has begun a new life, and is ready; the lives before it are dead.

    A part that starts while a scheduler is in a later life than its first hears it, too.

    Attributes
    ----------
    role : str
        scheduler, detokenizer or router.
    index, life : int
        Which one, and which life of it: 2 or more, since at the start everybody waits for everybody.
    """

    role: str
    index: int
    life: int


class PartDied(msgspec.Struct, array_like=True, tag=9, gc=False):
    """A scheduler, a detokenizer or the router has died; fields as in `PartStarted`.

    A child that starts while a part is down hears it, too.
    """

    role: str
    index: int
    life: int


class Ping(msgspec.Struct, array_like=True, tag=10, gc=False):
    """From a child to itself, once a second: its loop goes round."""


ToItself = LauncherExited | Ping
ToChild = Start | OwnerStarted | OwnerDied | Drain | Stop | Fork | PartStarted | PartDied
