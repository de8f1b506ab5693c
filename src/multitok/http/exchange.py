"""One request and its answer on a hot route, without ASGI.

An exchange stands where uvicorn's protocol expects its `RequestResponseCycle`, so that pipelining, keep-alive and
shutdown treat both alike; but it has no task, event or queue of its own. A route is called when the body is complete
and writes to the exchange, at once or later, from the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from multitok.http import sse
from multitok.http.errors import error_body, error_lines, internal_error
from multitok.tokenizer.requests import RequestError

if TYPE_CHECKING:
    from multitok.http.protocol import DirectHttpProtocol

logger = logging.getLogger(__name__)

Route = Callable[["HttpExchange"], None]

JSON = b"application/json"
# Others have their turn after so many bytes of a body.
BREATHER = 256 * 1024
# A larger answer is written in pieces of this size, as the client takes them: what it has not taken can be seen then.
PIECE = 128 * 1024
_STREAM_HEADERS = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)


def _canceller(task: asyncio.Task[None]) -> Callable[[], None]:
    def cancel() -> None:
        task.cancel()

    return cancel


class _NoEvent:
    """uvicorn sets its cycle's `message_event`; nobody waits for an exchange."""

    __slots__ = ()

    def set(self) -> None:
        """Do nothing."""


_NO_EVENT = _NoEvent()


def body_too_large(limit: int) -> RequestError:
    """Make the refusal of a body that is larger than a limit in bytes."""
    return RequestError(413, f"the body is larger than the limit of {limit} bytes")


class HttpExchange:
    """A request on a hot route and the way to answer it.

    Parameters
    ----------
    protocol : DirectHttpProtocol
        The connection.
    route : callable or None
        Called with the exchange when the body is complete; None for a request that is refused.
    headers : list of (bytes, bytes)
        Names are in lower case.
    chunked : bool
        Whether a streamed answer may be chunked (HTTP/1.1); otherwise its end is the connection's.
    keep_alive : bool
        Whether the connection stays open afterwards.
    expect_continue : bool
        Whether the client waits for ``100 Continue`` before it sends the body.
    refusal : RequestError or None
        What the request is answered with, without its body being read.
    tenant : int
        Whose limits it counts against; 0 where there are no keys.
    cors : bytes
        Header lines for a web page of another origin.

    Attributes
    ----------
    on_disconnect : callable or None
        Called once when the client leaves before the answer is complete.
    on_writable : callable or None
        Called when a paused connection takes data again.
    on_cut : callable or None
        Called with an error when a drain's time is up; a stream ends with it as an event.
    id_is_given : bool
        The request's id is the client's.
    request_id : str or None
        Returned in ``x-request-id`` once set.
    tenant : int
        Whose limits it counts against; 0 where there are no keys.
    """

    __slots__ = (
        "_active",
        "_breather",
        "_rest",
        "body",
        "chunked",
        "cors",
        "disconnected",
        "expect_continue",
        "flow",
        "headers",
        "id_is_given",
        "keep_alive",
        "message_event",
        "more_body",
        "on_cut",
        "on_disconnect",
        "on_writable",
        "protocol",
        "refusal",
        "request_id",
        "response_complete",
        "response_started",
        "route",
        "tenant",
        "transport",
    )

    def __init__(
        self,
        protocol: DirectHttpProtocol,
        route: Route | None,
        headers: list[tuple[bytes, bytes]],
        *,
        chunked: bool,
        keep_alive: bool,
        expect_continue: bool,
        refusal: RequestError | None = None,
        tenant: int = 0,
        cors: bytes = b"",
    ) -> None:
        self.protocol = protocol
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.route = route
        self.headers = headers
        self.chunked = chunked
        self.keep_alive = keep_alive
        self.expect_continue = expect_continue
        self.body = bytearray()
        self.more_body = True
        self.refusal = refusal
        self.tenant = tenant
        self.cors = cors
        self.response_started = False
        self.response_complete = False
        self.disconnected = False
        self.message_event = _NO_EVENT
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.on_cut: Callable[[RequestError], None] | None = None
        self.request_id: str | None = None
        self.id_is_given = False
        self._active = False
        self._breather = BREATHER
        self._rest: deque[memoryview[int]] | None = None

    # What the protocol calls.

    def start(self) -> None:
        """Take the connection's turn: earlier requests on it have been answered."""
        self._active = True
        if self.refusal is not None:
            self.send_error(self.refusal)
        elif not self.more_body:
            self._call_route()
        elif self.expect_continue and not self.body:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def feed(self, data: bytes) -> None:
        """Take a part of the body."""
        if self.response_complete or self.refusal is not None:
            return
        limit = self.protocol.server_state.max_body_bytes
        if len(self.body) + len(data) > limit:
            self.refuse(body_too_large(limit))
        else:
            self.body += data
            if len(self.body) >= self._breather:
                # A client that sends faster than this process reads would have the loop to itself.
                self._breather += BREATHER
                self.flow.pause_reading()
                self.protocol.loop.call_soon(self.flow.resume_reading)

    def body_complete(self) -> None:
        """Take the end of the body."""
        self.more_body = False
        if self._active and not self.response_complete:
            self._call_route()

    def refuse(self, error: RequestError) -> None:
        """Answer with an error when the exchange's turn has come, and close; nothing more of the body is kept."""
        self.refusal = error
        self.keep_alive = False
        self.body = bytearray()
        if self._active:
            self.send_error(error)

    def disconnect(self) -> None:
        """Tell whoever works on the answer that nobody waits for it any more."""
        if self.disconnected or self.response_complete:
            return
        self.disconnected = True
        callback = self.on_disconnect
        self._forget()
        if callback is not None:
            callback()

    def cut(self, error: RequestError) -> None:
        """End an unfinished answer with an error, because a drain's time is up."""
        self.keep_alive = False
        abort = self.on_disconnect
        if self.on_cut is not None:
            self.on_cut(error)
        elif not self.response_started:
            self.send_error(error)
        if abort is not None:
            abort()

    # What routes call.

    def header(self, name: bytes) -> bytes | None:
        """Return the first header of a (lower-case) name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def respond(self, status: int, body: bytes, content_type: bytes = JSON, extra: bytes = b"") -> None:
        """Send the whole answer.

        Parameters
        ----------
        status : int
            HTTP status.
        body : bytes
            Content.
        content_type : bytes
            Its type.
        extra : bytes
            Further header lines, each with its line end.
        """
        if self.response_complete or self.disconnected:
            return
        self.response_started = True
        head = self._head(status, b"content-type: %b\r\ncontent-length: %d\r\n%b" % (content_type, len(body), extra))
        if len(body) <= PIECE:
            self.transport.write(head + body)
            self._complete()
        else:
            self._begin_rest(head, [body])

    def respond_in_blocks(self, status: int, blocks: list[bytes]) -> None:
        """Send the whole answer, which is JSON: joined, a hundred megabytes of it would take too long."""
        if len(blocks) == 1:
            self.respond(status, blocks[0])
        elif not (self.response_complete or self.disconnected):
            self.response_started = True
            size = sum(map(len, blocks))
            self._begin_rest(self._head(status, b"content-type: %b\r\ncontent-length: %d\r\n" % (JSON, size)), blocks)

    def respond_no_content(self, extra: bytes) -> None:
        """Send an answer without content.

        Parameters
        ----------
        extra : bytes
            Further header lines, each with its line end.
        """
        self.response_started = True
        self.transport.write(self._head(204, extra))
        self._complete()

    def send_error(self, error: RequestError) -> None:
        """Send an error as the whole answer."""
        self.respond(error.status, error_body(error), JSON, error_lines(error.status))

    def write_events(self, data: bytes) -> None:
        """Send events of a stream; the first call sends the head too, in the same write."""
        if self.disconnected:
            return
        frame = b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data
        if not self.response_started:
            frame = self._stream_head() + frame
        self.transport.write(frame)

    def write_delta(self, before: bytes, delta: bytes, after: bytes) -> None:
        """Send one event of a stream that has begun, in three parts."""
        if self.disconnected:
            return
        if self.chunked:
            size = len(before) + len(delta) + len(after)
            self.transport.write(b"%x\r\n%b%b%b\r\n" % (size, before, delta, after))
        else:
            self.transport.write(before + delta + after)

    def end_events(self, data: bytes) -> None:
        """Send the last events of a stream, and its end."""
        if self.disconnected or self.response_complete:
            return
        frame = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if self.chunked else data
        if not self.response_started:
            frame = self._stream_head() + frame
        self.transport.write(frame)
        self._complete()

    def end_with_error(self, error: RequestError, events: bytes = b"") -> None:
        """End with an error: as the answer, or as an event where a stream has begun."""
        if self.response_started:
            self.end_events(events + sse.event(error_body(error)) + sse.DONE)
        else:
            self.send_error(error)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Let a task go on with the answer, where a route must wait for something first.

        Parameters
        ----------
        work : coroutine
            Answers, or raises `RequestError`; it is cancelled when the client leaves.
        """
        task = self.protocol.loop.create_task(self._run(work))
        self.protocol.tasks.add(task)
        task.add_done_callback(self.protocol.tasks.discard)
        self.on_disconnect = _canceller(task)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RequestError as error:
            self.send_error(error)
        except Exception:
            self._fail()

    def drop(self) -> None:
        """Break the connection, because its client does not read."""
        self.disconnect()
        self.transport.abort()

    # Inside.

    def _call_route(self) -> None:
        assert self.route is not None
        try:
            self.route(self)
        except RequestError as error:
            self.send_error(error)
        except Exception:
            self._fail()

    def _fail(self) -> None:
        logger.exception("a route failed")
        if self.response_started:
            self.drop()
        else:
            self.send_error(internal_error())

    def _head(self, status: int, lines: bytes) -> bytes:
        parts = [STATUS_LINE[status], self.protocol.server_state.date_line, lines]
        if self.request_id is not None:
            parts.append(b"x-request-id: %b\r\n" % self.request_id.encode())
        if self.cors:
            parts.append(self.cors)
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)

    def _stream_head(self) -> bytes:
        self.response_started = True
        if self.chunked:
            return self._head(200, _STREAM_HEADERS + b"transfer-encoding: chunked\r\n")
        self.keep_alive = False
        return self._head(200, _STREAM_HEADERS)

    def _begin_rest(self, head: bytes, blocks: list[bytes]) -> None:
        self.transport.write(head)
        self._rest = deque(memoryview(block) for block in blocks)
        self.on_writable, self.on_cut = self._write_rest, self._cut_rest
        self._write_rest()

    def _write_rest(self) -> None:
        """Write as much of a large answer as the connection takes."""
        while self._rest and not self.flow.write_paused and not self.disconnected:
            block = self._rest.popleft()
            if len(block) > PIECE:
                self._rest.appendleft(block[PIECE:])
                block = block[:PIECE]
            self.transport.write(block)
        if not self._rest and not (self.disconnected or self.response_complete):
            self._complete()

    def _cut_rest(self, error: RequestError) -> None:
        self.drop()

    def _complete(self) -> None:
        self.response_complete = True
        self.body = bytearray()
        self._forget()
        if not self.keep_alive:
            self.protocol.close_after_answer(unread=self.more_body)
        self.protocol.on_response_complete()

    def _forget(self) -> None:
        # The callbacks lead back here; a cycle would wait for the garbage collector.
        self.on_disconnect = self.on_writable = self.on_cut = None
        self._rest = None
