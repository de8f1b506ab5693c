"""Accepting by least load from one shared socket."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator

import pytest
import uvloop
from http_double import WAIT

from multitok.http import accept
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
