"""What prefill/decode deployments put into a request reaches the engine untouched, and comes back to the client."""

from __future__ import annotations

from typing import Any

import pytest
from reference import MODEL
from server import Server

KV = {"do_remote_decode": True, "remote_engine_id": "e-1", "remote_block_ids": [1, 2, 3], "nested": {"a": [None, 1.5]}}
FIELDS: dict[str, Any] = {
    "bootstrap_host": "10.0.0.7",
    "bootstrap_port": 8998,
    "bootstrap_room": 2**63 - 1,
    "kv_transfer_params": KV,
}
MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("stream", [False, True])
def test_engine_fields_go_all_the_way_and_back(either: Server, stream: bool) -> None:
    """The simulated engine gives back what it was given."""
    api = either.openai
    chat = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, stream=stream, extra_body=FIELDS)
    raw = api.completions.create(model=MODEL, prompt="Hello", max_tokens=5, stream=stream, extra_body=FIELDS)
    for answer in (chat, raw):
        last = list(answer)[-1] if stream else answer
        assert last.kv_transfer_params == KV
        assert last.choices[0].finish_reason == "length"
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 5}, **FIELDS}
    meta = either.http.post("/generate", json=body).json()["meta_info"]
    assert {name: meta[name] for name in FIELDS} == FIELDS


def test_an_answer_without_them_says_nothing_of_them(either: Server) -> None:
    answer = either.openai.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5)
    assert "kv_transfer_params" not in answer.model_dump()
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 5}}
    assert FIELDS.keys().isdisjoint(either.http.post("/generate", json=body).json()["meta_info"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bootstrap_port", 65536),
        ("bootstrap_port", -1),
        ("bootstrap_room", -1),
        ("bootstrap_room", 2**63),
        ("bootstrap_room", "7"),
        ("bootstrap_host", 7),
        ("bootstrap_host", "h" * 70_000),
        ("kv_transfer_params", [1]),
        ("kv_transfer_params", {"a": "x" * 70_000}),
    ],
)
def test_values_that_no_engine_could_use_are_refused_by_name(multi: Server, path: str, name: str, value: Any) -> None:
    body = {"messages": MESSAGES} if "chat" in path else {"text" if path == "/generate" else "prompt": "Hello"}
    answer = multi.http.post(path, json=body | {name: value})
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]
