"""The native API and the health routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from http_double import INFO, Answer, Connection, DoubleManager, RunningServer, running
from starlette.requests import Request

from multitok.http.admin.health import HealthRoutes


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running(DoubleManager(auto="abc")) as server:
        yield server


@pytest.fixture
def connection(server: RunningServer) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


def post(connection: Connection, path: str, body: Any) -> Answer:
    connection.post(path, body)
    return connection.read()


def get(connection: Connection, path: str) -> Answer:
    connection.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return connection.read()


def test_generate_one(connection: Connection) -> None:
    answer = post(connection, "/generate", {"text": "hé", "sampling_params": {"temperature": 0}, "rid": "r7"}).json()
    assert answer["text"] == "abc"
    assert answer["output_ids"] == [97, 98, 99]
    meta = answer["meta_info"]
    assert meta["id"] == "r7"
    assert meta["finish_reason"] == {"type": "stop", "matched": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 1)


@pytest.mark.parametrize("name", ["seed", "sampling_seed"])
def test_the_seed_has_two_names(server: RunningServer, connection: Connection, name: str) -> None:
    assert post(connection, "/generate", {"text": "x", "sampling_params": {name: 7}}).status == 200
    assert server.manager.submissions.get(timeout=5).request.sampling_params.seed == 7


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        ({"max_tokens": 2}, "max_tokens"),
        ({"seed": 1, "sampling_seed": 2}, "sampling_seed"),
        ({"stream_interval": 4}, "stream_interval"),
    ],
)
def test_sampling_params_that_mean_nothing_are_refused_by_name(
    connection: Connection, sampling: Any, word: str
) -> None:
    answer = post(connection, "/generate", {"text": "x", "sampling_params": sampling})
    assert answer.status == 400
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"text": ["a", "b"]}, {"input_ids": [[97], [98]]}])
def test_generate_a_list(connection: Connection, body: Any) -> None:
    answers = post(connection, "/generate", body | {"sampling_params": {"n": 2}, "rid": "r"}).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r-0", "r-1", "r-2", "r-3"]


def test_generate_streams_increments(connection: Connection) -> None:
    body = {"input_ids": [97], "stream": True, "return_logprob": True, "top_logprobs_num": 2}
    events = post(connection, "/generate", body | {"return_text_in_logprobs": True}).events()
    assert events.pop() == b"[DONE]"
    decoded = [msgspec.json.decode(event) for event in events]
    assert [event["text"] for event in decoded] == ["a", "b", "c"]
    assert [event["output_ids"] for event in decoded] == [[97], [98], [99]]
    assert [event["meta_info"]["finish_reason"] is None for event in decoded] == [True, True, False]
    assert decoded[0]["meta_info"]["output_token_logprobs"] == [[-0.5, 97, "a"]]
    assert decoded[0]["meta_info"]["output_top_logprobs"] == [[[-0.5, 97, "a"], [-2.0, 122, "z"]]]


def test_echo_of_ids(connection: Connection) -> None:
    answer = post(connection, "/v1/completions", {"prompt": [[104, 105], [106]], "echo": True}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hiabc", "jabc"]
    answer = post(connection, "/v1/completions", {"prompt": [104, 105], "echo": True, "stream": True})
    events = answer.events()[:-1]
    assert "".join(msgspec.json.decode(event)["choices"][0]["text"] for event in events) == "hiabc"


def test_tokenize(connection: Connection) -> None:
    answer = post(connection, "/tokenize", {"prompt": "ab"}).json()
    assert answer == {"tokens": [1, 97, 98], "count": 3, "max_model_len": 4096}
    answer = post(connection, "/tokenize", {"prompt": ["ab", ""], "add_special_tokens": False}).json()
    assert (answer["tokens"], answer["count"]) == ([[97, 98], []], [2, 0])


def test_detokenize(connection: Connection) -> None:
    assert post(connection, "/detokenize", {"tokens": [97, 98]}).json() == {"text": "ab"}
    assert post(connection, "/detokenize", {"tokens": [[97], []]}).json() == {"text": ["a", ""]}
    assert post(connection, "/detokenize", {"tokens": []}).json() == {"text": ""}
    for tokens, param in (([-1], "tokens"), ([[1], [70000]], "tokens[1]"), ([1, [2]], "tokens"), ("x", "tokens")):
        answer = post(connection, "/detokenize", {"tokens": tokens})
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)


def test_ready(server: RunningServer, connection: Connection) -> None:
    assert get(connection, "/ready").status == 200
    server.manager.ready = False
    answer = get(connection, "/ready")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert get(connection, "/health").status == 200


def test_server_info(connection: Connection) -> None:
    assert get(connection, "/server_info").json() == {"engine": "double"}


def test_a_failing_asgi_route_answers_500(
    server: RunningServer, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    server.manager.server_info = None
    for _ in range(2):
        answer = get(connection, "/server_info")
        assert answer.status == 500
        assert answer.json()["error"]["message"] == "internal server error"
    assert "/server_info failed" in caplog.text


def test_health_generate(server: RunningServer, connection: Connection) -> None:
    assert get(connection, "/health_generate").status == 200
    request = server.manager.next_submission().request
    assert request.sampling_params.max_new_tokens == request.max_new_tokens == 1
    server.manager.engine_info = msgspec.structs.replace(INFO, task="embed", embedding_size=3)
    assert get(connection, "/health_generate").status == 200


def test_health_generate_of_a_failing_engine() -> None:
    with running(DoubleManager()) as server, server.connect() as connection:
        connection.send(b"GET /health_generate HTTP/1.1\r\nHost: x\r\n\r\n")
        server.call(server.manager.next_submission().fail, 500, "the engine died")
        answer = connection.read()
        assert answer.status == 503
        assert "the engine died" in answer.json()["error"]["message"]


def test_health_generate_of_a_hanging_engine() -> None:
    manager = DoubleManager()
    request = Request({"type": "http", "query_string": b""})
    with running(manager) as server:
        response = server.await_(HealthRoutes(manager, probe_timeout=0.01).health_generate(request))
        assert response.status_code == 503
        assert manager.next_submission().aborted.is_set()
