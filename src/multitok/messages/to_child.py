"""Messages from the launcher to a child, over its channel."""

from __future__ import annotations

import msgspec

from multitok.messages.control import ControlOperation, ControlState, Settle


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
    """From a child to itself, once a second: its loop goes round; `sent` is when, in seconds of CLOCK_MONOTONIC."""

    sent: float = 0.0


class Control(msgspec.Struct, array_like=True, tag=11, gc=False):
    """The control state, and the operation that has led to it; the first message to each life.

    A part does it before anything that is asked of it later, and says so by `OperationAck`.

    Attributes
    ----------
    state : ControlState
        Takes the place of the state so far.
    id : int
        The operation; 0: this is no operation but a life's beginning, and not to be acknowledged.
    operation : ControlOperation or None
        What is to be done; None: as much as the new state demands.
    """

    state: ControlState
    id: int = 0
    operation: ControlOperation | Settle | None = None


class ControlReqOutput(msgspec.Struct, array_like=True, tag=12, gc=False):
    """To an HTTP worker: what has become of its `ControlReq`.

    Attributes
    ----------
    number : int
        The question.
    id, epoch : int
        The operation, and the version of the state after it.
    status : int
        HTTP status: 200; 504 when some have not answered in time; or a refusal's.
    message : str
        What has failed, in words meant for the operator.
    done, died, late : list of str
        Parts that have done it, that have died meanwhile (their next life has the state), and that have not answered.
    count : int
        How many requests it has ended.
    """

    number: int
    id: int = 0
    epoch: int = 0
    status: int = 200
    message: str = ""
    done: list[str] = []
    died: list[str] = []
    late: list[str] = []
    count: int = 0


ToItself = LauncherExited | Ping
ToChild = Start | OwnerStarted | OwnerDied | Drain | Stop | Fork | PartStarted | PartDied | Control | ControlReqOutput
