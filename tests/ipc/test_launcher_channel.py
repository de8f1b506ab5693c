from __future__ import annotations

import msgspec
import pytest

from multitok import __version__
from multitok.ipc.launcher_channel import LauncherChannel, LauncherGone
from multitok.messages.protocol import protocol_hash
from multitok.messages.to_child import Drain, OwnerDied, Stop
from multitok.messages.to_launcher import Hello, Ready, ToLauncher
from parts import channel_pair


@pytest.fixture
def launcher():
    """The launcher's end, and the child's."""
    ours, theirs = channel_pair()
    channel = LauncherChannel(theirs)
    yield ours, channel
    channel._socket.close()
    ours.close()


def read(ours):
    return msgspec.msgpack.decode(ours.recv(65536), type=ToLauncher)


def test_the_first_word_is_the_protocol_that_the_child_speaks(launcher):
    ours, _ = launcher
    assert read(ours) == Hello(protocol_hash(), __version__)


def test_messages_keep_their_bounds_and_their_order_both_ways(launcher):
    ours, channel = launcher
    channel.send(Ready(b"info"))
    channel.send(Ready())
    assert [read(ours) for _ in range(3)][1:] == [Ready(b"info"), Ready()]
    assert channel.receive() == []
    for order in (OwnerDied("w1.1"), Drain(2.5), Stop()):
        ours.send(msgspec.msgpack.encode(order))
    assert channel.receive() == [OwnerDied("w1.1"), Drain(2.5), Stop()]
    assert channel.receive() == []


def test_a_launcher_that_is_gone_is_noticed_when_reading_and_when_sending(launcher):
    ours, channel = launcher
    ours.close()
    with pytest.raises(LauncherGone):
        channel.receive()
    with pytest.raises(LauncherGone):
        channel.send(Ready())
