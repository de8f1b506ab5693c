"""Accepting connections: one shared listening socket, and the least loaded worker goes first.

    kernel queue --+-- worker 1 (12 connections): accepts at once
                   +-- worker 2 (14 connections): looks away for 2 ms, then takes what is still there
                   +-- worker 3 (hung):           keeps nobody from accepting

Every worker sees that the socket is readable. Who has more connections than the lowest on the load board hesitates;
nobody waits for anybody, so a hung worker costs others a few milliseconds and no connection.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

# Seconds that a worker hesitates per connection that it has above the lowest, and at most.
HESITATION = 0.001
MAX_HESITATION = 0.005
# Seconds without accepting after running out of descriptors or memory.
EXHAUSTED_PAUSE = 0.5
# Descriptors that connections leave to everything else in the process.
RESERVED_DESCRIPTORS = 32
# Bytes that the kernel takes for a client before the wire has room: more waits here, where it can be merged. Without
# it the kernel keeps megabytes for each client that does not read.
KERNEL_BUFFER = 128 * 1024

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class LoadSlot(Protocol):
    """A worker's place on the load board."""

    def set_connections(self, n: int) -> None:
        """Publish the number of own connections."""
        ...

    def lowest_connections(self) -> int:
        """Lowest number over all live workers, own included."""
        ...

    def beat(self, allowance: float) -> None:
        """Say that this process goes round, and counts as dead when it is silent for more seconds than this."""
        ...


class Acceptor:
    """Accepts from a shared listening socket.

    Parameters
    ----------
    listen_socket : socket.socket
        Listening; made non-blocking here.
    slot : LoadSlot
        Own place on the load board.
    protocol_factory : callable
        Makes a connection's protocol, which must end in a call of `connection_closed`.
    on_empty : callable
        Called when the last connection has ended.
    options : dict
        For ``connect_accepted_socket``: TLS and its time-outs.
    """

    def __init__(
        self,
        listen_socket: socket.socket,
        slot: LoadSlot,
        protocol_factory: Callable[[], asyncio.Protocol],
        on_empty: Callable[[], None] = lambda: None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._socket = listen_socket
        self._slot = slot
        self._protocol_factory = protocol_factory
        self._on_empty = on_empty
        self._options = options or {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # A set, so that an end counts once, however it is heard of.
        self._open: set[asyncio.BaseProtocol] = set()
        # Until a connection is served, or has failed: with TLS until the handshake is done.
        self._opening: set[asyncio.Task[None]] = set()
        self._running = False
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(1, limit - len(os.listdir("/proc/self/fd")) - RESERVED_DESCRIPTORS)

    @property
    def connections(self) -> int:
        """Open connections of this worker."""
        return len(self._open)

    def start(self) -> None:
        """Begin to accept."""
        self._socket.setblocking(False)
        self._slot.set_connections(len(self._open))
        self._running = True
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def stop(self) -> None:
        """Stop accepting; what waits in the kernel's queue is left to the other workers."""
        if not self._running:
            return
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._loop.remove_reader(self._socket.fileno())

    def connection_closed(self, protocol: asyncio.BaseProtocol) -> None:
        """Count a connection's end."""
        self._open.discard(protocol)
        self._slot.set_connections(len(self._open))
        if not self._open:
            self._on_empty()

    def abort_opening(self) -> None:
        """Give up on connections that have not got as far as a request."""
        for task in self._opening:
            task.cancel()

    def _on_readable(self) -> None:
        excess = len(self._open) - self._slot.lowest_connections()
        if excess <= 0:
            self._accept()
        else:
            self._look_away(min(excess * HESITATION, MAX_HESITATION), self._look_again)

    def _look_away(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._timer = self._loop.call_later(seconds, then)

    def _look_again(self) -> None:
        """Take what is still there after hesitating, whoever was meant to have it."""
        self._timer = None
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._accept()

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def _accept(self) -> None:
        if len(self._open) >= self._most:
            self._pause("too many connections for the limit of open files")
            return
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # Another worker was faster, or the client is gone.
        except OSError as exc:
            if exc.errno not in _EXHAUSTED:
                logger.warning("accepting failed: %s", exc)
            else:
                self._pause(str(exc))
            return
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, KERNEL_BUFFER)
        protocol = self._protocol_factory()
        self._open.add(protocol)
        self._slot.set_connections(len(self._open))
        task = self._loop.create_task(self._connect(connection, protocol))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _pause(self, reason: str) -> None:
        logger.error("accepting pauses for %g seconds: %s", EXHAUSTED_PAUSE, reason)
        self._look_away(EXHAUSTED_PAUSE, self._resume)

    async def _connect(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, **self._options)
        except BaseException as exc:
            connection.close()
            self.connection_closed(protocol)
            if isinstance(exc, OSError):
                # A client that went away, or a scanner that does not speak TLS.
                logger.debug("a connection failed before it was served: %s", exc)
            elif isinstance(exc, Exception):
                logger.exception("setting up a connection failed")
            else:
                raise
