"""The official client, as it is, against the server."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import openai
import pytest
from http_double import INFO, WAIT, DoubleManager, RunningServer, running

from multitok.tokenizer.requests import RequestError

TEXT = 'né "q"\n🙂'


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running(DoubleManager(auto=TEXT)) as server:
        yield server


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0)


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


MESSAGES: Any = [{"role": "user", "content": "hi"}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="double-model", messages=MESSAGES, n=2)
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<user>hi<assistant>")
    assert answer.usage.completion_tokens == 2 * len(TEXT)
    assert answer.id.startswith("chatcmpl-")


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="double-model", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * len(TEXT)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == TEXT
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        assert choices[-1].finish_reason == "stop"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="double-model", messages=MESSAGES, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == list(TEXT)
    assert bytes(logprobs.content[-1].bytes or []) == "🙂".encode()
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["n", "z"]


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="double-model", prompt=["ab", "c"], n=2, echo=True)
    assert [choice.text for choice in answer.choices] == [f"ab{TEXT}"] * 2 + [f"c{TEXT}"] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.id.startswith("cmpl-")


def test_completions_stream_with_logprobs(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="double-model", prompt=[97, 98], stream=True, logprobs=1))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]  # type: ignore[union-attr]
    assert offsets == list(range(len(TEXT)))


def test_return_token_ids(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    ids = [ord(c) for c in TEXT]
    answer: Any = client.chat.completions.create(model="double-model", messages=MESSAGES, extra_body=extra)
    assert answer.choices[0].token_ids == ids
    assert answer.prompt_token_ids == [ord(c) for c in "<user>hi<assistant>"]
    chunks: Any = list(
        client.chat.completions.create(model="double-model", messages=MESSAGES, stream=True, extra_body=extra)
    )
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    assert [i for chunk in chunks[1:] for i in chunk.choices[0].token_ids] == ids
    answer = client.completions.create(model="double-model", prompt="ab", extra_body=extra)
    assert (answer.choices[0].prompt_token_ids, answer.choices[0].token_ids) == ([97, 98], ids)
    chunks = list(client.completions.create(model="double-model", prompt="ab", stream=True, extra_body=extra))
    assert chunks[0].choices[0].prompt_token_ids == [97, 98]
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == ids


@pytest.mark.parametrize("encoding", [openai.NOT_GIVEN, "float", "base64"])
def test_embeddings(encoding: Any) -> None:
    info = msgspec.structs.replace(INFO, task="embed", embedding_size=4)
    with running(DoubleManager(info, auto="x")) as server, client_of(server) as client:
        answer = client.embeddings.create(model="double-model", input=["ab", "cde"], encoding_format=encoding)
        rows: Any = [row.embedding for row in answer.data]
        if encoding == "base64":
            rows = [array("f", base64.b64decode(row)).tolist() for row in rows]
        assert [list(map(float, row)) for row in rows] == [[0.25] * 4, [0.5] * 4]
        assert answer.usage.prompt_tokens == 5
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="double-model", input="ab", dimensions=3)
        with pytest.raises(openai.BadRequestError, match="does not generate text"):
            client.chat.completions.create(model="double-model", messages=MESSAGES)


def test_models(client: openai.OpenAI) -> None:
    # The second one is an adapter of the first.
    assert [model.id for model in client.models.list()] == ["double-model", "poet"]
    assert client.models.retrieve("double-model").created == 1700000000
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_raise_the_clients_exceptions(
    server: RunningServer, client: openai.OpenAI, status: int, kind: type[openai.APIStatusError], stream: bool
) -> None:
    server.manager.refusal = RequestError(status, "no, because", "some_field")
    with pytest.raises(kind, match="no, because") as caught:
        client.chat.completions.create(model="double-model", messages=MESSAGES, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.param == "some_field"
    assert caught.value.response.headers.get("retry-after") == ("1" if status in (429, 503) else None)


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


def test_failure_in_mid_stream_raises() -> None:
    with running(DoubleManager()) as server, client_of(server) as client, ThreadPoolExecutor(1) as pool:
        create = pool.submit(client.chat.completions.create, model="double-model", messages=MESSAGES, stream=True)
        submission = server.manager.next_submission()
        server.call(submission.step, "ab")
        stream: Any = create.result(WAIT)
        server.call(submission.fail, 500, "the engine died")
        text = ""
        with pytest.raises(openai.APIError, match="the engine died"):
            for chunk in stream:
                text += chunk.choices[0].delta.content
        assert text == "ab"


def test_closing_a_stream_aborts() -> None:
    with running(DoubleManager()) as server, client_of(server) as client, ThreadPoolExecutor(1) as pool:
        create = pool.submit(client.chat.completions.create, model="double-model", messages=MESSAGES, stream=True)
        submission = server.manager.next_submission()
        server.call(submission.step, "ab")
        create.result(WAIT).close()
        assert submission.aborted.wait(WAIT)


def test_request_id(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="double-model", messages=MESSAGES, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert answer.id == answer._request_id == "mine-1"


def test_a_text_that_no_prompt_can_hold_is_refused_before_it_is_rendered(client, server) -> None:
    with pytest.raises(openai.BadRequestError, match="too long"):
        client.chat.completions.create(
            model="double-model", messages=[{"role": "user", "content": "a" * 1_100_000}], extra_body={"fail": 1}
        )
