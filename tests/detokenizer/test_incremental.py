"""Promise 1: whatever the tokenizer, the ids and the split, the pieces together are what `tokenizers` decodes."""

from __future__ import annotations

import codecs
import logging
import time
from array import array
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers_under_test import NAMES, REAL, STRATEGIES, STRIPPING, odd, tokenizer_named

from examples import examples
from multitok.detokenizer import incremental, table_states
from multitok.detokenizer.incremental import TextDecoder
from multitok.detokenizer.verify import PROBES

every_tokenizer = pytest.mark.parametrize("name", NAMES)
real_tokenizer = pytest.mark.parametrize("name", list(REAL))
relaxed = settings(deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow])


@cache
def decoder_named(name: str) -> TextDecoder:
    return TextDecoder.from_tokenizer(tokenizer_named(name))


@cache
def encoded_probes(name: str) -> tuple[tuple[int, ...], ...]:
    encoded = (tokenizer_named(name).encode(text, add_special_tokens=False).ids for text in PROBES)
    return tuple(tuple(ids) for ids in encoded if ids)


def id_lists(name: str, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    """Random ids, single bytes, special tokens and runs of real text, in any order."""
    size = decoder_named(name).size
    tokenizer = tokenizer_named(name)
    added = sorted(tokenizer.get_added_tokens_decoder()) or [0]
    single = st.one_of(st.integers(0, size - 1), st.integers(0, min(size, 300) - 1), st.sampled_from(added))
    runs = st.sampled_from(encoded_probes(name)).flatmap(
        lambda ids: st.tuples(st.integers(0, len(ids)), st.integers(1, 6)).map(lambda at: ids[at[0] : at[0] + at[1]])
    )
    pieces = st.lists(st.one_of(single.map(lambda i: (i,)), runs), max_size=max_size)
    return pieces.map(lambda lists: [i for ids in lists for i in ids])


def decode_in_pieces(state, ids: list[int], cuts: list[int]) -> str:
    """Push ids one by one and, up to each cut, several at once in turn."""
    out = []
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for number, (start, end) in enumerate(pairwise(bounds)):
        if number % 2:
            out.append(state.push_many(ids[start:end]))
        else:
            out += [state.push(i) for i in ids[start:end]]
    return "".join(out) + state.flush()


def common_length(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


cut_lists = st.lists(st.integers(0, 60), max_size=6)


@every_tokenizer
def test_the_best_strategy_is_taken_and_agrees_with_the_reference(name):
    assert decoder_named(name).strategy == STRATEGIES[name]


@every_tokenizer
@given(data=st.data(), cuts=cut_lists, skip=st.booleans())
@relaxed
def test_pieces_of_any_ids_are_the_reference(name, data, cuts, skip):
    ids = data.draw(id_lists(name))
    reference = tokenizer_named(name).decode(ids, skip_special_tokens=skip)
    assert decode_in_pieces(decoder_named(name).start([], skip), ids, cuts) == reference


texts = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(PROBES), max_size=3).map("".join),
    st.text(alphabet=st.characters(min_codepoint=0x0E00, max_codepoint=0x0E7F), max_size=20),
    st.text(alphabet="👩\u200d👨👧❤\ufe0f🏽🇰🇷e\u0301\u0300 ", max_size=20),
    st.text(alphabet="가힣한글漢字かな ,\n\t", max_size=30),
)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("odd-")])
@given(text=texts, cuts=cut_lists, skip=st.booleans())
@relaxed
def test_pieces_of_encoded_text_are_the_reference(name, text, cuts, skip):
    ids = tokenizer_named(name).encode(text).ids
    reference = tokenizer_named(name).decode(ids, skip_special_tokens=skip)
    assert decode_in_pieces(decoder_named(name).start([], skip), ids, cuts) == reference


@every_tokenizer
@given(data=st.data(), cuts=cut_lists, skip=st.booleans())
@relaxed
def test_after_a_prompt_tail_the_pieces_are_what_the_whole_has_beyond_the_tail(name, data, cuts, skip):
    tail, ids = data.draw(id_lists(name, 12)), data.draw(id_lists(name, 20))
    tokenizer = tokenizer_named(name)
    prompt = tokenizer.decode(tail, skip_special_tokens=skip)
    full = tokenizer.decode(tail + ids, skip_special_tokens=skip)
    text = decode_in_pieces(decoder_named(name).start(tail, skip), ids, cuts)
    assert text == full[common_length(prompt, full) :]
    if full.startswith(prompt):
        assert prompt + text == full


@every_tokenizer
@given(data=st.data(), skip=st.booleans())
@relaxed
def test_what_is_held_is_always_the_rest_of_the_reference(name, data, skip):
    ids = data.draw(id_lists(name, 12))
    state = decoder_named(name).start([], skip)
    text = ""
    for i, token_id in enumerate(ids):
        text += state.push(token_id)
        assert text + state.peek() == tokenizer_named(name).decode(ids[: i + 1], skip_special_tokens=skip)
    assert state.peek() == state.flush()


@cache
def stripping(name: str) -> tuple[Tokenizer, TextDecoder]:
    tokenizer = odd(STRIPPING[name][0])
    return tokenizer, TextDecoder.from_tokenizer(tokenizer)


@pytest.mark.parametrize("name", list(STRIPPING))
@given(data=st.data(), cuts=cut_lists, skip=st.booleans())
@settings(relaxed, suppress_health_check=[HealthCheck.filter_too_much])
def test_characters_stripped_from_the_end_are_held_until_then(name, data, cuts, skip):
    tokenizer, decoder = stripping(name)
    assert decoder.strategy == STRIPPING[name][1]
    ids = data.draw(id_lists("odd-fuse", 12))
    # Text with another letter in it: the library crashes on one that is stripped to nothing.
    ids += [tokenizer.token_to_id("ba")] * data.draw(st.integers(1, 3))
    try:
        reference = tokenizer.decode(ids, skip_special_tokens=skip)
    except BaseException as error:
        assert type(error).__name__ == "PanicException"
        return
    assert decode_in_pieces(decoder.start([], skip), ids, cuts) == reference


@pytest.mark.parametrize("name", [name for name in NAMES if STRATEGIES[name].endswith("-table")])
@given(data=st.data(), skip=st.booleans())
@relaxed
def test_a_table_holds_nothing_but_a_character_that_is_open(name, data, skip):
    ids = data.draw(id_lists(name, 12))
    state = decoder_named(name).start([], skip)
    text = "".join([state.push(i) for i in ids])
    held = state.peek()
    assert held in ("", "\ufffd")
    assert text + held == tokenizer_named(name).decode(ids, skip_special_tokens=skip)
    if STRATEGIES[name] != "byte-level-table":
        assert held == ""


@pytest.mark.parametrize("name", [name for name in NAMES if STRATEGIES[name] == "byte-fallback"])
@given(data=st.data())
@relaxed
def test_byte_fallback_holds_only_an_open_run(name, data):
    ids = data.draw(id_lists(name, 12))
    decoder = decoder_named(name)
    state = decoder.start([], False)
    plain = next(i for i in encoded_probes(name)[0] if not tokenizer_named(name).id_to_token(i).startswith("<0x"))
    for i in ids:
        state.push(i)
    state.push(plain)
    assert state.peek() == ""


@given(data=st.binary(max_size=40), cuts=cut_lists)
@settings(deadline=None, max_examples=examples(500))
def test_any_bytes_are_what_a_lossy_decoding_of_all_of_them_gives(data, cuts):
    tokenizer = tokenizer_named("trained-byte-level")
    letters = {byte: letter for letter, byte in table_states.BYTE_ALPHABET.items()}
    ids = [tokenizer.token_to_id(letters[byte]) for byte in data]
    state = decoder_named("trained-byte-level").start([], True)
    # Python's incremental decoder says, independently, what is certain so far.
    codec = codecs.getincrementaldecoder("utf-8")("replace")
    for token_id, byte in zip(ids, data, strict=True):
        assert state.push(token_id) == codec.decode(bytes((byte,)))
    text = decode_in_pieces(decoder_named("trained-byte-level").start([], True), ids, cuts)
    assert text == tokenizer.decode(ids) == data.decode(errors="replace")


class TestTailThatEndsInsideACharacter:
    """E2 82 AC is the euro sign, EF BF BD is U+FFFD itself."""

    def byte_level(self, *data: int) -> list[int]:
        letters = {byte: letter for letter, byte in table_states.BYTE_ALPHABET.items()}
        return [tokenizer_named("trained-byte-level").token_to_id(letters[byte]) for byte in data]

    def output(self, tail: list[int], ids: list[int], name: str = "trained-byte-level") -> str:
        state = decoder_named(name).start(tail, True)
        return "".join([state.push(i) for i in ids]) + state.flush()

    def test_a_character_that_the_output_completes_is_the_outputs(self):
        assert self.output(self.byte_level(0x61, 0xE2, 0x82), self.byte_level(0xAC, 0x62)) == "€b"

    def test_a_replacement_that_the_prompt_shows_already_is_not_repeated(self):
        assert self.output(self.byte_level(0x61, 0xE2, 0x82), self.byte_level(0x62)) == "b"
        assert self.output(self.byte_level(0x61, 0xE2), self.byte_level(0x82, 0x62)) == "b"

    def test_without_output_there_is_no_text(self):
        assert self.output(self.byte_level(0x61, 0xE2, 0x82), []) == ""

    def test_an_output_that_only_begins_a_character_shows_its_own_replacement(self):
        assert self.output(self.byte_level(0x61), self.byte_level(0xE2)) == "\ufffd"
        assert self.output(self.byte_level(0xE2), self.byte_level(0xE2)) == "\ufffd"

    def test_a_completed_character_that_looks_like_the_replacement_is_the_prompts(self):
        assert self.output(self.byte_level(0xEF, 0xBF), self.byte_level(0xBD, 0x62)) == "b"

    def fallback(self, *tokens: str) -> list[int]:
        return [tokenizer_named("odd-llama").token_to_id(token) for token in tokens]

    def test_a_byte_run_that_the_output_completes_is_the_outputs(self):
        tail, ids = self.fallback("b", "<0xE2>", "<0x80>"), self.fallback("<0x8D>", "b")
        assert self.output(tail, ids, "odd-llama") == "\u200db"

    def test_a_whole_byte_run_of_the_prompt_is_not_repeated(self):
        tail, ids = self.fallback("b", "<0x41>"), self.fallback("<0x2E>", "b")
        assert self.output(tail, ids, "odd-llama") == ".b"

    def test_a_byte_run_that_the_output_breaks_shows_one_replacement_per_byte_beyond_the_prompts(self):
        tail, ids = self.fallback("b", "<0xE2>"), self.fallback("<0x80>", "b")
        assert self.output(tail, ids, "odd-llama") == "\ufffdb"

    def test_a_whole_byte_run_that_the_output_breaks_is_shown_as_the_reference_then_has_it(self):
        tail, ids = self.fallback("b", "<0x41>"), self.fallback("<0xFF>", "b")
        assert self.output(tail, ids, "odd-llama") == "\ufffd\ufffdb"

    def test_the_space_between_prompt_and_output_is_kept(self):
        tokenizer = tokenizer_named("mistral-v1")
        tail, ids = tokenizer.encode("Hello").ids, tokenizer.encode("world").ids
        assert self.output([], ids, "mistral-v1") == "world"
        assert self.output(tail, ids, "mistral-v1") == " world"


@every_tokenizer
@pytest.mark.parametrize("beyond", [-1, -(2**31), 0, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_refused_by_name_and_changes_nothing(name, beyond):
    decoder = decoder_named(name)
    bad = decoder.size + beyond if beyond >= 0 else beyond
    ids = list(encoded_probes(name)[0])
    state = decoder.start(ids[:1], True)
    text = ""
    for i in ids[1:]:
        with pytest.raises(ValueError, match=f"token id {bad} is outside"):
            state.push(bad)
        with pytest.raises(ValueError, match=f"token id {bad} is outside"):
            state.push_many([i, bad])
        text += state.push(i)
    with pytest.raises(ValueError, match=f"token id {bad} is outside"):
        decoder.start([bad], True)
    with pytest.raises(ValueError, match=f"token id {bad} is outside"):
        decoder.token_text(bad)
    clean = decoder.start(ids[:1], True)
    assert text + state.flush() == clean.push_many(ids[1:]) + clean.flush()


@every_tokenizer
def test_packed_ids_are_taken_as_they_come(name):
    ids = array("i", encoded_probes(name)[0])
    state = decoder_named(name).start(array("i"), False)
    text = state.push_many(memoryview(ids)[:3]) + state.push_many(ids[3:]) + state.push_many(array("i"))
    assert text + state.flush() == tokenizer_named(name).decode(list(ids), skip_special_tokens=False)


def test_ids_of_a_padded_embedding_show_nothing_as_in_the_reference():
    tokenizer = tokenizer_named("trained-byte-level")
    size = decoder_named("trained-byte-level").size
    padded = TextDecoder.from_tokenizer(tokenizer, vocab_size=size + 10)
    ids = tokenizer.encode("안").ids
    state = padded.start([], True)
    with_padding = [i for token_id in ids for i in (token_id, size + 9)]
    assert "".join([state.push(i) for i in with_padding]) + state.flush() == "안" == tokenizer.decode(with_padding)
    assert padded.token_text(size) == ("", b"")


@real_tokenizer
def test_bytes_of_single_tokens_together_are_the_text(name):
    decoder = decoder_named(name)
    for ids in encoded_probes(name):
        state = decoder.start([ids[0]], False)
        text = state.push_many(ids[1:]) + state.flush()
        alone = [decoder.token_text(i) for i in ids]
        assert all(piece == data.decode(errors="replace") for piece, data in alone)
        if not text.startswith("\ufffd") and decoder.token_text(ids[0])[0].find("\ufffd") < 0:
            assert b"".join(data for _, data in alone[1:]).decode() == text


def test_a_single_token_is_shown_as_in_the_middle_of_a_text():
    tokenizer, decoder = tokenizer_named("mistral-v1"), decoder_named("mistral-v1")
    assert decoder.token_text(tokenizer.token_to_id("▁Hello")) == (" Hello", b" Hello")
    assert decoder.token_text(tokenizer.token_to_id("<0xE2>")) == ("\ufffd", b"\xe2")
    assert decoder.token_text(tokenizer.token_to_id("</s>")) == ("</s>", b"</s>")
    tokenizer, decoder = tokenizer_named("deepseek"), decoder_named("deepseek")
    assert decoder.token_text(tokenizer.token_to_id("ĠHello")) == (" Hello", b" Hello")
    tokenizer, decoder = tokenizer_named("minilm"), decoder_named("minilm")
    assert decoder.token_text(tokenizer.token_to_id("hello")) == (" hello", b" hello")
    assert decoder.token_text(tokenizer.token_to_id("##ing")) == ("ing", b"ing")


def test_a_table_that_differs_from_the_reference_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(table_states, "byte_level_bytes", lambda token: token.encode())
    tokenizer = tokenizer_named("trained-byte-level")
    with caplog.at_level(logging.WARNING):
        decoder = TextDecoder.from_tokenizer(tokenizer)
    assert decoder.strategy == "stages"
    assert "byte-level-table differs from tokenizers" in caplog.text
    ids = tokenizer.encode("안녕 👩‍👩‍👧‍👦").ids
    assert decode_in_pieces(decoder.start([], True), ids, [3, 5]) == tokenizer.decode(ids)


def test_where_nothing_agrees_the_reference_itself_decodes_at_the_end(monkeypatch, caplog):
    monkeypatch.setattr(incremental, "first_difference", lambda *args: "everything")
    tokenizer = tokenizer_named("trained-byte-level")
    with caplog.at_level(logging.WARNING):
        decoder = TextDecoder.from_tokenizer(tokenizer)
    assert decoder.strategy == "held"
    assert "text comes when a request ends" in caplog.text
    ids = tokenizer.encode("안녕 👩‍👩‍👧‍👦").ids
    state = decoder.start([], True)
    assert state.push_many(ids) == ""
    assert state.flush() == tokenizer.decode(ids)


def test_a_decoder_without_a_description_is_held():
    class Shouting:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            return [token.upper() for token in tokens]

    tokenizer = odd(None)
    tokenizer.decoder = decoders.Decoder.custom(Shouting())
    decoder = TextDecoder.from_tokenizer(tokenizer)
    ids = [0, 50, 52]
    assert decoder.strategy == "held"
    assert decode_in_pieces(decoder.start([], True), ids, []) == tokenizer.decode(ids)


def test_a_vocabulary_with_one_far_away_id_is_refused_and_no_table_is_built():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 2**31}, unk_token="a"))
    with pytest.raises(ValueError, match="2 tokens, but ids up to 2147483648"):
        TextDecoder.from_tokenizer(tokenizer)


def test_an_empty_vocabulary_decodes_nothing():
    decoder = TextDecoder.from_tokenizer(Tokenizer(models.BPE()))
    assert decoder.start([], True).flush() == ""


@pytest.mark.parametrize("name", ["trained-byte-level", "odd-llama", "odd-wordpiece", "odd-bpe", "odd-ctc"])
def test_cost_per_token_does_not_grow_with_the_text(name):
    """Also while a byte run stays open, the worst case that a model can be made to produce."""
    byte = tokenizer_named(name).token_to_id("<0x41>")
    ids = [byte] * 20_000 if byte is not None else list(encoded_probes(name)[0]) * 1_000

    def seconds(state) -> float:
        start = time.perf_counter()
        for i in ids:
            state.push(i)
        return time.perf_counter() - start

    ratios = []
    for _ in range(5):
        state = decoder_named(name).start([], True)
        early = seconds(state)
        for _ in range(8):
            state.push_many(ids)
        ratios.append(seconds(state) / early)
    assert min(ratios) < 3
