"""Whatever works with one HTTP worker works the same with four."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reference import MODEL, ids_of
from server import Server

_TEXT = "The quick brown fox jumps over the lazy dog; 12 345 times, naïve café 🙂 한국어."
_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": _TEXT}], "max_tokens": 70}
_RAW = {"model": MODEL, "prompt": _TEXT, "max_tokens": 30}
_NATIVE = {"text": _TEXT, "sampling_params": {"max_new_tokens": 30}}
_CHAT_PATH, _RAW_PATH = "/v1/chat/completions", "/v1/completions"

REQUESTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "chat": (_CHAT_PATH, _CHAT),
    "chat with choices": (_CHAT_PATH, {**_CHAT, "n": 3}),
    "chat with log probabilities": (_CHAT_PATH, {**_CHAT, "logprobs": True, "top_logprobs": 3}),
    "chat with token ids": (_CHAT_PATH, {**_CHAT, "return_token_ids": True}),
    "chat with a stop string": (_CHAT_PATH, {**_CHAT, "stop": ["brown fox", "never"]}),
    "chat with special tokens": (_CHAT_PATH, {**_CHAT, "skip_special_tokens": False}),
    "completion": (_RAW_PATH, _RAW),
    "completion of ids": (_RAW_PATH, {**_RAW, "prompt": ids_of(_TEXT)}),
    "completion of a list": (_RAW_PATH, {**_RAW, "prompt": [_TEXT, "another one"], "n": 2}),
    "completion of lists of ids": (_RAW_PATH, {**_RAW, "prompt": [ids_of(_TEXT), [5, 6, 7]]}),
    "completion with echo": (_RAW_PATH, {**_RAW, "echo": True}),
    "completion of ids with echo": (_RAW_PATH, {**_RAW, "prompt": ids_of(_TEXT), "echo": True, "n": 2}),
    "completion with log probabilities": (_RAW_PATH, {**_RAW, "logprobs": 2}),
    "completion with token ids": (_RAW_PATH, {**_RAW, "return_token_ids": True}),
    "completion with a stop string": (_RAW_PATH, {**_RAW, "stop": " fox j"}),
    "completion with a stop id": (_RAW_PATH, {**_RAW, "stop_token_ids": [ids_of(_TEXT)[4]]}),
    "completion with min_tokens": (_RAW_PATH, {**_RAW, "stop_token_ids": [ids_of(_TEXT)[4]], "min_tokens": 9}),
    "completion with usage": (_RAW_PATH, {**_RAW, "stream_options": {"include_usage": True}}),
    "completion of a long text": (_RAW_PATH, {**_RAW, "prompt": _TEXT * 100}),
    "text too long": (_RAW_PATH, {**_RAW, "prompt": _TEXT * 1000}),
    "native": ("/generate", _NATIVE),
    "native list": ("/generate", {**_NATIVE, "text": [_TEXT, "two"], "return_logprob": True}),
    "tokenize": ("/tokenize", {"prompt": _TEXT}),
    "tokenize a list": ("/tokenize", {"prompt": [_TEXT, "", "x"], "add_special_tokens": False}),
    "detokenize": ("/detokenize", {"tokens": ids_of(_TEXT)}),
    "detokenize lists": ("/detokenize", {"tokens": [ids_of(_TEXT), [0, 1, 2]], "skip_special_tokens": False}),
    "models": ("/v1/models", None),
    "one model": (f"/v1/models/{MODEL}", None),
    "health": ("/health", None),
    "ready": ("/ready", None),
    "health_generate": ("/health_generate", None),
    "abort of nothing": ("/abort_request", {"rid": "nobody"}),
    "no such model": (_CHAT_PATH, {**_CHAT, "model": "other"}),
    "no such path": ("/v1/nothing", None),
    "no messages": (_CHAT_PATH, {"model": MODEL}),
    "no prompt": (_RAW_PATH, {"model": MODEL}),
    "empty prompt": (_RAW_PATH, {**_RAW, "prompt": ""}),
    "empty list": (_RAW_PATH, {**_RAW, "prompt": []}),
    "ids outside the vocabulary": (_RAW_PATH, {**_RAW, "prompt": [1, 10**6]}),
    "prompt too long": (_RAW_PATH, {**_RAW, "prompt": [5] * 9000}),
    "output too long": (_RAW_PATH, {**_RAW, "max_tokens": 8190}),
    "max_tokens 0": (_RAW_PATH, {**_RAW, "max_tokens": 0}),
    "temperature below 0": (_CHAT_PATH, {**_CHAT, "temperature": -1}),
    "n 0": (_CHAT_PATH, {**_CHAT, "n": 0}),
    "logit_bias": (_CHAT_PATH, {**_CHAT, "logit_bias": {"5": 1.0}}),
    "tools": (_CHAT_PATH, {**_CHAT, "tools": [{"type": "function"}]}),
    "response_format": (_CHAT_PATH, {**_CHAT, "response_format": {"type": "json_object"}}),
    "embedding of a generator": ("/v1/embeddings", {"model": MODEL, "input": "x"}),
    "generation failure": (_RAW_PATH, {**_RAW, "prompt": "wrong type", "max_tokens": "many"}),
}
# What differs from call to call, wherever it runs.
_OWN = {"id", "created", "e2e_latency"}


def _common(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _common(item) for key, item in value.items() if key not in _OWN}
    return [_common(item) for item in value] if isinstance(value, list) else value


def _answer(server: Server, path: str, body: dict[str, Any] | None) -> tuple[int, str, Any]:
    answer = server.http.get(path) if body is None else server.http.post(path, json=body)
    return answer.status_code, answer.headers["content-type"], _common(answer.json())


def _events(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    """Events by choice: those of several choices may come in any order."""
    by_choice: dict[Any, list[Any]] = {}
    with server.http.stream("POST", path, json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            return answer.status_code, answer.headers["content-type"], _common(json.loads(answer.read()))
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        event = _common(json.loads(line))
        choices = event.get("choices", [event])
        by_choice.setdefault(choices[0].get("index") if choices else "usage", []).append(event)
    return answer.status_code, answer.headers["content-type"], by_choice


@pytest.mark.parametrize("name", REQUESTS)
def test_one_and_four_workers_answer_alike(name: str, single: Server, multi: Server) -> None:
    path, body = REQUESTS[name]
    assert _answer(single, path, body) == _answer(multi, path, body)


@pytest.mark.parametrize(
    "name", [name for name, (path, _) in REQUESTS.items() if path in (_CHAT_PATH, _RAW_PATH, "/generate")]
)
def test_one_and_four_workers_stream_alike(name: str, single: Server, multi: Server) -> None:
    path, body = REQUESTS[name]
    assert body is not None
    assert _events(single, path, body) == _events(multi, path, body)


def test_server_info_differs_only_where_the_processes_do(single: Server, multi: Server) -> None:
    one, four = (server.http.get("/server_info").json() for server in (single, multi))
    assert one.keys() == four.keys()
    assert one["engine"] == four["engine"]
    differing = {key for key in one["server_args"] if one["server_args"][key] != four["server_args"][key]}
    assert differing == {"tokenizer_worker_num", "detokenizer_worker_num"}
