"""ChildProcess: one life of one part, as the launcher sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from multitok.messages.to_child import ToChild
from multitok.messages.to_launcher import ToLauncher

_MAX_PACKET = 65536


def make_channel() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a channel: the launcher's and the child's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def part_name(role: str, index: int) -> str:
    """Return role and index as in the process title; of some roles there is only one."""
    return role if role in ("router", "fork_server") else f"{role}:{index}"


class ChildProcess:
    """A running child with its channel.

    Parameters
    ----------
    role : str
        scheduler, detokenizer, router, fork_server or tokenizer_worker.
    index, life : int
        Which one of its role, and which life of it.
    pid : int
        A child of this process; reaped here.
    channel : socket
        The launcher's end.

    Attributes
    ----------
    ready : bool
        It has said so.
    failure : tuple of (str, int) or None
        What it said before it ended: message and exit status.
    """

    def __init__(self, role: str, index: int, life: int, pid: int, channel: socket.socket) -> None:
        self.role, self.index, self.life, self.pid = role, index, life, pid
        self.ready = False
        self.failure: tuple[str, int] | None = None
        self.channel = channel
        channel.setblocking(False)
        self.pidfd = os.pidfd_open(pid)
        self._decoder: msgspec.msgpack.Decoder[ToLauncher] = msgspec.msgpack.Decoder(ToLauncher)

    @classmethod
    def spawn(
        cls, role: str, index: int, life: int, blocks: list[str], listen_sockets: dict[str, socket.socket]
    ) -> ChildProcess:
        """Start a new interpreter.

        Parameters
        ----------
        role, index, life
            As above.
        blocks : list of str
            Names of the shared blocks that it reads.
        listen_sockets : dict of str to socket
            What it inherits, by address.
        """
        ours, theirs = make_channel()
        fds = {address: sock.fileno() for address, sock in listen_sockets.items()}
        with theirs:
            process = subprocess.Popen(
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
        # Reaped by pid, as adopted children are; Popen must not warn that it was not waited for.
        process.returncode = 0
        return cls(role, index, life, process.pid, ours)

    @property
    def name(self) -> str:
        """Role and index, as in the process title."""
        return part_name(self.role, self.index)

    def send(self, message: ToChild, fds: Sequence[int] = ()) -> None:
        """Send a message, with descriptors; one that is ending doesn't get it."""
        try:
            socket.send_fds(self.channel, [msgspec.msgpack.encode(message)], fds)
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
        os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Collect an ended child; returns how it ended, in words."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.pidfd)
        self.channel.close()
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
