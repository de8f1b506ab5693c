"""What the load generator notes about an answer, however it is split into reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from multitok.bench.connection import LoadConnection, Sample, now

USAGE = b'{"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(data: bytes) -> bytes:
    return chunk(b"data: %b\n\n" % data)


# The second event's text looks like what is searched for, but is text.
TRICKY = rb'{"choices":[{"delta":{"content":"\ndata: {\"content\":\"x\"} \"content\": \"y"}}]}'
STREAM = [
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    event(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}'),
    event(b'{"choices":[{"delta":{"content": "one"}}]}'),
    event(TRICKY),
    event('{"choices":[{"delta":{"reasoning_content":"é"}}]}'.encode()),
    event(b'{"choices":[],"usage":%b}' % USAGE),
    event(b"[DONE]"),
    b"0\r\n\r\n",
]


class Transport:
    """Takes what is sent, and notes the end."""

    def __init__(self) -> None:
        self.sent = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.aborted = True


def receive(pieces: list[bytes], *, stream: bool = True, api: str = "chat") -> tuple[Sample, Transport, LoadConnection]:
    async def run() -> tuple[Sample, Transport, LoadConnection]:
        connection, transport = LoadConnection(api), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        sample = Sample(now())
        done = connection.send(b"request", stream, sample)
        for piece in pieces:
            assert not done.done()
            connection.data_received(piece)
        if not done.done():
            connection.connection_lost(None)
        await done
        return sample, transport, connection

    return asyncio.run(run())


def check_stream(sample: Sample) -> None:
    assert sample.error is None
    assert (len(sample.times), sample.events) == (3, 6)
    assert (sample.prompt_tokens, sample.output_tokens, sample.cached_tokens) == (9, 3, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 64, 10_000])
def test_events_are_counted_however_they_are_split(size: int) -> None:
    whole = b"".join(STREAM)
    sample, transport, connection = receive([whole[i : i + size] for i in range(0, len(whole), size)])
    check_stream(sample)
    assert sample.reads == -(-len(whole) // size)
    assert sample.size == len(whole)
    assert transport.sent == b"request"
    assert not connection.closed


def test_events_with_text_have_their_times() -> None:
    sample, _, _ = receive(STREAM)
    check_stream(sample)
    assert sample.start < sample.times[0] < sample.times[1] < sample.times[2] < sample.end


def test_a_connection_is_used_again() -> None:
    async def run() -> None:
        connection = LoadConnection("chat")
        connection.connection_made(Transport())  # type: ignore[arg-type]
        for _ in range(3):
            sample = Sample(now())
            done = connection.send(b"request", True, sample)
            connection.data_received(b"".join(STREAM))
            await done
            check_stream(sample)

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 10_000])
def test_plain_answer(size: int) -> None:
    body = b'{"choices":[{"text":"one two three"}],"usage":%b}' % USAGE
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    sample, _, _ = receive(pieces, stream=False, api="completions")
    assert sample.error is None
    assert not sample.times
    assert (sample.prompt_tokens, sample.output_tokens) == (9, 3)


def test_refusal() -> None:
    answer = b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9\r\n\r\n{"a": 12}'
    sample, transport, connection = receive([answer])
    assert (sample.error, sample.detail) == ("HTTP 503", '{"a": 12}')
    assert not transport.aborted
    assert not connection.closed


@pytest.mark.parametrize("kept", range(len(STREAM)))
def test_connection_lost(kept: int) -> None:
    sample, transport, connection = receive(STREAM[:kept])
    assert sample.error == "connection lost"
    assert connection.closed
    assert transport.aborted


def test_stream_without_end() -> None:
    sample, _, _ = receive([*STREAM[:-2], STREAM[-1]])
    assert sample.error == "stream without end"


def test_error_in_stream() -> None:
    sample, _, _ = receive([*STREAM[:3], event(b'{"error":{"message":"broken"}}'), *STREAM[-2:]])
    assert sample.error == "error in stream"
    assert "broken" in sample.detail


def test_no_http() -> None:
    sample, _, connection = receive([b"SSH-2.0-OpenSSH\r\n"])
    assert sample.error == "bad response"
    assert connection.closed


def test_the_last_answer_of_a_connection(scripted: Callable[..., Any]) -> None:
    body = b'{"usage":%b}' % USAGE
    sample, transport, connection = receive(
        [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)], stream=False
    )
    assert sample.error is None
    assert connection.closed
    assert transport.aborted
