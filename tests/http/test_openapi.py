"""The published description of the API: valid, complete, and true."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from http_double import INFO, DoubleManager, RunningServer, chat, running
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from hostile import REQUESTS
from multitok.http.admin.control import OPERATIONS
from multitok.http.answers import ChatCompletion, Completion, Generation
from multitok.http.openapi import document

CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance),
    *(response_schema_conformance, negative_data_rejection, unsupported_method),
]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


@pytest.fixture(scope="module", params=["generate", "embed"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    info = msgspec.structs.replace(INFO, task=request.param, embedding_size=4)
    with running(DoubleManager(info, auto="abc")) as server:
        yield server


def get(server: RunningServer, path: str) -> Any:
    with server.connect() as connection:
        connection.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = connection.read()
        assert answer.status == 200
        return answer.json()


def test_it_is_served(server: RunningServer) -> None:
    assert get(server, "/openapi.json") == document()


def test_it_has_every_route_and_field() -> None:
    made = document()
    schemas = made["components"]["schemas"]
    for path, (kind, _) in REQUESTS.items():
        body = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{kind.__name__}"}
        assert set(schemas[kind.__name__]["properties"]) == {
            field.encode_name for field in msgspec.structs.fields(kind)
        }
    assert schemas["ChatRequest"]["properties"]["tools"]["enum"] == [None, []]
    assert made["components"]["schemas"]["ErrorBody"]


def test_keys_are_part_of_it() -> None:
    assert "security" not in document()
    assert document(keys=True)["security"] == [{"key": []}]


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", chat(n=2, logprobs=True, top_logprobs=2, return_token_ids=True), ChatCompletion),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "return_token_ids": True}, Completion),
        ("/v1/completions", {"prompt": "a"}, Completion),
        ("/generate", {"text": "a", "return_logprob": True}, Generation),
        ("/generate", {"text": ["a"]}, list[Generation]),
    ],
)
def test_answers_are_of_the_published_shape(path: str, body: Any, kind: Any) -> None:
    with running(DoubleManager(auto="abc")) as server, server.connect() as connection:
        connection.post(path, body)
        answer = connection.read()
        made = msgspec.json.decode(answer.body, type=kind)
        # Nothing in it that the shape lacks.
        assert msgspec.to_builtins(made) == answer.json()


def explore(server: RunningServer, examples: int, seconds: float | None = None) -> int:
    """Ask what the description allows and what it doesn't; returns how often."""
    schema = schemathesis.openapi.from_dict(document())
    url = f"http://127.0.0.1:{server.port}"
    asked = 0
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        for result in schema.get_all_operations():
            operation = result.ok()
            # What operators do is the same whatever the model does.
            if operation.path in OPERATIONS and server.manager.engine_info.task == "embed":
                continue
            # What has no body has nothing to get wrong.
            modes = MODES if operation.method == "post" else MODES[:1]
            for mode in modes:

                @settings(
                    max_examples=examples,
                    deadline=None,
                    database=None,
                    derandomize=end is None,
                    suppress_health_check=list(HealthCheck),
                    phases=[Phase.generate, Phase.shrink],
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def probe(case: schemathesis.Case) -> None:
                    nonlocal asked
                    asked += 1
                    case.call_and_validate(base_url=url, checks=CHECKS)

                probe()
        if end is None or time.monotonic() > end:
            return asked


def test_the_server_keeps_to_it(server: RunningServer) -> None:
    assert explore(server, 20) > 100


@pytest.mark.slow
def test_the_server_keeps_to_it_for_long(server: RunningServer, record_property: Callable[[str, object], None]) -> None:
    seconds = float(os.environ.get("FUZZ_SECONDS", "60"))
    record_property("requests", explore(server, 300, seconds / 2))
