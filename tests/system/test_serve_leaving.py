"""A client that leaves, and /abort_request, free the engine."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from internals import wait_until_nothing_is_held
from reference import MODEL, ids_of
from server import LEAVE_S, SIMULATED, STOP_S, Server, engine_args, eventually, workers

# At 5 ms a token these would run for more than half a minute.
_LONG: dict[str, Any] = {"model": MODEL, "prompt": "a long story", "max_tokens": 8000}


def test_client_that_leaves_a_stream_frees_the_engine(either: Server) -> None:
    stream = either.openai.completions.create(**_LONG, stream=True)
    next(stream)
    either.wait_for_load(1)
    stream.close()
    either.wait_until_idle(LEAVE_S)


def test_client_that_leaves_while_it_waits_for_an_answer_frees_the_engine(either: Server) -> None:
    connection = either.begin("/v1/completions", _LONG)
    either.wait_for_load(1)
    connection.close()
    either.wait_until_idle(LEAVE_S)


@pytest.mark.parametrize("prompt", ["short", "so long that a thread tokenizes it " * 700], ids=["short", "long"])
def test_client_that_leaves_at_once_leaves_nothing_running(prompt: str, either: Server) -> None:
    for stream in (False, True):
        for _ in range(10):
            either.begin("/v1/completions", {"prompt": prompt, "max_tokens": 2000, "stream": stream}).close()
    # Whatever order things are noticed in: the next request comes after those.
    either.openai.completions.create(model=MODEL, prompt="hello", max_tokens=1)
    either.wait_until_idle(LEAVE_S)


def test_client_that_leaves_frees_every_choice_of_every_prompt(either: Server) -> None:
    stream = either.openai.completions.create(**{**_LONG, "prompt": ["one", "two", "three"]}, n=4, stream=True)
    next(stream)
    either.wait_for_load(12)
    stream.close()
    either.wait_until_idle(LEAVE_S)


def test_client_that_leaves_disturbs_nobody_else(multi: Server) -> None:
    staying = multi.openai.completions.create(model=MODEL, prompt="stay", max_tokens=300, stream=True)
    next(staying)
    leaving = [multi.openai.completions.create(**_LONG, stream=True) for _ in range(8)]
    for stream in leaving:
        next(stream)
        stream.close()
    *_, last = staying
    assert last.choices[0].finish_reason == "length"


def test_client_that_leaves_while_its_prompt_is_worked_on_frees_the_engine() -> None:
    # 8 ids per step of 20 ms; the whole prompt would take 17 s.
    slow = engine_args(prefill_ms_per_token=2.5, prefill_chunk=8)
    with Server(*SIMULATED, *slow, *workers(2)) as server:
        for stream in (False, True):
            connection = server.begin(
                "/v1/completions", {**_LONG, "prompt": [5] * 7000, "max_tokens": 1, "stream": stream}
            )
            server.wait_for_load(1)
            connection.close()
            server.wait_until_idle(LEAVE_S)


def test_client_that_leaves_the_queue_is_not_served() -> None:
    with Server(*SIMULATED, *engine_args(step_ms=5), *workers(2), "--max-running-requests", "1") as server:
        first = server.begin("/v1/completions", _LONG)
        server.wait_for_load(1)
        second = server.begin("/v1/completions", {**_LONG, "stream": True})
        server.wait_for_load(1, waiting=1)
        second.close()
        server.wait_for_load(1, within=LEAVE_S)
        first.close()
        server.wait_until_idle(LEAVE_S)


def test_request_can_be_aborted_through_a_worker_that_does_not_own_it(multi: Server) -> None:
    with multi.connection_to(1) as owner, multi.connection_to(3) as other:
        stream = multi.openai_over(owner).completions.create(**_LONG, stream=True, extra_body={"request_id": "mine"})
        next(stream)
        assert other.post("/abort_request", json={"rid": "mine"}).status_code == 200
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
        multi.wait_until_idle(LEAVE_S)


def test_request_that_waits_for_its_whole_answer_is_told_of_its_abortion(either: Server) -> None:
    answers: list[openai.types.Completion] = []
    # Its own retries must not bring back what was aborted.
    client = either.openai.with_options(max_retries=2)

    def call() -> None:
        answers.append(client.completions.create(**_LONG, n=3, extra_body={"request_id": "whole"}))

    caller = threading.Thread(target=call)
    caller.start()
    either.wait_for_load(3)
    assert either.http.post("/abort_request", json={"rid": "whole"}).status_code == 200
    caller.join(LEAVE_S)
    assert [choice.finish_reason for choice in answers[0].choices] == ["abort"] * 3
    assert answers[0].usage is not None
    assert 0 < answers[0].usage.completion_tokens < 3 * _LONG["max_tokens"]
    either.wait_until_idle(LEAVE_S)


def test_abort_all_ends_everybody(multi: Server) -> None:
    streams = [multi.openai.completions.create(**_LONG, stream=True) for _ in range(6)]
    for stream in streams:
        next(stream)
    assert multi.http.post("/abort_request", json={"abort_all": True}).status_code == 200
    for stream in streams:
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
    multi.wait_until_idle(LEAVE_S)


def test_id_that_is_in_use_is_refused_whoever_owns_it(multi: Server) -> None:
    with multi.connection_to(1) as owner, multi.connection_to(2) as other:
        body = {"request_id": "twice"}
        stream = multi.openai_over(owner).completions.create(**_LONG, stream=True, extra_body=body)
        next(stream)
        with pytest.raises(openai.BadRequestError, match="twice"):
            multi.openai_over(other).completions.create(**_LONG, extra_body=body)
        stream.close()
        multi.wait_until_idle(LEAVE_S)
        answer = multi.openai_over(other).completions.create(model=MODEL, prompt="x", max_tokens=1, extra_body=body)
        assert answer.id == "twice"


def test_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    options = ["--max-running-requests", "1", "--max-queued-requests", "1"]
    with Server(*SIMULATED, *engine_args(step_ms=5), *workers(2), *options) as server:
        running = [server.begin("/v1/completions", {**_LONG, "stream": i == 0}) for i in range(2)]
        server.wait_for_load(1, waiting=1)
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as caught:
                server.openai.completions.create(**_LONG, stream=stream)
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["retry-after"]) > 0
        for connection in running:
            connection.close()
        server.wait_until_idle(LEAVE_S)


def test_failure_of_one_request_reaches_its_caller_and_nobody_else() -> None:
    poison = ids_of(" poison")[0]
    with Server(*SIMULATED, *engine_args(step_ms=5, fail_on_id=poison), *workers(2)) as server:
        healthy = server.openai.completions.create(model=MODEL, prompt="healthy", max_tokens=200, stream=True)
        next(healthy)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="simulated failure"):
                server.openai.completions.create(model=MODEL, prompt="a poison", max_tokens=5, stream=stream)
        *_, last = healthy
        assert last.choices[0].finish_reason == "length"
        server.wait_until_idle(LEAVE_S)


def test_failure_in_the_middle_of_a_stream_ends_it_with_an_error_event() -> None:
    with Server(*SIMULATED, *engine_args(fail_after_tokens=5), *workers(2)) as server:
        text = ""
        with pytest.raises(openai.APIError, match="simulated failure"):
            for chunk in server.openai.completions.create(
                model=MODEL, prompt="one two three", max_tokens=9, stream=True
            ):
                text += chunk.choices[0].text
        assert text
        server.wait_until_idle(LEAVE_S)


# At any stage

_KINDS: dict[str, dict[str, Any]] = {
    "stream": {"stream": True},
    "whole": {},
    "choices": {"n": 4, "stream": True},
    "list": {"prompt": ["one", "two", "three"]},
}
# Seconds that a client stays; None: until its answer has begun.
_STAYS = [0.0, 0.001, 0.005, 0.02, None]
_AT_ONCE = 200
_EACH = 4
# A worker keeps some memory of its busiest moments; a request that stays would be a kilobyte at least.
_FLAT_MB = 4.0


def _leave(server: Server, stay: float | None, **body: Any) -> None:
    """Ask for a long answer, and go away after a while, or with the first piece of a stream."""
    with contextlib.closing(server.begin("/v1/completions", {**_LONG, **body})) as connection:
        if stay is not None:
            time.sleep(stay)
        elif body.get("stream"):
            assert connection.sock.recv(4096)
        else:
            server.wait_for_load(1 if "prompt" not in body else 3)


@pytest.mark.parametrize("stay", _STAYS, ids=["0 ms", "1 ms", "5 ms", "20 ms", "begun"])
def test_client_may_leave_at_any_stage(stay: float | None, either: Server) -> None:
    for body in _EACH * list(_KINDS.values()):
        _leave(either, stay, **body)
        if stay is None:
            either.wait_until_idle(LEAVE_S)
    # What was sent last is noticed last: the next request comes after it.
    either.openai.completions.create(model=MODEL, prompt="hello", max_tokens=1)
    wait_until_nothing_is_held(either, LEAVE_S)


def test_200_clients_may_leave_at_once(either: Server) -> None:
    kinds = list(_KINDS.values())
    with contextlib.ExitStack() as connections:
        for i in range(_AT_ONCE):
            body = {**_LONG, **kinds[i % len(kinds)]}
            connections.enter_context(contextlib.closing(either.begin("/v1/completions", body)))
        eventually(lambda: sum(either.load()) >= _AT_ONCE, STOP_S, "they are all in the engine, or wait for it")
    wait_until_nothing_is_held(either, LEAVE_S)


def _rss_mb(server: Server) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, pid in server.titles().items():
        (line,) = [s for s in Path(f"/proc/{pid}/status").read_text().splitlines() if s.startswith("VmRSS")]
        found[name] = int(line.split()[1]) / 1024
    return found


@pytest.mark.parametrize("times", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_clients_that_leave(times: int) -> None:
    with Server(*SIMULATED, *engine_args(step_ms=5), *workers(2)) as server:

        def leave(count: int) -> None:
            kinds = itertools.cycle(itertools.product((0.0, 0.001, 0.005), _KINDS.values()))
            for stay, body in itertools.islice(kinds, count):
                _leave(server, stay, **body)
            server.openai.completions.create(model=MODEL, prompt="hello", max_tokens=1)
            wait_until_nothing_is_held(server, LEAVE_S)

        leave(500)
        before = _rss_mb(server)
        leave(times)
        grown = {name: size - before[name] for name, size in _rss_mb(server).items()}
        assert max(grown.values()) < _FLAT_MB, grown


# One id for one request at a time


def _short(client: openai.OpenAI, request_id: str, tokens: int = 1, **more: Any) -> openai.types.Completion:
    body = {"request_id": request_id, **more}
    answer: openai.types.Completion = client.completions.create(
        model=MODEL, prompt="x", max_tokens=tokens, extra_body=body
    )
    return answer


def test_of_two_requests_with_one_id_at_once_one_is_refused(multi: Server) -> None:
    with multi.connection_to(1) as one, multi.connection_to(2) as other:
        for i in range(10):
            start = threading.Barrier(2)
            ends: list[str] = []

            def call(client: httpx.Client, request_id: str, start: threading.Barrier, ends: list[str]) -> None:
                start.wait(STOP_S)
                try:
                    ends.append(_short(multi.openai_over(client), request_id, tokens=100).id)
                except openai.BadRequestError as error:
                    assert request_id in str(error)
                    ends.append("refused")

            callers = [threading.Thread(target=call, args=(c, f"both-{i}", start, ends)) for c in (one, other)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join(STOP_S)
            assert sorted(ends) == [f"both-{i}", "refused"]


def test_id_may_be_used_again_once_its_request_has_ended_in_any_way() -> None:
    poison = ids_of(" poison")[0]
    parts = [*engine_args(step_ms=5, fail_on_id=poison), *workers(2)]
    with Server(*SIMULATED, *parts) as server:
        with server.connection_to(1) as one, server.connection_to(2) as other:
            first, second = server.openai_over(one), server.openai_over(other)
            mine = {"request_id": "mine"}

            def is_free() -> bool:
                # An abort takes a step or two to arrive.
                with contextlib.suppress(openai.BadRequestError):
                    return _short(second, "mine").id == "mine"
                return False

            # Finished.
            assert _short(first, "mine").id == "mine"
            assert _short(second, "mine").id == "mine"
            # Refused before it came to the engine, and failed in it.
            for wrong in ({"temperature": 9}, {"prompt": "a poison"}):
                with pytest.raises(openai.APIStatusError):
                    first.completions.create(**{**_LONG, **wrong}, extra_body=mine)
                assert _short(second, "mine").id == "mine"
            # Ended by a stop string, in the detokenizer: the scheduler hears of it from the owner.
            first.completions.create(**_LONG, stop="story", extra_body=mine)
            eventually(is_free, LEAVE_S, "the id is free after a stop string")
            # Aborted by somebody.
            stream = first.completions.create(**_LONG, stream=True, extra_body=mine)
            next(stream)
            assert other.post("/abort_request", json={"rid": "mine"}).status_code == 200
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
            eventually(is_free, LEAVE_S, "the id is free after an abort")
        # Left.
        _leave(server, None, stream=True, request_id="mine")
        with server.connection_to(2) as other:
            second = server.openai_over(other)
            eventually(is_free, LEAVE_S, "the id is free when its client has left")
            # With its worker.
            with server.connection_to(1) as one:
                stream = server.openai_over(one).completions.create(**_LONG, stream=True, extra_body=mine)
                next(stream)
                server.kill("tokenizer_worker:1")
                eventually(is_free, LEAVE_S, "the id is free when its worker has died")
        wait_until_nothing_is_held(server, LEAVE_S)
