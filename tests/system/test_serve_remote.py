"""multitok in front of other multitoks: ``--engine remote``."""

from __future__ import annotations

import asyncio
import os
import signal

import openai
import pytest
from reference import MODEL, echo_text
from server import DEATH_S, SIMULATED, START_S, Server, engine_args, workers

_STREAMS = 20
_TOKENS = 150


def behind(*options: str, step_ms: int = 10, port: int | None = None, errors: bool = False) -> Server:
    """A server whose engine is to be used by another one."""
    where = () if port is None else ("--port", str(port))
    return Server(*SIMULATED, *engine_args(step_ms=step_ms), *where, *options, errors=errors)


def front(*urls: str, errors: bool = True, wait: bool = True, options: tuple[str, ...] = (), **arguments) -> Server:
    """A server with two workers that uses others."""
    given = {"url": ",".join(urls), "health_period": 0.3} | arguments
    return Server("--engine", "remote", *engine_args(**given), *workers(2), *options, errors=errors, wait=wait)


def prompts(count: int = _STREAMS) -> list[str]:
    return [f"The {i}th of the sailors told this story about the island: " * 2 for i in range(count)]


def kill_all_of(server: Server) -> None:
    """Kill a server with all its processes, as if its machine had gone."""
    os.kill(server.pid, signal.SIGKILL)
    server._process.wait()
    server._waited_for = True
    server.wait_for_children(DEATH_S)


async def stream(client: openai.AsyncOpenAI, prompt: str, begun: asyncio.Semaphore, tokens: int = _TOKENS, **fields):
    text = ""
    async for chunk in await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, stream=True, **fields
    ):
        if not text:
            begun.release()
        text += chunk.choices[0].text
    return text


def run_streams(server: Server, texts: list[str], meanwhile, **fields):
    """Run streams at once; `meanwhile` is called once all have begun. Returns their texts or errors."""

    async def run():
        begun = asyncio.Semaphore(0)
        async with openai.AsyncOpenAI(
            base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=START_S
        ) as client:
            tasks = [asyncio.create_task(stream(client, text, begun, **fields)) for text in texts]
            for _ in texts:
                await begun.acquire()
            await asyncio.to_thread(meanwhile)
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


def test_streams_go_on_exactly_when_one_of_two_engines_is_killed_and_are_refused_when_both_are():
    texts = prompts()
    with behind() as first, behind() as second, front(first.base_url, second.base_url) as server:
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

        begin = len(server._log)
        with behind(port=first.port) as again:
            server.wait_for_line(rf"{again.base_url} is up: multitok simulated", begin=begin)
            answer = server.openai.completions.create(model=MODEL, prompt=texts[0], max_tokens=7, temperature=0)
            assert answer.choices[0].text == echo_text(texts[0], 7)
