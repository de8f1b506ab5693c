"""Several models: which one a request is for, and what is answered when there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from http_double import INFO, Answer, Connection, DoubleManager, chat, running


class ManyModels(DoubleManager):
    """A manager of several models, which does what they ask itself."""

    def __init__(self) -> None:
        super().__init__(auto="abc")
        self.made = [DoubleManager() for _ in range(3)]
        embed = msgspec.structs.replace(INFO, task="embed", embedding_size=3, vocab_size=10)
        infos = [embed, INFO, INFO]
        for index, (model, name, info) in enumerate(zip(self.made, ("embed", "chat", "org/bare"), infos, strict=True)):
            model.index, model.name, model.engine_info, model.context_length = index, name, info, 100 + index
        self.made[2].chat_template = None

    @property
    def models(self) -> list[DoubleManager]:
        return self.made

    def submit_embedding(self, request: Any, sink: Any) -> Any:
        self.engine_info = self.made[0].engine_info
        return super().submit_embedding(request, sink)


@pytest.fixture
def manager() -> ManyModels:
    return ManyModels()


@pytest.fixture
def connection(manager: ManyModels) -> Iterator[Connection]:
    with running(manager) as server, server.connect() as connection:
        yield connection


def call(connection: Connection, path: str, body: Any = None) -> Answer:
    if body is None:
        connection.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    else:
        connection.post(path, body)
    return connection.read()


RAW = {"prompt": "hi", "max_tokens": 5}
NATIVE = {"text": "hi", "sampling_params": {"max_new_tokens": 5}}
ROUTES = {
    "/v1/chat/completions": chat(),
    "/v1/completions": RAW,
    "/generate": NATIVE,
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_name_that_no_model_has_is_not_found(connection: Connection, path: str) -> None:
    answer = call(connection, path, {**ROUTES[path], "model": "other"})
    assert answer.status == 404
    assert answer.json()["error"]["param"] == "model"
    assert "'other'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/embeddings"])
def test_a_model_that_does_something_else_refuses_by_name(connection: Connection, path: str) -> None:
    wrong = "chat" if path == "/v1/embeddings" else "embed"
    answer = call(connection, path, {**ROUTES[path], "model": wrong})
    assert answer.status == 400
    assert f"'{wrong}'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "name", "index"),
    [
        ("/v1/completions", "chat", 1),
        ("/v1/completions", "org/bare", 2),
        ("/v1/completions", None, 1),
        ("/v1/completions", "", 1),
        ("/v1/chat/completions", "chat", 1),
        ("/generate", "org/bare", 2),
        ("/generate", None, 1),
        ("/v1/embeddings", "embed", 0),
        ("/v1/embeddings", None, 0),
    ],
)
def test_a_name_picks_the_model_and_without_one_it_is_the_first_that_fits(
    manager: ManyModels, connection: Connection, path: str, name: str | None, index: int
) -> None:
    answer = call(connection, path, {**ROUTES[path], "model": name})
    assert answer.status == 200
    assert manager.next_submission().request.model == index
    if path != "/generate":
        assert answer.json()["model"] == manager.models[index].name


def test_the_limits_are_those_of_the_model(connection: Connection) -> None:
    assert call(connection, "/tokenize", {"prompt": "hi", "model": "chat"}).json()["max_model_len"] == 101
    assert call(connection, "/tokenize", {"prompt": "hi"}).json()["max_model_len"] == 100
    assert call(connection, "/detokenize", {"tokens": [70], "model": "embed"}).status == 400
    assert call(connection, "/detokenize", {"tokens": [70], "model": "chat"}).json()["text"] == "F"
    assert call(connection, "/v1/embeddings", {"input": [70]}).status == 400


def test_a_model_without_a_chat_template_is_named(connection: Connection) -> None:
    answer = call(connection, "/v1/chat/completions", chat(model="org/bare"))
    assert answer.status == 400
    assert "'org/bare' has no chat template" in answer.json()["error"]["message"]


def test_all_models_are_listed_and_each_has_its_card(connection: Connection) -> None:
    cards = call(connection, "/v1/models").json()["data"]
    # The last one is an adapter of the first.
    served = [("embed", 100), ("chat", 101), ("org/bare", 102), ("poet", 100)]
    assert [(card["id"], card["max_model_len"]) for card in cards] == served
    for card in cards:
        assert call(connection, f"/v1/models/{card['id']}").json() == card
    assert call(connection, "/v1/models/other").status == 404


def test_ready_is_all_models_or_the_named_one(manager: ManyModels, connection: Connection) -> None:
    assert call(connection, "/ready").status == 200
    manager.models[0].ready = False
    assert call(connection, "/ready").status == 503
    assert call(connection, "/ready?model=embed").status == 503
    assert call(connection, "/ready?model=chat").status == 200
    assert call(connection, "/ready?model=other").status == 404


def test_health_generate_goes_through_all_models_or_the_named_one(manager: ManyModels, connection: Connection) -> None:
    assert call(connection, "/health_generate").status == 200
    assert {manager.next_submission().request.model for _ in range(3)} == {0, 1, 2}
    assert call(connection, "/health_generate?model=org/bare").status == 200
    assert manager.next_submission().request.model == 2
    assert manager.submissions.empty()
