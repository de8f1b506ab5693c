"""From bytes to messages, within limits of size and time: uvicorn's httptools protocol, watched.

httptools has no limits and says nothing before a header is whole, so what arrives is counted here; and a message that
has begun must come on. One timer per connection serves all of that (see `Deadline`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from multitok.http.deadline import Deadline
from multitok.http.limits import BODY_STEP, FRAMES_PER_BYTE
from multitok.http.state import DirectServerState
from multitok.tokenizer.requests import RequestError

logger = logging.getLogger(__name__)

INVALID = "Invalid HTTP request received."

# Each may come once: of two, somebody before this server may have looked at the other.
_NOTED = frozenset(
    (b"authorization", b"content-length", b"host", b"origin", b"transfer-encoding", b"x-api-key", b"x-request-id")
)


class ParsingProtocol(HttpToolsProtocol):
    """A connection's receiving side.

    Attributes
    ----------
    noted : dict of bytes to bytes
        Of the message's headers those that the connection itself looks at.
    """

    server_state: DirectServerState

    def __init__(
        self,
        config: Config,
        server_state: DirectServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.noted: dict[bytes, bytes] = {}
        # One of them that came twice.
        self._repeated: bytes | None = None
        # A message has begun and has not ended; its head has not ended.
        self._receiving = self._in_head = False
        # Input is thrown away.
        self._discarding = False
        # Bytes of the message before the data that is being parsed, and the size of that.
        self._wire = self._fed = 0
        self._body_size = 0
        # What the body must reach before its time is up.
        self._body_mark = BODY_STEP
        # The time for what is being received has begun; for a connection's first head, with the connection.
        self._timed = True
        self._read_deadline = Deadline(self.loop, self._on_read_due)

    @abstractmethod
    def _refuse_message(self, error: RequestError) -> None:
        """End the connection over a message that is broken, too large or too slow."""

    @abstractmethod
    def _on_read_due(self) -> None:
        """Nothing came in time."""

    def data_received(self, data: bytes) -> None:
        """Parse; an upgrade that is not offered here is ignored, as RFC 9110 allows, and the request is served."""
        if self._discarding:
            return
        self._fed = len(data)
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as exc:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse_message(RequestError(400, "CONNECT is not supported."))
                    return
                # The parser skips the body of such a request; it gets the head again, without the upgrade.
                data = self._head_without_upgrade() + data[exc.args[0] :]
                self._new_parser()
            except httptools.HttpParserError as exc:
                if isinstance(exc, httptools.HttpParserCallbackError) and not isinstance(
                    exc.__context__, httptools.HttpParserError | UnicodeError
                ):
                    logger.error("a parser callback failed", exc_info=exc.__context__)
                self._refuse_message(RequestError(400, INVALID))
                return
            else:
                break
        self._wire += self._fed
        if self._receiving and not self._discarding:
            self._watch_message()

    def _watch_message(self) -> None:
        """See to it that an unfinished message comes on, and that what was kept of it stays small."""
        state = self.server_state
        if not self._timed:
            self._timed = True
            self._read_deadline.set(state.receive_timeout)
        if self._in_head:
            if self._wire > state.max_header_bytes:
                self._refuse_message(head_too_large(state.max_header_bytes))
        elif self._wire - FRAMES_PER_BYTE * self._body_size > state.max_header_bytes + self._fed:
            self._refuse_message(RequestError(400, "the chunks of the body have more frame than content"))

    def _head_problem(self) -> RequestError | None:
        """Say what is wrong with a head, whatever it asks for; the connection can't go on after it.

        What the parser lets pass and others may read in another way is refused here.
        """
        limit = self.server_state.max_header_bytes
        # Negative: the message begins in the middle of the data.
        if not 0 <= self._wire <= limit - self._fed:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > limit:
                return head_too_large(limit)
        noted = self.noted
        if self._repeated is not None:
            return RequestError(400, f"the header {self._repeated.decode().title()} may come only once")
        if b"host" not in noted and self.parser.get_http_version() != "1.0":
            return RequestError(400, "the header Host is missing")
        if b"transfer-encoding" in noted and noted[b"transfer-encoding"].lower() != b"chunked":
            return RequestError(400, "Transfer-Encoding: must be chunked and nothing else")
        return None

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

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Begin to take down a message."""
        super().on_message_begin()
        self._receiving = self._in_head = True
        self.noted = {}
        self._repeated = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take down a header; those behind a chunked body are ignored."""
        if not self._in_head:
            return
        name = name.lower()
        self.headers.append((name, value))
        if name in _NOTED:
            if name in self.noted:
                self._repeated = name
            self.noted[name] = value
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True

    def _begin_body(self) -> None:
        """Note the end of the head."""
        self._in_head = self._timed = False
        self._body_size = 0
        self._body_mark = BODY_STEP

    def _count_body(self, size: int) -> None:
        """Note a part of the body, which has time again for the next step."""
        self._body_size += size
        if self._body_size >= self._body_mark:
            self._body_mark = self._body_size + BODY_STEP
            self._timed = False

    def _end_message(self) -> None:
        """Note the end of the message."""
        self._receiving = self._timed = False
        self._wire = -self._fed


def head_too_large(limit: int) -> RequestError:
    """Make the refusal of a head that is larger than a limit in bytes."""
    return RequestError(431, f"the request's line and headers are larger than the limit of {limit} bytes")
