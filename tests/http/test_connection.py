"""HTTP/1.1 as a client's socket sees it, with hot and ASGI requests mixed on one connection."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from every_route import ALL, message
from http_double import WAIT, Connection, DoubleManager, RunningServer, chat, request, running

CHAT = "/v1/chat/completions"


@pytest.fixture
def auto() -> Iterator[RunningServer]:
    with running(DoubleManager(auto="abc"), max_body_bytes=4096) as server:
        yield server


@pytest.fixture
def manual() -> Iterator[RunningServer]:
    with running(DoubleManager()) as server:
        yield server


def content(answer) -> str:
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]["message"]["content"]


def streamed(answer) -> str:
    events = answer.events()
    assert events.pop() == b"[DONE]"
    deltas = [msgspec.json.decode(event)["choices"][0]["delta"] for event in events]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_keep_alive_across_kinds_of_routes(auto: RunningServer) -> None:
    with auto.connect() as connection:
        for _ in range(3):
            connection.post(CHAT, chat())
            assert content(connection.read()) == "abc"
            connection.post(CHAT, chat(stream=True))
            answer = connection.read()
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-accel-buffering"] == "no"
            assert streamed(answer) == "abc"
            connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.read().json() == {"status": "ok"}
            connection.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})
            assert connection.read().json()["tokens"] == [97, 98]


def test_every_answer_has_one_date(auto: RunningServer) -> None:
    with auto.connect() as connection:
        connection.post(CHAT, chat())
        assert connection.read().headers["date"].endswith("GMT")
        connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.read().headers["date"].endswith("GMT")


def test_pipelined_requests_are_answered_in_order(manual: RunningServer) -> None:
    with manual.connect() as connection:
        connection.send(
            request(CHAT, chat("one", stream=True))
            + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            + request(CHAT, chat("two"))
            + request(CHAT, b"{")
            + request("/tokenize", {"prompt": "a"})
            + request(CHAT, chat("three", stream=True))
        )
        first = manual.manager.next_submission()
        manual.call(first.step, "a")
        assert manual.manager.submissions.empty()
        manual.call(first.finish, "b")
        assert streamed(connection.read()) == "ab"
        assert connection.read().json() == {"status": "ok"}
        manual.call(manual.manager.next_submission().finish, "zwei")
        assert content(connection.read()) == "zwei"
        assert connection.read().status == 400
        assert connection.read().json()["tokens"] == [1, 97]
        manual.call(manual.manager.next_submission().finish, "drei")
        assert streamed(connection.read()) == "drei"


def test_thousands_of_pipelined_refusals(manual: RunningServer) -> None:
    """The first answer lets all others go at once, without recursion."""
    bad = request(CHAT, b"{")
    with manual.connect() as connection:
        connection.send(request(CHAT, chat()))
        first = manual.manager.next_submission()
        connection.send(bad * 2000)
        manual.call(first.finish, "x")
        assert content(connection.read()) == "x"
        for _ in range(2000):
            assert connection.read().status == 400


def test_head_and_body_byte_by_byte(auto: RunningServer) -> None:
    with auto.connect() as connection:
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request(CHAT, chat("hé")):
            connection.send(bytes([byte]))
        assert content(connection.read()) == "abc"


def test_chunked_request_body(auto: RunningServer) -> None:
    body = msgspec.json.encode(chat())
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:5], body[5:6], body[6:]))
    with auto.connect() as connection:
        for _ in range(2):
            connection.send(b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode())
            connection.send(chunks + b"0\r\n\r\n")
            assert content(connection.read()) == "abc"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_expect_100_continue(auto: RunningServer, path: str) -> None:
    body = msgspec.json.encode(chat() | {"prompt": "a"})
    with auto.connect() as connection:
        connection.send(
            b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
            % (path.encode(), len(body))
        )
        assert connection.file.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert connection.file.readline() == b"\r\n"
        connection.send(body)
        assert connection.read().status == 200


def test_expect_100_continue_of_a_body_that_is_too_large(auto: RunningServer) -> None:
    with auto.connect() as connection:
        connection.send(
            b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5000\r\n\r\n" % CHAT.encode()
        )
        assert connection.read().status == 413
        assert connection.at_end()


def test_connection_close_is_honoured(auto: RunningServer) -> None:
    for stream in (False, True):
        with auto.connect() as connection:
            connection.post(CHAT, chat(stream=stream), "Connection: close\r\n")
            answer = connection.read()
            assert answer.headers["connection"] == "close"
            assert (streamed if stream else content)(answer) == "abc"
            assert connection.at_end()


def test_http_1_0(auto: RunningServer) -> None:
    for stream in (False, True):
        with auto.connect() as connection:
            connection.post(CHAT, chat(stream=stream), version="1.0")
            answer = connection.read()
            assert "transfer-encoding" not in answer.headers
            assert (streamed if stream else content)(answer) == "abc"
            assert connection.at_end()


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_other_methods_get_405(auto: RunningServer, method: str) -> None:
    with auto.connect() as connection:
        for _ in range(2):
            connection.send(f"{method} {CHAT} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = connection.read(no_body=method == "HEAD")
            assert answer.status == 405
            assert answer.headers["allow"] == "POST"
            if method != "HEAD":
                assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_route(auto: RunningServer) -> None:
    with auto.connect() as connection:
        connection.post("/v1/nothing", {})
        answer = connection.read()
        assert answer.status == 404
        assert "/v1/nothing" in answer.json()["error"]["message"]


def test_query_string_and_absolute_url(auto: RunningServer) -> None:
    with auto.connect() as connection:
        for path in (f"{CHAT}?a=1", f"http://example{CHAT}?a=1"):
            connection.post(path, chat())
            assert content(connection.read()) == "abc"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(auto: RunningServer, path: str, chunked: bool) -> None:
    body = msgspec.json.encode({"prompt": "a" * 200_000})
    with auto.connect() as connection:
        if chunked:
            connection.send(b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode())
            connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        else:
            connection.post(path, body)
        answer = connection.read()
        assert answer.status == 413
        assert "4096 bytes" in answer.json()["error"]["message"]
        assert connection.at_end()


def test_body_limit_of_a_pipelined_request(manual: RunningServer) -> None:
    with running(DoubleManager(), max_body_bytes=4096) as server, server.connect() as connection:
        connection.send(request(CHAT, chat()) + request(CHAT, b" " * 5000))
        server.call(server.manager.next_submission().finish, "x")
        assert content(connection.read()) == "x"
        assert connection.read().status == 413


def test_garbage_gets_400_as_json(auto: RunningServer) -> None:
    with auto.connect() as connection:
        connection.send(b"\x16\x03\x01 not http\r\n\r\n")
        answer = connection.read()
        assert answer.status == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert connection.at_end()


def test_a_path_that_is_not_ascii(auto: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with auto.connect() as connection:
        connection.send("GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.read().status in (400, 404)
    assert not caplog.records


def test_garbage_after_a_request_does_not_spoil_its_answer(manual: RunningServer) -> None:
    with manual.connect() as connection:
        connection.send(request(CHAT, chat(stream=True)) + b"\x00garbage\r\n\r\n")
        submission = manual.manager.next_submission()
        manual.call(submission.step, "a")
        manual.call(submission.finish, "b")
        assert streamed(connection.read()) == "ab"
        assert connection.at_end()


@pytest.mark.parametrize(
    "garbage", [b"\x00garbage\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz"]
)
def test_all_requests_before_garbage_are_answered(manual: RunningServer, garbage: bytes) -> None:
    with manual.connect() as connection:
        connection.send(request(CHAT, chat("one")) + request(CHAT, chat("two")) + garbage)
        for text in ("eins", "zwei"):
            manual.call(manual.manager.next_submission().finish, text)
            assert content(connection.read()) == text
        assert connection.at_end()


@pytest.mark.parametrize("line", ["X: a\r\n" * 200, "Connection: close\r\n"])
@pytest.mark.parametrize("route", ALL, ids=lambda route: route[1])
def test_garbage_behind_a_last_request_has_no_answer(auto: RunningServer, route: Any, line: str) -> None:
    with auto.connect() as connection:
        connection.send(message(*route, line) + b"\0\r\n\r\n")
        assert connection.read().status in (200, 431)
        assert connection.at_end()


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_garbage_in_a_body(auto: RunningServer, path: str) -> None:
    with auto.connect() as connection:
        connection.send(b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" % path.encode())
        assert connection.read().status == 400
        assert connection.at_end()


def test_an_upgrade_that_is_not_offered_is_ignored(auto: RunningServer) -> None:
    """Java's HttpClient sends this with every request."""
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    with auto.connect() as connection:
        for _ in range(2):
            connection.post(CHAT, chat(), upgrade)
            assert content(connection.read()) == "abc"
        connection.send(request(CHAT, chat(), upgrade) * 3)
        for _ in range(3):
            assert content(connection.read()) == "abc"
        connection.send(f"GET /health HTTP/1.1\r\nHost: x\r\n{upgrade}\r\n".encode())
        assert connection.read().status == 200


def test_connect_is_refused(auto: RunningServer) -> None:
    with auto.connect() as connection:
        connection.send(b"CONNECT example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.read().status == 400


def test_idle_connections_are_closed() -> None:
    manager = DoubleManager(auto="abc")
    with (
        running(manager, keep_alive_timeout=1) as server,
        server.connect() as silent,
        server.connect() as connection,
    ):
        connection.post(CHAT, chat())
        assert content(connection.read()) == "abc"
        assert connection.at_end()
        assert silent.at_end()


def reset(connection: Connection) -> None:
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: Connection) -> None:
    connection.sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [Connection.close, reset, half_close])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_leaving_aborts(manual: RunningServer, leave, stream: bool, steps: int) -> None:
    connection = manual.connect()
    connection.post(CHAT, chat(stream=stream))
    submission = manual.manager.next_submission()
    for _ in range(steps):
        manual.call(submission.step, "a")
    leave(connection)
    assert submission.aborted.wait(WAIT)
    connection.close()


def test_leaving_with_pipelined_requests_aborts_the_running_one(manual: RunningServer) -> None:
    connection = manual.connect()
    connection.send(
        request(CHAT, chat("one")) + request(CHAT, chat("two")) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    submission = manual.manager.next_submission()
    connection.close()
    assert submission.aborted.wait(WAIT)
    assert manual.manager.submissions.empty()


def test_leaving_in_an_embedding(manual: RunningServer) -> None:
    manual.manager.engine_info = msgspec.structs.replace(manual.manager.engine_info, task="embed", embedding_size=2)
    connection = manual.connect()
    connection.post("/v1/embeddings", {"input": "a"})
    submission = manual.manager.next_submission()
    connection.close()
    assert submission.aborted.wait(WAIT)


def test_a_finished_request_is_not_aborted(manual: RunningServer) -> None:
    connection = manual.connect()
    connection.post(CHAT, chat())
    submission = manual.manager.next_submission()
    manual.call(submission.finish, "a")
    assert content(connection.read()) == "a"
    connection.close()
    deadline = time.monotonic() + WAIT
    while manual.slot.published[-1] and time.monotonic() < deadline:
        manual.call(lambda: None)
    assert manual.slot.published[-1] == 0
    assert not submission.aborted.is_set()


def test_a_failing_route_answers_500(auto: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    auto.manager.chat_template.render = None
    with auto.connect() as connection:
        connection.post(CHAT, chat())
        answer = connection.read()
        assert answer.status == 500
        assert answer.json()["error"]["message"] == "internal server error"
        connection.post("/v1/completions", {"prompt": "a"})
        assert connection.read().status == 200
    assert "a route failed" in caplog.text
