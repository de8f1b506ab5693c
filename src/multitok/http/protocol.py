"""The connection: uvicorn's httptools protocol, with the hot routes served past ASGI.

uvicorn keeps what it is good at: parsing, keep-alive, flow control, the ASGI cycle for every other route. What differs
here is stated at each method.
"""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from multitok.http.cors import Headers, as_lines
from multitok.http.errors import error_body
from multitok.http.exchange import HttpExchange, Route, body_too_large
from multitok.http.gate import Gate
from multitok.http.limits import DISCARDED_BODY
from multitok.http.parsing import ParsingProtocol
from multitok.http.slow_client import SlowClientWatch
from multitok.http.state import DirectServerState
from multitok.tokenizer.requests import RequestError

logger = logging.getLogger(__name__)

# Requests that may wait on one connection before reading pauses. Reading on is what notices a client that leaves.
PIPELINE_LIMIT = 8
# How long unread input is thrown away after a last answer: closing at once would reset the connection under it.
LINGER_SECONDS = 5.0
# How long a client with TLS has to answer the end of an idle connection.
TLS_GOODBYE_SECONDS = 0.5
# Once around the loop: whatever has arrived is parsed.
ONCE_AROUND = 0.001
SHUTTING_DOWN = "the server is shutting down"

# Stands in for a request that is not answered yet, where uvicorn would otherwise begin with the next one.
_UNANSWERED: Any = SimpleNamespace(response_complete=False)
# The connection can't go on after these.
_CLOSING_STATUS = (413, 431)


class _AsgiTransport:
    """The transport of an ASGI cycle, which closes it after a last answer: what the client still sends is read first.

    Parameters
    ----------
    protocol : DirectHttpProtocol
        Of the connection.
    """

    def __init__(self, protocol: DirectHttpProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        """Close once what was written has gone out."""
        self._protocol.close_after_asgi()


class DirectHttpProtocol(ParsingProtocol):
    """A connection whose hot routes write straight to the transport."""

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
        # Nothing is answered any more.
        self._ended = False
        # An idle connection's time is up, and what has arrived meanwhile is looked at a last time.
        self._last_look = False
        self._client_watch: SlowClientWatch | None = None
        self._gate = Gate(server_state)

    # Connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the time for the first request's head; a connection that never sends anything is closed."""
        super().connection_made(transport)
        # With TLS it would be eight times as much.
        transport.set_write_buffer_limits(HIGH_WATER_LIMIT)
        state = self.server_state
        patience = min(self.timeout_keep_alive, state.receive_timeout)
        self._read_deadline.set(patience if state.drain_grace is None else min(patience, state.drain_grace))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every unfinished request of the connection, not only the one that was parsed last."""
        self._leave()
        super().connection_lost(exc)
        self._read_deadline.close()
        if self._client_watch is not None:
            self._client_watch.close()
            self._client_watch = None
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

    def pause_writing(self) -> None:
        """Give the client time to take what waits."""
        super().pause_writing()
        self._watch_client()

    def resume_writing(self) -> None:
        """Let the stream write what it merged meanwhile, then start what waited for room."""
        super().resume_writing()
        if self._client_watch is not None and not self.transport.is_closing():
            self._client_watch.end()
        active = self._active
        if isinstance(active, HttpExchange) and active.on_writable is not None:
            active.on_writable()
        self._start_next()

    def _watch_client(self) -> None:
        if self.transport.get_write_buffer_size() == 0:
            return
        if self._client_watch is None:
            timeout = self.server_state.slow_client_timeout
            self._client_watch = SlowClientWatch(self.loop, self.transport, timeout, self._drop)
        self._client_watch.begin()

    def _drop(self) -> None:
        logger.debug("a client does not read in time: dropped")
        self._leave()
        self.transport.abort()

    def _on_read_due(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        elif self._ended:
            self._close_idle()
        elif self._discarding:
            # Closes when what runs has been answered.
            return
        elif self._receiving:
            if self.flow.read_paused:
                self._read_deadline.set(self.server_state.receive_timeout)
            else:
                self._refuse_message(RequestError(408, "the request took too long to arrive"))
        elif self._last_look:
            self._close_idle()
        else:
            self._last_look = True
            self._read_deadline.set(ONCE_AROUND)

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
        if not (unread or self._discarding):
            self._close()
            return
        self._discarding = self._ended = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._read_deadline.set(LINGER_SECONDS)

    def close_after_asgi(self) -> None:
        """Close after the answer of an ASGI cycle that runs, whether it has looked at the whole body or not."""
        self.close_after_answer(unread=self._active is not None and self._active.more_body)

    def _close(self) -> None:
        """Close, without waiting for ever for a client that does not read."""
        if not self.transport.is_closing():
            self._watch_client()
            self._read_deadline.clear()
            self.transport.close()

    def _close_idle(self) -> None:
        self._close()
        if self.scheme == "https":
            # A client that looks at its idle connections only when it needs them does not say goodbye.
            self._read_deadline.set(TLS_GOODBYE_SECONDS)

    # What parsing finds.

    def _refuse_message(self, error: RequestError) -> None:
        """Answer with the error where it is this connection's turn; requests before this one are still answered."""
        if self._discarding or self.transport.is_closing():
            # Behind a request that was the last, in the same data.
            return
        logger.debug("%s", error.message)
        cycle: Any = self.cycle
        if cycle is not None and cycle.more_body and self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
            cycle = self.pipeline[0][0] if self.pipeline else self._active
            self.cycle = cycle
        if cycle is None or cycle.response_complete:
            if self._receiving and not self._in_head:
                # It was answered before its body was there.
                self.close_after_answer(unread=True)
            else:
                self._send_error(error)
        elif cycle is self._active and cycle.more_body:
            cycle.keep_alive = False
            if isinstance(cycle, HttpExchange):
                cycle.send_error(error)
            else:
                self._leave()
                if cycle.response_started:
                    self._close()
                else:
                    self._send_error(error)
        else:
            cycle.keep_alive = False
            self._discarding = True

    def _send_error(self, error: RequestError) -> None:
        """Answer in the error format of the API to what is no request, and close."""
        body = error_body(error)
        self.transport.write(
            b"%b%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[error.status], self.server_state.date_line, len(body), body)
        )
        self.close_after_answer(unread=True)

    def on_headers_complete(self) -> None:
        """Make an exchange for a hot route and for what is refused, and an ASGI cycle for everything else."""
        parser, state = self.parser, self.server_state
        if parser.should_upgrade() or self.transport.is_closing() or self._discarding:
            return
        url = self.url if self.url.startswith(b"/") else httptools.parse_url(self.url).path or b"/"
        self._begin_body()
        path, method = url.partition(b"?")[0], parser.get_method()
        route = state.routes.get(path) if method == b"POST" else None
        cors: Headers = []
        if state.cors is not None:
            cors = state.cors.headers(self.noted.get(b"origin"))
            if cors and method == b"OPTIONS" and self._has_header(b"access-control-request-method"):
                route = state.cors.preflight
        broken = refusal = self._head_problem()
        if broken is None:
            refusal = self._gate.check(path, self.headers, self.noted, route is not None and method == b"OPTIONS")
        previous = self.cycle
        busy = previous is not None and not previous.response_complete
        # A client that does not read is not answered either.
        unread = self.flow.write_paused and not busy
        busy = busy or unread
        direct = route is not None or refusal is not None
        if direct:
            self.cycle = self._exchange(route, refusal, as_lines(cors) if cors else b"")  # type: ignore[assignment]
            if busy:
                self.pipeline.appendleft((self.cycle, self.app))
        else:
            self.scope["state"] |= {"access": self._gate.access, "cors": cors}
            self._begin_asgi(previous, unread)
            if not busy:
                self._active = self.cycle
        if broken is not None or state.drain_grace is not None:
            self.cycle.keep_alive = False
        if busy:
            self._regulate_reading()
        elif direct:
            self._begin(self.cycle)

    def _begin_asgi(self, previous: Any, unread: bool) -> None:
        if unread:
            self.cycle = _UNANSWERED
        try:
            super().on_headers_complete()
        except Exception:
            # A path that can't be: the head is what is broken, and there is no cycle for it.
            self.cycle, self._in_head = previous, True
            raise
        transport: Any = _AsgiTransport(self)
        self.cycle.transport = transport

    def _has_header(self, name: bytes) -> bool:
        return any(key == name for key, _ in self.headers)

    def _exchange(self, route: Route | None, refusal: RequestError | None, cors: bytes = b"") -> HttpExchange:
        http11 = self.parser.get_http_version() == "1.1"
        return HttpExchange(
            self,
            route,
            self.headers,
            chunked=http11,
            keep_alive=http11 and self.parser.should_keep_alive() and (refusal is None or self._goes_on(refusal)),
            expect_continue=self.expect_100_continue,
            refusal=refusal,
            tenant=self._gate.access.tenant,
            cors=cors,
        )

    def _goes_on(self, refusal: RequestError) -> bool:
        """Whether a refused request's body is thrown away, and the connection kept."""
        if refusal.status in _CLOSING_STATUS or b"transfer-encoding" in self.noted or self.expect_100_continue:
            return False
        return int(self.noted.get(b"content-length", 0)) <= DISCARDED_BODY

    def on_body(self, body: bytes) -> None:
        """Feed an exchange; uvicorn's cycle gets the body its way."""
        self._count_body(len(body))
        if self._skips_message():
            return
        cycle: Any = self.cycle
        if isinstance(cycle, HttpExchange):
            cycle.feed(body)
            if cycle is not self._active:
                self._regulate_reading()
            return
        if self._body_size <= self.server_state.max_body_bytes:
            super().on_body(body)
        elif not cycle.response_complete:
            self._refuse_asgi_body(cycle)

    def _refuse_asgi_body(self, cycle: Any) -> None:
        """Put an exchange that answers 413 in the place of an ASGI cycle, which is told that the client left."""
        limit = self.server_state.max_body_bytes
        exchange: Any = self._exchange(None, body_too_large(limit))
        exchange.keep_alive = False
        self.cycle = exchange
        if cycle is not self._active:
            self.pipeline[0] = (exchange, self.app)
            return
        cycle.disconnected = True
        cycle.message_event.set()
        self._active = exchange
        if cycle.response_started:
            self._close()
        else:
            exchange.start()

    def on_message_complete(self) -> None:
        """Call an exchange's route when its turn has come."""
        self._end_message()
        if self._skips_message():
            return
        if self._active is None and not self.pipeline:
            # It was answered before its body was there.
            self._wait_for_request()
        else:
            self._read_deadline.clear()
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
        if self.transport.is_closing():
            self._watch_client()
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
        if not self._receiving:
            self._read_deadline.clear()
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
        if self._receiving or self._ended:
            return
        grace = self.server_state.drain_grace
        self._last_look = False
        self._read_deadline.set(self.timeout_keep_alive if grace is None else grace)

    # Drain.

    def shutdown(self) -> None:
        """Begin to drain: the connection's next answer, if it has not begun yet, is its last."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._wait_for_request()
        elif not cycle.response_started:
            cycle.keep_alive = False

    def cut(self) -> bool:
        """End what has not finished in time; returns whether there was a request.

        The task of an ASGI request is cancelled by the server, and answers then, unless its answer has begun.
        """
        active = self._active
        self.pipeline.clear()
        if active is None:
            self._close_idle()
            return False
        active.keep_alive = False
        if isinstance(active, HttpExchange):
            active.cut(RequestError(503, SHUTTING_DOWN))
        elif active.response_started:
            self._drop()
        return True
