"""Closed and open loop, against a server that answers at once."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from multitok.bench.load import Load, LoadResult, run_load
from multitok.bench.requests import Numbered, Settings
from multitok.bench.summary import percentiles, summarize
from multitok.bench.target import BenchError, Target, find_model

BODY = b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
LAST_ANSWER = ANSWER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
SETTINGS = Settings(model="m", stream=False)


def run(target: Target, load: Load, sessions: list[Any] | None = None, seed: int = 0) -> LoadResult:
    sessions = sessions or [[SETTINGS.body("@@@@@@@@@@@@ hello", 2)]]
    return asyncio.run(run_load(target, "chat", Numbered(sessions, target, "chat", seed), load))


def bodies(requests: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(request.partition(b"\r\n\r\n")[2]) for request in requests]


@pytest.mark.parametrize("load", [Load(sessions=20, clients=1), Load(sessions=20, rate=2000.0)])
def test_every_prompt_is_another(scripted: Callable[..., Any], load: Load) -> None:
    server = scripted([LAST_ANSWER], close=True)
    result = run(Target(host="127.0.0.1", port=server.port), load)
    assert [sample.error for sample in result.samples] == [None] * 20
    prompts = {body["messages"][0]["content"] for body in bodies(server.requests)}
    assert len(prompts) == 20
    assert all(len(prompt) == 12 + len(" hello") and prompt[:12].isdigit() for prompt in prompts)
    assert summarize(result, load).output_tokens == 40


def test_runs_with_other_seeds_have_other_prompts(scripted: Callable[..., Any]) -> None:
    server = scripted([LAST_ANSWER], close=True)
    for seed in range(3):
        run(Target(host="127.0.0.1", port=server.port), Load(sessions=10, clients=1), seed=seed)
    assert len({body["messages"][0]["content"] for body in bodies(server.requests)}) == 30


def test_a_session_is_sent_in_order_over_one_connection(scripted: Callable[..., Any]) -> None:
    server = scripted([ANSWER])
    turns = [SETTINGS.body(f"@@@@@@@@@@@@ turn {turn}", 2) for turn in range(3)]
    run(Target(host="127.0.0.1", port=server.port), Load(sessions=2, clients=1), [turns])
    texts = [body["messages"][0]["content"] for body in bodies(server.requests)]
    assert [text[13:] for text in texts] == ["turn 0", "turn 1", "turn 2"] * 2
    assert len({text[:12] for text in texts[:3]}) == 1
    assert texts[0] != texts[3]
    assert server.connections == 1


def test_errors_by_kind(scripted: Callable[..., Any]) -> None:
    refusal = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nslow"
    server = scripted([refusal])
    load = Load(sessions=3, clients=1)
    summary = summarize(run(Target(host="127.0.0.1", port=server.port), load), load)
    assert (summary.ok, summary.errors, summary.error_details) == (0, {"HTTP 429": 3}, ["HTTP 429: slow"])
    assert summary.latency is None


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    target = Target(host="127.0.0.1", port=port)
    load = Load(sessions=2, clients=2)
    assert summarize(run(target, load), load).errors == {"no connection": 2}
    with pytest.raises(BenchError, match="nothing listens on"):
        find_model(target)


def test_an_answer_that_never_comes(scripted: Callable[..., Any]) -> None:
    server = scripted([])
    load = Load(sessions=1, clients=1, timeout=0.2)
    assert summarize(run(Target(host="127.0.0.1", port=server.port), load), load).errors == {"timeout": 1}


def test_percentiles_are_values_that_were_seen() -> None:
    found = percentiles([number / 1000 for number in range(100, 0, -1)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max, found.mean) == (51, 91, 100, 100, 50.5)
    assert percentiles([]) is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:30000/v1/", "http://localhost:30000"),
        ("https://api.example.com/openai/v1", "https://api.example.com:443/openai"),
        ("http://[::1]:5", "http://[::1]:5"),
    ],
)
def test_urls(url: str, shown: str) -> None:
    assert Target.parse(url).url == shown


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(BenchError):
        Target.parse(url)
