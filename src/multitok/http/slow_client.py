"""Clients that do not read what they asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from multitok.http.deadline import Deadline

# What a client that reads slowly must take of what waits within each time-out. While writing is paused more than this
# waits, so that even the least that lets it go on is enough.
READING_STEP = 16 * 1024


class SlowClientWatch:
    """Drops a client that takes too little of what waits for it in a while.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
        Runs the connection.
    transport : asyncio.Transport
        What waits.
    timeout : float
        Seconds that the client has for each step.
    drop : callable
        Breaks the connection.
    """

    __slots__ = ("_deadline", "_drop", "_timeout", "_transport", "_untaken")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, timeout: float, drop: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._timeout = timeout
        self._drop = drop
        self._untaken = 0
        self._deadline = Deadline(loop, self._on_due)

    def begin(self) -> None:
        """Watch what waits now."""
        self._untaken = self._transport.get_write_buffer_size()
        self._deadline.set(self._timeout)

    def end(self) -> None:
        """The client has taken enough."""
        self._deadline.clear()

    def close(self) -> None:
        """Watch no more; the connection is gone."""
        self._deadline.close()

    def _on_due(self) -> None:
        if self._transport.get_write_buffer_size() > self._untaken - READING_STEP:
            self._drop()
        else:
            self.begin()
