"""Other processes of this machine: what they send to a server's sockets, and other servers."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign import CONNECTIONS, MESSAGES
from processes import listening_unix, socket_inodes
from reference import MODEL, echo_text
from server import SIMULATED, STOP_S, Server, engine_args, eventually, free_port, workers

_SLOW = [*SIMULATED, *engine_args(step_ms=5)]
_PARTS = {"single": [], "multi": [*workers(2), "--detokenizer-worker-num", "2"]}
_PROMPT = "meanwhile in another part of the house"
_LONG, _SHORT = 160, 20
# The longest that fits into a unix socket's address; a runtime directory below it would not.
_LONG_PATH = 100


@pytest.fixture(scope="module", params=list(_PARTS))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    # What is dropped is told as an error.
    with Server(*_SLOW, *_PARTS[request.param], errors=True) as server:
        n = sum(name.startswith("tokenizer_worker") for name in server.processes())
        for worker in range(1, n + 1):
            with server.connection_to(worker) as client:
                # Both detokenizers, in turn: from now on all parts are connected.
                for _ in range(2):
                    client.post("/v1/completions", json={"prompt": _PROMPT, "max_tokens": 1}).raise_for_status()
        yield server
        assert "Traceback" not in server.log


def _sockets(server: Server) -> list[str]:
    (runtime_dir,) = server.directory.glob("multitok-*")
    paths = [path for path in listening_unix().values() if Path(path).parent == runtime_dir]
    assert paths
    return sorted(set(paths))


@contextlib.contextmanager
def _foreign(attack: str, paths: list[str], directory: Path) -> Iterator[None]:
    """Run an attack; inside, it has done what it does and its connections are still open."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("foreign.py")), attack, *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=directory,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(STOP_S, process.kill)
    timer.start()
    try:
        assert process.stdout.readline() == b"done\n"
        yield
    finally:
        timer.cancel()
        process.stdin.close()
        process.stdout.close()
        process.wait()


def _threads(server: Server) -> dict[str, int]:
    return {name: len(os.listdir(f"/proc/{pid}/task")) for name, pid in server.titles().items()}


def _unix_sockets(server: Server) -> int:
    """Count the server's unix sockets that have an address: each that listens, and each connection to it."""
    (runtime_dir,) = server.directory.glob("multitok-*")
    return sum(str(runtime_dir) in line for line in Path("/proc/net/unix").read_text().splitlines())


def _stream(server: Server, tokens: int) -> Any:
    stream = server.openai.completions.create(model=MODEL, prompt=_PROMPT, max_tokens=tokens, stream=True)
    return next(stream).choices[0].text, stream


def _rest(begun: Any) -> str:
    first, stream = begun
    return first + "".join(chunk.choices[0].text for chunk in stream)


@pytest.mark.parametrize("attack", [*MESSAGES, *CONNECTIONS])
def test_what_a_foreign_process_sends_disturbs_nobody(attack: str, server: Server, tmp_path: Path) -> None:
    assert _rest(_stream(server, _SHORT)) == echo_text(_PROMPT, _SHORT)
    server.wait_until_idle()
    pids, threads, sockets = server.titles(), _threads(server), _unix_sockets(server)
    streams = [_stream(server, _LONG) for _ in range(4)]
    with _foreign(attack, _sockets(server), tmp_path):
        for begun in streams:
            assert _rest(begun) == echo_text(_PROMPT, _LONG)
        # New ones are taken, whole and streamed.
        answer = server.openai.completions.create(model=MODEL, prompt=_PROMPT, max_tokens=_SHORT)
        assert answer.choices[0].text == echo_text(_PROMPT, _SHORT)
        assert _rest(_stream(server, _SHORT)) == echo_text(_PROMPT, _SHORT)
        server.wait_until_idle()
        assert server.titles() == pids
        # A part may lose a thread, and with it one of its directions, and live on.
        assert _threads(server) == threads
    assert not (server.directory / "unpickled").exists()
    eventually(lambda: _unix_sockets(server) == sockets, STOP_S, "its connections are gone")


@pytest.mark.parametrize("parts", _PARTS.values(), ids=_PARTS)
def test_foreign_frames_are_counted_and_logged_by_whoever_got_them(parts: list[str], tmp_path: Path) -> None:
    with Server(*_SLOW, *parts, errors=True) as server:
        with _foreign("another start's", _sockets(server), tmp_path):
            for name in server.titles():
                if "fork_server" not in name:
                    part = re.escape(name.removeprefix("multitok::"))
                    server.wait_for_line(rf"{part}.*dropped a (frame|message)", STOP_S)
        server.wait_until_idle()


def test_only_this_user_can_reach_sockets_and_blocks(server: Server) -> None:
    (runtime_dir,) = server.directory.glob("multitok-*")
    assert runtime_dir.stat().st_mode & 0o777 == 0o700
    # 8 random hex digits: short, and not to be guessed or used up beforehand.
    assert re.fullmatch(r"multitok-[0-9a-f]{8}", runtime_dir.name)
    files = [*runtime_dir.iterdir(), *(Path("/dev/shm", name) for name in server.blocks())]
    assert len(files) > 5
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files if path.stat().st_mode & 0o077} == {}


class _FarAway(Server):
    """A server whose TMPDIR has a path as long as a unix socket's address may be."""

    def _environment(self) -> dict[str, str]:
        self.far = self.directory / ("x" * (_LONG_PATH - len(str(self.directory))))
        self.far.mkdir()
        return {**super()._environment(), "TMPDIR": str(self.far)}


def test_long_tmpdir_is_not_used() -> None:
    with _FarAway(*_SLOW, *_PARTS["multi"]) as server:
        pid = server.titles()["multitok::router"]
        paths = listening_unix()
        (runtime_dir,) = {Path(paths[i]).parent for i in socket_inodes(pid) if paths.get(i)}
        assert runtime_dir.parent == Path("/tmp")
        assert runtime_dir.stat().st_mode & 0o777 == 0o700
        assert _rest(_stream(server, _SHORT)) == echo_text(_PROMPT, _SHORT)
        server.terminate()
        assert server.wait() == 0
        assert not runtime_dir.exists()
        server.far.rmdir()


def test_second_server_with_the_same_settings_disturbs_nobody() -> None:
    parts = _PARTS["multi"]
    with Server(*_SLOW, *parts) as first:
        begun = _stream(first, 8000)
        held = _sockets(first), first.blocks()
        with Server(*_SLOW, *parts) as second:
            assert _rest(_stream(second, _SHORT)) == echo_text(_PROMPT, _SHORT)
            assert not set(_sockets(second)) & set(held[0])
        # Nor does its end, or that of one which is killed with everything that it has.
        assert (_sockets(first), first.blocks()) == held
        assert next(begun[1]).choices[0].text
        begun[1].close()
        assert _rest(_stream(first, _SHORT)) == echo_text(_PROMPT, _SHORT)
        first.wait_until_idle()


def test_port_that_is_taken_is_named() -> None:
    port = free_port()
    with Server(*_SLOW, "--port", str(port)) as first:
        begun = _stream(first, _LONG)
        with Server(*_SLOW, "--port", str(port), wait=False, errors=True) as second:
            assert second.wait() == 1
            second.wait_for_line(rf"can't listen on 127\.0\.0\.1 port {port}: Address already in use")
            assert "Traceback" not in second.log
        assert _rest(begun) == echo_text(_PROMPT, _LONG)
