"""Connections go to the workers with the fewest, also while these are being replaced."""

from __future__ import annotations

import json
import selectors
import signal
import socket
from collections import Counter
from collections.abc import Callable

import pytest
from server import DEATH_S, SIMULATED, STOP_S, Server, engine_args, eventually, workers

CLIENTS = 64


@pytest.fixture(scope="module")
def server():
    with Server(*SIMULATED, *engine_args(step_ms=5), *workers(4), "--detokenizer-worker-num", "2") as server:
        yield server


def _connect_at_once(port: int, n: int) -> list[socket.socket]:
    sockets = [socket.socket() for _ in range(n)]
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
            selector.register(sock, selectors.EVENT_WRITE)
        while selector.get_map():
            ready = selector.select(STOP_S)
            assert ready
            for key, _ in ready:
                selector.unregister(key.fileobj)
    for sock in sockets:
        sock.settimeout(STOP_S)
    return sockets


def _connect_one_by_one(port: int, n: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port), timeout=STOP_S) for _ in range(n)]


def _connect_and_ask(port: int, n: int) -> list[socket.socket]:
    sockets = []
    for _ in range(n):
        sockets += _connect_one_by_one(port, 1)
        _worker_of(sockets[-1])
    return sockets


def _worker_of(sock: socket.socket) -> str:
    return _ask(sock)[0]


def _ask(sock: socket.socket) -> tuple[str, bool]:
    """Address of the worker at the other end, and whether the connection goes on."""
    sock.sendall(b"GET /server_info HTTP/1.1\r\nHost: x\r\n\r\n")
    received = b""
    while b"\r\n\r\n" not in received:
        data = sock.recv(65536)
        assert data, "the connection ended without an answer"
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    (size,) = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
    while len(body) < size:
        body += sock.recv(65536)
    return json.loads(body)["worker"]["address"], b"connection: close" not in lines


class _KeptAlive:
    """A client that keeps its connection, and makes another one when it is told that an answer was the last."""

    def __init__(self, port: int, sock: socket.socket | None = None) -> None:
        self._port = port
        self._sock = sock
        self.worker = ""

    def ask(self) -> None:
        if self._sock is None:
            (self._sock,) = _connect_one_by_one(self._port, 1)
        self.worker, goes_on = _ask(self._sock)
        if not goes_on:
            self.close()

    def ask_until_kept(self) -> None:
        """Ask again until the connection is to a worker that stays."""
        self.ask()
        while self._sock is None:
            self.ask()

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("connect", [_connect_at_once, _connect_one_by_one, _connect_and_ask])
def test_64_clients_spread_over_4_workers(server: Server, connect, busy: bool) -> None:
    streams = []
    if busy:
        body = {"prompt": "a long story", "max_tokens": 8000, "stream": True}
        streams = [server.begin("/v1/completions", body) for _ in range(32)]
        server.wait_for_load(32)
    sockets = connect(server.port, CLIENTS)
    _check_spread([_worker_of(sock) for sock in sockets])
    for sock in [*sockets, *streams]:
        sock.close()
    server.wait_until_idle()
    _wait_until_only_ours(server)


def _check_spread(addresses: list[str]) -> None:
    counts = Counter(addresses)
    assert sum(counts.values()) == CLIENTS
    assert max(counts.values()) / (CLIENTS / 4) <= 1.3, counts


def _wait_until_only_ours(server: Server) -> None:
    def only_ours() -> bool:
        figures = server.processes()
        return sum(figures[f"tokenizer_worker:{i}"]["load"] for i in range(1, 5)) == 1

    eventually(only_ours, DEATH_S, "counters are back at this test's own connection")


def _replace_workers(server: Server, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Replace all workers one after the other, and do something again and again until it is done."""
    seen = server.log.count("every HTTP worker is replaced")
    server.send_signal(signal.SIGHUP)

    def replaced() -> bool:
        meanwhile()
        return server.log.count("every HTTP worker is replaced") > seen

    eventually(replaced, STOP_S, "every HTTP worker is replaced")


@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_64_clients_spread_over_4_workers_that_replace_others(server: Server, when: str) -> None:
    """Whenever they connect: before it, a few at a time while it goes on, or all at once after it."""
    clients = [_KeptAlive(server.port) for _ in range(CLIENTS)]
    asking: list[_KeptAlive] = []
    idle = []
    if when == "before":
        asking = clients
    elif when == "after":
        idle = _connect_and_ask(server.port, CLIENTS)
    for client in asking:
        client.ask()

    def all_ask() -> None:
        if when == "while":
            asking.extend(clients[len(asking) :][:8])
        for client in asking:
            client.ask()

    _replace_workers(server, all_ask)
    if when == "after":
        clients = [_KeptAlive(server.port, sock) for sock in _connect_at_once(server.port, CLIENTS)]
    for client in clients:
        client.ask_until_kept()
    assert len({client.worker.partition(".")[2] for client in clients}) == 1, "none is at a worker that goes"
    _check_spread([client.worker for client in clients])
    for sock in idle:
        sock.close()
    for client in clients:
        client.close()
    _wait_until_only_ours(server)
