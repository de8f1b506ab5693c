"""One try to have a request done at one address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from multitok.engines.remote.api import Delta, Failure, PeerApi, Work, failure_of
from multitok.engines.remote.connection import Connection
from multitok.engines.remote.events import EventReader
from multitok.engines.remote.peer import Peer

_MOST_ERROR_BYTES = 64 * 1024
_MOST_ANSWER_BYTES = 64 << 20
# How long after a request's last word the end of its answer may come.
_TAIL_S = 5.0


class Attempt:
    """One try: hears of the answer, and reads it.

    Parameters
    ----------
    peer : Peer
        Where.
    work : Work
        What.
    on_delta : callable
        Called with what is new, for the last time with its end or failure.

    Attributes
    ----------
    peer : Peer
        As given.
    have : int
        Output ids that came of it.
    """

    def __init__(self, peer: Peer, work: Work, on_delta: Callable[[Delta], None]) -> None:
        assert peer.api is not None
        self.peer = peer
        self._rid = work.rid
        self.have = 0
        self._api: PeerApi = peer.api
        self._on_delta = on_delta
        route, body, self._stream = peer.api.request(work)
        self._request = peer.pool.request("POST", route, body)
        self._connection: Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._over = False
        self._status = 0
        self._events = EventReader()
        self._body: list[bytes] = []
        self._size = 0

    def start(self) -> None:
        """Send it."""
        connection = self.peer.pool.take_idle()
        if connection is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        else:
            self._send(connection)

    def cancel(self) -> None:
        """End it, here and there; nothing more is heard of it."""
        if self._over:
            return
        self._over = True
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.abort()
            self.peer.abort(self._rid)

    async def _open(self) -> None:
        try:
            connection = await self.peer.pool.open()
        except OSError as error:
            self._opening = None
            self._lost(str(error) or type(error).__name__)
            return
        self._opening = None
        if self._over:
            connection.abort()
        else:
            self._send(connection)

    def _send(self, connection: Connection) -> None:
        self._connection = connection
        connection.send(self._request, self)

    # What the connection says

    def on_head(self, status: int) -> None:
        """Note the status."""
        self._status = status

    def on_piece(self, data: bytes) -> None:
        """Read the events that a piece completes."""
        if self._over:
            return
        if self._status != 200 or not self._stream:
            self._size += len(data)
            if self._size <= (_MOST_ERROR_BYTES if self._status != 200 else _MOST_ANSWER_BYTES):
                self._body.append(data)
            return
        try:
            for event in self._events.feed(data):
                if self._read(event):
                    return
        except (ValueError, TypeError) as error:
            self._make_no_sense(error)

    def on_complete(self) -> None:
        """Take a whole answer, or note that the events have ended too early."""
        self._connection = None
        if self._over:
            return
        if self._status != 200:
            self._end(Delta([], failure=failure_of(self._status, b"".join(self._body))))
            return
        if not self._stream:
            try:
                self._read(b"".join(self._body))
            except (ValueError, TypeError) as error:
                self._make_no_sense(error)
        if not self._over:
            self._lost("its answer ended before the request did")

    def on_lost(self, reason: str, stale: bool) -> None:
        """Try another connection if this one had gone stale."""
        self._connection = None
        if self._over:
            return
        if stale:
            self.start()
        else:
            self._lost(reason)

    # What it means

    def _read(self, data: bytes) -> bool:
        """Take an event, or a whole answer; returns whether that was all."""
        delta = self._api.read(data, self.have)
        if delta is not None:
            self.have += len(delta.ids)
            if delta.failure is None and delta.finish is None:
                self._on_delta(delta)
            else:
                self._end(delta)
        return self._over

    def _end(self, delta: Delta) -> None:
        self._over = True
        if self._connection is not None:
            # What follows is of no interest, but once it is over the connection serves another request.
            asyncio.get_running_loop().call_later(_TAIL_S, self._cut_tail)
        self._on_delta(delta)

    def _cut_tail(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    def _lost(self, reason: str) -> None:
        self.peer.report_failure(reason)
        self._end(Delta([], failure=Failure(503, reason)))

    def _make_no_sense(self, error: Exception) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        self._end(Delta([], failure=Failure(502, f"its answer makes no sense: {error}")))
