"""One kept-alive connection, and what it notes about an answer: as little work per event as it can be.

A raw asyncio protocol: no task, future or JSON per event. Events are counted by their line starts, and those that carry
text by the first byte of it, in whole lines only; JSON has no raw line breaks, so text can't look like a line start.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections import deque
from typing import cast

import httptools

# Of an answer's text, per API. An escaped quote inside of JSON text has a backslash where these expect none.
TEXT = {
    "chat": re.compile(rb'"(?:reasoning_)?content": ?"[^"]'),
    "completions": re.compile(rb'"text": ?"[^"]'),
}
_COMPLETION = re.compile(rb'"completion_tokens": ?(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens": ?(\d+)')
_CACHED = re.compile(rb'"cached_tokens": ?(\d+)')
# Usage stands in the last blocks of an answer.
_BLOCKS_KEPT = 6
_ERROR_SHOWN = 300

now = time.perf_counter


class Sample:
    """One request as its client saw it; times are of `time.perf_counter`.

    Attributes
    ----------
    start, end : float
        When it was due, and when its answer was complete.
    times : array of float
        When each event with text came; of a plain answer, nothing.
    events : int
        Events of any kind, the closing one included.
    reads : int
        How often the socket had something to read.
    output_tokens, prompt_tokens, cached_tokens : int or None
        As the server counts them; None where it doesn't say.
    error : str or None
        What went wrong, by kind.
    detail : str
        What the server said about it.
    """

    __slots__ = (
        *("cached_tokens", "detail", "end", "error", "events", "output_tokens", "prompt_tokens", "reads", "size"),
        *("start", "times"),
    )

    def __init__(self, start: float) -> None:
        self.start = start
        self.end = start
        self.times = array("d")
        self.events = 0
        self.reads = 0
        self.size = 0
        self.output_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.error: str | None = None
        self.detail = ""


class LoadConnection(asyncio.Protocol):
    """A client's connection: one request after another.

    Parameters
    ----------
    api : str
        Which API's answers come: 'chat' or 'completions'.
    """

    def __init__(self, api: str) -> None:
        self._find_text = TEXT[api].findall
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False

    # What the load does

    def send(self, payload: bytes, stream: bool, sample: Sample) -> asyncio.Future[None]:
        """Send a request; the future is done when `sample` is complete."""
        assert self._transport is not None
        self._sample = sample
        self._stream = stream
        self._parts: list[bytes] = []
        self._last: deque[bytes] = deque(maxlen=_BLOCKS_KEPT)
        self._rest = b""
        self._complete = False
        self._kept = True
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        return waiter

    def abort(self) -> None:
        """Close at once; what comes after this is not noted."""
        self.closed = True
        self._waiter = None
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport."""
        # uvloop's transports are no subclasses.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take in what the server sent."""
        time_read = now()
        if self._waiter is None:
            return
        sample = self._sample
        sample.reads += 1
        sample.size += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("bad response", str(error))
            return
        if self._stream and self._parts:
            self._take_events(time_read)
        if self._complete:
            self._finish(time_read)

    def eof_received(self) -> None:
        """Nothing to do: `connection_lost` comes next."""

    def connection_lost(self, error: Exception | None) -> None:
        """End the request that waits."""
        self.closed = True
        if self._waiter is not None:
            self._fail("connection lost", str(error or "closed by the server before the answer was complete"))

    # What httptools calls

    def on_body(self, body: bytes) -> None:
        """Collect a piece of the body."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Note that the answer is complete, and what the parser forgets after it."""
        self._complete = True
        self._status = self._parser.get_status_code()
        self._kept = self._parser.should_keep_alive()

    def _take_events(self, time_read: float) -> None:
        parts = self._parts
        block = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._rest:
            block = self._rest + block
        if not block.endswith(b"\n"):
            cut = block.rfind(b"\n") + 1
            block, self._rest = block[:cut], block[cut:]
        else:
            self._rest = b""
        if not block:
            return
        sample = self._sample
        sample.events += block.count(b"\ndata:") + block.startswith(b"data:")
        found = len(self._find_text(block))
        if found == 1:
            sample.times.append(time_read)
        elif found:
            sample.times.extend([time_read] * found)
        if b'data: {"error"' in block:
            sample.error, sample.detail = "error in stream", block[:_ERROR_SHOWN].decode(errors="replace")
        self._last.append(block)

    def _finish(self, time_read: float) -> None:
        sample = self._sample
        sample.end = time_read
        body = b"".join([*self._last, self._rest, *self._parts])
        if self._status != 200:
            self._fail(f"HTTP {self._status}", body[:_ERROR_SHOWN].decode(errors="replace"))
            return
        sample.output_tokens = _last_number(_COMPLETION, body)
        sample.prompt_tokens = _last_number(_PROMPT, body)
        sample.cached_tokens = _last_number(_CACHED, body)
        if self._stream and sample.error is None and b"data: [DONE]" not in body:
            sample.error = "stream without end"
        self._done()

    def _fail(self, kind: str, detail: str) -> None:
        self._sample.end = now()
        self._sample.error, self._sample.detail = kind, detail
        self._done()
        if not kind.startswith("HTTP "):
            self.abort()

    def _done(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if not self._kept:
            self.abort()


def _last_number(pattern: re.Pattern[bytes], body: bytes) -> int | None:
    found = pattern.findall(body)
    return int(found[-1]) if found else None
