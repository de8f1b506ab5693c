"""multitok in front of other multitoks: ``--engine remote``."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import openai
import pytest
from reference import MODEL, echo_text, ids_of
from server import DEATH_S, LEAVE_S, SIMULATED, START_S, STOP_S, Server, engine_args, eventually, free_port, workers

_STREAMS = 20
_TOKENS = 150


def behind(*options: str, step_ms: int = 10, errors: bool = False) -> Server:
    """Make a server whose engine is to be used by another one."""
    return Server(*SIMULATED, *engine_args(step_ms=step_ms), *options, errors=errors)


def front(*servers: Server, errors: bool = False, **arguments: object) -> Server:
    """Make a server with two workers that uses others."""
    given = {"url": ",".join(server.base_url for server in servers), "health_period": 0.3} | arguments
    return Server("--engine", "remote", *engine_args(**given), *workers(2), errors=errors)


def prompts(count: int = _STREAMS) -> list[str]:
    return [f"The {i}th of the sailors told this story about the island: " * 2 for i in range(count)]


def kill_all_of(server: Server) -> None:
    """Kill a server: its launcher, with which all of its processes end."""
    server.send_signal(signal.SIGKILL)
    server.wait()
    server.wait_for_children(DEATH_S)


async def stream(client: openai.AsyncOpenAI, prompt: str, begun: asyncio.Semaphore) -> str:
    text = ""
    async for chunk in await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=_TOKENS, temperature=0, stream=True
    ):
        if not text:
            begun.release()
        text += chunk.choices[0].text
    return text


def run_streams(server: Server, texts: list[str], meanwhile: Callable[[], None]) -> list[str | BaseException]:
    """Run streams at once; `meanwhile` is called once all have begun. Returns their texts or errors."""

    async def run() -> list[str | BaseException]:
        begun = asyncio.Semaphore(0)
        async with openai.AsyncOpenAI(
            base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=START_S
        ) as client:
            tasks = [asyncio.create_task(stream(client, text, begun)) for text in texts]
            for _ in texts:
                await begun.acquire()
            await asyncio.to_thread(meanwhile)
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


def test_streams_go_on_exactly_when_one_of_two_engines_is_killed_and_are_refused_when_both_are():
    texts = prompts()
    with behind(errors=True) as first, behind(errors=True) as second, front(first, second, errors=True) as server:
        assert server.http.get("/server_info").json()["engine"]["name"] == "remote"

        def kill_one() -> None:
            assert first.load()[0] == second.load()[0] == _STREAMS / 2
            kill_all_of(first)

        results = run_streams(server, texts, kill_one)
        assert results == [echo_text(text, _TOKENS) for text in texts]
        server.wait_for_line(rf"{first.base_url} is down: ")
        server.wait_until_idle()
        second.wait_until_idle()

        results = run_streams(server, texts[:4], lambda: kill_all_of(second))
        assert all(isinstance(result, openai.APIError) for result in results), results
        assert all("engine" in str(result) for result in results)
        server.wait_for_line(rf"{second.base_url} is down: ")
        server.wait_until_idle()
        with pytest.raises(openai.InternalServerError, match="no engine can be reached") as refused:
            server.openai.completions.create(model=MODEL, prompt="x", max_tokens=2)
        assert refused.value.status_code == 503
        eventually(lambda: server.http.get("/ready").status_code == 503, DEATH_S, "it is not ready without an engine")

        begin = len(server._log)
        with behind("--port", str(first.port)) as again:
            server.wait_for_line(rf"{again.base_url} is up: multitok simulated", begin=begin)
            answer = server.openai.completions.create(model=MODEL, prompt=texts[0], max_tokens=7, temperature=0)
            assert answer.choices[0].text == echo_text(texts[0], 7)
            eventually(lambda: server.http.get("/ready").status_code == 200, DEATH_S, "it is ready again")


def test_streams_end_at_an_engine_that_drains() -> None:
    texts = prompts(4)
    # 150 ids in 3 seconds, in which its health is asked for ten times.
    with behind(step_ms=20) as engine, front(engine, errors=True) as server:

        def drain() -> None:
            engine.terminate()
            server.wait_for_line(f"{engine.base_url} is down")

        assert run_streams(server, texts, drain) == [echo_text(text, _TOKENS) for text in texts]
        assert engine.wait() == 0
        engine.wait_for_line(r"stopped: \d+ request\(s\) finished while draining, 0 cut")


def test_a_client_that_leaves_frees_the_slot_at_the_other_end() -> None:
    with behind() as engine, front(engine) as server:
        connection = server.begin("/v1/completions", {"prompt": "x y", "max_tokens": 5000, "stream": True})
        engine.wait_for_load(1)
        connection.close()
        engine.wait_until_idle(LEAVE_S)
        server.wait_until_idle(LEAVE_S)


def test_what_the_engine_can_do_is_what_clients_can_ask_for() -> None:
    with behind("--api-key", "a-secret") as engine, front(engine, api_key="a-secret") as server:
        info = server.http.get("/server_info").json()
        assert "a-secret" not in str(info)
        assert info["engine"]["simulated"] is True
        answer = server.openai.completions.create(model=MODEL, prompt="a b c", max_tokens=5, logprobs=3, seed=1)
        assert answer.choices[0].text == echo_text("a b c", 5)
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.token_logprobs or []) == 5
        with pytest.raises(openai.BadRequestError, match="json_object is not supported by the engine 'remote'"):
            server.openai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], response_format={"type": "json_object"}
            )
        assert "a-secret" not in server.log


def test_a_start_without_an_engine_ends_with_the_reason() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    options = engine_args(url=url, wait=0.3)
    with Server("--engine", "remote", *options, wait=False, errors=True) as server:
        assert server.wait(START_S) == 2
        server.wait_for_line(rf"no engine has answered for 0.3 s: {url}: .*refused", STOP_S)


def test_another_server_can_have_the_rest_of_an_output_made() -> None:
    ids = ids_of("one two three four")
    with behind(step_ms=0) as server:
        body: dict[str, Any] = {
            "input_ids": [*ids, *ids, ids[0]],
            "resumed_tokens": len(ids) + 1,
            "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        }
        answer = server.http.post("/generate", json=body).json()
        assert answer["output_ids"] == [*ids[1:], *ids][:4]
        for count in (-1, len(body["input_ids"])):
            refused = server.http.post("/generate", json={**body, "resumed_tokens": count})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "resumed_tokens"
