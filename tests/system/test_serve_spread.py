"""Connections go to the workers with the fewest."""

from __future__ import annotations

import json
import selectors
import socket
from collections import Counter

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
    sock.sendall(b"GET /server_info HTTP/1.1\r\nHost: x\r\n\r\n")
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    (size,) = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < size:
        body += sock.recv(65536)
    address: str = json.loads(body)["worker"]["address"]
    return address


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("connect", [_connect_at_once, _connect_one_by_one, _connect_and_ask])
def test_64_clients_spread_over_4_workers(server: Server, connect, busy: bool) -> None:
    streams = []
    if busy:
        body = {"prompt": "a long story", "max_tokens": 8000, "stream": True}
        streams = [server.begin("/v1/completions", body) for _ in range(32)]
        server.wait_for_load(32)
    sockets = connect(server.port, CLIENTS)
    counts = Counter(_worker_of(sock) for sock in sockets)
    assert sum(counts.values()) == CLIENTS
    assert max(counts.values()) / (CLIENTS / 4) <= 1.3, counts
    for sock in [*sockets, *streams]:
        sock.close()
    server.wait_until_idle()

    def only_ours() -> bool:
        figures = server.processes()
        return sum(figures[f"tokenizer_worker:{i}"]["load"] for i in range(1, 5)) == 1

    eventually(only_ours, DEATH_S, "counters are back at this test's own connection")
