"""Routes of the control plane: what they ask for, and what they answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from http_double import INFO, Answer, Connection, DoubleManager, RunningServer, chat, running

from multitok.http.admin.control import LONG_S, OPERATIONS, QUICK_S, OperationAnswer
from multitok.messages.control import AbortMatching, Continue, ControlState, FreezeGc, Pause, SetLogLevel
from multitok.messages.operations import (
    FlushCache,
    LoadAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)
from multitok.messages.sampling import EngineFields
from multitok.tokenizer.requests import RequestError

ASKED: list[tuple[str, dict[str, Any], Any, float]] = [
    ("/pause_generation", {}, Pause("abort"), QUICK_S),
    ("/pause_generation", {"mode": "wait"}, Pause("wait"), LONG_S),
    ("/pause_generation", {"mode": "in_place"}, Pause("keep"), QUICK_S),
    ("/continue_generation", {"torch_empty_cache": True}, Continue(), QUICK_S),
    ("/flush_cache", {"timeout": 2.5}, FlushCache(), 2.5),
    ("/abort_request", {"rid": "x"}, AbortMatching("x"), QUICK_S),
    ("/abort_request", {"rid_prefix": "x"}, AbortMatching("x", prefix=True), QUICK_S),
    ("/abort_request", {"rid": "", "abort_all": True}, AbortMatching(), QUICK_S),
    ("/abort_request", {"abort_all": True, "model": "double-model"}, AbortMatching(model=0), QUICK_S),
    ("/configure_logging", {"log_level": "debug", "log_requests": False}, SetLogLevel("debug"), QUICK_S),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, LoadAdapter("a", "/a"), LONG_S),
    ("/unload_lora_adapter", {"lora_name": "poet"}, UnloadAdapter("poet"), QUICK_S),
    ("/update_weights_from_disk", {"model_path": "/w", "flush_cache": False}, UpdateWeights("/w"), LONG_S),
    ("/freeze_gc", {}, FreezeGc(), QUICK_S),
    ("/start_profile", {"output_dir": "/p"}, StartProfile("/p"), QUICK_S),
    ("/stop_profile", {}, StopProfile(), LONG_S),
]


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


@pytest.mark.parametrize(("path", "body", "operation", "timeout"), ASKED)
def test_an_operation_is_carried_out_and_the_answer_says_by_whom(
    server: RunningServer, connection: Connection, path: str, body: Any, operation: Any, timeout: float
) -> None:
    answer = post(connection, path, body)
    assert answer.status == 200
    assert server.manager.control.asked == [(operation, timeout)]
    said = msgspec.json.decode(answer.body, type=OperationAnswer)
    assert (said.success, said.id, said.epoch, said.done) == (True, 1, 7, ["launcher", "scheduler:0"])


def test_all_routes_are_tried() -> None:
    assert {path for path, *_ in ASKED} == set(OPERATIONS)


@pytest.mark.parametrize("path", OPERATIONS)
def test_where_nothing_need_be_said_get_and_an_empty_body_do(connection: Connection, path: str) -> None:
    assert get(connection, path).status == (200 if OPERATIONS[path][2] else 405)
    needs = path in ("/abort_request", "/configure_logging", "/load_lora_adapter", "/unload_lora_adapter")
    needs = needs or path == "/update_weights_from_disk"
    assert post(connection, path, b"").status == (400 if needs else 200)


def test_new_weights_can_take_the_place_of_what_runs_and_of_the_cache(
    server: RunningServer, connection: Connection
) -> None:
    body = {"model_path": "/w", "weight_version": "v2", "abort_all_requests": True}
    assert post(connection, "/update_weights_from_disk", body).json()["num_paused_requests"] == 0
    asked = [operation for operation, _ in server.manager.control.asked]
    assert asked == [AbortMatching(model=0), UpdateWeights("/w", "v2"), FlushCache()]


def test_an_answer_says_that_the_weights_are_new_though_the_cache_is_not(
    server: RunningServer, connection: Connection
) -> None:
    server.manager.control.refusal = RequestError(503, "requests use cached blocks")
    server.manager.control.refused = FlushCache
    answer = post(connection, "/update_weights_from_disk", {"model_path": "/w"})
    assert answer.status == 503
    message = "the weights are updated, but the cache is not flushed: requests use cached blocks"
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause_generation", {"mode": "retract"}, "mode"),
        ("/pause_generation", {"timeout": 0}, "timeout"),
        ("/pause_generation", {"model": "double-model"}, "model"),
        ("/continue_generation", {"model": "double-model"}, "model"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": "a", "rid_prefix": "b"}, "rid_prefix"),
        ("/abort_request", {"rid_prefix": ""}, "rid_prefix"),
        ("/configure_logging", {"log_level": "loud"}, "log_level"),
        ("/configure_logging", {"log_level": "info", "log_requests_level": 2}, "log_requests_level"),
        ("/configure_logging", {"log_requests": True}, "log_requests"),
        ("/configure_logging", {}, "log_level"),
        ("/load_lora_adapter", {"lora_name": "double-model", "lora_path": "/a"}, "lora_name"),
        ("/load_lora_adapter", {"lora_name": "a\n", "lora_path": "/a"}, "lora_name"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": ""}, "lora_path"),
        ("/unload_lora_adapter", {"lora_name": "nobody"}, "lora_name"),
        ("/update_weights_from_disk", {"model_path": "/w", "load_format": "dummy"}, "load_format"),
    ],
)
def test_what_can_not_be_asked_for_is_named(
    server: RunningServer, connection: Connection, path: str, body: Any, param: str
) -> None:
    answer = post(connection, path, body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert server.manager.control.asked == []


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/flush_cache", {}, "flush_cache"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, "load_lora_adapter"),
        ("/unload_lora_adapter", {"lora_name": "poet"}, "unload_lora_adapter"),
        ("/update_weights_from_disk", {"model_path": "/w"}, "update_weights_from_disk"),
        ("/start_profile", {}, "start_profile"),
        ("/stop_profile", {}, "stop_profile"),
    ],
)
def test_an_operation_that_the_engine_lacks_is_refused(path: str, body: Any, word: str) -> None:
    manager = DoubleManager(msgspec.structs.replace(INFO, operations=[]))
    with running(manager) as server, server.connect() as connection:
        answer = post(connection, path, body)
        assert answer.status == 400
        assert answer.json()["error"]["message"] == f"engine 'double' has no operation '{word}'"
        assert manager.control.asked == []


def test_a_failure_is_an_error_in_the_apis_format(server: RunningServer, connection: Connection) -> None:
    server.manager.control.refusal = RequestError(504, "operation 1 (pause) was not done in time by scheduler:0")
    answer = post(connection, "/pause_generation", {})
    assert answer.status == 504
    assert "scheduler:0" in answer.json()["error"]["message"]


def test_a_loaded_adapter_is_a_model_by_its_own_name(server: RunningServer, connection: Connection) -> None:
    models = get(connection, "/v1/models").json()["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in models] == [
        ("double-model", "double-model", None),
        ("poet", "/adapters/poet", "double-model"),
    ]
    assert get(connection, "/v1/models/poet").json() == models[1]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat() | {"model": "poet"}),
        ("/v1/completions", {"model": "poet", "prompt": "a"}),
        ("/generate", {"model": "poet", "text": "a"}),
        ("/generate", {"lora_path": "poet", "text": "a"}),
    ]
    for path, body in asked:
        answer = post(connection, path, body)
        assert answer.json().get("model", "poet") == "poet"
        assert server.manager.next_submission().request.engine_fields == EngineFields(adapter="poet")
    assert post(connection, "/v1/completions", {"model": "double-model", "prompt": "a"}).status == 200
    assert server.manager.next_submission().request.engine_fields is None


def test_an_adapter_that_is_not_loaded_is_no_model(server: RunningServer, connection: Connection) -> None:
    server.manager.control.state = ControlState()
    assert post(connection, "/v1/completions", {"model": "poet", "prompt": "a"}).status == 404
    assert get(connection, "/v1/models/poet").status == 404
    answer = post(connection, "/generate", {"lora_path": "poet", "text": "a"})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "lora_path")


def test_no_token_goes_round_during_a_pause(server: RunningServer, connection: Connection) -> None:
    server.manager.control.state = ControlState(paused="wait")
    answer = get(connection, "/health_generate")
    assert (answer.status, answer.json()["error"]["message"]) == (503, "generation is paused")
    assert server.manager.submissions.empty()


def test_admin_state(connection: Connection) -> None:
    assert get(connection, "/admin/state").json() == {"control": {}, "processes": {}}
