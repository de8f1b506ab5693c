"""Children that do nothing, with real processes and channels, as the launcher holds them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from multitok.launcher.child_process import ChildProcess, make_channel
from multitok.launcher.children import Children
from multitok.messages.to_child import ToChild


class Family:
    """A `Children` that tests fill, and what each of them was told."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.buried: list[ChildProcess] = []
        self.children = Children(self.selector, lambda child: None, self.buried.append)
        self._ends: dict[ChildProcess, socket.socket] = {}

    def add(self, role: str, index: int = 0, life: int = 1, *, ready: bool = True) -> ChildProcess:
        ours, theirs = make_channel()
        child = ChildProcess(role, index, life, self.process(), ours)
        child.ready_at = 0.0 if ready else None
        self.take(child, theirs)
        self.children.watch(child)
        return child

    def take(self, child: ChildProcess, theirs: socket.socket) -> None:
        theirs.setblocking(False)
        self._ends[child] = theirs

    @staticmethod
    def process() -> int:
        """Start a process that does nothing; returns its id."""
        process = subprocess.Popen(["sleep", "600"])
        # It is reaped as a child is.
        process.returncode = 0
        return process.pid

    def told(self, child: ChildProcess) -> list[ToChild]:
        """What a child was told since it was asked last."""
        messages: list[ToChild] = []
        while True:
            try:
                packet = self._ends[child].recv(65536)
            except BlockingIOError:
                return messages
            messages.append(msgspec.msgpack.decode(packet, type=ToChild))

    def end(self, child: ChildProcess) -> str:
        """Kill and reap a child."""
        os.kill(child.pid, signal.SIGKILL)
        return self.children.reap(child)

    def close(self) -> None:
        for child in self.children.all():
            self.end(child)
        for theirs in self._ends.values():
            theirs.close()
        self.selector.close()


@pytest.fixture
def family() -> Iterator[Family]:
    family = Family()
    yield family
    family.close()
