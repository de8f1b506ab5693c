"""Streams: frames, merging while the client does not read, errors in the middle."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator

import msgspec
import pytest
from http_double import WAIT, Connection, DoubleManager, RunningServer, chat, running

from multitok.messages.base import FinishReason

CHAT = "/v1/chat/completions"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running(DoubleManager()) as server:
        yield server


def deltas(events: list[bytes], index: int = 0) -> str:
    choices = [c for event in events for c in msgspec.json.decode(event)["choices"] if c["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_one_chunk_per_step(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.post(CHAT, chat(stream=True, n=2))
        submission = server.manager.next_submission()
        server.call(submission.step, "a")
        status, headers = connection.read_head()
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        first = connection.read_chunk()
        assert first.count(b"data: ") == 4
        assert first.count(b'"role":"assistant"') == 2
        server.call(submission.step, "b")
        assert connection.read_chunk().count(b"data: ") == 2
        server.call(submission.finish, "c")
        last = connection.read_chunk()
        assert last.count(b'"finish_reason":"stop"') == 2
        assert last.endswith(b"data: [DONE]\n\n")
        assert connection.read_chunk() == b""


def test_nothing_is_sent_while_text_is_held_back(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.post(CHAT, chat(stream=True))
        submission = server.manager.next_submission()
        server.call(submission.step, "")
        server.call(submission.step, "x")
        server.call(submission.step, "")
        server.call(submission.finish, "")
        events = connection.read().events()
        assert len(events) == 4
        assert deltas(events[:-1]) == "x"


def test_failure_before_the_first_output_has_its_status(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.post(CHAT, chat(stream=True))
        server.call(server.manager.next_submission().fail, 503, "full")
        answer = connection.read()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "overloaded"


def test_failure_in_the_middle_is_an_event(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.post(CHAT, chat(stream=True))
        submission = server.manager.next_submission()
        server.call(submission.step, "ab")
        server.call(submission.fail, 500, "the engine died")
        events = connection.read().events()
        assert deltas(events[:-2]) == "ab"
        assert msgspec.json.decode(events[-2])["error"]["message"] == "the engine died"
        assert events[-1] == b"[DONE]"
        connection.post(CHAT, chat())
        server.call(server.manager.next_submission().finish, "next")
        assert connection.read().status == 200


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat), ("/v1/completions", lambda **fields: {"prompt": "hi", **fields})]
)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_the_short_way_writes_what_the_long_way_writes(server: RunningServer, path, body, version: str) -> None:
    streams = []
    for short_way in (True, False):
        with server.connect() as connection:
            connection.post(path, body(stream=True, request_id="same"), version=version)
            submission = server.manager.next_submission()
            for text in ("a", 'b"\n', "🙂é", "\u2028"):
                server.call(submission.step, text, None, short_way)
            server.call(submission.finish)
            streams.append(re.sub(rb'"created":\d+', b"", connection.read().body))
    assert streams[0] == streams[1]
    assert streams[0].count(b"data: ") >= 5


class Stalled:
    """A stream whose client does not read: both sides' buffers are small and full."""

    def __init__(self, server: RunningServer, **fields) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(WAIT)
        sock.connect(("127.0.0.1", server.port))
        self.server = server
        self.connection = Connection(sock)
        self.connection.post(CHAT, chat(stream=True, **fields))
        self.submission = server.manager.next_submission()
        self.choices = fields.get("n", 1)
        self.text = [""] * self.choices
        self.exchange = self.submission.sink._exchange
        transport = self.exchange.transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while not self.exchange.flow.write_paused:
            self.step("é\n" * 3000)

    def step(self, text: str, finish: FinishReason | None = None) -> None:
        def emit() -> None:
            for index in range(self.choices):
                own = f"{index}{text}"
                self.text[index] += own
                self.submission.output(own, index, finish)
            self.submission.sink.on_step_end()

        self.server.call(emit)

    @property
    def buffered(self) -> int:
        return self.server.call(self.exchange.transport.get_write_buffer_size)


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_are_merged_while_the_client_does_not_read(server: RunningServer, n: int) -> None:
    stalled = Stalled(server, n=n)
    before = stalled.buffered
    for i in range(500):
        stalled.step(f'🙂{i}"')
    assert stalled.buffered <= before
    assert stalled.connection.read_head()[0] == 200
    chunks = [stalled.connection.read_chunk() for _ in range(1)]
    while b"499" not in chunks[-1]:
        chunks.append(stalled.connection.read_chunk())
    assert chunks[-1].count(b"data: ") == n
    stalled.step("end", FinishReason("stop"))
    chunks += iter(stalled.connection.read_chunk, b"")
    events = [event[6:] for event in b"".join(chunks).split(b"\n\n")[:-1]]
    assert events.pop() == b"[DONE]"
    assert [deltas(events, i) for i in range(n)] == stalled.text
    stalled.connection.close()


def test_a_stream_that_ends_while_the_client_does_not_read(server: RunningServer) -> None:
    stalled = Stalled(server, logprobs=True, return_token_ids=True, stream_options={"include_usage": True})
    for _ in range(20):
        stalled.step("xy")
    stalled.step("", FinishReason("length"))
    answer = stalled.connection.read()
    events = answer.events()
    assert events.pop() == b"[DONE]"
    assert deltas(events) == stalled.text[0]
    decoded = [msgspec.json.decode(event) for event in events]
    assert decoded.pop()["usage"]["completion_tokens"] == len(stalled.text[0])
    choices = [chunk["choices"][0] for chunk in decoded]
    ids = [i for choice in choices for i in choice.get("token_ids", [])]
    assert "".join(map(chr, ids)) == stalled.text[0]
    logged = [entry["token"] for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert "".join(logged) == stalled.text[0]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    stalled.connection.post(CHAT, chat())
    server.call(server.manager.next_submission().finish, "next")
    assert stalled.connection.read().status == 200
    stalled.connection.close()


def test_a_failure_while_the_client_does_not_read(server: RunningServer) -> None:
    stalled = Stalled(server)
    stalled.step("xy")
    server.call(stalled.submission.fail, 500, "the engine died")
    events = stalled.connection.read().events()
    assert deltas(events[:-2]) == stalled.text[0]
    assert b"the engine died" in events[-2]
    stalled.connection.close()


def test_a_client_that_never_reads_is_dropped(server: RunningServer) -> None:
    stalled = Stalled(server)
    for _ in range(100):
        if stalled.submission.aborted.is_set():
            break
        stalled.step("x" * 10_000)
    assert stalled.submission.aborted.is_set()
    # A character is an id in these tests: it counts once as text and four bytes as an id.
    assert 256 * 1024 < 5 * sum(map(len, stalled.text)) < 512 * 1024 + 5 * 20_000
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := stalled.connection.sock.recv(65536):
            received += data
    assert not received.endswith(b"0\r\n\r\n")
    stalled.connection.close()
