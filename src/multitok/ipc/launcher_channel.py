"""A child's end of its channel to the launcher: one message per packet, both ways; it ends when the launcher does."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

from multitok import __version__
from multitok.messages.protocol import protocol_hash
from multitok.messages.to_child import Control, ToChild
from multitok.messages.to_launcher import Hello, ToLauncher

_MAX_PACKET = 65536
_MAX_FDS = 4


class LauncherGone(Exception):
    """The launcher has exited, so this process has to."""


class LauncherSlow(LauncherGone):
    """It does not read what it is sent; it may only be stopped."""


class LauncherChannel:
    """The child's end; the first word on it is this process's `Hello`.

    Parameters
    ----------
    fd : int
        Descriptor of a connected SOCK_SEQPACKET unix socket; owned from now on.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._decoder: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
        self.send(Hello(protocol_hash(), __version__))

    def fileno(self) -> int:
        """Return the descriptor, for a poller."""
        return self._socket.fileno()

    def send(self, message: ToLauncher) -> None:
        """Send a message.

        Raises
        ------
        LauncherGone
            Nobody is there to read it, or nobody does.
        """
        try:
            self._socket.send(msgspec.msgpack.encode(message))
        except BlockingIOError as error:
            raise LauncherSlow from error
        except OSError as error:
            raise LauncherGone from error

    def take_briefing(self) -> Control | None:
        """Return the control state that a life begins with, if it lies here; the launcher sends it before anything."""
        try:
            packet = self._socket.recv(_MAX_PACKET, socket.MSG_PEEK)
            if not packet or not isinstance(message := self._decoder.decode(packet), Control):
                return None
            self._socket.recv(_MAX_PACKET)
        except OSError:
            return None
        return message

    def receive(self) -> list[ToChild]:
        """Return the messages that have arrived, without blocking.

        Raises
        ------
        LauncherGone
            The launcher has closed its end.
        """
        return [message for message, _ in self.receive_with_fds()]

    def receive_with_fds(self) -> Iterator[tuple[ToChild, list[int]]]:
        """Yield the messages that have arrived and the descriptors that came with each; see `receive`.

        A message is taken off the socket when it is asked for: a fork between two inherits no descriptors of the next.
        """
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(self._socket, _MAX_PACKET, _MAX_FDS)
            except BlockingIOError:
                return
            except OSError as error:
                raise LauncherGone from error
            if not packet:
                raise LauncherGone
            yield self._decoder.decode(packet), fds

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
