"""Any process may be killed at any time; what is not survivable yet ends with an error, not with silence."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import httpx
import openai
import pytest
from reference import MODEL, echo_text
from server import DEATH_S, ERROR_S, SIMULATED, Server, engine_args, eventually, port_is_free, workers

PROMPT = "a tale of two cities and one harbour"
_SLOW = [*SIMULATED, *engine_args(step_ms=5)]
_BROKEN = (openai.APIError, httpx.HTTPError)


def _stream(api: openai.OpenAI, tokens: int) -> Any:
    stream = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=tokens, stream=True)
    return next(stream).choices[0].text, stream


def _rest(begun: Any) -> str:
    first, stream = begun
    return first + "".join(chunk.choices[0].text for chunk in stream)


@pytest.mark.parametrize("http_workers", [1, 4])
@pytest.mark.parametrize("running", [False, True], ids=["idle", "streaming"])
def test_everything_ends_with_a_killed_launcher(http_workers: int, running: bool) -> None:
    parts = ["--detokenizer-worker-num", "2", "--data-parallel-size", "2"]
    with Server(*_SLOW, *workers(http_workers), *parts, errors=True) as server:
        streams = [_stream(server.openai, 8000)[1] for _ in range(4)] if running else []
        server.send_signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        server.wait_for_children(DEATH_S)
        server.check_nothing_left()
        assert port_is_free(server.port)
        for stream in streams:
            with pytest.raises(_BROKEN):
                for _ in stream:
                    pass


def test_everything_ends_with_a_launcher_that_is_killed_while_starting() -> None:
    with Server(*SIMULATED, *engine_args(load_s=60), *workers(2), wait=False, errors=True) as server:
        server.wait_for_line("simulated engine")
        server.send_signal(signal.SIGKILL)
        server.wait()
        server.wait_for_children(DEATH_S)


def test_killed_worker_is_replaced_and_nobody_else_notices() -> None:
    with Server(*_SLOW, *workers(4), "--detokenizer-worker-num", "2") as server:
        with server.connection_to(2) as doomed, server.connection_to(1) as other, server.connection_to(3) as third:
            lost = [_stream(server.openai_over(doomed), 8000)]
            others = [_stream(server.openai_over(client), 600) for client in (other, third)]
            server.wait_for_load(3)
            server.kill("tokenizer_worker:2")
            with pytest.raises(_BROKEN):
                _rest(lost[0])
            # Its request is ended in the engine, where 8000 tokens would take 40 s.
            eventually(lambda: server.load()[0] <= 2, DEATH_S, "the dead worker's request is gone")
            figures = eventually(
                lambda: (f := server.processes()["tokenizer_worker:2"])["life"] == 2 and f, DEATH_S, "a replacement"
            )
            assert figures["load"] <= 1
            for begun in others:
                assert _rest(begun) == echo_text(PROMPT, 600)
        with server.connection_to(2, life=2) as replaced:
            answer = server.openai_over(replaced).completions.create(model=MODEL, prompt=PROMPT, max_tokens=30)
            assert answer.choices[0].text == echo_text(PROMPT, 30)
        server.wait_until_idle()
        server.wait_for_line(r"tokenizer_worker:2 \(pid \d+\) died of SIGKILL; starting its life 2")


def test_only_worker_is_replaced_too() -> None:
    with Server(*_SLOW) as server:
        begun = _stream(server.openai, 8000)
        server.kill("tokenizer_worker:1")
        with pytest.raises(_BROKEN):
            _rest(begun)
        # The socket is the launcher's, so that meanwhile clients wait and are not refused.
        assert server.connection().get("/server_info").json()["worker"]["address"] == "w1.2"
        server.wait_until_idle(DEATH_S)
        assert _rest(_stream(server.openai, 20)) == echo_text(PROMPT, 20)


def test_worker_can_be_killed_again_and_again() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        for life in range(2, 6):
            server.kill("tokenizer_worker:1")
            with server.connection_to(2) as other:
                eventually(
                    lambda client=other, life=life: (
                        client.get("/server_info").json()["processes"]["tokenizer_worker:1"]["life"] == life
                    ),
                    DEATH_S,
                    f"life {life}",
                )
            with server.connection_to(1, life=life) as client:
                assert _rest(_stream(server.openai_over(client), 20)) == echo_text(PROMPT, 20)


def test_workers_that_keep_dying_end_the_server() -> None:
    with Server(*_SLOW, errors=True) as server:
        for life in range(1, 7):
            pid = eventually(lambda: server.titles().get("multitok::tokenizer_worker:1"), DEATH_S, f"life {life}")
            server.connection().get("/health")
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: pid not in server.titles().values(), DEATH_S, "its end")
        assert server.wait() == 1
        server.wait_for_line("HTTP workers keep dying")


def test_fork_server_is_replaced_and_workers_live_on() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        begun = _stream(server.openai, 300)
        pid = server.kill("fork_server")
        eventually(lambda: server.titles().get("multitok::fork_server", pid) != pid, DEATH_S, "a replacement")
        assert _rest(begun) == echo_text(PROMPT, 300)
        server.kill("tokenizer_worker:1")
        with server.connection_to(2) as other:
            eventually(
                lambda: other.get("/server_info").json()["processes"]["tokenizer_worker:1"]["life"] == 2,
                DEATH_S,
                "a worker from the new fork server",
            )


@pytest.mark.parametrize("part", ["fork_server", "tokenizer_worker:1"])
def test_replacement_that_is_killed_at_once_is_replaced_too(part: str) -> None:
    with Server(*_SLOW, *workers(2)) as server:
        name = f"multitok::{part}"
        with server.connection_to(2) as other:
            begun = _stream(server.openai_over(other), 300)
            killed = {server.kill(part)}
            for _ in range(2):
                pid = eventually(lambda: {server.titles().get(name)} - killed - {None}, DEATH_S, "a replacement").pop()
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            assert _rest(begun) == echo_text(PROMPT, 300)
            if part == "fork_server":
                server.kill("tokenizer_worker:1")
            eventually(
                lambda: other.get("/server_info").json()["processes"]["tokenizer_worker:1"]["life"] > 1,
                DEATH_S,
                "a worker that lives",
            )


def test_worker_that_dies_while_there_is_no_fork_server_is_replaced() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        server.kill("fork_server")
        server.kill("tokenizer_worker:1")
        with server.connection_to(2) as other:
            eventually(
                lambda: other.get("/server_info").json()["processes"]["tokenizer_worker:1"]["life"] > 1,
                DEATH_S,
                "a worker from the new fork server",
            )


@pytest.mark.parametrize(
    ("part", "http_workers", "detokenizers"),
    [
        ("scheduler:0", 1, 1),
        ("scheduler:0", 2, 2),
        ("detokenizer:0", 1, 1),
        ("detokenizer:1", 2, 2),
        ("router", 2, 1),
    ],
)
def test_death_of_a_part_that_is_not_replaced_ends_the_server_with_a_reason(
    part: str, http_workers: int, detokenizers: int
) -> None:
    options = [*workers(http_workers), "--detokenizer-worker-num", str(detokenizers)]
    with Server(*_SLOW, *options, errors=True) as server:
        _, stream = _stream(server.openai, 8000)
        failures: list[Exception] = []

        def call() -> None:
            with pytest.raises(_BROKEN) as error:
                server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8000)
            failures.append(error.value)

        waiting = threading.Thread(target=call)
        waiting.start()
        server.wait_for_load(2)
        server.kill(part)
        with pytest.raises(_BROKEN):
            for _ in stream:
                pass
        waiting.join(ERROR_S)
        assert failures
        assert server.wait(DEATH_S) not in (0, 2)
        server.wait_for_line(rf"ERROR .*{part} \(pid \d+\) died of SIGKILL")
        assert port_is_free(server.port)


def test_engine_that_fails_ends_the_server_with_its_own_words() -> None:
    with Server(*SIMULATED, *engine_args(crash_after_steps=20), *workers(2), errors=True) as server:
        for stream in (True, False):
            with pytest.raises(_BROKEN):
                answer = server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8000, stream=stream)
                for _ in answer:
                    pass
        assert server.wait(DEATH_S) not in (0, 2)
        server.wait_for_line("ERROR .*launcher .*simulated crash at step 20")
