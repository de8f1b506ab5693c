"""TLS: the same answers, and no connection that stays behind."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates
from every_route import ALL, ASGI, HOT, call, head, message
from http_double import WAIT, Connection, DoubleManager, RunningServer, chat, running
from test_drain import begin

from multitok.config import OptionError, ServerArgs
from multitok.http.tls import load_tls

# Makes an answer of 1.5 MB.
TEXTS = {"prompt": ["x" * 3000] * 100}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def server(certificates: Certificates) -> Iterator[RunningServer]:
    args = {"receive_timeout": 0.3, "slow_client_timeout": 0.3, "max_body_bytes": 1 << 20}
    with running(DoubleManager(auto="abc"), **certificates.options, **args) as server:
        yield server
        with connect(server, certificates) as connection:
            for route in ALL:
                assert call(connection, route).status == 200
        eventually(lambda: server.slot.published[-1] == 0)


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline


def connect(server: RunningServer, certificates: Certificates, **options: Any) -> Connection:
    context = certificates.client_context()
    for name, value in options.items():
        setattr(context, name, value)
    context.set_alpn_protocols(["h2", "http/1.1"])
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)
    return Connection(context.wrap_socket(sock, server_hostname="localhost"))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_every_route(server: RunningServer, certificates: Certificates, version: ssl.TLSVersion) -> None:
    with connect(server, certificates, minimum_version=version, maximum_version=version) as connection:
        assert connection.sock.selected_alpn_protocol() == "http/1.1"  # type: ignore[attr-defined]
        for route in ALL:
            assert call(connection, route).status == 200
        connection.post(HOT[0][1], chat(stream=True))
        assert connection.read().events()[-1] == b"[DONE]"
        connection.send(message(*HOT[0]) + message(*ASGI[0]) + message(*HOT[1]))
        assert [connection.read().status for _ in range(3)] == [200] * 3
        for refused in (head("GET", "/nothing"), head("GET", "/health", "X-Request-Id: a b\r\n")):
            connection.send(refused)
            assert connection.read().status in (400, 404)
        connection.post(HOT[0][1], chat(), "Connection: close\r\n")
        assert connection.read().status == 200
        assert connection.at_end()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_older_versions_are_refused(server: RunningServer, certificates: Certificates) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        old = {"minimum_version": ssl.TLSVersion.TLSv1, "maximum_version": ssl.TLSVersion.TLSv1_1}
        connect(server, certificates, **old)


@pytest.mark.parametrize(
    "greeting", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\0" * 1000, None]
)
def test_who_does_not_speak_tls(
    server: RunningServer, greeting: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Scanners, health checks of the transport, and clients that take it for plain HTTP."""
    scanners = [socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) for _ in range(10)]
    for scanner in scanners:
        if greeting is None:
            scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            scanner.close()
        else:
            scanner.sendall(greeting)
    for scanner in scanners:
        if greeting is not None:
            # An alert, or nothing, but an end.
            with contextlib.suppress(ConnectionResetError):
                while scanner.recv(4096):
                    pass
            scanner.close()
    eventually(lambda: server.slot.published[-1] == 0)
    assert min(server.slot.published) == 0
    assert not caplog.records


def test_a_drain_does_not_wait_for_handshakes(certificates: Certificates) -> None:
    with (
        running(DoubleManager(), **certificates.options) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as scanner,
    ):
        eventually(lambda: server.slot.published[-1] == 1)
        began = time.monotonic()
        assert begin(server, 0.05).result(WAIT) == (0, 0)
        assert time.monotonic() - began < WAIT
        with contextlib.suppress(ConnectionResetError):
            assert scanner.recv(1) == b""


def test_a_client_that_does_not_say_goodbye_does_not_hold_up_a_drain(certificates: Certificates) -> None:
    with (
        running(DoubleManager(auto="abc"), **certificates.options) as server,
        connect(server, certificates) as connection,
    ):
        assert call(connection, HOT[0]).status == 200
        began = time.monotonic()
        assert begin(server, 10 * WAIT).result(WAIT) == (0, 0)
        assert time.monotonic() - began < WAIT


def test_a_refusal_arrives_before_the_end_of_the_connection(server: RunningServer, certificates: Certificates) -> None:
    for route in (HOT[0], ASGI[1]):
        with connect(server, certificates) as connection:
            connection.send(head("POST", route[1], "", 30 << 20) + b"x" * 3_000_000)
            assert connection.read().status == 413


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_dropped(
    server: RunningServer, certificates: Certificates, stream: bool
) -> None:
    server.manager.auto = None
    with connect(server, certificates) as connection:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.post(HOT[0][1], chat(stream=stream))
        submission = server.manager.next_submission()
        if stream:
            while not submission.sink._exchange.flow.write_paused:
                server.call(submission.step, "x" * 20_000)
        else:
            server.call(submission.finish, "x" * 30_000_000)
        assert submission.aborted.wait(WAIT)
        eventually(lambda: server.slot.published[-1] == 0)
    server.manager.auto = "abc"


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_answer_of_a_route_behind_asgi_that_is_not_read(
    server: RunningServer, certificates: Certificates, goes_on: bool
) -> None:
    with connect(server, certificates) as connection:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.post("/tokenize", TEXTS, "" if goes_on else "Connection: close\r\n")
        eventually(lambda: server.slot.published[-1] == 0)


def test_large_answers_arrive_whole(server: RunningServer, certificates: Certificates) -> None:
    server.manager.auto = None
    for headers in ("", "Connection: close\r\n"):
        with connect(server, certificates) as connection:
            connection.post(HOT[0][1], chat(), headers)
            server.call(server.manager.next_submission().finish, "xy" * 5_000_000)
            assert connection.read().json()["choices"][0]["message"]["content"] == "xy" * 5_000_000
            if not headers:
                connection.post("/tokenize", TEXTS)
                assert [len(ids) for ids in connection.read().json()["tokens"]] == [3001] * 100
    server.manager.auto = "abc"


@pytest.mark.parametrize("leave", ["close", "reset", "unwrap"])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_aborts(server: RunningServer, certificates: Certificates, leave: str, stream: bool) -> None:
    server.manager.auto = None
    connection = connect(server, certificates)
    connection.post(HOT[0][1], chat(stream=stream))
    submission = server.manager.next_submission()
    server.call(submission.step, "a")
    if leave == "reset":
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if leave == "unwrap":
        with contextlib.suppress(OSError):
            connection.sock.unwrap()  # type: ignore[attr-defined]
    connection.close()
    assert submission.aborted.wait(WAIT)
    eventually(lambda: server.slot.published[-1] == 0)
    server.manager.auto = "abc"


# Files.


def test_without_a_certificate_there_is_no_tls() -> None:
    assert load_tls(ServerArgs()) is None


def test_files_that_can_not_be_used(certificates: Certificates, tmp_path: Path) -> None:
    other = Certificates(tmp_path)
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    for certfile, keyfile, words in (
        (None, certificates.keyfile, "--ssl-keyfile: needs --ssl-certfile"),
        (str(tmp_path / "none"), certificates.keyfile, "--ssl-certfile: can't read .*none: No such file"),
        (certificates.certfile, str(tmp_path), "--ssl-keyfile: can't read .*: Is a directory"),
        (certificates.certfile, other.keyfile, "not a certificate and its key.*mismatch"),
        (certificates.certfile, None, "not a certificate and its key"),
        (str(garbage), certificates.keyfile, "not a certificate and its key"),
        (certificates.keyfile, certificates.certfile, "not a certificate and its key"),
    ):
        with pytest.raises(OptionError, match=words):
            load_tls(ServerArgs(ssl_certfile=certfile, ssl_keyfile=keyfile))
