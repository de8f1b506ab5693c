"""Hostile values in every field, against real processes: afterwards the same ones serve the next request."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from server import FACTOR, SIMULATED, STOP_S, Server, engine_args, workers

from hostile import ALL_VALUES, REQUESTS, fields
from parts import byte_tokenizer

LONGEST_ERROR = 2000
# Of all pairs of a field and a value, so many are tried; all of them are in tests/http.
ONE_IN = 10


def _ask(http: httpx.Client, path: str, body: bytes) -> httpx.Response:
    return http.post(path, content=body, headers={"content-type": "application/json"})


def test_the_same_processes_serve_after_hostile_input(either: Server) -> None:
    before = either.titles()
    statuses: set[int] = set()
    for path in REQUESTS:
        for i, field in enumerate(fields(path)):
            for j, (kind, raw) in enumerate(ALL_VALUES.items()):
                if (i + j) % ONE_IN:
                    continue
                answer = _ask(either.http, path, field.body(raw))
                statuses.add(answer.status_code)
                # 504: a time limit that is over at once.
                assert answer.status_code in (200, 400, 404, 504), (field.name, kind, answer.text[:500])
                if answer.status_code != 200:
                    assert len(answer.content) < LONGEST_ERROR
                    assert answer.json()["error"]["message"]
    assert statuses >= {200, 400}
    text = either.openai.completions.create(model="", prompt="abcabc", max_tokens=4).choices[0].text
    assert text
    assert either.titles() == before


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "word " * 40_000}, "prompt"),
        ("/v1/completions", {"prompt": [100] * 40_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 40_000}]}, "messages"),
        ("/generate", {"text": "word " * 40_000}, "text"),
        ("/generate", {"input_ids": [100] * 40_000}, "input_ids"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 10**6}, "max_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 10**6}}, "sampling_params.max_new_tokens"),
    ],
)
def test_what_the_context_has_no_room_for_is_refused_by_name(
    single: Server, path: str, body: dict[str, Any], field: str
) -> None:
    answer = single.http.post(path, json=body)
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["param"] == field


ENDLESS = (
    "{% if messages[0].content == 'loop' %}{% for a in range(90000) %}{% for b in range(90000) %}{{ a }}{% endfor %}"
    "{% endfor %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("count", [1, 2])
def test_a_template_without_end_costs_its_own_requests_only(tmp_path: Path, count: int) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(ENDLESS)

    def chat(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}

    options = ["--tokenizer", str(tmp_path), *workers(count), *engine_args(step_ms=1)]
    with Server(*SIMULATED, *options) as server:
        before = server.titles()
        begun = time.monotonic()
        hanging = server.begin("/v1/chat/completions", chat("loop"))
        # Meanwhile every worker answers.
        while not _has_answered(hanging):
            asked = time.monotonic()
            with httpx.Client(base_url=server.base_url, timeout=STOP_S, trust_env=False) as client:
                assert client.get("/health").status_code == 200
                assert client.post("/v1/chat/completions", json=chat("abc")).status_code == 200
            assert time.monotonic() - asked < 1.0 * FACTOR
        answer = hanging.getresponse()
        assert answer.status == 400
        assert b"too long" in answer.read()
        assert time.monotonic() - begun < 6.0 * FACTOR
        hanging.close()
        assert server.titles() == before


def _has_answered(connection: Any) -> bool:
    return bool(select.select([connection.sock], [], [], 0)[0])
