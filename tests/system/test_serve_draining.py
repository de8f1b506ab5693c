"""SIGTERM and Ctrl-C let running requests finish, and end every process; `Server` checks that nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from reference import MODEL, echo_text
from server import DEATH_S, ERROR_S, SIMULATED, STOP_S, Server, engine_args, eventually, port_is_free, workers

PROMPT = "once upon a time in a land far away"
_SLOW = [*SIMULATED, *engine_args(step_ms=5)]


def _stream(server: Server, tokens: int) -> Any:
    stream = server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=tokens, stream=True)
    return next(stream).choices[0].text, stream


@pytest.mark.parametrize(("number", "http_workers"), [(signal.SIGTERM, 1), (signal.SIGTERM, 3), (signal.SIGINT, 3)])
def test_running_requests_finish_while_new_connections_are_refused(number: signal.Signals, http_workers: int) -> None:
    tokens = 300
    with Server(*_SLOW, *workers(http_workers)) as server:
        streams = [_stream(server, tokens) for _ in range(6)]
        whole = threading.Thread(target=lambda: answers.append(_whole(server, tokens)))
        answers: list[Any] = []
        whole.start()
        server.wait_for_load(7)
        server.send_signal(number)
        server.wait_for_line(f"{number.name}: draining")
        eventually(lambda: not server.accepts(), STOP_S, "connections are refused")
        for first, stream in streams:
            rest = list(stream)
            assert first + "".join(chunk.choices[0].text for chunk in rest) == echo_text(PROMPT, tokens)
            assert rest[-1].choices[0].finish_reason == "length"
        whole.join(STOP_S)
        assert answers[0].choices[0].text == echo_text(PROMPT, tokens)
        assert server.wait() == 0
        server.wait_for_line(r"stopped: \d+ request\(s\) finished while draining, 0 cut")
        assert port_is_free(server.port)


def _whole(server: Server, tokens: int) -> Any:
    return server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=tokens)


def test_kept_alive_connection_is_answered_once_more_and_told_to_close() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        # A stream keeps the server from being done: for longer than anything is waited for here.
        _, stream = _stream(server, 8000)
        client = server.connection()
        assert "connection" not in client.get("/health").headers
        server.terminate()

        def told() -> bool:
            return client.get("/health").raise_for_status().headers.get("connection") == "close"

        eventually(told, STOP_S, "Connection: close")
        # The client obeys, and its next connection is refused.
        eventually(lambda: not server.accepts(), STOP_S, "connections are refused")
        with pytest.raises(httpx.ConnectError):
            client.get("/health")
        stream.close()
        assert server.wait() == 0


def test_idle_kept_alive_connection_does_not_hold_up_the_end() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        for _ in range(8):
            server.connection().get("/health")
        begun = time.monotonic()
        server.terminate()
        assert server.wait() == 0
        assert time.monotonic() - begun < DEATH_S


def test_what_does_not_finish_in_time_is_told() -> None:
    with Server(*_SLOW, *workers(2), "--drain-timeout", "0.5") as server:
        _, stream = _stream(server, 8000)
        caught: list[Exception] = []

        def call() -> None:
            with pytest.raises(openai.APIStatusError) as error:
                _whole(server, 8000)
            caught.append(error.value)

        whole = threading.Thread(target=call)
        whole.start()
        server.wait_for_load(2)
        server.terminate()
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in stream:
                pass
        whole.join(ERROR_S)
        assert isinstance(caught[0], openai.APIStatusError)
        assert caught[0].status_code == 503
        assert server.wait() == 0
        server.wait_for_line("0 request.* finished while draining, 2 cut")


def test_second_signal_ends_at_once() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        _, stream = _stream(server, 8000)
        server.terminate()
        server.wait_for_line("draining")
        server.terminate()
        assert server.wait(DEATH_S) == 0
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            for _ in stream:
                pass


def test_part_that_is_stopped_holds_the_end_up_no_longer_than_it_takes_to_notice() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        pids = [pid for name, pid in server.titles().items() if "worker" not in name]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        server.terminate()
        assert server.wait(DEATH_S) == 0


def test_ready_says_no_while_draining_and_health_says_yes() -> None:
    with Server(*_SLOW) as server:
        client = server.connection()
        assert client.get("/ready").status_code == 200
        pipelined = server.begin("/v1/completions", {"prompt": PROMPT, "max_tokens": 400})
        server.wait_for_load(1)
        server.terminate()
        server.wait_for_line("draining")
        # The launcher has said so on the board before it said so in the log.
        assert client.get("/ready").status_code == 503
        assert pipelined.getresponse().status == 200
        pipelined.close()
        assert server.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_starting_ends_everything(number: signal.Signals) -> None:
    with Server(*SIMULATED, *engine_args(load_s=60), *workers(2), wait=False) as server:
        server.wait_for_line("simulated engine")
        server.send_signal(number)
        assert server.wait(DEATH_S) == 0


def test_signal_while_a_part_is_loading_again_ends_everything() -> None:
    with Server(*SIMULATED, *engine_args(load_s=2), *workers(2)) as server:
        old = server.kill("scheduler:0")
        eventually(lambda: server.pid_of("scheduler:0") not in (old, None), DEATH_S, "the next life")
        server.terminate()
        assert server.wait(DEATH_S) == 0
        server.wait_for_line("stopped: ")
        # It did not have to load to its end.
        assert "is ready, life 2" not in server.log
