"""The connection: uvicorn's httptools protocol, with the hot routes served past ASGI.

uvicorn keeps what it is good at: parsing, keep-alive, flow control, the ASGI cycle for every other route. What differs
here is stated at each method.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from multitok.http.errors import error_body
from multitok.http.exchange import HttpExchange, Route
from multitok.http.state import DirectServerState
from multitok.tokenizer.requests import RequestError

logger = logging.getLogger(__name__)

# Requests that may wait on one connection before reading pauses. Reading on is what notices a client that leaves.
PIPELINE_LIMIT = 8
# How long unread input is thrown away after a last answer: closing at once would reset the connection under it.
LINGER_SECONDS = 5.0
SHUTTING_DOWN = "the server is shutting down"


class DirectHttpProtocol(HttpToolsProtocol):
    """A connection whose hot routes write straight to the transport."""

    server_state: DirectServerState

    def __init__(
        self,
        config: Config,
        server_state: DirectServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._active: Any = None
        self._starting = False
        # A message has begun and has not ended.
        self._receiving = False
        # Input is thrown away.
        self._discarding = False
        # Nothing is answered any more.
        self._ended = False
        self._body_size = 0

    # Connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Arm the idle timer too: a connection that never sends anything is closed."""
        super().connection_made(transport)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every unfinished request of the connection, not only the one that was parsed last."""
        self._leave()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        # An exchange refers back to its connection; apart, both go at once.
        self.cycle = self._active = None  # type: ignore[assignment]
        self.server_state.on_closed(self)

    def eof_received(self) -> None:
        """Take a half-closed connection for a client that left, as uvicorn does; the transport closes itself."""
        self._leave()

    def _leave(self) -> None:
        waiting: list[Any] = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        if self._active is not None:
            waiting.append(self._active)
        for cycle in waiting:
            if isinstance(cycle, HttpExchange):
                cycle.disconnect()
            elif not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def resume_writing(self) -> None:
        """Let the stream write what it merged meanwhile, then start what waited for room."""
        super().resume_writing()
        active = self._active
        if isinstance(active, HttpExchange) and active.on_writable is not None:
            active.on_writable()
        self._start_next()

    def close_after_answer(self, unread: bool = False) -> None:
        """Close once what was written has gone out.

        Parameters
        ----------
        unread : bool
            The client may still be sending. What comes is thrown away for a while, since closing would reset the
            connection, and the client would see that in place of the answer.
        """
        if self.transport.is_closing():
            return
        if not (unread or self._discarding) or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._discarding = self._ended = True
        self.flow.resume_reading()
        self.transport.write_eof()
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(LINGER_SECONDS, self.timeout_keep_alive_handler)

    # Parsing.

    def data_received(self, data: bytes) -> None:
        """Parse; an upgrade that is not offered here is ignored, as RFC 9110 allows, and the request is served."""
        if self._discarding:
            return
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as exc:
                if self.parser.get_method() == b"CONNECT":
                    self._malformed("CONNECT is not supported.")
                    return
                # The parser skips the body of such a request; it gets the head again, without the upgrade.
                data = self._head_without_upgrade() + data[exc.args[0] :]
                self._new_parser()
            except httptools.HttpParserError as exc:
                if isinstance(exc, httptools.HttpParserCallbackError) and not isinstance(
                    exc.__context__, httptools.HttpParserError | UnicodeError
                ):
                    logger.error("a parser callback failed", exc_info=exc.__context__)
                self._malformed("Invalid HTTP request received.")
                return
            else:
                return

    def _new_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name in (b"upgrade", b"http2-settings"):
                continue
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(t for t in tokens if t.lower() not in (b"upgrade", b"http2-settings"))  # noqa: PLW2901
                if not value:
                    continue
            lines.append(b"%b: %b\r\n" % (name, value))
        lines.append(b"\r\n")
        return b"".join(lines)

    def _malformed(self, message: str) -> None:
        """Answer 400 where it is this connection's turn; requests before the broken one are still answered."""
        logger.debug("%s", message)
        cycle = self.cycle
        if cycle is not None and cycle.more_body and self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
            cycle = self.pipeline[0][0] if self.pipeline else self._active
            self.cycle = cycle
        if cycle is None or cycle.response_complete:
            self.send_400_response(message)
        elif cycle is self._active and cycle.more_body:
            if isinstance(cycle, HttpExchange):
                cycle.keep_alive = False
                cycle.send_error(RequestError(400, message))
            else:
                cycle.keep_alive = False
                self._leave()
                if cycle.response_started:
                    self.transport.close()
                else:
                    self.send_400_response(message)
        else:
            cycle.keep_alive = False
            self._discarding = True

    def send_400_response(self, msg: str) -> None:
        """Answer in the error format of the API."""
        body = error_body(RequestError(400, msg))
        self.transport.write(
            b"%b%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[400], self.server_state.date_line, len(body), body)
        )
        self.close_after_answer(unread=True)

    def on_message_begin(self) -> None:
        """Note that a request is coming in, so that a drain does not take the connection for idle."""
        super().on_message_begin()
        self._receiving = True

    def on_headers_complete(self) -> None:
        """Make an exchange for a hot route, and an ASGI cycle for everything else."""
        parser = self.parser
        if parser.should_upgrade() or self.transport.is_closing() or self._discarding:
            return
        url = self.url if self.url.startswith(b"/") else httptools.parse_url(self.url).path or b"/"
        route = self.server_state.routes.get(url.partition(b"?")[0]) if parser.get_method() == b"POST" else None
        previous = self.cycle
        busy = previous is not None and not previous.response_complete
        self._body_size = 0
        too_large = self._content_length() > self.server_state.max_body_bytes
        direct = route is not None or too_large
        if direct:
            self.cycle = self._exchange(route, too_large)  # type: ignore[assignment]
            if busy:
                self.pipeline.appendleft((self.cycle, self.app))
        else:
            super().on_headers_complete()
            if not busy:
                self._active = self.cycle
        if self.server_state.drain_grace is not None:
            self.cycle.keep_alive = False
        if busy:
            self._regulate_reading()
        elif direct:
            self._begin(self.cycle)

    def _content_length(self) -> int:
        return next((int(value) for name, value in self.headers if name == b"content-length"), 0)

    def _exchange(self, route: Route | None, too_large: bool) -> HttpExchange:
        http11 = self.parser.get_http_version() == "1.1"
        return HttpExchange(
            self,
            route,
            self.headers,
            chunked=http11,
            keep_alive=http11 and self.parser.should_keep_alive(),
            expect_continue=self.expect_100_continue,
            too_large=too_large,
        )

    def on_body(self, body: bytes) -> None:
        """Feed an exchange; uvicorn's cycle gets the body its way."""
        if self._skips_message():
            return
        cycle: Any = self.cycle
        if isinstance(cycle, HttpExchange):
            cycle.feed(body)
            if cycle is not self._active:
                self._regulate_reading()
            return
        self._body_size += len(body)
        if self._body_size <= self.server_state.max_body_bytes:
            super().on_body(body)
        elif not cycle.response_complete:
            self._refuse_asgi_body(cycle)

    def _refuse_asgi_body(self, cycle: Any) -> None:
        """Put an exchange that answers 413 in the place of an ASGI cycle, which is told that the client left."""
        exchange: Any = self._exchange(None, too_large=True)
        self.cycle = exchange
        if cycle is not self._active:
            self.pipeline[0] = (exchange, self.app)
            return
        cycle.disconnected = True
        cycle.message_event.set()
        self._active = exchange
        if cycle.response_started:
            self.transport.close()
        else:
            exchange.start()

    def on_message_complete(self) -> None:
        """Call an exchange's route when its turn has come."""
        self._receiving = False
        if self._skips_message():
            return
        cycle: Any = self.cycle
        if isinstance(cycle, HttpExchange):
            if not cycle.response_complete:
                cycle.body_complete()
        else:
            super().on_message_complete()

    def _skips_message(self) -> bool:
        return self.parser.should_upgrade() or self.transport.is_closing() or self._discarding

    # Pipeline.

    def on_response_complete(self) -> None:
        """Start the next request of the connection, of either kind."""
        self.server_state.total_requests += 1
        self._active = None
        self._start_next()

    def _start_next(self) -> None:
        # A loop and not a recursion: thousands of pipelined requests may be refused one after the other.
        if self._starting or self._active is not None:
            return
        self._starting = True
        try:
            while self._active is None and not self.transport.is_closing() and not self._ended:
                if not self.pipeline:
                    self.flow.resume_reading()
                    self._wait_for_request()
                    return
                if self.flow.write_paused:
                    return
                cycle, _ = self.pipeline.pop()
                self._begin(cycle)
        finally:
            self._starting = False

    def _begin(self, cycle: Any) -> None:
        self._unset_keepalive_if_required()
        self._active = cycle
        if isinstance(cycle, HttpExchange):
            cycle.start()
        else:
            task = self.loop.create_task(cycle.run_asgi(self.app))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
        if self._active is cycle:
            self._regulate_reading()

    def _regulate_reading(self) -> None:
        waiting = self.pipeline
        if len(waiting) > PIPELINE_LIMIT or sum(len(cycle.body) for cycle, _ in waiting) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _wait_for_request(self) -> None:
        grace = self.server_state.drain_grace
        self._unset_keepalive_if_required()
        if grace is not None and self._receiving:
            return
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive if grace is None else grace, self.timeout_keep_alive_handler
        )

    # Drain.

    def shutdown(self) -> None:
        """Begin to drain: the connection's next answer, if it has not begun yet, is its last."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            if not self._ended:
                self._wait_for_request()
        elif not cycle.response_started:
            cycle.keep_alive = False

    def cut(self) -> bool:
        """End what has not finished in time; returns whether there was a request.

        The task of an ASGI request is cancelled by the server, and answers then.
        """
        active = self._active
        self.pipeline.clear()
        if active is None:
            self.transport.close()
            return False
        active.keep_alive = False
        if isinstance(active, HttpExchange):
            active.cut(RequestError(503, SHUTTING_DOWN))
        return True
