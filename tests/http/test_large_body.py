"""A large body is decoded in pieces, to exactly what decoding it whole gives."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from multitok.http import large_body, token_ids
from multitok.http.decode import decode_body
from multitok.http.large_body import LongTexts
from multitok.http.openai.types import ChatRequest, CompletionRequest
from multitok.http.token_ids import TokenIds
from multitok.tokenizer.requests import RequestError

_SMALL_PIECE = 64
_VOCABULARY = 1000
_TEXTS = st.text(st.sampled_from(["a", "\\", '"', "\n", "é", "漢", "😀", "\ud83d", "\x01", "/"]), max_size=600)


@pytest.fixture(scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_body, "PIECE", _SMALL_PIECE)
        patch.setattr(large_body, "_LONG", 40)
        patch.setattr(token_ids, "_PIECE", 32)
        yield


def _whole(body: bytes) -> Any:
    return msgspec.json.decode(body)


def _in_pieces(body: bytes) -> tuple[Any, int]:
    texts = LongTexts(body)
    return texts.put_back(msgspec.json.decode(texts.rest)), len(texts.rest)


_KEYS = st.text(st.sampled_from('abc\\"é:,[]{}'), max_size=50)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_KEYS, inner, max_size=5),
    max_leaves=30,
)
_STYLES = st.sampled_from([{}, {"indent": 3}, {"separators": (",", ":")}, {"separators": (" \n, ", "\t:\r\n")}])


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


@settings(max_examples=examples(300), deadline=None)
@given(value=_VALUES, style=_STYLES, ascii_only=st.booleans())
def test_any_value_stays_what_it_is(small_pieces, value, style, ascii_only):
    body = json.dumps(value, ensure_ascii=ascii_only, **style).encode("utf-8", "surrogatepass")
    if _is_json(body):
        assert _in_pieces(body)[0] == _whole(body)


@settings(max_examples=examples(100), deadline=None)
@given(value=_VALUES)
def test_values_are_counted(small_pieces, value):
    def count(item: Any) -> int:
        below = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        # An empty list or object is counted twice.
        return 1 + (isinstance(item, list | dict) and not item) + sum(map(count, below))

    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    if _is_json(body):
        assert LongTexts(body).values == count(value)


@settings(max_examples=examples(300), deadline=None)
@given(text=_TEXTS, before=_TEXTS, ascii_only=st.booleans(), field=st.sampled_from(["content", "other"]))
def test_pieces_are_what_the_whole_is(small_pieces, text, before, ascii_only, field):
    value = {
        "model": before,
        "messages": [{"role": "user", field: text}, {"content": [{"type": "text", "text": text}]}],
    }
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        expected = _whole(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # A lone surrogate: the pieces are refused just so.
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            _in_pieces(body)
        return
    assert _in_pieces(body)[0] == expected


@pytest.mark.parametrize("text", ["\\" * 500, "\n" * 500, "漢字" * 500, "😀" * 500, '"' * 500, "a\\" * 400, "é" * 501])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_texts_of_escapes_only_are_cut_between_them(small_pieces, text, ascii_only):
    body = json.dumps({"prompt": [text, "x"]}, ensure_ascii=ascii_only).encode()
    decoded, rest = _in_pieces(body)
    assert decoded == {"prompt": [text, "x"]}
    assert rest < 150


def test_a_large_body_becomes_a_request(small_pieces):
    text = "Ein Satz. " * 300_000
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 3}).encode()
    assert decode_body(msgspec.json.Decoder(ChatRequest), body) == msgspec.json.decode(body, type=ChatRequest)
    body = json.dumps({"prompt": [text, "short"], "n": 2}).encode()
    assert decode_body(msgspec.json.Decoder(CompletionRequest), body).prompt == [text, "short"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"messages": [{"content": "' + b"a" * 2_000_000, "truncated"),
        (b'{"messages": [{"role": "user", "content": "' + b"a" * 2_000_000 + b'"}], "n": "x"}', "n: "),
        (b'{"messages": [{"role": "user", "content": "' + b"a" * 2_000_000 + b'\xff"}]}', "valid JSON"),
        (b'{"messages": "' + b"a" * 2_000_000 + b'"}', "messages: "),
        (b"[" * 2_000_000, "at most|nested"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'"' * 2_000_000, "at most"),
        (b'{"' + b"k" * 20_000_000 + b'":1}', "beside texts"),
        (b'{"messages":' + b" " * 20_000_000 + b"[]}", "beside texts"),
    ],
)
def test_a_large_body_that_is_wrong_gets_a_400(body, words):
    with pytest.raises(RequestError, match=words) as error:
        decode_body(msgspec.json.Decoder(ChatRequest), body)
    assert error.value.status == 400


def test_a_text_that_looks_like_a_mark_stays_what_it_is(small_pieces):
    long = "b" * 200
    body = json.dumps({"prompt": [long, "0", ""]}).encode()
    texts = LongTexts(body)
    assert texts.put_back(msgspec.json.decode(texts.rest)) == {"prompt": [long, "0", ""]}


# Token ids.

_IDS = st.lists(st.integers(0, _VOCABULARY - 1), max_size=80)


def _with_ids(body: bytes, field: str = "prompt") -> Any:
    texts = LongTexts(body, [field])
    return texts.put_back(msgspec.json.decode(texts.rest))


def _plain(value: Any) -> Any:
    if isinstance(value, TokenIds):
        packed = value.pack(_VOCABULARY, "prompt")
        assert len(packed) == 4 * len(value)
        return memoryview(packed).cast("i").tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=200, deadline=None)
@given(ids=_IDS | st.lists(_IDS, max_size=5), before=_VALUES, after=_VALUES, style=_STYLES)
def test_ids_are_what_they_are_in_the_whole(small_pieces, ids, before, after, style):
    body = json.dumps({"a": before, "prompt": ids, "b": after}, **style).encode("utf-8", "surrogatepass")
    if _is_json(body):
        assert _plain(_with_ids(body)) == _whole(body)


def test_long_lists_of_ids_are_not_decoded_with_the_rest(small_pieces):
    ids = list(range(100))
    for value, kind in (([*ids], TokenIds), ([ids, ids], list)):
        texts = LongTexts(json.dumps({"prompt": value}).encode(), ["prompt"])
        assert len(texts.rest) < 80
        assert isinstance(texts.put_back(msgspec.json.decode(texts.rest))["prompt"], kind)
    # What is no field of the request, or lies deeper, is no list of ids.
    for body in ({"prompt": ids}, {"a": {"input": ids}}, {"input": [{"input": ids}]}):
        assert _with_ids(json.dumps(body).encode(), "input") == body


@pytest.mark.parametrize(
    "content",
    ["1.5", "null", "true", "1e3", "[1", "{}", "1 2", "01", "-", "", " ", "1,", ",1", "1,,2", "x", "٣", "1,\x00"],
)
@pytest.mark.parametrize("place", [0, 20, 40])
def test_what_is_no_list_of_ids_is_refused(small_pieces, content, place):
    numbers = ["7"] * 40
    numbers.insert(place, content)
    ids = TokenIds(memoryview(",".join(numbers).encode()))
    with pytest.raises(RequestError) as error:
        ids.pack(_VOCABULARY, "prompt[3]")
    assert (error.value.status, error.value.param) == (400, "prompt[3]")


@pytest.mark.parametrize("token_id", [-1, _VOCABULARY, 2**31, 2**64, -(2**70)])
def test_an_id_outside_of_the_vocabulary_is_named(small_pieces, token_id):
    ids = TokenIds(memoryview(f"{'1,' * 50}{token_id}{',1' * 50}".encode()))
    with pytest.raises(RequestError, match=f"token id {token_id} is outside"):
        ids.pack(_VOCABULARY, "prompt")


# Limits.


def test_as_many_values_as_are_allowed(monkeypatch):
    monkeypatch.setattr(large_body, "MOST_VALUES", 1000)
    # The object, the list, and what is in it.
    assert LongTexts(json.dumps({"a": [0] * 998}).encode()).values == 1000
    for value, field in ((999 * [0], "a"), (600 * [[1]], "a"), (500 * [{"b": ""}], "a"), ("[" * 999, None)):
        with pytest.raises(RequestError, match="at most 1000 values") as error:
            LongTexts(json.dumps({"a": value}).encode() if field else b'{"a"' + value.encode())
        assert error.value.status == 400
    for body in (json.dumps({str(i): 0 for i in range(1001)}).encode(), b'""' * 3000):
        with pytest.raises(RequestError, match="at most 1000 values") as error:
            LongTexts(body)
        assert error.value.param is None


def test_text_full_of_commas_and_brackets_counts_as_one_value(monkeypatch):
    monkeypatch.setattr(large_body, "MOST_VALUES", 10)
    assert LongTexts(json.dumps({"a": '[{,"\\' * 100_000}).encode()).values == 2
