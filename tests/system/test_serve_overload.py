"""Past every limit a client is told at once and when to come again; what was refused costs nobody anything."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from internals import wait_until_nothing_is_held
from reference import MODEL, echo_text, ids_of
from server import ERROR_S, FACTOR, LEAVE_S, SIMULATED, STOP_S, Server, engine_args, eventually, workers

CLIENTS = 200
_TOKENS = 20
# At 5 ms a token this would run for more than half a minute.
_LONG: dict[str, Any] = {"model": MODEL, "prompt": "a long story", "max_tokens": 8000}
_SLOW = [*SIMULATED, *engine_args(step_ms=5)]
_ONE_AT_A_TIME = [*_SLOW, *workers(4), "--max-running-requests", "1"]


class _Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: dict[str, Any]
    seconds: float


async def _ask(port: int, body: dict[str, Any], connected: asyncio.Barrier) -> _Answer:
    """Ask when everybody is connected; the seconds count from then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    await connected.wait()
    begun = time.monotonic()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(data)
        + data
    )
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    seconds = time.monotonic() - begun
    writer.close()
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return _Answer(int(first.split()[1]), headers, json.loads(answer), seconds)


def _ask_all_at_once(server: Server, bodies: list[dict[str, Any]]) -> list[_Answer]:
    async def gather() -> list[_Answer]:
        connected = asyncio.Barrier(len(bodies))
        async with asyncio.timeout(2 * STOP_S):
            return await asyncio.gather(*(_ask(server.port, body, connected) for body in bodies))

    return asyncio.run(gather())


def test_200_clients_at_a_server_for_two_are_served_or_refused_at_once() -> None:
    with Server(*_ONE_AT_A_TIME, "--max-queued-requests", "1") as server:
        prompts = [f"client {i} asks" for i in range(CLIENTS)]
        answers = _ask_all_at_once(server, [{"prompt": prompt, "max_tokens": _TOKENS} for prompt in prompts])
        served = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer.status == 200]
        refused = [answer for answer in answers if answer.status == 503]
        assert len(served) + len(refused) == CLIENTS
        assert len(served) >= 2
        assert all(answer.body["choices"][0]["text"] == echo_text(prompt, _TOKENS) for prompt, answer in served)
        assert max(answer.seconds for answer in refused) < ERROR_S
        assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
        assert {answer.body["error"]["code"] for answer in refused} == {"overloaded"}
        wait_until_nothing_is_held(server, LEAVE_S)
        # There is room again.
        assert server.openai.completions.create(model=MODEL, prompt="and now", max_tokens=1)


def test_clients_that_come_again_as_they_are_told_are_all_served() -> None:
    with Server(*_ONE_AT_A_TIME, "--max-queued-requests", "8") as server:
        left = [f"client {i} asks" for i in range(CLIENTS // 4)]
        for _ in range(CLIENTS):
            answers = _ask_all_at_once(server, [{"prompt": prompt, "max_tokens": 2} for prompt in left])
            assert {answer.status for answer in answers} <= {200, 503}
            left = [prompt for prompt, answer in zip(left, answers, strict=True) if answer.status != 200]
            if not left:
                break
        assert not left
        wait_until_nothing_is_held(server, LEAVE_S)


@contextlib.contextmanager
def _busy(server: Server) -> Iterator[None]:
    """Keep the only place in the engine taken."""
    with contextlib.closing(server.begin("/v1/completions", _LONG)):
        server.wait_for_load(1)
        yield


def test_those_with_priority_are_served_first_and_equals_in_turn() -> None:
    with Server(*_ONE_AT_A_TIME) as server:
        order: list[str] = []

        def call(name: str, priority: int) -> None:
            server.openai.completions.create(
                model=MODEL, prompt=name, max_tokens=_TOKENS, extra_body={"priority": priority}
            )
            order.append(name)

        callers = []
        with _busy(server):
            asked = [("low 1", -1), ("plain 1", 0), ("high 1", 5), ("low 2", -1), ("plain 2", 0), ("high 2", 5)]
            for waiting, (name, priority) in enumerate(asked, 1):
                callers.append(threading.Thread(target=call, args=(name, priority)))
                callers[-1].start()
                server.wait_for_load(1, waiting=waiting)
        for caller in callers:
            caller.join(STOP_S)
        assert order == [f"{kind} {i}" for kind in ("high", "plain", "low") for i in (1, 2)]


def test_prompts_that_wait_are_bounded_in_tokens() -> None:
    prompt = [5] * 80
    with Server(*_ONE_AT_A_TIME, "--max-queued-tokens", "100") as server:
        with _busy(server):
            with contextlib.closing(server.begin("/v1/completions", {"prompt": prompt, "max_tokens": 1})) as waiting:
                server.wait_for_load(1, waiting=1)
                for stream in (False, True):
                    with pytest.raises(openai.APIStatusError) as caught:
                        server.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=1, stream=stream)
                    assert caught.value.status_code == 503
                    assert int(caught.value.response.headers["retry-after"]) > 0
                # One that fits is taken.
                small = server.begin("/v1/completions", {"prompt": prompt[:20], "max_tokens": 1})
                server.wait_for_load(1, waiting=2)
                small.close()
                server.wait_for_load(1, waiting=1)
                assert waiting.sock
            # The room of those that left can be used again.
            server.wait_for_load(1, within=LEAVE_S)
            again = server.begin("/v1/completions", {"prompt": prompt, "max_tokens": 1})
            server.wait_for_load(1, waiting=1)
        assert again.getresponse().status == 200
        again.close()
        wait_until_nothing_is_held(server, LEAVE_S)


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_waits_too_long_is_refused(stream: bool) -> None:
    limit = 0.5
    with Server(*_ONE_AT_A_TIME, "--queue-timeout", str(limit)) as server:
        with _busy(server):
            begun = time.monotonic()
            with pytest.raises(openai.APIStatusError, match="waited") as caught:
                server.openai.completions.create(model=MODEL, prompt="late", max_tokens=1, stream=stream)
            assert limit <= time.monotonic() - begun < FACTOR * limit + ERROR_S
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["retry-after"]) > 0
            # What runs is not meant.
            server.wait_for_load(1)
        wait_until_nothing_is_held(server, LEAVE_S)


def test_request_that_takes_too_long_is_ended() -> None:
    limit = 0.5
    with Server(*_SLOW, *workers(4), "--request-timeout", str(limit)) as server:
        with pytest.raises(openai.APIStatusError, match="longer than its limit") as caught:
            server.openai.completions.create(**_LONG)
        assert caught.value.status_code == 504
        text = ""
        with pytest.raises(openai.APIError, match="longer than its limit"):
            for chunk in server.openai.completions.create(**_LONG, stream=True):
                text += chunk.choices[0].text
        assert text
        assert echo_text(_LONG["prompt"], _LONG["max_tokens"]).startswith(text)
        wait_until_nothing_is_held(server, LEAVE_S)
        # One that is quicker is not meant.
        assert server.openai.completions.create(model=MODEL, prompt="quick", max_tokens=3)


def test_request_may_ask_for_less_time_but_not_for_more() -> None:
    with Server(*_SLOW, *workers(2), "--request-timeout", "1") as server:
        for asked, given in ((0.2, "0.2"), (100, "1")):
            with pytest.raises(openai.APIStatusError, match=f"longer than its limit of {given} seconds"):
                server.openai.completions.create(**_LONG, extra_body={"timeout": asked})
        wait_until_nothing_is_held(server, LEAVE_S)


@pytest.mark.parametrize("limit", ["requests", "tokens"])
def test_greedy_key_does_not_starve_the_others(limit: str) -> None:
    long_tokens = len(ids_of(_LONG["prompt"])) + _LONG["max_tokens"]
    options = {"requests": ["--max-requests-per-key", "2"], "tokens": ["--max-tokens-per-key", str(2 * long_tokens)]}
    keys = ["--api-key", "greedy-key", "--api-key", "modest-key"]
    with Server(*_SLOW, *workers(4), *keys, *options[limit], "--max-running-requests", "3") as server:
        greedy, modest = (server.openai.with_options(api_key=key) for key in ("greedy-key", "modest-key"))
        streams = [greedy.completions.create(**_LONG, stream=True) for _ in range(2)]
        for stream in streams:
            next(stream)
        for streamed in itertools.islice(itertools.cycle((False, True)), 8):
            with pytest.raises(openai.RateLimitError) as caught:
                greedy.completions.create(**_LONG, stream=streamed)
            assert int(caught.value.response.headers["retry-after"]) > 0
        answer = modest.completions.create(model=MODEL, prompt="modest", max_tokens=_TOKENS)
        assert answer.choices[0].text == echo_text("modest", _TOKENS)
        # One that ends makes room for one of the same key.
        streams.pop().close()

        def has_room() -> bool:
            with contextlib.suppress(openai.RateLimitError):
                return bool(greedy.completions.create(model=MODEL, prompt="again", max_tokens=1))
            return False

        eventually(has_room, LEAVE_S, "the greedy key may ask again")
        streams.pop().close()
