"""No text has fewer tokens than the bound says, and endless texts have a bound that is worth something."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import FAMILIES, backends, minilm

from multitok.tokenizer.backends import load_tokenizer
from multitok.tokenizer.limits import check_texts
from multitok.tokenizer.probe_texts import probe_texts
from multitok.tokenizer.requests import RequestError
from multitok.tokenizer.token_bound import TokenBound, token_bound

every_family = pytest.mark.parametrize("family", FAMILIES)
PARTS = [
    *(
        "a",
        "Z",
        "0",
        " ",
        "\n",
        "-",
        "e\u0301",
        "\u0338",
        "=\u0338",
        "K\u030a",
        "\u212a",
        "\u1f82",
        "α\u0313\u0300\u0345",
    ),
    *("中", "가", "\u1100\u1161\u11a8", "😀", "\x04", "\x1d", "\U00040000", "\ud7a3", "Ⅷ"),
]


def byte_bpe(**changes) -> dict:
    letters = [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]
    model = {"type": "BPE", "vocab": {chr(letter): i for i, letter in enumerate(letters)}, "merges": []}
    parts = {"added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "ByteLevel"}, "model": model}
    return parts | changes


def bound(tokenizer: dict) -> TokenBound | None:
    return token_bound(json.dumps(tokenizer).encode())


@every_family
@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=8), times=st.integers(1, 50))
def test_generated_texts_have_no_fewer_tokens(family, parts, times):
    _, fast = backends(family)
    text = "".join(parts) * times
    assert fast.least_tokens(text) <= len(fast.encode(text, False)) // 4


@every_family
def test_the_densest_texts_have_no_fewer_tokens(family):
    _, fast = backends(family)
    tokenizer = load_tokenizer(FAMILIES[family]())
    tokens = sorted((tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())), key=len)[-300:]
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    for text in [*(token * 40 for token in tokens), *probe_texts(added)]:
        assert fast.least_tokens(text) <= len(fast.encode(text, False)) // 4


@every_family
@pytest.mark.parametrize("char", ["a", " ", "x ", "中", "="])
def test_a_text_far_beyond_any_context_is_known_to_be_so(family, char):
    _, fast = backends(family)
    assert fast.least_tokens(char * 10_000_000) > 15_000


def test_unknown_characters_may_leave_no_token():
    _, fast = backends("smollm2")
    assert fast.encode("\x04" * 1000, False) == b""
    assert fast.least_tokens("\x04" * 1000) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "WordPiece", "vocab": {"a": 0}}},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
        {"model": byte_bpe()["model"] | {"end_of_word_suffix": "</w>"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"}, {"type": "ByteLevel"}]}},
        {"normalizer": {"type": "Strip"}},
        {"normalizer": {"type": "StripAccents"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": ""}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}},
        {"added_tokens": [{"content": "<x>", "lstrip": True, "rstrip": False}]},
    ],
)  # fmt: skip
def test_where_a_token_can_hold_anything_there_is_no_bound(changes):
    assert bound(byte_bpe()) is not None
    assert bound(byte_bpe(**changes)) is None


def test_word_piece_has_no_bound():
    assert token_bound(Path(minilm().tokenizer_file).read_bytes()) is None


def test_an_added_token_can_be_the_longest():
    added = [{"content": "<" + "a" * 300 + ">", "lstrip": False, "rstrip": False}]
    assert bound(byte_bpe(added_tokens=added)) == TokenBound(302, 300, 1, False, b"")


def test_a_text_beyond_the_context_is_refused_without_tokenizing_it():
    class NeverEncodes:
        least_tokens = backends("smollm2")[1].least_tokens

    check_texts(["a" * 8192 * 4, b"\0" * 100], 8192, NeverEncodes())
    with pytest.raises(RequestError, match="the prompt of 1000000 characters has more tokens than the limit of 8192"):
        check_texts(["ok", "ab " * 333_333 + "a"], 8192, NeverEncodes())
