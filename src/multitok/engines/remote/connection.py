"""Kept-alive HTTP/1.1 connections to one address: as little work per piece of an answer as it can be.

A raw asyncio protocol with httptools' parser; no task, future or queue per piece. docs/decisions.md has the numbers.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from multitok.engines.remote.options import Address

# A head that is longer is no answer to a request of ours.
_MOST_HEAD_BYTES = 64 * 1024
# Connections are closed when they have not been used for so long; servers do it sooner or later.
_IDLE_S = 30.0
_MOST_IDLE = 1024
# A stream may be silent for long; after so many seconds of silence the other side is asked three times, at intervals.
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


def _nobody() -> None:
    """Stand in for whoever wants to know."""


class Receiver(Protocol):
    """Hears of the answer to one request: a head, pieces of the body, and one of the two ends."""

    def on_head(self, status: int) -> None:
        """Take the status."""
        ...

    def on_piece(self, data: bytes) -> None:
        """Take a piece of the body."""
        ...

    def on_complete(self) -> None:
        """Note that the answer is complete."""
        ...

    def on_lost(self, reason: str, stale: bool) -> None:
        """Note that no more will come of it.

        Parameters
        ----------
        reason : str
            Why, for the log.
        stale : bool
            The connection had been kept alive, and the server seems to have closed it before it saw the request.
        """
        ...


class Connection(asyncio.Protocol):
    """One connection: one request after another.

    Parameters
    ----------
    pool : ConnectionPool
        Takes it back.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._used = False
        self._head_bytes = 0
        self._answer_begun = False
        self.idle_since = 0.0

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    def send(self, request: bytes, receiver: Receiver) -> None:
        """Send a request; `receiver` hears of the answer."""
        assert self._transport is not None
        self._receiver = receiver
        self._head_bytes = 0
        self._answer_begun = False
        self._transport.write(request)

    def abort(self) -> None:
        """Close at once; the receiver hears nothing more."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport, and have the kernel find out about a way that was lost in silence."""
        # uvloop's transports are no subclasses.
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        for level, option, value in _KEEP_ALIVE:
            sock.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        """Take in what the server sent."""
        if self._receiver is None:
            # An answer that nobody asked for, or one that is unwanted.
            self.abort()
            return
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
        self._answer_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what it sent is no HTTP: {error}")
            return
        if self._head_bytes > _MOST_HEAD_BYTES:
            self._fail("its answer's head is too long")

    def connection_lost(self, error: Exception | None) -> None:
        """End the request that waits for an answer."""
        self._transport = None
        self._pool.forget(self)
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            reason = f"the connection was lost ({error})" if error else "it closed the connection"
            receiver.on_lost(reason, stale=self._used and not self._answer_begun)

    # What httptools calls

    def on_headers_complete(self) -> None:
        """Pass the status on."""
        self._head_bytes = -1
        if self._receiver is not None:
            self._receiver.on_head(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        """Pass a piece of the body on."""
        if self._receiver is not None:
            self._receiver.on_piece(body)

    def on_message_complete(self) -> None:
        """Pass the end on; the connection is free, or of no more use."""
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        self._used = True
        if self._parser.should_keep_alive():
            self._pool.put_back(self)
        elif self._transport is not None:
            self._transport.close()
        receiver.on_complete()

    def _fail(self, reason: str) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.on_lost(reason, stale=False)


class ConnectionPool:
    """Connections to one address; those in use are bounded by the requests that use them.

    Parameters
    ----------
    address : Address
        Where they lead.
    api_key : str or None
        Sent with every request.
    timeout : float
        Seconds that a new one may take.

    Attributes
    ----------
    on_idle_closed : callable
        Called when the server has closed one that was kept alive: it may have ended.
    """

    def __init__(self, address: Address, api_key: str | None, timeout: float) -> None:
        self.address = address
        self._timeout = timeout
        self._idle: deque[Connection] = deque()
        self._tls = ssl.create_default_context() if address.tls else None
        key = "" if api_key is None else f"authorization: Bearer {api_key}\r\n"
        self._lines = f"host: {address.host_header}\r\nuser-agent: multitok\r\naccept: */*\r\n{key}"
        self._closed = False
        self.on_idle_closed: Callable[[], None] = _nobody

    def take_idle(self) -> Connection | None:
        """Return a connection that is kept alive, the one used last."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def open(self) -> Connection:
        """Return a new connection.

        Raises
        ------
        OSError
            There is none to be had, within the time limit.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self.address.host, self.address.port, ssl=self._tls
                )
        except TimeoutError:
            raise OSError(f"no connection within {self._timeout:g} s") from None
        return connection

    def put_back(self, connection: Connection) -> None:
        """Keep a connection for the next request."""
        if self._closed or len(self._idle) >= _MOST_IDLE:
            connection.abort()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that is gone."""
        # Those that are closed by the server are the ones that were used longest ago.
        if connection in self._idle:
            self._idle.remove(connection)
            self.on_idle_closed()

    def close_old(self) -> None:
        """Close what has not been used for long."""
        limit = asyncio.get_running_loop().time() - _IDLE_S
        while self._idle and self._idle[0].idle_since < limit:
            self._idle.popleft().abort()

    def close_idle(self) -> None:
        """Close all that are not in use."""
        while self._idle:
            self._idle.pop().abort()

    def close(self) -> None:
        """Close all idle connections, and keep none any more."""
        self._closed = True
        self.close_idle()

    def request(self, method: str, route: str, body: bytes = b"") -> bytes:
        """Return a request as it is sent."""
        lines = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if method == "POST" else ""
        head = f"{method} {self.address.path}{route} HTTP/1.1\r\n{self._lines}{lines}\r\n"
        return head.encode("ascii") + body
