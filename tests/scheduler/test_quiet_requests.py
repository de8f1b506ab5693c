"""What nobody reads before its end is sent on many ids at a time."""

from __future__ import annotations

import pytest
from rank_under_test import LONG, Rank, generate

from multitok.messages.base import FinishReason
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_scheduler import DecodeParams

QUIET = DecodeParams(stream=False)


@pytest.fixture
def rank(make_site):
    return Rank(make_site(engine_arg=["step_ms=2"]))


@pytest.mark.parametrize(("tokens", "rows"), [(1, [1]), (20, [20]), (64, [64]), (65, [64, 1]), (90, [64, 26])])
def test_a_quiet_request_is_sent_on_in_few_rows(rank, tokens, rows):
    rank.send(generate(1, "abcd", tokens=tokens, decode_params=QUIET))
    assert rank.wait_for_end(1) == FinishReason("length")
    assert [len(row.ids) for row in rank.rows[1]] == rows
    assert rank.ids(1) == (list(b"abcd") * 40)[:tokens]
    assert [row.params is not None for row in rank.rows[1]] == [True] + [False] * (len(rows) - 1)
    last = rank.rows[1][-1].batch
    assert last.completion_tokens == [tokens]
    assert last.extras is not None
    assert last.extras.time_stats is not None
    (times,) = last.extras.time_stats
    assert times is not None
    assert times.received <= times.admitted < times.first_token <= times.finished


def test_one_that_is_streamed_or_has_stop_strings_is_sent_on_at_each_step(rank):
    rank.send(
        generate(1, "abcd", tokens=5),
        generate(2, "abcd", tokens=5, decode_params=DecodeParams(stream=False, stop=["x"])),
    )
    for number in (1, 2):
        rank.wait_for_end(number)
        assert [len(row.ids) for row in rank.rows[number]] == [1] * 5


def test_log_probabilities_are_gathered_too(rank):
    params = SamplingParams(max_new_tokens=10, logprobs=2)
    rank.send(generate(1, sampling_params=params), generate(2, sampling_params=params, decode_params=QUIET))
    rank.wait_for_end(1)
    rank.wait_for_end(2)
    (quiet,) = rank.rows[2]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        told = [entry for row in rank.rows[1] for entry in column(row, name)]
        assert column(quiet, name) == told
        assert len(told) == 10


def column(row, name):
    """What a row's batch says of it."""
    return getattr(row.batch.extras, name)[row.batch.numbers.index(row.number)]


def test_what_was_gathered_goes_out_with_an_abort(rank):
    rank.send(generate(1, "abcd", tokens=LONG), generate(2, "abcd", tokens=LONG, decode_params=QUIET))
    rank.wait_for_first(1)
    rank.abort(2)
    assert rank.wait_for_end(2) == FinishReason("abort")
    ids = rank.ids(2)
    assert ids
    assert ids == (list(b"abcd") * LONG)[: len(ids)]
    rank.abort(1)
