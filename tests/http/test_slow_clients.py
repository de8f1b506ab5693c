"""Clients that do not read: they are dropped in time, and hold little until then."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from every_route import ALL, call, message
from http_double import WAIT, Connection, DoubleManager, RunningServer, chat, request, running
from test_drain import begin

CHAT = "/v1/chat/completions"
TEXTS = {"prompt": ["x" * 3000] * 100}


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline


@pytest.fixture
def patient() -> Iterator[RunningServer]:
    with running(DoubleManager()) as server:
        yield server


@pytest.fixture
def impatient() -> Iterator[RunningServer]:
    with running(DoubleManager(), slow_client_timeout=0.2) as server:
        yield server
        eventually(lambda: server.slot.published[-1] == 0)
        with server.connect() as connection:
            for route in ALL[2:]:
                assert call(connection, route).status == 200


def connect(server: RunningServer) -> Connection:
    """Connect with little room on both sides."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(WAIT)
    sock.connect(("127.0.0.1", server.port))
    return Connection(sock)


def protocol_of(server: RunningServer) -> Any:
    eventually(lambda: server.server._state.connections)  # type: ignore[union-attr]
    (protocol,) = server.server._state.connections  # type: ignore[union-attr]
    return protocol


def stall(server: RunningServer, connection: Connection, stream: bool) -> Any:
    """Ask for something that does not fit in the buffers, and read nothing."""
    connection.post(CHAT, chat(stream=stream))
    submission = server.manager.next_submission()
    protocol = submission.sink._exchange.protocol
    if stream:
        while not protocol.flow.write_paused:
            server.call(submission.step, "x" * 20_000)
    else:
        server.call(submission.finish, "x" * 10_000_000)
        eventually(lambda: protocol.flow.write_paused)
    return submission


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_dropped(impatient: RunningServer, stream: bool) -> None:
    with connect(impatient) as connection:
        submission = stall(impatient, connection, stream)
        assert submission.aborted.wait(WAIT)
        eventually(lambda: impatient.slot.published[-1] == 0)
        with contextlib.suppress(ConnectionResetError):
            assert not connection.file.read().endswith(b"0\r\n\r\n")


def test_an_answer_of_a_route_behind_asgi_that_is_not_read(impatient: RunningServer) -> None:
    with connect(impatient) as connection:
        connection.post("/tokenize", TEXTS)
        eventually(lambda: impatient.slot.published[-1] == 0)


def test_an_answer_of_a_route_behind_asgi_that_is_read_late(patient: RunningServer) -> None:
    """It is made whole, and written as its client takes it."""
    with connect(patient) as connection:
        connection.post("/tokenize", TEXTS)
        protocol = protocol_of(patient)
        eventually(lambda: protocol.flow is not None and protocol.flow.write_paused)
        assert patient.call(protocol.transport.get_write_buffer_size) < 512 * 1024
        answer = connection.read()
        assert (answer.status, len(answer.json()["tokens"])) == (200, 100)
        assert call(connection, ALL[2]).status == 200


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_last_answer_that_is_not_read(impatient: RunningServer, path: str, version: str) -> None:
    """The connection is closing already, and what waits may be less than what pauses it."""
    with connect(impatient) as connection:
        connection.post(path, TEXTS if path == "/tokenize" else chat(), "Connection: close\r\n", version)
        if path == CHAT:
            impatient.call(impatient.manager.next_submission().finish, "x" * 300_000)
        eventually(lambda: impatient.slot.published[-1] == 0)


def test_an_idle_connection_whose_last_answer_was_not_read() -> None:
    with (
        running(DoubleManager(), keep_alive_timeout=1, slow_client_timeout=0.2) as server,
        connect(server) as connection,
    ):
        connection.post(CHAT, chat())
        submission = server.manager.next_submission()
        protocol = submission.sink._exchange.protocol
        server.call(submission.finish, "x")
        # Too little to pause the connection for, more than its buffers take.
        size = 1000
        while not server.call(protocol.transport.get_write_buffer_size):
            size += 1000
            connection.post(CHAT, chat())
            server.call(server.manager.next_submission().finish, "x" * size)
        eventually(lambda: server.slot.published[-1] == 0)


def test_a_client_that_reads_slowly_is_kept() -> None:
    """It takes its steps within the time that each has; all of it takes longer."""
    with running(DoubleManager(), slow_client_timeout=0.3) as server, connect(server) as connection:
        submission = stall(server, connection, stream=False)
        protocol = submission.sink._exchange.protocol
        watch = protocol._client_watch
        began = time.monotonic()
        received = 0
        while time.monotonic() - began < 1.0:
            # Whatever the watch has seen last, it sees a step more next time.
            untaken = watch._untaken
            while server.call(lambda: watch._untaken) == untaken and received < 9_000_000:
                received += len(connection.sock.recv(30_000))
            if received >= 9_000_000:
                break
        assert not submission.aborted.is_set()
        while received < 10_000_000:
            received += len(connection.sock.recv(1 << 20))


@pytest.mark.parametrize("size", [1_000, 128 * 1024, 128 * 1024 + 1, 10_000_000])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_large_answers_arrive_whole(patient: RunningServer, size: int, version: str) -> None:
    text = ("é" + "abcdefghi" * 3) * (size // 28 + 1)
    for _ in range(2):
        with patient.connect() as connection:
            connection.post(CHAT, chat(), version=version)
            patient.call(patient.manager.next_submission().finish, text)
            assert connection.read().json()["choices"][0]["message"]["content"] == text
            if version == "1.1":
                connection.send(request("/tokenize", {"prompt": "a"}) + request(CHAT, chat(stream=True)))
                assert connection.read().status == 200
                patient.call(patient.manager.next_submission().finish, text)
                assert text.encode() in connection.read().body


def test_what_comes_behind_a_large_answer_waits_for_it(patient: RunningServer) -> None:
    with connect(patient) as connection:
        submission = stall(patient, connection, stream=False)
        connection.send(request(CHAT, b"{") + message("GET", "/health", None))
        patient.call(lambda: None)
        assert not submission.aborted.is_set()
        assert [connection.read().status for _ in range(3)] == [200, 400, 200]


@pytest.mark.parametrize("leave", ["close", "reset"])
def test_leaving_in_a_large_answer(patient: RunningServer, leave: str) -> None:
    connection = connect(patient)
    submission = stall(patient, connection, stream=False)
    exchange = submission.sink._exchange
    if leave == "reset":
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    eventually(lambda: patient.slot.published[-1] == 0)
    assert exchange._rest is None
    assert exchange.on_writable is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_does_not_wait_for_a_client_that_does_not_read(patient: RunningServer, stream: bool) -> None:
    with connect(patient) as connection:
        stall(patient, connection, stream)
        assert begin(patient, 0.05).result(WAIT) == (0, 1)


def test_a_drain_does_not_wait_for_who_does_not_read_an_answer_behind_asgi(
    patient: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(patient) as connection:
        connection.post("/tokenize", TEXTS)
        protocol = protocol_of(patient)
        eventually(lambda: protocol.flow is not None and protocol.flow.write_paused)
        assert begin(patient, 0.05).result(WAIT) == (0, 1)
        with contextlib.suppress(ConnectionResetError):
            connection.file.read()
    assert not caplog.records


@pytest.mark.parametrize(
    "piece",
    [request(CHAT, b"{"), message("GET", "/v1/models", None), request(CHAT, b"{") + message("GET", "/nothing", None)],
)
def test_a_client_that_asks_and_never_reads(impatient: RunningServer, piece: bytes) -> None:
    """What it is not given is not made either."""
    most = 0
    with connect(impatient) as connection:
        protocol = protocol_of(impatient)
        sent = 0
        connection.sock.settimeout(0.05)
        with contextlib.suppress(OSError):
            while sent < 64 << 20:
                with contextlib.suppress(TimeoutError):
                    sent += connection.sock.send(piece * 50)
                transport = protocol.transport
                most = max(most, impatient.call(transport.get_write_buffer_size), len(protocol.pipeline))
                if not impatient.server._state.connections:  # type: ignore[union-attr]
                    break
        assert sent < 32 << 20
        # One packet's worth of requests beyond the limits.
        assert most < 1 << 20
        eventually(lambda: impatient.slot.published[-1] == 0)


def test_stalled_clients_do_not_hold_up_others(patient: RunningServer) -> None:
    """The rest of `test_serve_slow_clients`, in small."""
    connections = [connect(patient) for _ in range(40)]
    stalled = [stall(patient, connection, stream=True) for connection in connections]
    with patient.connect() as reader:
        reader.post(CHAT, chat(stream=True))
        submission = patient.manager.next_submission()
        for _ in range(50):
            for other in stalled:
                if not other.aborted.is_set():
                    patient.call(other.step, "y" * 400)
            patient.call(submission.step, "z" * 10)
        held = sum(other.sink._held for other in stalled)
        assert 0 < held <= 40 * 512 * 1024
        buffered = sum(patient.call(o.sink._exchange.transport.get_write_buffer_size) for o in stalled)
        assert buffered <= 40 * 128 * 1024
        patient.call(submission.finish, "end")
        events = reader.read().events()[:-1]
        texts = [msgspec.json.decode(event)["choices"][0]["delta"].get("content") or "" for event in events]
        assert "".join(texts) == "z" * 500 + "end"
    for connection in connections:
        connection.close()
    eventually(lambda: patient.slot.published[-1] == 0)
