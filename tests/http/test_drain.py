"""Draining: running requests finish, kept-alive connections are answered once more, the rest is told."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from http_double import WAIT, DoubleManager, RunningServer, chat, running

CHAT = "/v1/chat/completions"


def begin(server: RunningServer, timeout: float):
    future = asyncio.run_coroutine_threadsafe(server.server.drain(timeout), server.loop)
    # The drain has begun when the socket of its process is closed.
    server.call(lambda: None)
    return future


def test_nothing_to_do() -> None:
    with running(DoubleManager()) as server:
        assert begin(server, 10).result(WAIT) == (0, 0)
        assert server.listener.fileno() == -1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))


def test_running_requests_finish() -> None:
    with running(DoubleManager()) as server, server.connect() as one, server.connect() as two:
        one.post(CHAT, chat(stream=True))
        first = server.manager.next_submission()
        two.post(CHAT, chat())
        second = server.manager.next_submission()
        server.call(first.step, "a")
        drained = begin(server, WAIT)
        server.call(first.finish, "b")
        server.call(second.finish, "c")
        assert one.read().events()[-1] == b"[DONE]"
        answer = two.read()
        assert answer.json()["choices"][0]["message"]["content"] == "c"
        assert answer.headers["connection"] == "close"
        assert two.at_end()
        assert one.at_end()
        assert drained.result(WAIT) == (2, 0)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_kept_alive_connection_is_answered_once_more(path: str) -> None:
    with running(DoubleManager(auto="abc")) as server, server.connect() as connection:
        connection.post(path, chat() | {"prompt": "a"})
        assert connection.read().headers.get("connection") is None
        drained = begin(server, WAIT)
        connection.post(path, chat() | {"prompt": "a"})
        answer = connection.read()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert connection.at_end()
        assert drained.result(WAIT) == (1, 0)


def test_idle_connections_are_closed() -> None:
    with running(DoubleManager()) as server, server.connect() as connection:
        server.call(lambda: None)
        assert begin(server, WAIT).result(WAIT) == (0, 0)
        assert connection.at_end()


def test_a_request_that_is_just_coming_in_is_answered() -> None:
    with running(DoubleManager(auto="abc"), keep_alive_timeout=1) as server, server.connect() as connection:
        connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-")
        while not server.call(lambda: any(c._receiving for c in server.server._state.connections)):
            pass
        drained = begin(server, WAIT)
        body = msgspec.json.encode(chat())
        connection.send(b"Length: %d\r\n\r\n%b" % (len(body), body))
        assert connection.read().headers["connection"] == "close"
        assert drained.result(WAIT) == (1, 0)


def test_a_request_that_comes_in_behind_a_stream_is_answered() -> None:
    with running(DoubleManager()) as server, server.connect() as connection:
        connection.post(CHAT, chat(stream=True))
        first = server.manager.next_submission()
        server.call(first.step, "a")
        body = msgspec.json.encode(chat())
        connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-")
        (protocol,) = server.server._state.connections
        while not server.call(lambda: protocol._receiving):
            pass
        drained = begin(server, WAIT)
        server.call(first.finish, "b")
        assert connection.read().events()[-1] == b"[DONE]"
        connection.send(b"Length: %d\r\n\r\n%b" % (len(body), body))
        server.call(server.manager.next_submission().finish, "c")
        assert connection.read().headers["connection"] == "close"
        assert drained.result(WAIT) == (2, 0)


def test_what_takes_too_long_is_told() -> None:
    with running(DoubleManager()) as server, server.connect() as one, server.connect() as two:
        one.post(CHAT, chat(stream=True))
        first = server.manager.next_submission()
        server.call(first.step, "a")
        two.post(CHAT, chat())
        second = server.manager.next_submission()
        assert begin(server, 0.05).result(WAIT) == (0, 2)
        events = one.read().events()
        assert msgspec.json.decode(events[-2])["error"]["message"] == "the server is shutting down"
        assert one.at_end()
        answer = two.read()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert two.at_end()
        assert first.aborted.is_set()
        assert second.aborted.is_set()


def test_an_asgi_request_that_takes_too_long_is_told() -> None:
    with running(DoubleManager()) as server, server.connect() as connection:
        connection.send(b"GET /health_generate HTTP/1.1\r\nHost: x\r\n\r\n")
        submission = server.manager.next_submission()
        assert begin(server, 0.05).result(WAIT) == (0, 1)
        answer = connection.read()
        assert answer.status == 503
        assert answer.headers["connection"] == "close"
        assert submission.aborted.is_set()
        assert connection.at_end()


def test_a_client_that_does_not_read_does_not_hold_up_a_drain() -> None:
    with running(DoubleManager()) as server, server.connect() as connection:
        connection.post(CHAT, chat(stream=True))
        submission = server.manager.next_submission()
        while not submission.sink._exchange.flow.write_paused:
            server.call(submission.step, "x" * 10_000)
        assert begin(server, 0.05).result(WAIT) == (0, 1)
        assert submission.aborted.is_set()


# In a rolling restart others go on serving.


def begin_rolling(server: RunningServer, timeout: float):
    future = asyncio.run_coroutine_threadsafe(server.server.drain(timeout, rolling=True), server.loop)
    server.call(lambda: None)
    return future


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_an_idle_connection_is_kept_for_its_next_request(path: str) -> None:
    with running(DoubleManager(auto="abc")) as server, server.connect() as connection, server.connect() as new:
        connection.post(path, chat() | {"prompt": "a"})
        assert connection.read().status == 200
        drained = begin_rolling(server, WAIT)
        (deadline, another) = [c._read_deadline for c in server.server._state.connections]
        now = server.call(server.loop.time)
        assert min(deadline._due, another._due) - now > WAIT - 5
        for waiting in (connection, new):
            waiting.post(path, chat() | {"prompt": "a"})
            answer = waiting.read()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert waiting.at_end()
        assert drained.result(WAIT) == (2, 0)


def test_an_idle_connection_is_not_kept_longer_than_it_would_be_otherwise() -> None:
    with running(DoubleManager(auto="abc"), keep_alive_timeout=1) as server, server.connect() as connection:
        connection.post(CHAT, chat())
        assert connection.read().status == 200
        assert begin_rolling(server, WAIT).result(WAIT) == (0, 0)
        assert connection.at_end()


def test_all_workers_may_have_to_go_meanwhile() -> None:
    with running(DoubleManager(auto="abc")) as server, server.connect() as connection:
        connection.post(CHAT, chat())
        assert connection.read().status == 200
        drained = begin_rolling(server, 10 * WAIT)
        server.call(server.server.leave_idle_connections)
        assert drained.result(WAIT) == (0, 0)
        assert connection.at_end()


def test_nor_longer_than_the_drain_may_take() -> None:
    with running(DoubleManager(auto="abc")) as server, server.connect() as connection:
        connection.post(CHAT, chat())
        assert connection.read().status == 200
        assert begin_rolling(server, 0.1).result(WAIT) == (0, 0)
        assert connection.at_end()


def test_a_request_that_has_arrived_when_its_connection_is_to_be_closed_is_answered() -> None:
    """The loop was busy: the timer is looked at before the sockets are."""
    with running(DoubleManager(auto="abc"), keep_alive_timeout=1) as server, server.connect() as connection:
        connection.post(CHAT, chat())
        assert connection.read().status == 200
        (protocol,) = server.server._state.connections

        def be_busy() -> None:
            connection.post(CHAT, chat())
            protocol._read_deadline._due = 0
            protocol._read_deadline._look()

        server.call(be_busy)
        assert connection.read().status == 200
