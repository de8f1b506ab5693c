"""A client's connection: raw, so that it costs little beside the server on the same cores."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

import httptools

from chaos.answer import Answer


class Connection(asyncio.Protocol):
    """One request after another; what comes without being asked for is counted.

    Attributes
    ----------
    worker : str
        Address of the worker's life at the other end.
    closed : bool
        Nothing can be sent any more.
    stray : int
        Answers that nobody has asked for.
    loss : str
        Why it was lost.
    """

    def __init__(self) -> None:
        self.worker = ""
        self.closed = False
        self.stray = 0
        self.loss = ""
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._retry_after = False
        self._identity: bytes | None = None

    @classmethod
    async def open(cls, port: int, timeout: float) -> Self:
        """Connect, and ask who is at the other end.

        Raises
        ------
        OSError
            Nobody listens.
        TimeoutError
            Nobody answered.
        """
        async with asyncio.timeout(timeout):
            _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
            try:
                await connection.identify()
            except BaseException:
                connection.leave()
                raise
        return connection

    async def identify(self) -> None:
        """Learn the worker's address; it stays empty when the connection is lost before that."""
        self._identity = b""
        answer = Answer(1, False)
        await self.ask(b"GET /server_info HTTP/1.1\r\nhost: chaos\r\n\r\n", answer)
        body, self._identity = self._identity, None
        if answer.complete:
            self.worker = json.loads(body)["worker"]["address"]

    def ask(self, request: bytes, answer: Answer) -> asyncio.Future[None]:
        """Send a request; the future is done when the answer is complete or the connection is lost."""
        self._answer = answer
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        if self.closed:
            waiter.set_result(None)
        else:
            self._transport.write(request)
        return waiter

    def leave(self) -> None:
        """Close at once, whatever is under way."""
        self.closed = True
        self._answer = None
        self._transport.abort()

    # What asyncio calls

    def connection_made(self, transport: Any) -> None:
        """Note the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take in what the server sent."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.loss = f"no HTTP: {error}"
            self._transport.abort()

    def eof_received(self) -> None:
        """Nothing to do: `connection_lost` comes next."""

    def connection_lost(self, error: Exception | None) -> None:
        """End the request that waits."""
        self.closed = True
        self.loss = self.loss or str(error or "closed by the server")
        self._wake()

    # What httptools calls

    def on_message_begin(self) -> None:
        """Count an answer that nobody has asked for."""
        self._retry_after = False
        self.stray += self._answer is None and not self.closed

    def on_header(self, name: bytes, value: bytes) -> None:
        """Look for Retry-After."""
        self._retry_after |= name.lower() == b"retry-after" and value.isdigit()

    def on_headers_complete(self) -> None:
        """Hand on the head."""
        if self._answer is not None:
            self._answer.take_head(self._parser.get_status_code(), self._retry_after)

    def on_body(self, data: bytes) -> None:
        """Hand on a piece of the body."""
        if self._identity is not None:
            self._identity += data
        elif self._answer is not None:
            self._answer.take_body(data)

    def on_message_complete(self) -> None:
        """Hand on the end."""
        if self._answer is not None:
            self._answer.take_end()
        if not self._parser.should_keep_alive():
            self.closed = True
            self._transport.close()
        self._wake()

    def _wake(self) -> None:
        self._answer = None
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
