"""A large body is decoded in pieces, to exactly what decoding it whole gives."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from multitok.http import large_body
from multitok.http.decode import decode_body
from multitok.http.large_body import LongTexts
from multitok.http.openai.types import ChatRequest, CompletionRequest
from multitok.tokenizer.requests import RequestError

_SMALL_PIECE = 64
_TEXTS = st.text(st.sampled_from(["a", "\\", '"', "\n", "é", "漢", "😀", "\ud83d", "\x01", "/"]), max_size=600)


@pytest.fixture(scope="module")
def small_pieces():
    original, large_body.PIECE = large_body.PIECE, _SMALL_PIECE
    yield
    large_body.PIECE = original


def _whole(body: bytes) -> Any:
    return msgspec.json.decode(body)


def _in_pieces(body: bytes) -> tuple[Any, int]:
    texts = LongTexts(body)
    return texts.put_back(msgspec.json.decode(texts.rest)), len(texts.rest)


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
        (b"[" * 2_000_000, "object"),
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
