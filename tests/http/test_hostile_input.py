"""Hostile values in every field of every route: a 4xx that names the field, and the server goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from http_double import INFO, Connection, DoubleManager, RunningServer, chat, running

from hostile import ALL_VALUES, NO_JSON, REQUESTS, Field, fields, takes
from multitok.tokenizer.requests import RequestError

# Five times what is promised.
PROMPTLY_S = 5.0
LONGEST_ERROR = 2000


@pytest.fixture(scope="module")
def generator() -> Iterator[RunningServer]:
    with running(DoubleManager(auto="abc")) as server:
        yield server


@pytest.fixture(scope="module")
def encoder() -> Iterator[RunningServer]:
    info = msgspec.structs.replace(INFO, task="embed", embedding_size=4)
    with running(DoubleManager(info, auto="x")) as server:
        yield server


@pytest.fixture(scope="module")
def connections(generator: RunningServer, encoder: RunningServer) -> Iterator[dict[str, Connection]]:
    with generator.connect() as one, encoder.connect() as other:
        yield {path: other if path == "/v1/embeddings" else one for path in REQUESTS}


@pytest.mark.parametrize("field", [pytest.param(f, id=f"{path}-{f.name}") for path in REQUESTS for f in fields(path)])
def test_every_field_withstands_hostile_values(connections: dict[str, Connection], field: Field) -> None:
    connection = connections[field.path]
    for kind, raw in ALL_VALUES.items():
        begin = time.monotonic()
        connection.post(field.path, field.body(raw))
        answer = connection.read()
        assert time.monotonic() - begin < PROMPTLY_S, kind
        if answer.status == 200:
            assert takes(field, raw), (kind, answer.body[:500])
            continue
        assert answer.status in (400, 404), (kind, answer.body[:500])
        assert len(answer.body) < LONGEST_ERROR, kind
        error = answer.json()["error"]
        assert error["type"] in ("invalid_request_error", "not_found_error")
        assert error["message"]
        # Such a body ends the reading where no field is known any more.
        if not (kind.startswith("nested") or (kind in NO_JSON and error["param"] is None)):
            named = error["param"] or ""
            assert field.name.startswith(named.partition("[")[0]) or named.startswith(field.name), (kind, error)
            assert named, (kind, error)


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("raw", ["NaN", "Infinity", "1e400", "lone surrogate"])
def test_what_json_lacks_is_named_in_every_field(connections: dict[str, Connection], path: str, raw: str) -> None:
    for field in fields(path):
        connections[path].post(path, field.body(NO_JSON[raw]))
        answer = connections[path].read()
        assert answer.status == 400
        assert answer.json()["error"]["param"] == field.name


CONTENT_TYPES = [
    "text/plain",
    "application/xml",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded",
]


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("content_type", [*CONTENT_TYPES, "application/json; charset=utf-16", ""])
def test_a_content_type_that_lies_changes_nothing(
    connections: dict[str, Connection], path: str, content_type: str
) -> None:
    connection = connections[path]
    connection.post(path, REQUESTS[path][1], f"Content-Type: {content_type}\r\n")
    assert connection.read().status == 200
    connection.post(path, b"a=1&b=2", f"Content-Type: {content_type}\r\n")
    assert connection.read().status == 400


def test_the_last_of_a_repeated_key_counts(connections: dict[str, Connection]) -> None:
    connection = connections["/v1/completions"]
    connection.post("/v1/completions", b'{"prompt":"a","n":0,"n":1}')
    assert connection.read().status == 200
    connection.post("/v1/completions", b'{"prompt":"a","n":1,"n":0}')
    assert connection.read().json()["error"]["param"] == "n"


LIMITED = {
    "max_prompts": 8, "max_prompt_tokens": 10, "max_stop_strings": 3, "max_logit_bias": 4, "max_request_id_length": 12,
}  # fmt: skip


@pytest.fixture(scope="module")
def limited() -> Iterator[RunningServer]:
    with running(DoubleManager(auto="abc"), **LIMITED) as server:
        yield server


def completion(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "a", "max_tokens": 4, **body}


def conversation(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", chat(max_tokens=4, **body)


def native(sampling: dict[str, Any] | None = None, **body: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4, **(sampling or {})}, **body}


def schema(levels: int = 1, text: str = "") -> dict[str, Any]:
    value: dict[str, Any] = {"description": text}
    for _ in range(levels):
        value = {"a": value}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


@pytest.mark.parametrize(
    ("most", "more", "param"),
    [
        (completion(prompt=["a"] * 8), completion(prompt=["a"] * 9), "prompt"),
        (completion(n=8), completion(n=9), "n"),
        (completion(prompt=["a"] * 4, n=2), completion(prompt=["a"] * 4, n=3), "n"),
        (completion(prompt=[1] * 10), completion(prompt=[1] * 11), "prompt"),
        (completion(prompt=[[1], [1] * 10]), completion(prompt=[[1], [1] * 11]), "prompt[1]"),
        (completion(stop=["a"] * 3), completion(stop=["a"] * 4), "stop"),
        (completion(stop="a" * 1024), completion(stop="a" * 1025), "stop"),
        (completion(stop_token_ids=[1] * 3), completion(stop_token_ids=[1] * 4), "stop_token_ids"),
        (completion(logit_bias=dict.fromkeys("1234", 1)), completion(logit_bias=dict.fromkeys("12345", 1)),
         "logit_bias"),
        (completion(request_id="x" * 12), completion(request_id="x" * 13), "request_id"),
        (conversation(rid="x" * 12), conversation(rid="x" * 13), "rid"),
        (native(rid="x" * 12), native(rid="x" * 13), "rid"),
        (("/abort_request", {"rid": "x" * 12}), ("/abort_request", {"rid": "x" * 13}), "rid"),
        (("/tokenize", {"prompt": ["a"] * 8}), ("/tokenize", {"prompt": ["a"] * 9}), "prompt"),
        (("/detokenize", {"tokens": [[1]] * 8}), ("/detokenize", {"tokens": [[1]] * 9}), "tokens"),
        (native(text=None, input_ids=[1] * 10), native(text=None, input_ids=[1] * 11), "input_ids"),
        (native({"n": 8}), native({"n": 9}), "sampling_params.n"),
        (native({"stop": ["a"] * 3}), native({"stop": ["a"] * 4}), "sampling_params.stop"),
        (completion(n=4, logprobs=1), completion(n=5, logprobs=1), "n"),
        (completion(prompt=["a"] * 4, logprobs=1), completion(prompt=["a"] * 5, logprobs=1), "prompt"),
        (conversation(n=4, logprobs=True, top_logprobs=1), conversation(n=3, logprobs=True, top_logprobs=2), "n"),
        (native({"n": 8}, return_logprob=True), native({"n": 5}, return_logprob=True, top_logprobs_num=1),
         "sampling_params.n"),
        (conversation(response_format=schema()), conversation(response_format=schema(text="x" * 65536)),
         "response_format.json_schema.schema"),
        (conversation(response_format=schema(60)), conversation(response_format=schema(70)),
         "response_format.json_schema.schema"),
        (native({"regex": "x" * 65536}), native({"regex": "x" * 65537}), "sampling_params.regex"),
        (native({"ebnf": "x" * 65536}), native({"ebnf": "x" * 65537}), "sampling_params.ebnf"),
        (native({"json_schema": "{}"}), native({"json_schema": "{"}), "sampling_params.json_schema"),
        (native({"json_schema": "{}"}), native({"json_schema": "[" * 100 + "]" * 100}), "sampling_params.json_schema"),
        (conversation(chat_template_kwargs={"a": "x" * 60000}), conversation(chat_template_kwargs={"a": "x" * 65536}),
         "chat_template_kwargs"),
        (conversation(chat_template_kwargs={"a": [[[]]]}),
         conversation(chat_template_kwargs={"a": msgspec.json.decode("[" * 70 + "]" * 70)}), "chat_template_kwargs"),
        (completion(timeout=0.5), completion(timeout=0), "timeout"),
        (native(timeout=3), native(timeout=-1), "timeout"),
        (conversation(timeout=2**31 - 1), conversation(timeout=2**31), "timeout"),
    ],
)  # fmt: skip
def test_limits_are_refused_by_name(
    limited: RunningServer, most: tuple[str, Any], more: tuple[str, Any], param: str
) -> None:
    with limited.connect() as connection:
        connection.post(*most)
        answer = connection.read()
        assert answer.status == 200, answer.body
        connection.post(*more)
        answer = connection.read()
        assert answer.status == 400, answer.body
        assert answer.json()["error"]["param"] == param


def test_stop_strings_are_limited_together(generator: RunningServer) -> None:
    with generator.connect() as connection:
        for count, status in ((4, 200), (5, 400)):
            connection.post(*completion(stop=["x" * 1024] * count))
            assert connection.read().status == status


def test_many_choices_of_what_is_large_are_refused(generator: RunningServer) -> None:
    with generator.connect() as connection:
        for fields, param in (
            ({"prompt": "x" * 20_000, "n": 2000}, "n"),
            ({"prompt": [1] * 4_000, "n": 2048, "stop": "x" * 1000}, "n"),
            ({"prompt": ["x"] * 1000, "response_format": schema(text="x" * 60_000)}, "prompt"),
            ({"n": 2000, "logit_bias": {str(i): 1 for i in range(1024)}, "stop": ["x" * 1000] * 4}, None),
        ):
            connection.post(*completion(max_tokens=1, **({"prompt": "a"} | fields)))
            answer = connection.read()
            assert answer.status == (200 if param is None else 400)
            if param is not None:
                assert answer.json()["error"]["param"] == param


def test_as_many_messages_as_the_context_has_tokens(generator: RunningServer) -> None:
    message = {"role": "user", "content": "a"}
    with generator.connect() as connection:
        for count, status in ((4096, 200), (4097, 400)):
            connection.post("/v1/chat/completions", {"messages": [message] * count, "max_tokens": 1})
            answer = connection.read()
            assert answer.status == status
        assert answer.json()["error"]["param"] == "messages"
        parts = [{"type": "text", "text": "a"}] * 4097
        connection.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
        assert connection.read().json()["error"]["param"] == "messages[0].content"


def test_an_answer_with_more_log_probabilities_than_fit_is_refused(generator: RunningServer) -> None:
    with generator.connect() as connection:
        body = {"prompt": "a", "n": 512, "logprobs": 1, "max_tokens": 4000}
        connection.post("/v1/completions", body)
        answer = connection.read()
        assert answer.json()["error"]["param"] == "n"
        assert "stream" in answer.json()["error"]["message"]
        connection.post("/v1/completions", body | {"stream": True})
        assert connection.read().status == 200


def test_timeout_priority_and_tenant_reach_the_manager(generator: RunningServer, encoder: RunningServer) -> None:
    for server, (path, body) in (
        (generator, completion()),
        (generator, conversation()),
        (generator, native()),
        (encoder, ("/v1/embeddings", {"input": "a"})),
    ):
        while not server.manager.submissions.empty():
            server.manager.next_submission()
        with server.connect() as connection:
            connection.post(path, body | {"timeout": 2.5, "priority": -3})
            assert connection.read().status == 200
        request = server.manager.next_submission().request
        assert (request.timeout, request.priority, request.tenant) == (2.5, -3, 0)


@pytest.mark.parametrize(
    ("request_", "field", "param"),
    [
        (completion(), "prompt", "prompt"),
        (conversation(), "prompt", "messages"),
        (native(), "prompt", "text"),
        (native(text=None, input_ids=[1]), "prompt", "input_ids"),
        (completion(), "max_tokens", "max_tokens"),
        (conversation(max_completion_tokens=4), "max_tokens", "max_completion_tokens"),
        (native(), "max_tokens", "sampling_params.max_new_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_manager_refuses_has_the_apis_name(
    request_: tuple[str, dict[str, Any]], field: str, param: str, stream: bool
) -> None:
    path, body = request_
    manager = DoubleManager()
    with running(manager) as server, server.connect() as connection:
        manager.refusal = RequestError(400, "no", field)
        connection.post(path, body | {"stream": stream})
        assert connection.read().json()["error"]["param"] == param
        # The same when it comes later, from a thread that tokenizes.
        manager.refusal = None
        connection.post(path, body | {"stream": stream})
        submission = manager.next_submission()
        server.call(submission.fail, 400, "no", field)
        assert connection.read().json()["error"]["param"] == param
