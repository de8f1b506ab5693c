"""Every field, bad values: a 400 that names the field, in the API's error format; neutral values are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from http_double import INFO, Connection, DoubleManager, RunningServer, chat, running

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "generate": "/generate"}
HUGE = 10**40


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(DoubleManager(auto="abc"), max_prompts=16) as server:
        yield server


@pytest.fixture(scope="module")
def limited() -> Iterator[RunningServer]:
    """An engine that can do nothing but greedy generation."""
    info = msgspec.structs.replace(INFO, sampling=["temperature"], grammars=[], top_logprobs=0)
    with running(DoubleManager(info, auto="abc")) as server:
        yield server


@pytest.fixture(scope="module")
def connection(server: RunningServer) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


def body_of(api: str, fields: dict[str, Any]) -> dict[str, Any]:
    if api == "chat":
        return chat() | fields
    if api == "completion":
        return {"prompt": "a"} | fields
    return {"text": "a", "sampling_params": fields}


def raw_body(api: str, name: str, raw: str) -> bytes:
    marker = "@@@"
    return msgspec.json.encode(body_of(api, {name: marker})).replace(b'"@@@"', raw.encode("utf-8", "surrogatepass"))


def refused(connection: Connection, path: str, body: Any, param: str, status: int = 400) -> str:
    connection.post(path, body)
    answer = connection.read()
    assert answer.status == status, answer.body
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"].startswith(param) or status != 400
    return error["message"]


SHARED_BAD = [
    ("temperature", [-0.1, 2.1, -1, HUGE, "x", True, [], {}]),
    ("top_p", [0, -0.5, 1.01, "x", False]),
    ("top_k", [-2, HUGE, 1.5, "x", True]),
    ("min_p", [-0.1, 1.1, "x"]),
    ("seed", [2**63, -(2**63) - 1, HUGE, 0.5, "x"]),
    ("presence_penalty", [-2.1, 2.1, "x"]),
    ("frequency_penalty", [-2.1, 2.1, "x"]),
    ("repetition_penalty", [0, -1, 2.1, "x"]),
    ("n", [0, -1, 17, HUGE, 1.5, "x", True]),
    ("stop", ["", 5, {}, ["a"] * 65, "x" * 1025]),
    ("stop_token_ids", [5, "x", {}]),
    ("ignore_eos", ["x", 1]),
    ("skip_special_tokens", ["x", 1]),
    ("logit_bias", [[], "x", {"x": 1}, {"-1": 1}, {"70000": 1}, {"1": 101}, {"1": -101}, {"²": 1}]),
    ("use_beam_search", [True]),
    ("length_penalty", [0.5]),
    ("bad_words", [["x"]]),
    ("include_stop_str_in_output", [True]),
]
OPENAI_BAD = [
    ("max_tokens", [0, -1, HUGE, 2**31, 1.5, "x", True]),
    ("min_tokens", [-1, HUGE, 1.5, "x"]),
    ("stream", ["x", 1]),
    ("stream_options", [5, "x", {"include_usage": True}]),
    ("response_format", [5, "json_object"]),
    ("user", [5]),
    ("return_token_ids", ["x", 1]),
    ("request_id", ["", "x" * 257, "a b", "a\r\nX: y", "é", 5]),
    ("priority", ["x", HUGE, 1.5]),
    ("guided_json", [{}, "x"]),
    ("structured_outputs", [{}]),
    ("prompt_logprobs", [0, 1]),
]
CHAT_BAD = [
    ("messages", [None, [], "x", {}]),
    ("max_completion_tokens", [0, -1, HUGE, "x"]),
    ("logprobs", [1, "x"]),
    ("top_logprobs", [1, -1, "x"]),
    ("chat_template_kwargs", [5, []]),
    ("add_generation_prompt", ["x"]),
    ("continue_final_message", ["x"]),
    ("tools", [[{"type": "function"}], "x"]),
    ("tool_choice", ["required", {"type": "function"}]),
    ("functions", [[{}]]),
    ("modalities", [["text", "audio"]]),
    ("audio", [{}]),
    ("echo", [True]),
]
COMPLETION_BAD = [
    ("prompt", [None, "", [], {}, 5, [[]], [""], [-1], [70000], [HUGE], [1.5], ["a"] * 17]),
    ("logprobs", [-1, 6, HUGE, True, "x"]),
    ("best_of", [2, 0, "x"]),
    ("suffix", ["x"]),
    ("echo", ["x", 1]),
    ("model", [5]),
]
GENERATE_BAD = [
    ("max_new_tokens", [0, -1, HUGE, "x"]),
    ("min_new_tokens", [-1, HUGE, "x"]),
    ("regex", ["", 5]),
    ("json_schema", ["", 5]),
]


def cases() -> Iterator[Any]:
    for api in PATHS:
        lists = [SHARED_BAD]
        lists += {"chat": [OPENAI_BAD, CHAT_BAD], "completion": [OPENAI_BAD, COMPLETION_BAD]}.get(api, [GENERATE_BAD])
        for fields in lists:
            for name, values in fields:
                for value in values:
                    yield pytest.param(api, name, value, id=f"{api}-{name}-{str(value)[:12]!a}")


@pytest.mark.parametrize(("api", "name", "value"), list(cases()))
def test_bad_values_are_refused_by_name(connection: Connection, api: str, name: str, value: Any) -> None:
    prefix = "sampling_params." if api == "generate" else ""
    connection.post(PATHS[api], body_of(api, {name: value}))
    answer = connection.read()
    assert answer.status == 400, answer.body
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    # An item of a list is named by its place.
    assert error["param"].partition("[")[0] == prefix + name
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"\\ud800"', '"\udfff"'])
def test_values_that_json_lacks_are_refused_by_name(connection: Connection, api: str, raw: str) -> None:
    name = "temperature" if raw[0] != '"' else "stop"
    prefix = "sampling_params." if api == "generate" else ""
    refused(connection, PATHS[api], raw_body(api, name, raw), prefix + name)


NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0, "seed": None, "presence_penalty": 0,
    "frequency_penalty": 0, "repetition_penalty": 1, "stop": [], "stop_token_ids": [], "ignore_eos": False, "n": 1,
    "logit_bias": {}, "skip_special_tokens": True, "bad_words": [], "use_beam_search": False, "length_penalty": 1.0,
}  # fmt: skip
NEUTRAL_OPENAI = NEUTRAL | {
    "stream": False, "stream_options": None, "min_tokens": 0, "response_format": {"type": "text"}, "user": "me",
    "return_token_ids": False, "priority": 0, "guided_json": None, "unheard_of": {"x": [1]},
}  # fmt: skip
NEUTRAL_OF = {
    "chat": NEUTRAL_OPENAI | {
        "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "functions": [], "echo": False,
        "modalities": ["text"], "store": False, "parallel_tool_calls": True, "metadata": {}, "service_tier": "auto",
    },
    "completion": NEUTRAL_OPENAI | {"suffix": "", "echo": False, "best_of": 1, "logprobs": None},
    "generate": NEUTRAL | {"min_new_tokens": 0},
}  # fmt: skip


@pytest.mark.parametrize("api", PATHS)
def test_null_and_neutral_values_are_accepted_by_any_engine(limited: RunningServer, api: str) -> None:
    neutral = NEUTRAL_OF[api]
    with limited.connect() as connection:
        for fields in [neutral, dict.fromkeys(neutral), *({name: value} for name, value in neutral.items())]:
            connection.post(PATHS[api], body_of(api, fields))
            answer = connection.read()
            assert answer.status == 200, (fields, answer.body)


LACKING = {
    "top_p": 0.5, "top_k": 5, "min_p": 0.5, "seed": 1, "presence_penalty": 1, "frequency_penalty": 1,
    "repetition_penalty": 1.5, "stop_token_ids": [1], "ignore_eos": True, "logit_bias": {"1": 1},
}  # fmt: skip


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("name", LACKING)
def test_what_the_engine_lacks_is_refused_by_name(limited: RunningServer, api: str, name: str) -> None:
    prefix = "sampling_params." if api == "generate" else ""
    with limited.connect() as connection:
        message = refused(connection, PATHS[api], body_of(api, {name: LACKING[name]}), prefix + name)
        assert "'double'" in message


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("chat", {"min_tokens": 3}, "min_tokens"),
        ("chat", {"logprobs": True}, "logprobs"),
        ("completion", {"logprobs": 0}, "logprobs"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("generate", {"regex": "a+"}, "sampling_params.regex"),
    ],
)
def test_other_things_the_engine_lacks(limited: RunningServer, api: str, fields: Any, param: str) -> None:
    with limited.connect() as connection:
        refused(connection, PATHS[api], body_of(api, fields), param)


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        ("chat", chat(max_tokens=4, min_tokens=5), "min_tokens"),
        ("chat", chat(stream_options={"include_usage": "x"}), "stream_options.include_usage"),
        ("chat", chat(stream=True, stream_options={"continuous_usage_stats": True}),
         "stream_options.continuous_usage_stats"),
        ("chat", chat(response_format={"type": "xml"}), "response_format.type"),
        ("chat", chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
        ("chat", chat(logprobs=True, top_logprobs=6), "top_logprobs"),
        ("chat", chat(stop=["a", ""]), "stop[1]"),
        ("chat", chat(stop_token_ids=[1, 70000]), "stop_token_ids[1]"),
        ("chat", chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
        ("chat", chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages"),
        ("chat", chat(chat_template_kwargs={"fail": True}), "messages"),
        ("chat", {"messages": [5]}, "messages[0]"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ("completion", {"prompt": ["a", [1]]}, "prompt[1]"),
        ("completion", {"prompt": [1, "a"]}, "prompt"),
        ("completion", {"prompt": [[1], [-5]]}, "prompt[1]"),
        ("completion", {"prompt": ["a"] * 8, "n": 3}, "n"),
        ("completion", {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ("chat", {}, "messages"),
        ("completion", {}, "prompt"),
        ("chat", chat(response_format={}), "response_format.type"),
        ("generate", {}, "text"),
        ("generate", {"text": "a", "input_ids": [1]}, "input_ids"),
        ("generate", {"text": []}, "text"),
        ("generate", {"input_ids": [70000]}, "input_ids"),
        ("generate", {"text": "a", "sampling_params": 5}, "sampling_params"),
        ("generate", {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ("generate", {"text": "a", "top_logprobs_num": 1}, "top_logprobs_num"),
        ("generate", {"text": "a", "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ("generate", {"text": "a", "image_data": ["x"]}, "image_data"),
        ("generate", {"text": "a", "rid": ["a"]}, "rid"),
    ],
)  # fmt: skip
def test_bad_combinations(connection: Connection, api: str, body: Any, param: str) -> None:
    refused(connection, PATHS[api], body, param)


@pytest.mark.parametrize("path", [*PATHS.values(), "/v1/embeddings", "/tokenize", "/detokenize", "/abort_request"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff",
        b"{}x",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\x00",
        b"\xef\xbb\xbf{}",
    ],
)
def test_bodies_that_are_no_request(connection: Connection, path: str, body: bytes) -> None:
    connection.post(path, body)
    answer = connection.read()
    assert answer.status == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", PATHS.values())
def test_unknown_model(connection: Connection, path: str) -> None:
    body = chat(text="a", prompt="a") | {"model": "other"}
    connection.post(path, body)
    answer = connection.read()
    assert answer.status == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["param"] == "model"


def test_missing_model_and_lying_content_type(connection: Connection) -> None:
    connection.post("/v1/completions", {"prompt": "a"}, "Content-Type: text/xml\r\n")
    assert connection.read().status == 200


def test_top_1_needs_no_engine_support_when_greedy() -> None:
    info = msgspec.structs.replace(INFO, top_logprobs=0)
    with running(DoubleManager(info, auto="abc")) as server, server.connect() as connection:
        connection.post("/v1/completions", {"prompt": "a", "logprobs": 1, "temperature": 0})
        logprobs = connection.read().json()["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}]
        connection.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=1, temperature=0))
        logprobs = connection.read().json()["choices"][0]["logprobs"]
        assert [entry["top_logprobs"][0]["token"] for entry in logprobs["content"]] == list("abc")
        for more in ({"temperature": 0.5}, {"presence_penalty": 1}, {"logit_bias": {"1": 1}}):
            body = {"prompt": "a", "logprobs": 1, "temperature": 0} | more
            refused(connection, "/v1/completions", body, "logprobs")


def test_fields_reach_the_engine(server: RunningServer, connection: Connection) -> None:
    while not server.manager.submissions.empty():
        server.manager.next_submission()
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    connection.post(
        PATHS["chat"],
        chat(
            temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-1, presence_penalty=1, frequency_penalty=-1,
            repetition_penalty=1.1, stop="END", stop_token_ids=[5], ignore_eos=True, n=2, max_tokens=3,
            max_completion_tokens=9, min_tokens=2, logit_bias={"7": -3}, skip_special_tokens=False, priority=4,
            request_id="r1", logprobs=True, top_logprobs=2,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        ),
    )  # fmt: skip
    assert connection.read().headers["x-request-id"] == "r1"
    request = server.manager.next_submission().request
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert (params.max_new_tokens, params.min_new_tokens, params.seed) == (9, 2, 2**63 - 1)
    assert (params.stop_token_ids, params.ignore_eos, params.logit_bias, params.logprobs) == ([5], True, {7: -3}, 2)
    assert msgspec.json.decode(params.grammar.text) == schema
    assert (request.max_new_tokens, request.n, request.stop, request.priority) == (9, 2, ["END"], 4)
    assert (request.skip_special_tokens, request.raw, request.add_special_tokens) == (False, False, False)
    assert request.prompts == ["<user>hi<assistant>"]
    assert request.request_id == "r1"


def test_chat_without_limit_has_none(server: RunningServer, connection: Connection) -> None:
    while not server.manager.submissions.empty():
        server.manager.next_submission()
    connection.post(PATHS["chat"], chat(continue_final_message=True))
    assert connection.read().status == 200
    request = server.manager.next_submission().request
    assert request.max_new_tokens is None
    assert request.prompts == ["<user>hi"]
