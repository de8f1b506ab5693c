"""An HTTP worker's part in a pause: it says when nothing is left that had begun."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherChannel
from multitok.messages.control import Continue, ControlState, Pause, Settle
from multitok.messages.to_child import Control
from multitok.messages.to_launcher import OperationAck, ToLauncher
from multitok.tokenizer.control_client import ControlClient

WAITING = ControlState(epoch=1, paused="wait")
GOING = ControlState(epoch=2)


class Launcher:
    """The other end of a worker's channel."""

    def __init__(self) -> None:
        self._socket, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._decoder = msgspec.msgpack.Decoder(ToLauncher)
        self._channel = channel = LauncherChannel(child.detach())
        self._socket.recv(65536)  # Hello
        self.client = ControlClient(Controlled(channel), channel.send)
        self._socket.setblocking(False)

    def close(self) -> None:
        """Close both ends."""
        self._socket.close()
        self._channel.close()

    async def acks(self, count: int) -> list[OperationAck]:
        """Return the next acknowledgements."""
        loop = asyncio.get_running_loop()
        return [self._decoder.decode(await loop.sock_recv(self._socket, 65536)) for _ in range(count)]

    def is_silent(self) -> bool:
        """Whether nothing was said."""
        try:
            self._socket.recv(65536, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def launcher():
    launcher = Launcher()
    yield launcher
    launcher.close()


def test_a_pause_is_settled_at_once_where_nothing_has_begun(launcher):
    async def run() -> None:
        launcher.client.follow(Control(WAITING, 1, Pause()))
        assert not launcher.client.settled
        launcher.client.follow(Control(WAITING, 2, Settle()))
        assert await launcher.acks(2) == [OperationAck(1), OperationAck(2)]
        assert launcher.client.settled
        launcher.client.follow(Control(GOING, 3, Continue()))
        assert not launcher.client.settled

    asyncio.run(run())


def test_a_pause_is_settled_when_the_last_has_ended_that_had_begun(launcher):
    async def run() -> None:
        looks = iter([True, True, True, False])
        launcher.client.has_begun = lambda: next(looks)
        launcher.client.follow(Control(WAITING, 2, Settle()))
        assert launcher.is_silent()
        assert await launcher.acks(1) == [OperationAck(2)]
        assert next(looks, None) is None
        assert launcher.client.settled

    asyncio.run(run())


def test_a_pause_that_settles_is_overtaken_by_continuing(launcher):
    async def run() -> None:
        launcher.client.has_begun = lambda: True
        launcher.client.follow(Control(WAITING, 2, Settle()))
        launcher.client.follow(Control(GOING, 3, Continue()))
        acks = await launcher.acks(2)
        assert {(ack.id, ack.status) for ack in acks} == {(2, 409), (3, 200)}
        assert not launcher.client.settled

    asyncio.run(run())
