"""ChildProcess: one life of one part, as the launcher sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import msgspec

from multitok.messages.to_child import ToChild
from multitok.messages.to_launcher import ToLauncher

_MAX_PACKET = 65536


class ChildProcess:
    """A running child with its channel.

    Parameters
    ----------
    role : str
        scheduler, detokenizer, router or tokenizer_worker.
    index, life : int
        Which one of its role, and which life of it.
    blocks : list of str
        Names of the shared blocks that it reads.
    listen_sockets : dict of str to socket
        What it inherits, by address.

    Attributes
    ----------
    ready : bool
        It has said so.
    failure : tuple of (str, int) or None
        What it said before it ended: message and exit status.
    """

    def __init__(
        self, role: str, index: int, life: int, blocks: list[str], listen_sockets: dict[str, socket.socket]
    ) -> None:
        self.role, self.index, self.life = role, index, life
        self.ready = False
        self.failure: tuple[str, int] | None = None
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        fds = {address: sock.fileno() for address, sock in listen_sockets.items()}
        with theirs:
            self._process = subprocess.Popen(
                # -P: a module in the working directory must not stand in for one of ours.
                [
                    *(sys.executable, "-P", "-m", "multitok.launcher.child"),
                    *(role, str(index), str(life), str(os.getpid()), str(theirs.fileno())),
                    msgspec.json.encode(fds).decode(),
                    *blocks,
                ],
                pass_fds=[theirs.fileno(), *fds.values()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C is the launcher's business.
                process_group=0,
            )
        self.pidfd = os.pidfd_open(self._process.pid)
        self._decoder: msgspec.msgpack.Decoder[ToLauncher] = msgspec.msgpack.Decoder(ToLauncher)

    @property
    def name(self) -> str:
        """Role and index, as in the process title."""
        return self.role if self.role == "router" else f"{self.role}:{self.index}"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: ToChild) -> None:
        """Send a message; one that is ending doesn't get it."""
        try:
            self.channel.send(msgspec.msgpack.encode(message))
        except OSError:
            return

    def receive(self) -> list[ToLauncher]:
        """Return the messages that have arrived."""
        messages: list[ToLauncher] = []
        while True:
            try:
                packet = self.channel.recv(_MAX_PACKET)
            except OSError:
                return messages
            if not packet:
                return messages
            messages.append(self._decoder.decode(packet))

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def reap(self) -> str:
        """Collect an ended child; returns how it ended, in words."""
        status = self._process.wait()
        os.close(self.pidfd)
        self.channel.close()
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
