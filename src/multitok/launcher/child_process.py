"""ChildProcess: one life of one part, as the launcher sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from multitok.messages.to_child import ToChild
from multitok.messages.to_launcher import ToLauncher

_MAX_PACKET = 65536
STOPPED = "is stopped (state T)"


def make_channel() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a channel: the launcher's and the child's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def part_name(role: str, index: int) -> str:
    """Return role and index as in the process title; of some roles there is only one."""
    return role if role in ("router", "fork_server") else f"{role}:{index}"


def _send_what_fits(channel: socket.socket, unsent: deque[bytes]) -> None:
    try:
        while unsent:
            channel.send(unsent[0])
            unsent.popleft()
    except BlockingIOError:
        return
    except OSError:
        unsent.clear()


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
    slot : int or None
        Its line on the load board, among those of its role; None: its index.
    unsent : iterable of bytes
        What it is to be told before anything else.

    Attributes
    ----------
    started_at, ready_at : float
        When it began, and when it said that it is ready; None until then.
    draining : bool
        An HTTP worker that was told to finish and go.
    hung : str or None
        How it hung, in words, when it was killed for that.
    exit_status : int or None
        Once it is reaped; minus the signal's number when it died of one.
    failure : tuple of (str, int) or None
        What it said before it ended: message and exit status.
    """

    def __init__(
        self,
        role: str,
        index: int,
        life: int,
        pid: int,
        channel: socket.socket,
        slot: int | None = None,
        unsent: Iterable[bytes] = (),
    ) -> None:
        self.role, self.index, self.life, self.pid = role, index, life, pid
        self.slot = index if slot is None else slot
        self.started_at = time.monotonic()
        self.ready_at: float | None = None
        self.draining = False
        self.hung: str | None = None
        self.exit_status: int | None = None
        self.failure: tuple[str, int] | None = None
        self.channel = channel
        self._unsent = deque(unsent)
        channel.setblocking(False)
        self.pidfd = os.pidfd_open(pid)
        self._decoder: msgspec.msgpack.Decoder[ToLauncher] = msgspec.msgpack.Decoder(ToLauncher)

    @classmethod
    def spawn(
        cls,
        role: str,
        index: int,
        life: int,
        blocks: list[str],
        listen_sockets: dict[str, socket.socket],
        briefing: Sequence[ToChild] = (),
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
        briefing : sequence of messages
            What it finds in its channel when it begins: as much of it as there is room for.
        """
        ours, theirs = make_channel()
        ours.setblocking(False)
        unsent = deque(map(msgspec.msgpack.encode, briefing))
        _send_what_fits(ours, unsent)
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
        return cls(role, index, life, process.pid, ours, unsent=unsent)

    @property
    def part(self) -> tuple[str, int]:
        """Role and index: what its lives have in common."""
        return self.role, self.index

    @property
    def name(self) -> str:
        """Role and index, as in the process title."""
        return part_name(self.role, self.index)

    @property
    def ready(self) -> bool:
        """Whether it has said that it is ready."""
        return self.ready_at is not None

    def send(self, message: ToChild, fds: Sequence[int] = ()) -> None:
        """Send a message; one that is ending doesn't get it, and one that reads late gets it late.

        Parameters
        ----------
        message : ToChild
            The message.
        fds : sequence of int
            Descriptors that go with it; such a message is not kept for a child that reads late.
        """
        if not fds:
            self._unsent.append(msgspec.msgpack.encode(message))
            self.send_rest()
            return
        try:
            socket.send_fds(self.channel, [msgspec.msgpack.encode(message)], fds)
        except OSError:
            return

    def send_rest(self) -> None:
        """Send what the channel had no room for."""
        _send_what_fits(self.channel, self._unsent)

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
        status = self.exit_status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.pidfd)
        self.channel.close()
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    @property
    def was_killed_from_outside(self) -> bool:
        """Whether it ended because somebody wanted it to; known once it is reaped."""
        return self.exit_status in (0, -signal.SIGKILL) and self.hung in (None, STOPPED)
