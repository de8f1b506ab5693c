"""Bodies of very many small things: a 4xx that names the field or the limit, or the right answer."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from http_double import INFO, DoubleManager, RunningServer, running

from hostile import REQUESTS
from multitok.http import large_body
from multitok.http.large_body import PIECE

CONTEXT = 300_000
MANY = 200_000
IDS = [i * 7919 % INFO.vocab_size for i in range(MANY)]
# Where ids may stand: path, other fields, field.
ID_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"max_tokens": 1}, "prompt"),
    ("/generate", {"sampling_params": {"max_new_tokens": 1}}, "input_ids"),
    ("/v1/embeddings", {}, "input"),
    ("/detokenize", {}, "tokens"),
]
by_id_field = pytest.mark.parametrize(("path", "others", "field"), ID_FIELDS, ids=[path for path, *_ in ID_FIELDS])


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, RunningServer]]:
    info = msgspec.structs.replace(INFO, context_length=CONTEXT)
    encoder = msgspec.structs.replace(info, task="embed", embedding_size=4)
    with running(DoubleManager(info, auto="abc")) as one, running(DoubleManager(encoder, auto="x")) as other:
        yield {path: other if path == "/v1/embeddings" else one for path in REQUESTS}


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_body, "MOST_VALUES", 5000)


def ask(servers: dict[str, RunningServer], path: str, body: Any) -> tuple[int, Any]:
    with servers[path].connect() as connection:
        connection.post(path, body)
        answer = connection.read()
    return answer.status, answer.json()


def refused(servers: dict[str, RunningServer], path: str, body: Any) -> tuple[str, str | None]:
    status, answer = ask(servers, path, body)
    assert status == 400, answer
    return answer["error"]["message"], answer["error"]["param"]


@pytest.mark.usefixtures("few_values")
@pytest.mark.parametrize("path", REQUESTS)
def test_many_fields_are_refused(servers: dict[str, RunningServer], path: str) -> None:
    body = REQUESTS[path][1]
    fields = {f"unknown {i:06d}": 1 for i in range(PIECE // 16)}
    assert refused(servers, path, body | fields) == ("a large body may have at most 5000 values", None)


@pytest.mark.usefixtures("few_values")
@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("value", [dict.fromkeys(map(str, range(20_000)), 0), [""] * 100_000, [[{}]] * 60_000])
def test_many_values_in_a_field_that_nobody_knows_are_refused(
    servers: dict[str, RunningServer], path: str, value: Any
) -> None:
    body = REQUESTS[path][1] | {"metadata": value, "padding": "x" * PIECE}
    message = "metadata: a large body may have at most 5000 values"
    assert refused(servers, path, body) == (message, "metadata")


@pytest.mark.parametrize("path", REQUESTS)
def test_a_large_body_of_few_values_is_answered(servers: dict[str, RunningServer], path: str) -> None:
    body = {"metadata": [{"a": ["b"]}] * 10_000, "padding": "x" * PIECE} | REQUESTS[path][1]
    assert ask(servers, path, body)[0] == 200


@by_id_field
@pytest.mark.parametrize("lists", [False, True])
def test_many_ids_are_taken(
    servers: dict[str, RunningServer], path: str, others: dict[str, Any], field: str, lists: bool
) -> None:
    rows = [IDS[:150_000], IDS[150_000:], [5]] if lists else [IDS]
    manager = servers[path].manager
    while not manager.submissions.empty():
        manager.next_submission()
    status, answer = ask(servers, path, others | {field: rows if lists else IDS})
    assert status == 200, answer
    if field == "tokens":
        texts = ["".join("\ufffd" if 0xD800 <= i < 0xE000 else chr(i) for i in row) for row in rows]
        assert answer["text"] == (texts if lists else texts[0])
    else:
        assert manager.next_submission().prompt_ids == [array("i", row).tobytes() for row in rows]


@by_id_field
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([*IDS, INFO.vocab_size], "outside the vocabulary"),
        ([-1, *IDS], "outside the vocabulary"),
        ([*IDS, 1.5], "integers"),
        ([*IDS, None], "integers"),
        ([*IDS, "1"], ""),
        ([*IDS, [1]], ""),
        ([*IDS] * 6, "ids; at most"),
    ],
)
def test_many_ids_that_are_none_or_do_not_fit_are_refused(
    servers: dict[str, RunningServer], path: str, others: dict[str, Any], field: str, wrong: list[Any], words: str
) -> None:
    message, param = refused(servers, path, others | {field: wrong})
    assert words in message
    assert param == field
    if words:
        message, param = refused(servers, path, others | {field: [[1], wrong]})
        assert words in message
        assert param in (field, f"{field}[1]")


def test_ids_that_will_be_cut_may_be_many(servers: dict[str, RunningServer]) -> None:
    body = {"input": IDS * 2}
    assert refused(servers, "/v1/embeddings", body)[1] == "input"
    assert ask(servers, "/v1/embeddings", body | {"truncate": True})[0] == 200


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


def conversation(*arguments: str) -> dict[str, Any]:
    calls = [CALL | {"function": {"name": "f", "arguments": text}} for text in arguments]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"messages": [{"role": "user", "content": "a"}, message], "max_tokens": 1}


@pytest.mark.usefixtures("few_values")
def test_values_in_the_arguments_of_calls_are_counted_together(
    servers: dict[str, RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multitok.http.openai.messages.MOST_VALUES", 5000)
    half = msgspec.json.encode({"a": [1] * 2400, "b": "," * PIECE}).decode()
    path = "/v1/chat/completions"
    for texts in ((half, half), (half, '"' + "," * 5000), ("no JSON" * PIECE,)):
        assert ask(servers, path, conversation(*texts))[0] == 200, texts[-1][:50]
    small = msgspec.json.encode({"a": [1] * 50}).decode()
    for texts in ((half, half, half), (half, half, *[small] * 20), ('{"a":[' + "1," * PIECE,)):
        message, param = refused(servers, path, conversation(*texts))
        assert "arguments" in message
        assert param == "messages[1].tool_calls"
