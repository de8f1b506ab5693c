"""Words for programs: each status has a type and a code, as an answer and as an event."""

from __future__ import annotations

import msgspec
import pytest
from every_route import HOT
from http_double import DoubleManager, chat, running

KINDS = [
    (429, "rate_limit_error", "rate_limit_exceeded"),
    (500, "server_error", "internal_error"),
    (503, "overloaded_error", "overloaded"),
    (504, "timeout_error", "timeout"),
]


@pytest.mark.parametrize(("status", "kind", "code"), KINDS)
def test_a_failure_tells_its_kind(status: int, kind: str, code: str) -> None:
    expected = {"message": "it was not to be", "type": kind, "param": None, "code": code}
    with running(DoubleManager()) as server, server.connect() as connection:
        for stream in (False, True):
            connection.post(HOT[0][1], chat(stream=stream))
            server.call(server.manager.next_submission().fail, status, "it was not to be")
            answer = connection.read()
            assert (answer.status, answer.json()) == (status, {"error": expected})
            assert ("retry-after" in answer.headers) == (status in (429, 503))
        # A stream that has begun.
        connection.post(HOT[0][1], chat(stream=True))
        submission = server.manager.next_submission()
        server.call(submission.step, "a")
        server.call(submission.fail, status, "it was not to be")
        *_, event, done = connection.read().events()
        assert (msgspec.json.decode(event), done) == ({"error": expected}, b"[DONE]")
