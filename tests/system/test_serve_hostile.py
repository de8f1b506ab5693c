"""Hostile values in every field, against real processes: afterwards the same ones serve the next request."""

from __future__ import annotations

import httpx
from server import Server

from hostile import ALL_VALUES, REQUESTS, fields

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
                assert answer.status_code in (200, 400, 404), (field.name, kind, answer.text[:500])
                if answer.status_code != 200:
                    assert len(answer.content) < LONGEST_ERROR
                    assert answer.json()["error"]["message"]
    assert statuses >= {200, 400}
    text = either.openai.completions.create(model="", prompt="abcabc", max_tokens=4).choices[0].text
    assert text
    assert either.titles() == before
