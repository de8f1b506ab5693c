"""Servers for the load generator: a real one, and one that answers given bytes."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_READY = re.compile(r"is ready after .*: (http://127\.0\.0\.1:\d+),")


class ServedProcess:
    """A ``multitok serve`` with the simulated engine: one id per request and millisecond."""

    def __init__(self) -> None:
        command = [str(Path(sys.executable).with_name("multitok")), "serve", "--engine", "simulated", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--engine-arg", "step_ms=1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        self.pid = self.process.pid
        self.log = ""
        for line in self.process.stdout:
            self.log += line
            if match := _READY.search(line):
                self.url = match[1]
                break
        else:
            raise AssertionError(f"not ready:\n{self.log}")
        # Otherwise the pipe could fill up.
        self._reader = threading.Thread(target=self.process.stdout.read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._reader.join(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="session")
def served() -> Iterator[ServedProcess]:
    process = ServedProcess()
    yield process
    process.close()


class ScriptedServer:
    """Answers each request of each connection with the given pieces, each in a write of its own."""

    def __init__(self, pieces: list[bytes], *, close: bool) -> None:
        self._pieces = pieces
        self._close = close
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.requests: list[bytes] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            self.connections += 1
            with connection, contextlib.suppress(ConnectionError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not self._answer_all(connection):
                    return

    def _answer_all(self, connection: socket.socket) -> bool:
        while request := connection.recv(1 << 20):
            if request == b"end":
                return False
            self.requests.append(request)
            for piece in self._pieces:
                connection.sendall(piece)
            if self._close:
                break
        return True

    def stop(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(b"end")
        self._thread.join(10)
        self._listener.close()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def make(pieces: list[bytes], *, close: bool = False) -> ScriptedServer:
        servers.append(ScriptedServer(pieces, close=close))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
