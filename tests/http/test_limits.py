"""What may arrive, and how slowly: each limit has its own status, and the next client is served."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from every_route import ALL, ASGI, HOT, call, error, head, message
from http_double import WAIT, Connection, DoubleManager, RunningServer, chat, running
from test_drain import begin

POSTS = [route for route in ALL if route[0] == "POST"]
by_path = pytest.mark.parametrize("route", ALL, ids=lambda route: route[1])
by_post = pytest.mark.parametrize("route", POSTS, ids=lambda route: route[1])
# A path that is not there is limited, too.
by_start = pytest.mark.parametrize("start", ["POST /v1/chat/completions", "GET /v1/models", "GET /nothing"])


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running(DoubleManager(auto="abc"), max_header_bytes=2048, max_body_bytes=8 << 20) as server:
        yield server
        serves(server)


@pytest.fixture
def impatient() -> Iterator[RunningServer]:
    with running(DoubleManager(auto="abc"), receive_timeout=0.2) as server:
        yield server
        serves(server)
        eventually(lambda: server.slot.published[-1] == 0)


def serves(server: RunningServer) -> None:
    with server.connect() as connection:
        for route in ALL:
            assert call(connection, route).status == 200


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline


def the_protocol(server: RunningServer) -> Any:
    eventually(lambda: server.server._state.connections)  # type: ignore[union-attr]
    (protocol,) = server.server._state.connections  # type: ignore[union-attr]
    return protocol


def send_until_refused(connection: Connection, data: bytes, most: int) -> None:
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            connection.send(data)
            sent += len(data)


# Size of the head.


@by_path
def test_a_head_up_to_the_limit(server: RunningServer, route: Any) -> None:
    def fitted(size: int) -> str:
        own = len(route[1]) + sum(len(f"{n}: {v}\r\n") for n, v in (("Host", "x"), ("X-Filler", "")))
        if route[2] is not None:
            own += len(f"Content-Length: {len(msgspec.json.encode(route[2]))}\r\n")
        return f"X-Filler: {'a' * (size - own)}\r\n"

    with server.connect() as connection:
        assert call(connection, route, fitted(2048)).status == 200
        assert error(call(connection, route, fitted(2049))) == (
            431,
            "the request's line and headers are larger than the limit of 2048 bytes",
        )
        assert connection.at_end()


@by_start
@pytest.mark.parametrize(
    "head_", [" HTTP/1.1\r\nX: " + "a" * 3000, "?" + "a" * 3000, " HTTP/1.1\r\n" + "X: a\r\n" * 1000]
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_head_that_is_too_large(server: RunningServer, start: str, head_: str, whole: bool) -> None:
    end = ("" if "HTTP" in head_ else " HTTP/1.1") + "\r\n\r\n"
    with server.connect() as connection:
        connection.send((start + head_ + (end if whole else "")).encode())
        assert error(connection.read())[0] == 431
        assert connection.at_end()


def test_a_head_that_never_ends_costs_nothing(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\nX: ")
        send_until_refused(connection, b"a" * 10_000, 1 << 26)
        with contextlib.suppress(ConnectionError):
            assert error(connection.read())[0] == 431


def test_a_head_that_is_too_large_behind_a_request(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.send(message(*HOT[0]) + head("GET", "/health", f"X: {'a' * 2100}\r\n"))
        assert connection.read().status == 200
        assert connection.read().status == 431
        assert connection.at_end()
    # Many requests in one packet are not one head.
    with server.connect() as connection:
        connection.send(message(*HOT[0]) * 20 + b"GET /health HTTP/1.1\r\nHo")
        for _ in range(20):
            assert connection.read().status == 200
        connection.send(b"st: x\r\n\r\n")
        assert connection.read().status == 200


@by_path
def test_the_number_of_headers(route: Any) -> None:
    with running(DoubleManager(auto="abc")) as server, server.connect() as connection:
        assert call(connection, route, "X: a\r\n" * 126).status == 200
        assert error(call(connection, route, "X: a\r\n" * 128))[0] == 431
        assert connection.at_end()


@by_path
def test_request_ids(route: Any) -> None:
    with running(DoubleManager(auto="abc"), max_request_id_length=40) as server, server.connect() as connection:
        for good in ("a" * 40, "!~", ""):
            assert call(connection, route, f"X-Request-Id: {good}\r\n").status == 200
        for bad in ("a" * 41, "a b", "\xe9", "a\tb", "\x80"):
            answer = call(connection, route, f"X-Request-Id: {bad}\r\n")
            assert error(answer)[0] == 400
            assert answer.json()["error"]["param"] == "X-Request-Id"


# Time.


@by_start
@pytest.mark.parametrize("part", ["", " HTTP/1.1\r\n", " HTTP/1.1\r\nHost: x\r\nContent-Le"])
def test_a_head_that_does_not_come_on(impatient: RunningServer, start: str, part: str) -> None:
    with impatient.connect() as connection:
        connection.send((start + part).encode())
        answer = connection.read()
        assert error(answer) == (408, "the request took too long to arrive")
        assert answer.json()["error"]["code"] == "request_timeout"
        assert answer.headers["connection"] == "close"
        assert connection.at_end()


def test_a_head_that_drips(impatient: RunningServer) -> None:
    with impatient.connect() as connection:
        connection.send(b"GET /health HTTP/1.1\r\nX: ")
        protocol = the_protocol(impatient)
        due = protocol._read_deadline._due
        for _ in range(5):
            connection.send(b"a")
            eventually(lambda fed=protocol._wire: protocol._wire > fed or protocol._ended)
            assert protocol._read_deadline._due <= due or protocol._ended
        assert connection.read().status == 408


def test_a_second_head_that_does_not_come_on(impatient: RunningServer) -> None:
    with impatient.connect() as connection:
        assert call(connection, HOT[0]).status == 200
        connection.send(message(*ASGI[0]) + b"POST /gen")
        assert connection.read().status == 200
        assert connection.read().status == 408


def test_a_connection_that_says_nothing_is_closed_without_a_word(impatient: RunningServer) -> None:
    with impatient.connect() as connection:
        assert connection.file.read() == b""
    with impatient.connect() as connection:
        connection.send(b"\r\n\r\n")
        assert connection.file.read() == b""


@by_post
@pytest.mark.parametrize("sent", [b"", b'{"te'])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_does_not_come_on(impatient: RunningServer, route: Any, sent: bytes, chunked: bool) -> None:
    with impatient.connect() as connection:
        if chunked:
            part = b"%x\r\n%b\r\n" % (len(sent), sent) if sent else b""
            connection.send(head("POST", route[1], "Transfer-Encoding: chunked\r\n") + part)
        else:
            connection.send(head("POST", route[1], "", 100) + sent)
        assert error(connection.read())[0] == 408
        assert connection.at_end()
    assert impatient.manager.submissions.empty()


def test_the_body_of_a_refused_request_that_does_not_come(impatient: RunningServer) -> None:
    with impatient.connect() as connection:
        connection.send(head("POST", "/generate", "X-Request-Id: a b\r\n", 100) + b"x")
        assert connection.read().status == 400
        # No second answer.
        assert connection.at_end()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_large_body_has_time_for_each_megabyte(path: str) -> None:
    with running(DoubleManager(auto="abc")) as server, server.connect() as connection:
        connection.send(head("POST", path, "", 5 << 20))
        protocol = the_protocol(server)
        eventually(lambda: protocol._receiving and not protocol._in_head)
        for i, (size, moves) in enumerate(((1000, False), (1 << 20, True), (1000, False), (1 << 20, True))):
            before = protocol._body_size
            # Cleared, so that a move within the same millisecond is seen too.
            server.call(protocol._read_deadline.clear)
            connection.send(b" " * size)
            eventually(lambda before=before, size=size: protocol._body_size == before + size)
            server.call(lambda: None)
            assert (protocol._read_deadline._due < math.inf) == moves, i


def test_a_stream_may_take_longer_than_a_request_may_take_to_arrive() -> None:
    with (
        running(DoubleManager(), receive_timeout=0.1) as server,
        server.connect() as connection,
        server.connect() as stalled,
    ):
        connection.post(*HOT[0][1:2], chat(stream=True))
        submission = server.manager.next_submission()
        server.call(submission.step, "a")
        stalled.send(b"GET")
        assert stalled.read().status == 408
        # Another request has begun behind the stream, and does not come on: the stream ends first.
        connection.send(b"GET /hea")
        with server.connect() as another:
            another.send(b"GET")
            assert another.read().status == 408
        server.call(submission.finish, "b")
        assert connection.read().events()[-1] == b"[DONE]"
        assert connection.at_end()


def test_input_that_waits_for_its_turn_is_not_late() -> None:
    """Reading pauses while a large request waits behind a running one."""
    with running(DoubleManager(), receive_timeout=0.1) as server, server.connect() as connection:
        connection.post(HOT[0][1], chat())
        first = server.manager.next_submission()
        body = msgspec.json.encode(chat("a" * 3_000_000))
        connection.send(head("POST", HOT[0][1], "", len(body)) + body[:200_000])
        protocol = the_protocol(server)
        eventually(lambda: protocol.flow.read_paused)
        with server.connect() as another:
            another.send(b"GET")
            assert another.read().status == 408
        server.call(first.finish, "x")
        assert connection.read().status == 200
        connection.send(body[200_000:])
        answer = connection.read()
        assert (answer.status, answer.json()["error"]["message"]) == (400, "too long")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_half_sent_body_does_not_hold_up_a_drain(path: str) -> None:
    with running(DoubleManager(), receive_timeout=0.2) as server, server.connect() as connection:
        connection.send(head("POST", path, "", 100) + b"{")
        protocol = the_protocol(server)
        eventually(lambda: protocol._body_size == 1)
        drained = begin(server, 10 * WAIT)
        assert connection.read().status == 408
        connection.close()
        drained.result(WAIT)


# Frames.


def chunked(path: str, chunks: bytes) -> bytes:
    return head("POST", path, "Transfer-Encoding: chunked\r\n") + chunks


@by_post
def test_a_byte_per_chunk(server: RunningServer, route: Any) -> None:
    body = msgspec.json.encode(route[2]) + b" " * 5000
    with server.connect() as connection:
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        connection.send(chunked(route[1], chunks + b"0\r\nX-Trailer: a\r\nAuthorization: b\r\n\r\n"))
        assert connection.read().status == 200
        assert call(connection, route).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("begin_", [b"1;", b"1;a=", b"1\r\nx\r\n0\r\nX: ", b"1\r\nx\r\n0\r\n"])
@pytest.mark.parametrize("more", [b"a" * 1000, b"x: a\r\n" * 200])
def test_frames_without_content(server: RunningServer, path: str, begin_: bytes, more: bytes) -> None:
    with server.connect() as connection:
        connection.send(chunked(path, begin_))
        protocol = the_protocol(server)
        most = 64 << 20
        send_until_refused(connection, more, most)
        with contextlib.suppress(ConnectionError):
            assert connection.read().status == 400
        assert protocol._wire < 1 << 20


TE = "Transfer-Encoding: chunked\r\n"
MALFORMED = {
    "both lengths": "Content-Length: 5\r\n" + TE,
    "both lengths, the other way": TE + "Content-Length: 5\r\n",
    "two lengths": "Content-Length: 5\r\nContent-Length: 5\r\n",
    "two different lengths": "Content-Length: 5\r\nContent-Length: 6\r\n",
    "a list of lengths": "Content-Length: 5, 5\r\n",
    "a signed length": "Content-Length: +5\r\n",
    "a negative length": "Content-Length: -5\r\n",
    "a hexadecimal length": "Content-Length: 0x5\r\n",
    "a huge length": "Content-Length: 99999999999999999999999\r\n",
    "an empty length": "Content-Length: \r\n",
    "a folded header": "X: a\r\n b\r\n",
    "a folded encoding": "Transfer-Encoding:\r\n chunked\r\n",
    "a space before the colon": "Transfer-Encoding : chunked\r\n",
    "a space before the name": " Transfer-Encoding: chunked\r\n",
    "an unknown encoding": "Transfer-Encoding: xchunked\r\n",
    "no encoding": "Transfer-Encoding: identity\r\n",
    "chunked is not the last encoding": "Transfer-Encoding: chunked, gzip\r\n",
    "two encodings": TE + TE,
    "chunked, then something else": TE + "Transfer-Encoding: identity\r\n",
    "a line end alone": "X: a\n",
    "a carriage return alone": "X: a\rY: b\r\n",
    "a NUL": "X: a\0b\r\n",
    "a NUL in a name": "X\0: a\r\n",
    "no colon": "Xa\r\n",
    "no name": ": a\r\n",
    # The parser lets these pass.
    "something before chunked": "Transfer-Encoding: identity, chunked\r\n",
    "another encoding before chunked": "Transfer-Encoding: gzip,chunked\r\n",
    "nothing before chunked": "Transfer-Encoding: , chunked\r\n",
    "something, then chunked": "Transfer-Encoding: identity\r\n" + TE,
    "another encoding, then chunked": "Transfer-Encoding: gzip\r\n" + TE,
    "two hosts": "HOST: y\r\n",
    "two equal hosts": "Host: x\r\n",
    "two authorizations": "Authorization: Bearer a\r\nauthorization: Bearer b\r\n",
    "two equal authorizations": "Authorization: Bearer a\r\n" * 2,
    "two keys": "X-API-Key: a\r\n" * 2,
    "two request ids": "X-Request-Id: a\r\nX-Request-Id: b\r\n",
    "two origins": "Origin: http://a\r\nOrigin: http://b\r\n",
}


@pytest.mark.parametrize("lines", MALFORMED.values(), ids=MALFORMED.keys())
@by_path
def test_heads_that_others_may_read_otherwise(server: RunningServer, route: Any, lines: str) -> None:
    with server.connect() as connection:
        # What a second reader of the bytes would take for a request.
        smuggled = (
            b"0\r\n\r\nPOST /abort_request HTTP/1.1\r\nHost: x\r\nContent-Length: 18\r\n\r\n" + b'{"abort_all":true}'
        )
        connection.send(f"{route[0]} {route[1]} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode("latin-1") + smuggled)
        assert error(connection.read())[0] == 400
        assert connection.at_end()
    assert server.manager.control.asked == []


@by_path
@pytest.mark.parametrize("behind", [False, True])
def test_a_head_without_host(server: RunningServer, route: Any, behind: bool) -> None:
    bare = message(*route).replace(b"Host: x\r\n", b"")
    with server.connect() as connection:
        connection.send((message(*HOT[1]) if behind else b"") + bare + message(*route))
        if behind:
            assert connection.read().status == 200
        assert error(connection.read()) == (400, "the header Host is missing")
        assert connection.at_end()
    # An empty one is one, and HTTP/1.0 has none.
    for good in (
        message(*route).replace(b"Host: x", b"Host: "),
        bare.replace(b"HTTP/1.1", b"HTTP/1.0"),
    ):
        with server.connect() as connection:
            connection.send(good)
            assert connection.read().status == 200


@by_path
def test_what_the_parser_lets_pass_is_named(server: RunningServer, route: Any) -> None:
    for lines, words in (
        ("Host: y\r\n", "the header Host may come only once"),
        ("Authorization: a\r\n" * 2, "the header Authorization may come only once"),
        ("Transfer-Encoding: identity, chunked\r\n", "Transfer-Encoding: must be chunked and nothing else"),
    ):
        with server.connect() as connection:
            connection.send(head(route[0], route[1], lines))
            assert error(connection.read()) == (400, words)
            assert connection.at_end()


@by_post
def test_chunked_in_any_spelling(server: RunningServer, route: Any) -> None:
    body = msgspec.json.encode(route[2])
    with server.connect() as connection:
        for value in ("chunked", "Chunked", "\tCHUNKED"):
            connection.send(head("POST", route[1], f"Transfer-Encoding:{value}\r\n"))
            connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            assert connection.read().status == 200


@pytest.mark.parametrize(
    "chunks",
    [b"zz\r\n", b"-1\r\n", b"0x5\r\nhello\r\n", b"5 \r\nhello\r\n", b"5\nhello\r\n", b"f" * 17 + b"\r\n", b"\r\n",
     b"5\r\nhelloX0\r\n\r\n", b"5;a=b\nhello\r\n", b"0\r\nContent-Length: 9\r\n\r\n"],
)  # fmt: skip
@by_post
def test_chunks_that_are_none(server: RunningServer, route: Any, chunks: bytes) -> None:
    with server.connect() as connection:
        connection.send(chunked(route[1], chunks))
        assert error(connection.read())[0] == 400
        assert connection.at_end()
    assert server.manager.submissions.empty()


@pytest.mark.parametrize(
    "start",
    ["get / HTTP/1.1", " GET / HTTP/1.1", "GET / HTTP/1.2", "GET / HTTP/9.9", "GET /a b HTTP/1.1", "GET  HTTP/1.1",
     "PRI * HTTP/2.0\r\n\r\nSM", "CONNECT a:1 HTTP/1.1", "\x16\x03\x01", "GET / HTTP/1.1\nX: x", "BREW / HTTP/1.1",
     "GET http:///// HTTP/1.1", "GET http://[ HTTP/1.1", "OPTIONS * HTTP/1.1"],
)  # fmt: skip
def test_request_lines_that_are_none(server: RunningServer, start: str) -> None:
    with server.connect() as connection:
        connection.send(f"{start}\r\nHost: x\r\n\r\n".encode("latin-1"))
        assert error(connection.read())[0] in (400, 404)


@by_post
@pytest.mark.parametrize("sent", [0, 5])
def test_a_truncated_body(server: RunningServer, route: Any, sent: int) -> None:
    connection = server.connect()
    data = msgspec.json.encode(route[2])
    connection.send(head("POST", route[1], "", len(data)) + data[:sent])
    the_protocol(server)
    connection.close()
    eventually(lambda: server.slot.published[-1] == 0)
    assert server.manager.submissions.empty()


@by_post
def test_the_content_type_is_not_believed(server: RunningServer, route: Any) -> None:
    with server.connect() as connection:
        for kind in ("text/xml", "multipart/form-data; boundary=x", "application/x-python-pickle", "application/json"):
            assert call(connection, route, f"Content-Type: {kind}\r\n").status == 200
            for body in (b"<a/>", b"\x80\x04N.", b"a=b"):
                assert call(connection, (*route[:2], body), f"Content-Type: {kind}\r\n").status == 400
        assert call(connection, route, "Content-Encoding: gzip\r\n").status == 200


@by_post
def test_http_1_0_keeps_nothing_open(server: RunningServer, route: Any) -> None:
    body = msgspec.json.encode(route[2])
    for lines in (b"", b"Connection: keep-alive\r\n"):
        with server.connect() as connection:
            connection.send(
                b"POST %b HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n" % (route[1].encode(), lines, len(body)) + body
            )
            assert connection.read().status == 200
            assert connection.at_end()


@pytest.mark.parametrize(("path", "status"), [("/server_info", 405), ("/nothing", 404), ("/freeze_gc", 200)])
@pytest.mark.parametrize(("version", "headers"), [("1.1", "Connection: close\r\n"), ("1.0", "")])
def test_the_last_answer_arrives_though_nobody_wanted_the_body(
    server: RunningServer, path: str, status: int, version: str, headers: str
) -> None:
    body = b'{"x": "' + b"a" * (5 << 20) + b'"}'
    for _ in range(5):
        with server.connect() as connection:
            connection.post(path, body, headers, version)
            assert connection.read().status == status
            assert connection.file.read() == b""
