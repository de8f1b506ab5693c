"""Accepting by least load from one shared socket."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import uvloop
from http_double import WAIT, Connection, DoubleManager, chat, request, running

from multitok.http import accept, protocol
from multitok.http.accept import Acceptor


class Board:
    """A load board of several workers in one process."""

    def __init__(self, workers: int) -> None:
        self.loads = [0] * workers

    def slot(self, index: int) -> Slot:
        return Slot(self, index)


class Slot:
    def __init__(self, board: Board, index: int) -> None:
        self.board, self.index = board, index

    def set_connections(self, n: int) -> None:
        self.board.loads[self.index] = n

    def lowest_connections(self) -> int:
        return min(self.board.loads)

    def beat(self, allowance: float) -> None:
        pass


class Echo(asyncio.Protocol):
    """Says which worker has the connection."""

    def __init__(self, worker: int, acceptors: list[Acceptor]) -> None:
        self.worker, self.acceptors = worker, acceptors

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(b"%d" % self.worker)

    def connection_lost(self, exc: Exception | None) -> None:
        self.acceptors[self.worker].connection_closed(self)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        yield listener


def make(listener: socket.socket, board: Board, workers: int) -> list[Acceptor]:
    acceptors: list[Acceptor] = []
    for i in range(workers):
        copy = socket.fromfd(listener.fileno(), socket.AF_INET, socket.SOCK_STREAM)
        acceptors.append(Acceptor(copy, board.slot(i), lambda i=i: Echo(i, acceptors)))
    return acceptors


def close(acceptors: list[Acceptor]) -> None:
    for acceptor in acceptors:
        acceptor.stop()
        acceptor._socket.close()


async def open_connection(listener: socket.socket) -> tuple[int, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    return int(await asyncio.wait_for(reader.readexactly(1), WAIT)), writer


async def hang_up(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()
        await writer.wait_closed()


def test_connections_spread_evenly(listener: socket.socket) -> None:
    async def main() -> None:
        board = Board(4)
        acceptors = make(listener, board, 4)
        for acceptor in acceptors:
            acceptor.start()
        opened = await asyncio.gather(*(open_connection(listener) for _ in range(64)))
        assert sum(board.loads) == 64
        assert max(board.loads) / (64 / 4) <= 1.3
        close(acceptors)
        await hang_up([writer for _, writer in opened])

    uvloop.run(main())


def test_the_least_loaded_worker_gets_the_connection(listener: socket.socket) -> None:
    async def main() -> None:
        board = Board(2)
        acceptors = make(listener, board, 2)
        acceptors[0]._open |= {asyncio.Protocol() for _ in range(10)}
        for acceptor in acceptors:
            acceptor.start()
        opened = [await open_connection(listener) for _ in range(8)]
        assert [worker for worker, _ in opened] == [1] * 8
        close(acceptors)
        await hang_up([writer for _, writer in opened])

    uvloop.run(main())


def test_a_hung_least_loaded_worker_keeps_nobody_from_accepting(listener: socket.socket) -> None:
    async def main() -> None:
        board = Board(2)
        acceptors = make(listener, board, 1)
        acceptors[0]._open |= {asyncio.Protocol() for _ in range(100)}
        acceptors[0].start()
        opened = [await open_connection(listener) for _ in range(3)]
        assert [worker for worker, _ in opened] == [0] * 3
        assert board.loads == [103, 0]
        close(acceptors)
        await hang_up([writer for _, writer in opened])

    uvloop.run(main())


def test_ends_are_counted(listener: socket.socket) -> None:
    async def main() -> None:
        board = Board(1)
        acceptors = make(listener, board, 1)
        acceptors[0].start()
        counts: list[int] = []
        ended = asyncio.Event()
        slot = acceptors[0]._slot
        publish = slot.set_connections

        def watch(n: int) -> None:
            publish(n)
            counts.append(n)
            if n == 0:
                ended.set()

        slot.set_connections = watch  # type: ignore[method-assign]
        await hang_up([(await open_connection(listener))[1] for _ in range(5)])
        await asyncio.wait_for(ended.wait(), WAIT)
        assert board.loads == [0]
        assert max(counts) <= 5
        close(acceptors)

    uvloop.run(main())


def test_accepted_sockets_do_not_delay(listener: socket.socket) -> None:
    async def main() -> None:
        transports: list[asyncio.Transport] = []

        class Keep(Echo):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                transports.append(transport)
                super().connection_made(transport)

        acceptors: list[Acceptor] = []
        copy = socket.fromfd(listener.fileno(), socket.AF_INET, socket.SOCK_STREAM)
        acceptors.append(Acceptor(copy, Board(1).slot(0), lambda: Keep(0, acceptors)))
        acceptors[0].start()
        _, writer = await open_connection(listener)
        sock = transports[0].get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        close(acceptors)
        await hang_up([writer])

    uvloop.run(main())


class Exhausted:
    """A listening socket of a process without free descriptors."""

    def __init__(self, sock: socket.socket, failures: int) -> None:
        self.sock, self.failures, self.calls = sock, failures, 0

    def accept(self) -> tuple[socket.socket, object]:
        self.calls += 1
        if self.calls <= self.failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return self.sock.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self.sock, name)


def test_running_out_of_descriptors_pauses_and_recovers(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept, "EXHAUSTED_PAUSE", 0.05)

    async def main() -> None:
        acceptors = make(listener, Board(1), 1)
        acceptors[0]._socket = exhausted = Exhausted(acceptors[0]._socket, 2)  # type: ignore[assignment]
        acceptors[0].start()
        _, writer = await open_connection(listener)
        # One call per pause, not a spin.
        assert exhausted.calls == 3
        close(acceptors)
        await hang_up([writer])

    uvloop.run(main())
    assert caplog.text.count("accepting pauses") == 2


def test_stop_leaves_waiting_connections_to_others(listener: socket.socket) -> None:
    async def main() -> None:
        board = Board(2)
        first, second = make(listener, board, 2)
        first.start()
        first.stop()
        opening = asyncio.ensure_future(open_connection(listener))
        await asyncio.sleep(0)
        second.start()
        worker, writer = await opening
        assert worker == 1
        close([first, second])
        await hang_up([writer])

    uvloop.run(main())


def test_the_kernel_keeps_little_for_a_client_that_does_not_read() -> None:
    with running(DoubleManager()) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request("/v1/chat/completions", chat(stream=True)))
        submission = server.manager.next_submission()
        sent = 0
        while not submission.sink._exchange.flow.write_paused:
            server.call(submission.step, "x" * 10_000)
            sent += 10_000
        assert sent < 512 * 1024


def abort(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


CHAT = request("/v1/chat/completions", chat(stream=True))
ENDS = [
    (b"", socket.socket.close),
    (b"", abort),
    (b"", half_close),
    (b"GET / HT", socket.socket.close),
    (b"GET / HT", abort),
    (b"GET / HT", half_close),
    (b"GET / HT", lambda _: None),
    (CHAT[:-5], abort),
    (CHAT[:-5], lambda _: None),
    (CHAT, socket.socket.close),
    (CHAT, abort),
    (CHAT, half_close),
    (CHAT * 3, abort),
    (b"\0\0\r\n", lambda _: None),
    (b"\0\0\r\n", abort),
    (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", abort),
    (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", half_close),
    (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", lambda _: None),
]


def test_every_kind_of_end_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.3)
    args = {"receive_timeout": 0.3, "keep_alive_timeout": 1, "slow_client_timeout": 0.3}
    with running(DoubleManager(), **args) as server:
        clients = []
        for data, end in ENDS * 5:
            client = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)
            client.sendall(data)
            end(client)
            clients.append(client)
        deadline = time.monotonic() + WAIT
        while server.slot.published[-1]:
            assert time.monotonic() < deadline
            while not server.manager.submissions.empty():
                server.call(server.manager.submissions.get().finish, "x")
        assert min(server.slot.published) == 0
        assert not server.server._acceptor._open
        assert not server.server._state.connections
        for client in clients:
            client.close()


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # New descriptors have the lowest free numbers.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


FLOOD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
clients = [socket.socket() for _ in range(200)]
for client in clients:
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", int(sys.argv[1])))
sys.stdin.read()
"""


def test_a_flood_of_connections_loses_no_request_in_progress(
    few_descriptors: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept, "EXHAUSTED_PAUSE", 0.05)

    def serves(connection: Connection, text: str) -> None:
        connection.send(CHAT)
        server.call(server.manager.next_submission().finish, text)
        assert text.encode() in connection.read().body

    with running(DoubleManager(), keep_alive_timeout=2) as server:
        with server.connect() as connection:
            connection.send(CHAT)
            submission = server.manager.next_submission()
            server.call(submission.step, "a")
            # Another process, whose descriptors are its own.
            with subprocess.Popen([sys.executable, "-c", FLOOD, str(server.port)], stdin=subprocess.PIPE) as flood:
                try:
                    deadline = time.monotonic() + WAIT
                    while "accepting pauses" not in caplog.text:
                        assert time.monotonic() < deadline
                    # Others in the process still have some.
                    os.close(os.dup(0))
                    server.call(submission.step, "b")
                    server.call(submission.finish, "c")
                    assert connection.read().events()[-1] == b"[DONE]"
                    serves(connection, "in the flood")
                finally:
                    flood.communicate(timeout=WAIT)
        with server.connect() as connection:
            serves(connection, "after it")
        deadline = time.monotonic() + WAIT
        while server.slot.published[-1]:
            assert time.monotonic() < deadline
