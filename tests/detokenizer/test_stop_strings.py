"""A stop string cuts the text at one place, however the text is split, and holds back no more than it must."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from multitok.detokenizer.stop_strings import StopMatcher


def specified(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, said naively: read on until some stop string ends here; take the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held_back(text: str, stops: list[str]) -> int:
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
        default=0,
    )


# Few letters, so that stop strings overlap each other and themselves.
letters = st.sampled_from("ab한")
pieces = st.lists(st.text(alphabet=letters, max_size=6), max_size=12)
stop_lists = st.lists(st.text(alphabet=letters, min_size=1, max_size=5), max_size=4)


@given(pieces=pieces, stops=stop_lists)
@settings(deadline=None, max_examples=examples(1000))
def test_any_split_gives_what_the_rule_says_and_holds_no_more_than_it_must(pieces, stops):
    text = "".join(pieces)
    cut, stop = specified(text, stops)
    matcher = StopMatcher(stops)
    delivered, seen, found = "", "", None
    for piece in pieces:
        seen += piece
        now, found = matcher.push(piece)
        delivered += now
        if specified(seen, stops)[1] is None:
            assert found is None
            assert len(delivered) == len(seen) - held_back(seen, stops)
        else:
            assert (delivered, found) == (cut, stop)
    delivered += matcher.flush()
    assert (delivered, found) == (cut, stop)


@given(text=st.text(alphabet=letters, max_size=30), stops=stop_lists)
@settings(deadline=None, max_examples=examples(300))
def test_one_piece_and_single_characters_agree(text, stops):
    whole, single = StopMatcher(stops), StopMatcher(stops)
    at_once, found = whole.push(text)
    pushed = [single.push(character) for character in text]
    assert "".join(now for now, _ in pushed) + single.flush() == at_once + whole.flush()
    assert (pushed[-1][1] if pushed else None) == found


def test_the_stop_that_ends_first_wins():
    assert StopMatcher(["abcd", "bc"]).push("abcd") == ("a", "bc")
    assert StopMatcher(["bcde", "ab"]).push("xabcde") == ("x", "ab")


def test_of_those_that_end_together_the_longest_wins():
    assert StopMatcher(["b", "ab", "cab"]).push("xcab") == ("x", "cab")


def test_nothing_follows_a_stop():
    matcher = StopMatcher(["END"])
    assert matcher.push("one E") == ("one ", None)
    assert matcher.push("ND two") == ("", "END")
    assert matcher.push(" three END") == ("", "END")
    assert matcher.flush() == ""


def test_what_was_held_comes_when_it_turns_out_to_be_no_stop():
    matcher = StopMatcher(["\n\nHuman:"])
    assert matcher.push("Hi.\n") == ("Hi.", None)
    assert matcher.push("\nHum") == ("", None)
    assert matcher.push("ble") == ("\n\nHumble", None)
    assert matcher.push(" \n") == (" ", None)
    assert matcher.flush() == "\n"
    assert matcher.flush() == ""


def test_without_stops_everything_passes():
    matcher = StopMatcher([])
    assert matcher.push("text") == ("text", None)
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_an_empty_stop_is_refused(stops):
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(stops)


def test_a_stop_may_span_any_number_of_pieces():
    matcher = StopMatcher(["ab" * 50])
    assert [matcher.push(letter) for letter in "ab" * 49 + "a"] == [("", None)] * 99
    assert matcher.push("b") == ("", "ab" * 50)


def test_cost_does_not_grow_with_the_text():
    stops = ["\n\n\n\n", "</answer>", "aaaaaaab"]

    def seconds(matcher: StopMatcher) -> float:
        start = time.perf_counter()
        for _ in range(5_000):
            matcher.push("aa")
        return time.perf_counter() - start

    ratios = []
    for _ in range(5):
        matcher = StopMatcher(stops)
        early = seconds(matcher)
        matcher.push("x" * 2_000_000)
        ratios.append(seconds(matcher) / early)
    assert min(ratios) < 3
