"""A server under test: started, waited for, looked at, stopped."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from multitok.bench.processes import Process, process_tree, snapshot, used_between
from multitok.bench.target import Target

_POLL_S = 0.02
_STOP_S = 20.0
_IDLE_S = 3.0


class NotReady(Exception):
    """The server ended, or wasn't ready in time."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class ServerProcess:
    """A server process and its children; a context manager.

    Parameters
    ----------
    command : sequence of str
        Its command line.
    environment : mapping of str to str
        Added to this process's own.
    port : int
        Where it will listen.
    health : str
        Route that answers 200 when it is ready.
    log : Path
        Where its output goes.
    timeout : float
        Seconds that it gets to become ready.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
        health: str,
        log: Path,
        timeout: float = 300.0,
    ) -> None:
        self._command = list(command)
        self._environment = dict(os.environ) | dict(environment)
        self._health = health
        self._log = log
        self._timeout = timeout
        self.target = Target(host="127.0.0.1", port=port)
        self.ready_s = 0.0
        self.start_cpu_s = 0.0

    def __enter__(self) -> Self:
        start = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        self.pid = self._process.pid
        try:
            while not self._answers():
                if self._process.poll() is not None:
                    raise NotReady(f"ended with status {self._process.returncode}; its last words: {self._tail()}")
                if time.perf_counter() - start > self._timeout:
                    raise NotReady(f"not ready after {self._timeout:.0f} s; its last words: {self._tail()}")
                time.sleep(_POLL_S)
        except BaseException:
            self._stop()
            raise
        self.ready_s = round(time.perf_counter() - start, 2)
        self.start_cpu_s = round(sum(each.cpu_s for each in snapshot(self.pid).values()), 2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.target.port, timeout=5)
        try:
            connection.request("GET", self._health)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-800:]

    def _stop(self) -> None:
        tree = process_tree(self.pid)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        # Children that outlive their parent would be noise in the next run.
        for pid in tree[1:] if self._process.poll() is not None else tree:
            if Path(f"/proc/{pid}").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def memory(self) -> list[Process]:
        """Return all processes as they are now."""
        return list(snapshot(self.pid).values())

    def idle_cpu(self) -> dict[str, float]:
        """Return the share of a core that each role uses while nothing is asked."""
        before = snapshot(self.pid)
        time.sleep(_IDLE_S)
        idle: dict[str, float] = {}
        for process in used_between(before, snapshot(self.pid)):
            idle[process.role] = round(idle.get(process.role, 0.0) + process.cpu_s / _IDLE_S, 4)
        return idle
