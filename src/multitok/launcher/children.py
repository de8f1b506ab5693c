"""The children that live, and what they are told of each other."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable
from pathlib import Path

from multitok.launcher.child_process import ChildProcess
from multitok.messages.numbers import owner_address
from multitok.messages.to_child import OwnerDied, OwnerStarted, PartDied, PartStarted, ToChild

SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"
ROUTER = "router"
FORK_SERVER = "fork_server"
WORKER = "tokenizer_worker"
# Whose deaths everybody has to know of; those of HTTP workers are told as the end of an owner.
_ANNOUNCED = (SCHEDULER, DETOKENIZER, ROUTER)


class Children:
    """Every child that has not been reaped, watched for its messages and its end.

    Parameters
    ----------
    selector : BaseSelector
        Calls, by its keys' data, what happens when a child says something or ends.
    hear, bury : callable
        Called then, with the child.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        hear: Callable[[ChildProcess], None],
        bury: Callable[[ChildProcess], None],
    ) -> None:
        self._selector = selector
        self._hear = hear
        self._bury = bury
        self._all: dict[int, ChildProcess] = {}

    def watch(self, child: ChildProcess) -> None:
        """Add a child."""
        self._all[child.pid] = child
        self._selector.register(child.channel, selectors.EVENT_READ, lambda: self._if_lives(child, self._hear))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._if_lives(child, self._bury))

    def stop_listening(self, child: ChildProcess) -> None:
        """Watch for a child's end only: it has closed its channel."""
        self._unregister(child.channel)

    def reap(self, child: ChildProcess) -> str:
        """Remove a child that has ended; returns how, in words."""
        self._unregister(child.channel)
        self._unregister(child.pidfd)
        del self._all[child.pid]
        return child.reap()

    def all(self) -> list[ChildProcess]:
        """Return every child."""
        return list(self._all.values())

    def of(self, role: str) -> list[ChildProcess]:
        """Return the children of a role."""
        return [child for child in self._all.values() if child.role == role]

    def late(self) -> list[ChildProcess]:
        """Return the children that are not ready."""
        return [child for child in self._all.values() if not child.ready]

    def reap_strays(self) -> None:
        """Collect adopted children that nobody knows of and that have ended.

        Not while an HTTP worker is being forked: it may have ended before its process id is known here.
        """
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in self._all:
                    return
                os.waitpid(ended.si_pid, 0)

    def _if_lives(self, child: ChildProcess, then: Callable[[ChildProcess], None]) -> None:
        # It may have been reaped in this very turn.
        if self._all.get(child.pid) is child:
            then(child)

    def _unregister(self, source: socket.socket | int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)


class Announcer:
    """Tells the children which parts and owners come and go, and a new life what it has missed.

    A part is briefed before it begins and then told everything, ready or not: so it knows what has happened before it
    looks at any message. HTTP workers hear of parts, all others of owners too.

    Parameters
    ----------
    children : Children
        All.
    runtime_dir : str
        Where the owners' addresses are.
    """

    def __init__(self, children: Children, runtime_dir: str) -> None:
        self._children = children
        self._runtime_dir = Path(runtime_dir)
        self._down: dict[tuple[str, int], PartDied] = {}
        # The newest life of each scheduler that was ready.
        self._lives: dict[int, int] = {}
        # Owners that ended since the last life of a part that was ready: what is on its way to it may still name them.
        self._missed: dict[tuple[str, int], list[OwnerDied]] = {}

    @property
    def scheduler_lives(self) -> list[int]:
        """Of each scheduler the newest life that was ready; all have been ready once."""
        return [self._lives[rank] for rank in sorted(self._lives)]

    def briefing(self, role: str, index: int) -> list[ToChild]:
        """Return what a part that begins now has to know: which lives are past, who is down, who is there."""
        if role not in _ANNOUNCED:
            return []
        up = [PartStarted(SCHEDULER, *life) for life in self._lives.items() if (SCHEDULER, life[0]) not in self._down]
        return [
            *(message for message in up if message.life > 1),
            *(message for part, message in self._down.items() if part != (role, index)),
            *self._missed.get((role, index), ()),
            *(OwnerStarted(_address(worker)) for worker in self._children.of(WORKER) if worker.ready),
        ]

    def became_ready(self, child: ChildProcess) -> None:
        """Tell the others of a child that has just become ready."""
        if child.role == WORKER:
            self._tell_parts(OwnerStarted(_address(child)))
        elif child.role in _ANNOUNCED:
            self._down.pop(child.part, None)
            self._missed.pop(child.part, None)
            if child.role == SCHEDULER:
                self._lives[child.index] = child.life
            if child.life > 1:
                self._tell_everybody(PartStarted(*child.part, child.life), but=child)

    def brief_worker(self, worker: ChildProcess) -> None:
        """Tell an HTTP worker which parts are down, right after its `Start`; from now on it hears what happens."""
        for message in self._down.values():
            worker.send(message)

    def died(self, child: ChildProcess) -> None:
        """Tell of a child that has ended; it is not among the children any more."""
        if child.role == WORKER:
            message = OwnerDied(_address(child))
            self._tell_parts(message)
            for missed in self._missed.values():
                missed.append(message)
            (self._runtime_dir / message.address).unlink(missing_ok=True)
        elif child.role in _ANNOUNCED and child.ready:
            self._down[child.part] = PartDied(*child.part, child.life)
            self._missed[child.part] = []
            self._tell_everybody(self._down[child.part])

    def _tell_parts(self, message: OwnerStarted | OwnerDied) -> None:
        for child in self._children.all():
            if child.role in _ANNOUNCED:
                child.send(message)

    def _tell_everybody(self, message: PartDied | PartStarted, but: ChildProcess | None = None) -> None:
        for child in self._children.all():
            if child is not but and child.role in (*_ANNOUNCED, WORKER):
                child.send(message)


def _address(worker: ChildProcess) -> str:
    return owner_address(worker.index, worker.life)
