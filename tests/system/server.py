"""A real ``multitok serve`` in a subprocess, and what tests want to know about it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import openai
from processes import pids_in, title

# Promised times are for a machine that is not busy with tests.
FACTOR = 5
LEAVE_S = 1.0 * FACTOR
DEATH_S = 2.0 * FACTOR
ERROR_S = 2.0 * FACTOR
START_S = 60.0
LOAD_S = 150.0
STOP_S = 30.0
_POLL_S = 0.01
_SHM = Path("/dev/shm")
_READY = re.compile(r"is ready after .*: (https?)://127\.0\.0\.1:(\d+),")

SIMULATED = ("--engine", "simulated")
# PYTHONPATH: a test run of another checkout than the installed one.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())} | {
    name: value for name, value in os.environ.items() if name == "PYTHONPATH"
}


def engine_args(**options: object) -> list[str]:
    return [part for key, value in options.items() for part in ("--engine-arg", f"{key}={value}")]


def workers(n: int) -> list[str]:
    return ["--tokenizer-worker-num", str(n)]


def eventually(condition: Callable[[], Any], within: float, what: str) -> Any:
    """Wait until a condition that nothing announces holds; returns what it returned."""
    deadline = time.monotonic() + within
    while True:
        if result := condition():
            return result
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(_POLL_S)


class Server:
    """A server; as a context manager it is started, and at the end must exit with 0 and leave nothing behind.

    Parameters
    ----------
    *options : str
        Of ``multitok serve``; the port is a free one unless it is given.
    wait : bool
        Whether entering waits until the server is ready.
    errors : bool
        Whether error lines in the log are part of the test.
    start_timeout : float
        Seconds until ready.
    api_key : str
        What its clients show.
    authority : str or None
        File with the authority of its certificate.
    """

    def __init__(
        self,
        *options: str,
        wait: bool = True,
        errors: bool = False,
        start_timeout: float = START_S,
        api_key: str = "none",
        authority: str | None = None,
    ) -> None:
        port = () if "--port" in options else ("--port", "0")
        self._command = [str(Path(sys.executable).with_name("multitok")), "serve", *port, *options]
        self._wait = wait
        self._errors = errors
        self._start_timeout = start_timeout
        self._api_key = api_key
        self.tls = True if authority is None else ssl.create_default_context(cafile=authority)
        self._news = threading.Condition()
        self._log: list[str] = []
        self._ended = self._waited_for = False
        self._connections = contextlib.ExitStack()

    def __enter__(self) -> Self:
        # Its own, so that whatever is in there at the end was left behind; short, for the sake of unix sockets.
        self.directory = Path(tempfile.mkdtemp(prefix="mt-", dir="/tmp"))
        self._process = subprocess.Popen(
            self._command,
            cwd=self.directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name="server log", daemon=True)
        self._reader.start()
        try:
            if self._wait:
                self.wait_until_ready()
        except BaseException:
            self._destroy()
            raise
        return self

    def _environment(self) -> dict[str, str]:
        return _ENVIRONMENT | {"TMPDIR": str(self.directory)}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._connections.close()
            if kind is not None:
                return
            if not self._waited_for:
                assert self._process.poll() is None, f"it has ended:\n{self.log}"
                self.terminate()
                assert self.wait() == 0, self.log
            self.check_nothing_left()
            if not self._errors:
                wrong = [line for line in self._log if " ERROR " in line or line.startswith("Traceback")]
                assert not wrong, self.log
        finally:
            self._destroy()

    def _destroy(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pid in pids_in(self.directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(STOP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        for path in _SHM.glob(f"multitok-{self.pid}-*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    # Log

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self._log.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    @property
    def log(self) -> str:
        return "\n".join(self._log)

    def wait_for_line(self, pattern: str | re.Pattern[str], within: float = START_S, begin: int = 0) -> re.Match[str]:
        """Wait for a log line, from the `begin`-th on."""

        def found() -> re.Match[str] | None:
            return next((match for line in self._log[begin:] if (match := re.search(pattern, line))), None)

        with self._news:
            self._news.wait_for(lambda: self._ended or found(), within)
            match = found()
        assert match, f"no line {pattern!r} in the log:\n{self.log}"
        return match

    # Life

    def wait_until_ready(self) -> None:
        ready = self.wait_for_line(_READY, self._start_timeout)
        self.port = int(ready[2])
        self.base_url = f"{ready[1]}://127.0.0.1:{self.port}"
        self.http = self.connection()
        self.openai = self._connections.enter_context(
            openai.OpenAI(
                base_url=f"{self.base_url}/v1",
                api_key=self._api_key,
                max_retries=0,
                timeout=STOP_S,
                http_client=openai.DefaultHttpxClient(verify=self.tls),
            )
        )

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, within: float = STOP_S) -> int:
        """Wait for the launcher's end; returns its status."""
        self._waited_for = True
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within:g} s:\n{self.log}") from None

    def wait_for_children(self, within: float) -> None:
        """Wait until nobody has the log open any more."""
        with self._news:
            assert self._news.wait_for(lambda: self._ended, within), f"alive: {self.titles()}\n{self.log}"

    def check_nothing_left(self) -> None:
        assert not pids_in(self.directory), self.titles()
        assert not self.blocks()
        assert not list(self.directory.iterdir())

    def blocks(self) -> list[str]:
        return [path.name for path in _SHM.glob(f"multitok-{self.pid}-*")]

    # Processes

    def titles(self) -> dict[str, int]:
        """Process id of each child, by its title."""
        found: dict[str, int] = {}
        for pid in pids_in(self.directory) - {self.pid}:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[title(pid)] = pid
        return found

    def kill(self, name: str) -> int:
        """Kill a child by its name in the title; returns its process id."""
        pid = self.titles()[f"multitok::{name}"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def pid_of(self, name: str) -> int | None:
        """Process id of a child by its name in the title."""
        return self.titles().get(f"multitok::{name}")

    def wait_for_replacement(self, name: str, old: int, within: float = DEATH_S) -> int:
        """Wait until another process than `old` is ready in its place; returns its id."""
        pid: int = eventually(
            lambda: (p := self.pid_of(name)) not in (old, None) and p, within, f"a replacement of {name}"
        )
        self.wait_for_line(rf"launcher .*{name} \(pid {pid}\) is ready, life \d+", within)
        return pid

    def wait_until_every_worker_is_ready(self, within: float = ERROR_S) -> None:
        """Wait until every HTTP worker takes requests: it hears of a scheduler a moment after the launcher has."""
        for name, figures in self.processes().items():
            role, _, index = name.partition(":")
            if role == "tokenizer_worker":
                with self.connection_to(int(index), life=figures["life"]) as client:
                    eventually(partial(_is_ready, client), within, f"{name} is ready")

    # Requests

    def connection(self) -> httpx.Client:
        """Open a client of one kept-alive connection; closed with the server."""
        return self._connections.enter_context(self._client())

    def _client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.base_url,
            limits=httpx.Limits(max_connections=1, keepalive_expiry=None),
            timeout=STOP_S,
            trust_env=False,
            verify=self.tls,
            headers={"authorization": f"Bearer {self._api_key}"},
        )

    @contextlib.contextmanager
    def connection_to(self, worker: int, *, life: int = 1) -> Iterator[httpx.Client]:
        """Connect to one of the HTTP workers."""
        with contextlib.ExitStack() as others:
            for _ in range(100):
                client = others.enter_context(self._client())
                if client.get("/server_info").json()["worker"]["address"] == f"w{worker}.{life}":
                    yield client
                    return
        raise AssertionError(f"no connection got to worker {worker}")

    def openai_over(self, client: Any) -> openai.OpenAI:
        """Ask through an httpx client; some versions of openai say in their types that they take others only."""
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key=self._api_key, max_retries=0, http_client=client)

    def begin(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        """Send a request without waiting for the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=STOP_S)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection

    def processes(self) -> dict[str, dict[str, int]]:
        processes: dict[str, dict[str, int]] = self.http.get("/server_info").raise_for_status().json()["processes"]
        return processes

    def load(self) -> tuple[int, int]:
        """Requests that run in the engines, and that wait for them."""
        ranks = [figures for name, figures in self.processes().items() if name.startswith("scheduler")]
        return sum(rank["load"] for rank in ranks), sum(rank["waiting"] for rank in ranks)

    def wait_until_served(self, within: float = DEATH_S) -> None:
        """Wait until no request is refused any more: the parts hear of a new scheduler one after the other."""
        body = {"prompt": "a", "max_tokens": 1}
        eventually(lambda: self.http.post("/v1/completions", json=body).status_code == 200, within, "served again")

    def wait_for_load(self, running: int, waiting: int = 0, within: float = STOP_S) -> None:
        eventually(lambda: self.load() == (running, waiting), within, f"{running} running, {waiting} waiting")

    def wait_until_idle(self, within: float = LEAVE_S) -> None:
        self.wait_for_load(0, within=within)

    def accepts(self) -> bool:
        """Whether the port takes connections."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


def port_is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _is_ready(client: httpx.Client) -> bool:
    return client.get("/ready").is_success
