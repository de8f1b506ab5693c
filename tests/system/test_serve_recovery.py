"""What a client sees of a part's death: its stream goes on, or it is told in time; nothing is lost in silence."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from reference import MODEL, echo_text
from server import DEATH_S, ERROR_S, FACTOR, SIMULATED, STOP_S, Server, engine_args, eventually, workers

STREAMS = 50
STEP_MS = 20
# Longer than it takes to notice that a process is stopped, and to replace it.
TOKENS = {signal.SIGKILL: 200, signal.SIGABRT: 200, signal.SIGSTOP: 400}
# Two looks, a second apart, find a stopped process.
DETECTION_S = {signal.SIGKILL: 0.0, signal.SIGABRT: 0.0, signal.SIGSTOP: 3.0 * FACTOR}
_SLOW = [*SIMULATED, *engine_args(step_ms=STEP_MS)]
_SINGLE = (*_SLOW, *workers(1))
_MULTI = (*_SLOW, *workers(4), "--detokenizer-worker-num", "2")

SIGNALS = [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGSTOP, signal.SIGABRT))]


def _prompt(i: int) -> str:
    return f"stream number {i} of many, each with words of its own: {i * 7919}"


class _Stream:
    """One streamed request, read by a thread of its own: the client's ledger."""

    def __init__(self, server: Server, i: int, tokens: int, news: threading.Condition, **options: Any) -> None:
        self.prompt = _prompt(i)
        self.tokens = tokens
        self.text = ""
        self.logprobs: list[float] = []
        self.begun = self.ended = False
        self.error: dict[str, Any] | None = None
        self.finish: str | None = None
        self.broken: Exception | None = None
        self._news = news
        body = {"model": MODEL, "prompt": self.prompt, "max_tokens": tokens, "stream": True, **options}
        self._connection = server.begin("/v1/completions", body)
        self._connection.sock.settimeout(2 * STOP_S)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._read()
        except (OSError, http.client.HTTPException) as error:
            self.broken = error
        finally:
            self._connection.close()
            with self._news:
                self.ended = True
                self._news.notify_all()

    def _read(self) -> None:
        response = self._connection.getresponse()
        if response.status != 200:
            self.error = {"status": response.status, **json.loads(response.read())["error"]}
            return
        done = False
        for line in response:
            done = done or line.startswith(b"data: [DONE]")
            if not line.startswith(b"data: ") or done:
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.error = chunk["error"]
                continue
            choice = chunk["choices"][0]
            self.text += choice["text"]
            if choice["logprobs"] is not None:
                self.logprobs += choice["logprobs"]["token_logprobs"]
            self.finish = choice["finish_reason"] or self.finish
            if not self.begun:
                with self._news:
                    self.begun = True
                    self._news.notify_all()
        if not done:
            # Read line by line, a connection that breaks looks like the end.
            raise http.client.IncompleteRead(self.text.encode())

    def check_whole(self) -> None:
        assert (self.error, self.broken, self.finish) == (None, None, "length"), self.prompt
        assert self.text == echo_text(self.prompt, self.tokens)


class _Streams:
    """Many of them."""

    def __init__(self, server: Server, tokens: int, count: int = STREAMS, **options: Any) -> None:
        self.news = threading.Condition()
        self.all = [_Stream(server, i, tokens, self.news, **options) for i in range(count)]

    def wait_until_all_have_begun(self) -> None:
        with self.news:
            assert self.news.wait_for(lambda: all(s.begun or s.ended for s in self.all), STOP_S)
        assert all(s.begun and not s.ended for s in self.all), "one has ended before the kill"

    def wait_until_all_have_ended(self, within: float) -> None:
        with self.news:
            assert self.news.wait_for(lambda: all(s.ended for s in self.all), within), (
                f"{sum(not s.ended for s in self.all)} streams neither ended nor were told"
            )
        for stream in self.all:
            stream.thread.join()


def _end(server: Server, part: str, number: signal.Signals) -> int:
    pid = server.pid_of(part)
    assert pid is not None
    os.kill(pid, number)
    return pid


def _works(server: Server) -> None:
    """Check that the next answers are right, from the moment on at which everybody has heard of the new part."""
    server.wait_until_every_worker_is_ready()
    for _ in range(4):
        answer = server.openai.completions.create(model=MODEL, prompt=_prompt(999), max_tokens=10)
        assert answer.choices[0].text == echo_text(_prompt(999), 10)


@pytest.mark.parametrize(
    ("part", "options"),
    [("detokenizer:0", _SINGLE), ("detokenizer:1", _MULTI), ("router", _MULTI)],
    ids=["detokenizer-single", "detokenizer-multi", "router"],
)
@pytest.mark.parametrize("number", SIGNALS)
def test_running_streams_go_on_without_a_lost_or_doubled_character(
    part: str, options: tuple[str, ...], number: signal.Signals
) -> None:
    with Server(*options) as server:
        streams = _Streams(server, TOKENS[number])
        streams.wait_until_all_have_begun()
        old = _end(server, part, number)
        assert not any(stream.ended for stream in streams.all)
        server.wait_for_replacement(part, old, DEATH_S + DETECTION_S[number])
        streams.wait_until_all_have_ended(STOP_S)
        for stream in streams.all:
            stream.check_whole()
        _works(server)
        server.wait_until_idle()


@pytest.mark.parametrize("part", ["detokenizer:0", "router"])
def test_a_part_can_be_killed_again_and_again_under_running_streams(part: str) -> None:
    with Server(*_SLOW, *workers(2)) as server:
        streams = _Streams(server, TOKENS[signal.SIGSTOP], count=20)
        streams.wait_until_all_have_begun()
        for _ in range(4):
            server.wait_for_replacement(part, _end(server, part, signal.SIGKILL))
        assert not any(stream.ended for stream in streams.all)
        streams.wait_until_all_have_ended(STOP_S)
        for stream in streams.all:
            stream.check_whole()


@pytest.mark.parametrize("part", ["detokenizer:0", "router"])
def test_requests_that_are_sent_in_between_are_answered_or_refused(part: str) -> None:
    with Server(*_SLOW, *workers(2)) as server:
        old = server.kill(part)
        # Before its end is even noticed, and while there is no other.
        between = _Streams(server, 10)
        server.wait_for_replacement(part, old)
        between.wait_until_all_have_ended(DEATH_S)
        for stream in between.all:
            assert stream.broken is None
            if stream.error is None:
                stream.check_whole()
            else:
                assert stream.error["status"] == 503
        _works(server)


@pytest.mark.parametrize("options", [_SINGLE, _MULTI], ids=["single", "multi"])
@pytest.mark.parametrize("number", SIGNALS)
def test_every_waiting_client_is_told_of_a_dead_scheduler(options: tuple[str, ...], number: signal.Signals) -> None:
    with Server(*options) as server, _whole_answers(server, 10) as answers:
        streams = _Streams(server, 4000)
        streams.wait_until_all_have_begun()
        server.wait_for_load(STREAMS + 10)
        old = _end(server, "scheduler:0", number)
        streams.wait_until_all_have_ended(ERROR_S + DETECTION_S[number])
        for stream in streams.all:
            assert stream.broken is None
            assert stream.error is not None
            assert stream.finish is None
            assert echo_text(stream.prompt, 4000).startswith(stream.text)
        eventually(lambda: len(answers) == 10, ERROR_S, "the others are told, too")
        assert answers == [503] * 10
        server.wait_for_replacement("scheduler:0", old)
        _works(server)
        server.wait_until_idle()


@contextmanager
def _whole_answers(server: Server, count: int) -> Iterator[list[object]]:
    """Ask for so many long answers that are not streamed; yields their statuses as they come."""
    statuses: list[object] = []

    def wait(connection: http.client.HTTPConnection) -> None:
        try:
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
        except (OSError, http.client.HTTPException) as error:
            statuses.append(repr(error))
        finally:
            connection.close()

    body = {"model": MODEL, "prompt": _prompt(0), "max_tokens": 4000}
    threads = [threading.Thread(target=wait, args=[server.begin("/v1/completions", body)]) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield statuses
    for thread in threads:
        thread.join(STOP_S)


def test_requests_without_any_scheduler_are_refused_at_once() -> None:
    with Server(*SIMULATED, *engine_args(load_s=3), *workers(2)) as server:
        old = server.kill("scheduler:0")
        eventually(lambda: server.http.get("/ready").status_code == 503, DEATH_S, "not ready")
        refused = _Streams(server, 10, count=8)
        refused.wait_until_all_have_ended(ERROR_S)
        assert [stream.error and stream.error["status"] for stream in refused.all] == [503] * 8
        server.wait_for_replacement("scheduler:0", old)
        _works(server)


def test_other_rank_serves_on_when_one_dies() -> None:
    with Server(*_SLOW, *workers(2), "--data-parallel-size", "2") as server:
        streams = _Streams(server, TOKENS[signal.SIGKILL], count=20)
        streams.wait_until_all_have_begun()
        old = server.kill("scheduler:1")
        streams.wait_until_all_have_ended(STOP_S)
        told = [stream for stream in streams.all if stream.error is not None]
        # In turn: half of them ran there.
        assert len(told) == 10
        for stream in streams.all:
            if stream.error is None:
                stream.check_whole()
        server.wait_for_replacement("scheduler:1", old)
        _works(server)


@pytest.mark.parametrize("options", [_SINGLE, _MULTI], ids=["single", "multi"])
@pytest.mark.parametrize("number", SIGNALS)
def test_streams_go_on_after_a_schedulers_death_where_that_is_exact(
    options: tuple[str, ...], number: signal.Signals
) -> None:
    with Server(*options, "--resume-generation") as server:
        streams = _Streams(server, TOKENS[number])
        streams.wait_until_all_have_begun()
        old = _end(server, "scheduler:0", number)
        assert not any(stream.ended for stream in streams.all)
        server.wait_for_replacement("scheduler:0", old, DEATH_S + DETECTION_S[number])
        streams.wait_until_all_have_ended(STOP_S)
        for stream in streams.all:
            stream.check_whole()
        _works(server)
        server.wait_until_idle()


def test_log_probabilities_go_on_after_a_schedulers_death() -> None:
    with Server(*_MULTI, "--resume-generation") as server:
        whole = server.openai.completions.create(model=MODEL, prompt=_prompt(0), max_tokens=200, logprobs=1)
        streams = _Streams(server, 200, count=1, logprobs=1)
        streams.wait_until_all_have_begun()
        server.kill("scheduler:0")
        streams.wait_until_all_have_ended(STOP_S)
        (stream,) = streams.all
        stream.check_whole()
        assert whole.choices[0].logprobs is not None
        assert stream.logprobs == whole.choices[0].logprobs.token_logprobs
        assert len(stream.logprobs) == 200


@pytest.mark.parametrize("options", [_SINGLE, _MULTI], ids=["single", "multi"])
def test_pause_waits_for_streams_that_go_on_after_a_schedulers_death(options: tuple[str, ...]) -> None:
    with Server(*options, "--resume-generation") as server, ThreadPoolExecutor(2) as callers:
        streams = _Streams(server, TOKENS[signal.SIGKILL], count=10)
        streams.wait_until_all_have_begun()
        pause = callers.submit(server.connection().post, "/pause_generation", json={"mode": "wait"}, timeout=STOP_S)
        server.wait_for_line("pause by")
        old = server.kill("scheduler:0")
        answer = pause.result()
        # From here on no scheduler does anything for them.
        stopped = _end(server, "scheduler:0", signal.SIGSTOP)
        assert answer.status_code == 200, answer.text
        assert answer.json()["died"] == ["scheduler:0"]
        streams.wait_until_all_have_ended(ERROR_S)
        assert server.pid_of("scheduler:0") == stopped != old
        os.kill(stopped, signal.SIGCONT)
        for stream in streams.all:
            stream.check_whole()
        server.wait_until_every_worker_is_ready()
        body = {"model": MODEL, "prompt": _prompt(999), "max_tokens": 10}
        held = callers.submit(server.connection().post, "/v1/completions", json=body, timeout=STOP_S)
        server.wait_for_load(0, waiting=1)
        assert not held.done()
        server.http.post("/continue_generation", json={}).raise_for_status()
        assert held.result().json()["choices"][0]["text"] == echo_text(_prompt(999), 10)


def test_pause_aborts_streams_that_wait_for_a_schedulers_next_life() -> None:
    with Server(*_MULTI, "--resume-generation") as server:
        streams = _Streams(server, TOKENS[signal.SIGKILL], count=10)
        streams.wait_until_all_have_begun()
        server.kill("scheduler:0")
        server.wait_for_line(r"scheduler:0 .*starting its life 2")
        answer = server.http.post("/pause_generation", json={"mode": "abort"}, timeout=STOP_S)
        assert answer.status_code == 200, answer.text
        streams.wait_until_all_have_ended(ERROR_S)
        assert {stream.finish for stream in streams.all} == {"abort"}
        server.http.post("/continue_generation", json={}).raise_for_status()
        _works(server)


def test_scheduler_that_dies_while_draining_leaves_nobody_waiting() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        streams = _Streams(server, 4000, count=8)
        streams.wait_until_all_have_begun()
        server.terminate()
        server.wait_for_line("draining")
        server.kill("scheduler:0")
        streams.wait_until_all_have_ended(ERROR_S)
        assert all(stream.error is not None for stream in streams.all)
        assert server.wait(DEATH_S) == 0


def test_detokenizer_that_dies_while_draining_does_not_cut_streams() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        streams = _Streams(server, TOKENS[signal.SIGKILL], count=8)
        streams.wait_until_all_have_begun()
        server.terminate()
        server.wait_for_line("draining")
        server.kill("detokenizer:0")
        streams.wait_until_all_have_ended(STOP_S)
        for stream in streams.all:
            stream.check_whole()
        assert server.wait() == 0
        server.wait_for_line(r"stopped: 8 request\(s\) finished while draining, 0 cut")


def test_streams_of_other_workers_see_no_gap_when_one_is_killed() -> None:
    with Server(*_MULTI) as server:
        streams = _Streams(server, TOKENS[signal.SIGKILL])
        streams.wait_until_all_have_begun()
        old = server.kill("tokenizer_worker:2")
        server.wait_for_replacement("tokenizer_worker:2", old)
        streams.wait_until_all_have_ended(STOP_S)
        broken = [stream for stream in streams.all if stream.broken is not None]
        # Connections spread evenly.
        assert 0 < len(broken) < STREAMS / 2
        for stream in streams.all:
            if stream.broken is None:
                stream.check_whole()
        server.wait_until_idle()


def test_scheduler_that_comes_back_while_there_is_no_router_is_used_again() -> None:
    with Server(*_SLOW, *workers(2), "--hang-timeout", "5") as server:
        scheduler, router = server.pid_of("scheduler:0"), server.pid_of("router")
        assert scheduler is not None and router is not None
        streams = _Streams(server, 4000, count=8)
        streams.wait_until_all_have_begun()
        os.kill(router, signal.SIGSTOP)
        os.kill(scheduler, signal.SIGKILL)
        server.wait_for_replacement("scheduler:0", scheduler)
        server.wait_for_replacement("router", router, DETECTION_S[signal.SIGSTOP] + DEATH_S)
        # Nobody had told their owners of the death.
        streams.wait_until_all_have_ended(ERROR_S)
        for stream in streams.all:
            assert stream.error is not None
            assert "the engine has died" in stream.error["message"]
        _works(server)
        for worker in (1, 2):
            with server.connection_to(worker) as client:
                body = {"model": MODEL, "prompt": _prompt(1), "max_tokens": 5}
                assert client.post("/v1/completions", json=body).status_code == 200


def test_resumable_requests_wait_when_all_ranks_die_at_once() -> None:
    with Server(*_SLOW, *workers(2), "--data-parallel-size", "2", "--resume-generation") as server:
        streams = _Streams(server, TOKENS[signal.SIGKILL], count=20)
        streams.wait_until_all_have_begun()
        for part in ("scheduler:0", "scheduler:1", "detokenizer:0"):
            server.kill(part)
        streams.wait_until_all_have_ended(STOP_S)
        for stream in streams.all:
            stream.check_whole()
