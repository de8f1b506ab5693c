"""SIGHUP replaces the HTTP workers one after the other, SIGTTIN and SIGTTOU change how many there are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

import httpx
import openai
import pytest
from processes import open_files, pids_in, threads
from reference import MODEL, echo_text
from server import DEATH_S, SIMULATED, STOP_S, Server, engine_args, eventually, workers

PROMPT = "every worker makes room for the one that follows"
TOKENS = 10
REQUESTS = 1000
CLIENTS = 8
# A worker that is being replaced stays for as long as a kept-alive connection may still bring a request.
_IMPATIENT = ["--keep-alive-timeout", "1"]
_FAST = [*SIMULATED, *engine_args(step_ms=1)]
_SLOW = [*SIMULATED, *engine_args(step_ms=5)]


def _worker_pids(server: Server) -> dict[str, int]:
    return {name: pid for name, pid in server.titles().items() if "tokenizer_worker" in name}


def _line_after(server: Server, pattern: str, number: signal.Signals) -> None:
    """Send a signal and wait for what the log says of it."""
    begin = len(server.log.splitlines())
    server.send_signal(number)
    server.wait_for_line(pattern, STOP_S, begin)


class _Load:
    """Clients that each send one request after the other over a kept-alive connection, and never a second time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._news = threading.Condition()
        self._left = REQUESTS
        self.statuses: Counter[object] = Counter()
        self._threads = [threading.Thread(target=self._client) for _ in range(CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(STOP_S)

    def wait_for_answers(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.statuses.total() >= count, STOP_S), self.statuses

    def _client(self) -> None:
        limits = httpx.Limits(max_connections=1)
        expected = echo_text(PROMPT, TOKENS)
        with httpx.Client(base_url=self._server.base_url, limits=limits, timeout=STOP_S, trust_env=False) as client:
            while self._takes_one():
                outcome: object
                try:
                    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": TOKENS})
                    right = answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected
                    outcome = 200 if right else (answer.status_code, answer.text)
                except httpx.HTTPError as error:
                    outcome = repr(error)
                with self._news:
                    self.statuses[outcome] += 1
                    self._news.notify_all()

    def _takes_one(self) -> bool:
        with self._news:
            self._left -= 1
            return self._left >= 0


def _holdings(server: Server) -> dict[str, tuple[int, int]]:
    """Descriptors and threads of everything that is not replaced."""
    parts = {name: pid for name, pid in server.titles().items() if "worker" not in name} | {"launcher": server.pid}
    return {name: (open_files(pid), threads(pid)) for name, pid in parts.items()}


def _use_every_worker(server: Server, count: int, life: int) -> None:
    for k in range(1, count + 1):
        with server.connection_to(k, life=life) as client:
            for _ in range(2):
                body = {"prompt": PROMPT, "max_tokens": TOKENS}
                assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("http_workers", [1, 4])
def test_no_request_fails_while_all_workers_are_replaced_three_times(http_workers: int) -> None:
    with Server(*_FAST, *workers(http_workers), "--detokenizer-worker-num", "2") as server:
        _use_every_worker(server, http_workers, life=1)
        titles, workers_before, holdings = server.titles(), _worker_pids(server), _holdings(server)
        load = _Load(server)
        load.start()
        for i in range(1, 4):
            load.wait_for_answers(REQUESTS * i // 5)
            _line_after(server, "every HTTP worker is replaced", signal.SIGHUP)
        load.join()
        assert load.statuses == {200: REQUESTS}
        eventually(lambda: len(server.titles()) == len(titles), STOP_S, "the old workers are gone")
        after = server.titles()
        assert after.keys() == titles.keys()
        assert not set(after.values()) & set(workers_before.values())
        assert {n: p for n, p in after.items() if n not in workers_before} == {
            n: p for n, p in titles.items() if n not in workers_before
        }
        _use_every_worker(server, http_workers, life=4)
        server.wait_until_idle()
        eventually(lambda: _holdings(server) == holdings, DEATH_S, f"{holdings}, but {_holdings(server)}")
        (runtime_dir,) = server.directory.iterdir()
        addresses = {path.name for path in runtime_dir.iterdir() if path.name.startswith("w")}
        assert addresses == {f"w{k}.4" for k in range(1, http_workers + 1)}
        assert len(server.blocks()) == 5


@pytest.mark.parametrize("http_workers", [1, 3])
def test_running_streams_end_on_the_old_workers(http_workers: int) -> None:
    with Server(*_SLOW, *workers(http_workers), *_IMPATIENT) as server:
        processes = len(pids_in(server.directory))
        # Long enough to be running when the last old worker is told to leave.
        streams = []
        for _ in range(6):
            stream = server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=600, stream=True)
            streams.append((next(stream).choices[0].text, stream))
        server.wait_for_load(6)
        _line_after(server, "every HTTP worker is replaced", signal.SIGHUP)
        assert len(pids_in(server.directory)) > processes
        for first, stream in streams:
            assert first + "".join(chunk.choices[0].text for chunk in stream) == echo_text(PROMPT, 600)
        # Two lives of one worker have one title.
        eventually(lambda: len(pids_in(server.directory)) == processes, STOP_S, "the old workers are gone")


def test_signals_in_a_row_are_done_one_after_the_other() -> None:
    with Server(*_FAST, *workers(2)) as server:
        server.send_signal(signal.SIGHUP)
        server.wait_for_line("SIGHUP: replacing 2 HTTP worker")
        for _ in range(2):
            # While the first replacement is under way, or after it: two signals at the same time are one to the kernel.
            _line_after(
                server, "tokenizer_worker:3 is (added|retired); there are [23] HTTP workers now", signal.SIGTTIN
            )
            _line_after(
                server, "tokenizer_worker:3 is (added|retired); there are [23] HTTP workers now", signal.SIGTTOU
            )
        lines = [line for line in server.log.splitlines() if "HTTP worker" in line and "launcher" in line]
        done = [line.split("launcher")[1].strip() for line in lines[1:]]
        assert done[:2] == [
            "SIGHUP: replacing 2 HTTP worker(s), one after the other",
            "every HTTP worker is replaced",
        ]
        with server.connection_to(2, life=2) as client:
            assert client.get("/health").status_code == 200


def test_worker_is_added_and_retired() -> None:
    with Server(*_FAST, *workers(2), *_IMPATIENT) as server:
        _line_after(server, r"tokenizer_worker:3 is added; there are 3 HTTP workers", signal.SIGTTIN)
        with server.connection_to(3) as client:
            body = {"prompt": PROMPT, "max_tokens": TOKENS}
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == echo_text(PROMPT, TOKENS)
        assert server.processes()["tokenizer_worker:3"]["life"] == 1
        # It is a worker like any other: replaced when it dies.
        server.wait_for_replacement("tokenizer_worker:3", server.kill("tokenizer_worker:3"))
        for left in (2, 1):
            _line_after(
                server, rf"tokenizer_worker:{left + 1} is retired; there are {left} HTTP workers", signal.SIGTTOU
            )
        eventually(lambda: len(_worker_pids(server)) == 1, STOP_S, "the retired workers are gone")
        _line_after(server, "SIGTTOU: no worker is retired: it is the last", signal.SIGTTOU)
        # An address is never used again.
        _line_after(server, "tokenizer_worker:2 is added", signal.SIGTTIN)
        with server.connection_to(2, life=2) as client:
            assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}).status_code == 200


def test_board_says_how_many_workers_there_may_be() -> None:
    with Server(*_FAST, *workers(2)) as server:
        for count in range(3, 7):
            _line_after(server, f"tokenizer_worker:{count} is added", signal.SIGTTIN)
        _line_after(server, "SIGTTIN: no worker is added: the load board has room for 6", signal.SIGTTIN)
        _line_after(server, "every HTTP worker is replaced", signal.SIGHUP)


def test_one_worker_can_be_replaced_but_not_joined() -> None:
    with Server(*_FAST) as server:
        _line_after(server, "SIGTTIN: no worker is added: with one HTTP worker there is no router", signal.SIGTTIN)
        _line_after(server, "SIGTTOU: no worker is retired: there is only one", signal.SIGTTOU)
        _line_after(server, "every HTTP worker is replaced", signal.SIGHUP)
        with server.connection_to(1, life=2) as client:
            assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}).status_code == 200


def test_signal_that_comes_while_starting_is_done_when_all_is_ready() -> None:
    with Server(*SIMULATED, *engine_args(load_s=1), *workers(2), wait=False) as server:
        server.wait_for_line("simulated engine")
        server.send_signal(signal.SIGHUP)
        server.wait_until_ready()
        server.wait_for_line("every HTTP worker is replaced")


def test_replacement_that_dies_is_tried_again_while_the_old_worker_serves() -> None:
    with Server(*_SLOW, *workers(2), *_IMPATIENT) as server:
        old = _worker_pids(server)
        # What makes the replacements stands still, so that they are late for sure.
        fork_server = server.pid_of("fork_server")
        assert fork_server is not None
        os.kill(fork_server, signal.SIGSTOP)
        server.send_signal(signal.SIGHUP)
        server.wait_for_line("SIGHUP: replacing")
        with server.connection_to(1) as client:
            assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}).status_code == 200
        os.kill(fork_server, signal.SIGKILL)
        server.wait_for_line("every HTTP worker is replaced", STOP_S)
        # Two lives of one worker have one title.
        eventually(
            lambda: not set(_worker_pids(server).values()) & set(old.values()), STOP_S, "the old workers are gone"
        )
        assert len(_worker_pids(server)) == 2


def test_worker_that_dies_while_it_drains_is_not_replaced() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        with server.connection_to(1) as client:
            stream = server.openai_over(client).completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=8000, stream=True
            )
            next(stream)
            old = server.pid_of("tokenizer_worker:1")
            assert old is not None
            _line_after(server, "every HTTP worker is replaced", signal.SIGHUP)
            os.kill(old, signal.SIGKILL)
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                for _ in stream:
                    pass
        eventually(lambda: len(_worker_pids(server)) == 2, STOP_S, "the old workers are gone")
        server.wait_until_idle(DEATH_S)
        assert "starting its life" not in server.log


def test_idle_connection_to_a_replaced_worker_does_not_hold_up_the_end() -> None:
    with Server(*_FAST, *workers(2)) as server:
        for _ in range(8):
            assert server.connection().get("/health").status_code == 200
        _line_after(server, "every HTTP worker is replaced", signal.SIGHUP)
        begun = time.monotonic()
        server.terminate()
        assert server.wait() == 0
        assert time.monotonic() - begun < DEATH_S


def test_end_during_a_rolling_restart() -> None:
    with Server(*_SLOW, *workers(3)) as server:
        server.send_signal(signal.SIGHUP)
        server.wait_for_line("SIGHUP: replacing")
        server.terminate()
        assert server.wait() == 0
        server.wait_for_line("stopped: ")
