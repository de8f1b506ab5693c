"""Long answers are made over several turns of the event loop."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from http_double import INFO, WAIT, DoubleManager, RunningServer, chat, running
from hypothesis import given
from hypothesis import strategies as st

from multitok.http import parts
from multitok.http.parts import joined_parts, list_parts

ITEMS = st.lists(st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2), max_size=300)


@given(ITEMS)
def test_a_list_in_parts_is_the_list(items: list[object]) -> None:
    assert msgspec.json.decode(b"".join(list_parts(iter(items)))) == items


@given(st.lists(ITEMS, max_size=4))
def test_a_list_of_things_in_parts_is_the_list(items: list[list[object]]) -> None:
    assert msgspec.json.decode(b"".join(joined_parts(map(list_parts, items)))) == items


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_TURN_S", 0.0)


class Turns:
    """Counts the loop's turns until it is stopped."""

    def __init__(self, server: RunningServer) -> None:
        self.count = 0
        self._loop = server.loop
        self._running = True

    def start(self) -> None:
        if self._running:
            self.count += 1
            self._loop.call_soon(self.start)

    def stop(self) -> None:
        self._running = False


REQUESTS = {
    "/v1/chat/completions": chat(n=8, logprobs=True, top_logprobs=2, max_tokens=1000),
    "/v1/completions": {"prompt": "a", "n": 8, "logprobs": 2, "max_tokens": 1000},
    "/generate": {
        "text": "a", "sampling_params": {"n": 8, "max_new_tokens": 1000}, "return_logprob": True, "top_logprobs_num": 2,
    },
}  # fmt: skip


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("path", REQUESTS)
def test_other_work_goes_on_while_a_long_answer_is_made(path: str) -> None:
    with running(DoubleManager()) as server, server.connect() as connection:
        connection.post(path, REQUESTS[path])
        submission = server.manager.next_submission()
        turns = Turns(server)

        def finish() -> None:
            turns.start()
            submission.finish("x" * 1000)

        server.call(finish)
        answer = connection.read()
        turns.stop()
        # 1000 entries of each of 8 choices, 16 to a part.
        assert turns.count >= 8 * 62
        made = answer.json()
        choices = made["choices"] if isinstance(made, dict) else made
        assert len(choices) == 8
        assert [len(entries) for entries in map(_entries, choices)] == [1000] * 8


def _entries(choice: dict[str, object]) -> list[object]:
    logprobs = choice.get("logprobs") or choice["meta_info"]
    assert isinstance(logprobs, dict)
    entries = logprobs.get("content") or logprobs.get("tokens") or logprobs["output_token_logprobs"]
    assert isinstance(entries, list)
    return entries


@pytest.mark.usefixtures("short_turns")
def test_embeddings_are_made_in_parts_too() -> None:
    info = msgspec.structs.replace(INFO, task="embed", embedding_size=4)
    with running(DoubleManager(info, auto="x")) as server, server.connect() as connection:
        connection.post("/v1/embeddings", {"input": ["ab"] * 100})
        assert [row["index"] for row in connection.read().json()["data"]] == list(range(100))


@pytest.mark.usefixtures("short_turns")
def test_a_client_that_leaves_meanwhile_ends_the_work() -> None:
    with running(DoubleManager()) as server:
        with server.connect() as connection:
            connection.post("/v1/completions", REQUESTS["/v1/completions"])
            submission = server.manager.next_submission()
            server.call(submission.finish, "x" * 1000)
        with server.connect() as connection:
            connection.post("/v1/completions", {"prompt": "a"})
            server.call(server.manager.next_submission().finish, "abc")
            assert connection.read().status == 200


def test_a_failure_in_the_middle_is_an_error_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(items: Iterable[object]) -> None:
        raise ValueError("planted")

    monkeypatch.setattr("multitok.http.openai.completions.joined_parts", fail)
    with running(DoubleManager(auto="abc")) as server, server.connect() as connection:
        connection.sock.settimeout(WAIT)
        connection.post("/v1/completions", {"prompt": "a"})
        answer = connection.read()
        assert answer.status == 500
        assert answer.json()["error"]["message"] == "internal server error"
