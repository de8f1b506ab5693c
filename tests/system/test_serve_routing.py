"""Every answer is whole and reaches the connection that asked."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import openai
import pytest
from reference import MODEL, echo_text, echoed, ids_of, raw_text, tokenizer
from server import SIMULATED, STOP_S, Server, engine_args, workers

CLIENTS = 64
_WORDS = ("river", "stone", "7", "window", "42", "of the", "harbour", "green,", "paper;", "moon?", "gate", "1999")


def _prompt(client: int) -> str:
    chosen = random.Random(client)
    return f"client {client} says: " + " ".join(chosen.choices(_WORDS, k=20))


async def _gather(server: Server, *calls: Any) -> list[Any]:
    """Make all calls at once, each as a client of its own, so that each has a connection of its own."""

    async def alone(call: Any) -> Any:
        async with openai.AsyncOpenAI(
            base_url=f"{server.base_url}/v1",
            api_key="none",
            max_retries=0,
            timeout=STOP_S,
            http_client=httpx.AsyncClient(trust_env=False),
        ) as client:
            return await call(client)

    return await asyncio.gather(*map(alone, calls))


def test_64_streams_at_once_are_each_whole_and_on_their_connection(multi: Server) -> None:
    tokens = 150
    started = 0
    all_started = asyncio.Event()

    def streaming(client: int) -> Any:
        async def call(api: openai.AsyncOpenAI) -> list[Any]:
            nonlocal started
            stream = await api.completions.create(
                model=MODEL,
                prompt=_prompt(client),
                max_tokens=tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True},
            )
            chunks = []
            async for chunk in stream:
                if not chunks:
                    started += 1
                    if started == CLIENTS:
                        all_started.set()
                    # Nobody reads on before everybody has an answer.
                    await asyncio.wait_for(all_started.wait(), STOP_S)
                chunks.append(chunk)
            return chunks

        return call

    answers = asyncio.run(_gather(multi, *map(streaming, range(CLIENTS))))
    for client, chunks in enumerate(answers):
        prompt = ids_of(_prompt(client))
        *deltas, usage = chunks
        assert "".join(chunk.choices[0].text for chunk in deltas) == echo_text(_prompt(client), tokens)
        assert [i for chunk in deltas for i in chunk.choices[0].token_ids] == echoed(prompt, tokens)
        # One event per token.
        assert len(deltas) == tokens
        assert [chunk.choices[0].finish_reason for chunk in deltas] == [None] * (tokens - 1) + ["length"]
        assert deltas[0].choices[0].prompt_token_ids == prompt
        assert len({chunk.id for chunk in chunks}) == 1
        assert usage.choices == []
        assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (len(prompt), tokens)
    assert len({chunks[0].id for chunks in answers}) == CLIENTS


def test_64_answers_at_once_are_each_on_their_connection(multi: Server) -> None:
    def whole(client: int) -> Any:
        return lambda api: api.completions.create(model=MODEL, prompt=_prompt(client), max_tokens=40)

    answers = asyncio.run(_gather(multi, *map(whole, range(CLIENTS))))
    for client, answer in enumerate(answers):
        assert answer.choices[0].text == echo_text(_prompt(client), 40)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 40


def test_lists_of_prompts_with_several_choices_come_back_in_order(either: Server) -> None:
    prompts = [_prompt(i) for i in range(9)]
    answer = either.openai.completions.create(model=MODEL, prompt=prompts, n=3, max_tokens=12)
    assert [choice.index for choice in answer.choices] == list(range(27))
    assert [choice.text for choice in answer.choices] == [echo_text(p, 12) for p in prompts for _ in range(3)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(ids_of(p)) for p in prompts)
    assert answer.usage.completion_tokens == 27 * 12


def test_streamed_choices_of_a_list_are_told_apart_by_index(either: Server) -> None:
    prompts = [ids_of(_prompt(i)) for i in range(5)]
    texts = [""] * 10
    finished = []
    for chunk in either.openai.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=12, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                finished.append(choice.index)
    assert texts == [raw_text(p, echoed(p, 12)) for p in prompts for _ in range(2)]
    assert sorted(finished) == list(range(10))


def test_all_kinds_of_requests_at_once_do_not_disturb_each_other(multi: Server) -> None:
    def streamed_chat(client: int) -> Any:
        async def call(api: openai.AsyncOpenAI) -> str:
            messages: Any = [{"role": "user", "content": _prompt(client)}]
            stream = await api.chat.completions.create(model=MODEL, messages=messages, max_tokens=60, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        return call

    def streamed(client: int) -> Any:
        async def call(api: openai.AsyncOpenAI) -> str:
            stream = await api.completions.create(model=MODEL, prompt=_prompt(client), max_tokens=60, stream=True)
            return "".join([c.choices[0].text async for c in stream])

        return call

    def whole(client: int) -> Any:
        async def call(api: openai.AsyncOpenAI) -> str:
            answer = await api.completions.create(model=MODEL, prompt=_prompt(client), max_tokens=60, n=2)
            assert answer.choices[0].text == answer.choices[1].text
            return answer.choices[0].text

        return call

    def several(client: int) -> Any:
        async def call(api: openai.AsyncOpenAI) -> str:
            prompts = [_prompt(1000 + client), _prompt(client)]
            answer = await api.completions.create(model=MODEL, prompt=prompts, max_tokens=60)
            assert answer.choices[0].text == echo_text(prompts[0], 60)
            return answer.choices[1].text

        return call

    kinds = (streamed, whole, several, streamed_chat)
    answers = asyncio.run(_gather(multi, *(kinds[i % 4](i) for i in range(CLIENTS))))
    for client, answer in enumerate(answers):
        if kinds[client % 4] is streamed_chat:
            rendered = (
                "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
                f"<|im_start|>user\n{_prompt(client)}<|im_end|>\n<|im_start|>assistant\n"
            )
            ids = tokenizer().encode(rendered, add_special_tokens=False).ids
            assert answer == tokenizer().decode(echoed(ids, 60), skip_special_tokens=True)
        else:
            assert answer == echo_text(_prompt(client), 60)


def test_one_connection_serves_many_requests_in_turn(either: Server) -> None:
    client = either.connection()
    for i in range(20):
        body = {"prompt": _prompt(i), "max_tokens": 3}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        assert answer["choices"][0]["text"] == echo_text(_prompt(i), 3)


@pytest.mark.parametrize("http_workers", [1, 2])
def test_requests_that_share_a_long_prefix_run_on_one_rank_and_others_on_the_other(http_workers: int) -> None:
    with Server(*SIMULATED, *engine_args(step_ms=5), *workers(http_workers), "--data-parallel-size", "2") as server:

        def begin(prompt: str) -> Any:
            stream = server.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=200, stream=True)
            next(stream)
            return stream

        shared = _prompt(1) * 60
        streams = [begin(f"{shared} {i}") for i in range(3)]
        # By least work, the third of three would be on the first one's rank.
        server.wait_for_load(3)
        loads = [server.processes()[f"scheduler:{rank}"]["load"] for rank in range(2)]
        assert sorted(loads) == [0, 3]
        streams.append(begin(_prompt(2) * 60))
        assert sorted(server.processes()[f"scheduler:{rank}"]["load"] for rank in range(2)) == [1, 3]
        for stream in streams:
            stream.close()
        server.wait_until_idle()


def test_ranks_come_in_turn_where_that_is_wanted() -> None:
    options = ["--data-parallel-size", "2", "--routing-policy", "round-robin"]
    with Server(*SIMULATED, *engine_args(step_ms=5), *options) as server:
        streams = []
        for _ in range(4):
            streams.append(
                server.openai.completions.create(model=MODEL, prompt=_prompt(1) * 60, max_tokens=200, stream=True)
            )
            next(streams[-1])
        server.wait_for_load(4)
        assert [server.processes()[f"scheduler:{rank}"]["load"] for rank in range(2)] == [2, 2]
        for stream in streams:
            stream.close()
