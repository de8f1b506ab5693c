"""What a rank does when another part has begun a new life, and what a new life of a rank does."""

from __future__ import annotations

import msgspec
import pytest
from rank_under_test import LONG, OWNER, Rank, embed, generate

from multitok.engines.simulated import simulated_logprob
from multitok.messages.base import FinishReason
from multitok.messages.control import AbortMatching
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_child import PartDied, PartStarted
from multitok.messages.to_detokenizer import BatchEmbeddingOutput
from multitok.messages.to_scheduler import DecodeParams, LiveReq
from parts import VOCAB_SIZE, pack

ABORTED = FinishReason("abort")
LENGTH = FinishReason("length")
PARAMS = DecodeParams(stop=["x"])


@pytest.fixture
def start(make_site):
    def start(engine: dict[str, object] | None = None, **options) -> Rank:
        arguments = [f"{key}={value}" for key, value in (engine or {}).items()]
        return Rank(make_site(engine_arg=arguments, **options))

    return start


@pytest.fixture
def slow(start):
    """One request runs at a time, one id per 10 ms."""
    return start(engine={"step_ms": 10}, max_running_requests=1)


# A detokenizer that has begun a new life


def test_a_running_request_is_rebuilt_and_goes_on_after_it(slow):
    slow.send(generate(1, "abc", tokens=LONG, decode_params=PARAMS))
    while len(slow.rows.get(1, ())) < 5:
        slow.hear()
    assert slow.compare({1: 3}, resend=[1], texts={1: 2}) == [1]
    rebuilt = slow.hear_rebuilt(1)
    assert (rebuilt.before, rebuilt.read_offset) == (list(b"abc"), 2)
    assert (rebuilt.row.params, rebuilt.row.first_index, rebuilt.row.owner) == (PARAMS, 3, OWNER)
    assert len(rebuilt.row.ids) >= 2
    assert (rebuilt.row.batch.rank, rebuilt.row.batch.life) == (0, 1)
    assert {row.batch.life for row in slow.rows[1]} == {1}
    assert slow.wait_for_end(1) == LENGTH
    ids = rebuilt.before + [token for row in slow.rows[1] for token in row.ids]
    assert ids == list((b"abc" * LONG)[:LONG])
    assert [row.first_index for row in slow.rows[1][1:]] == list(range(3 + len(rebuilt.row.ids), LONG))
    assert all(row.params is None for row in slow.rows[1][1:])


def test_an_owner_that_has_nothing_of_a_request_gets_all_of_it(slow):
    slow.send(generate(1, "abc", tokens=LONG))
    slow.wait_for_first(1)
    slow.compare({1: 0}, resend=[1])
    rebuilt = slow.hear_rebuilt(1)
    assert (rebuilt.before, rebuilt.row.first_index) == ([], 0)
    assert rebuilt.row.ids[:1] == list(b"a")


def test_the_end_of_a_request_is_told_again_until_it_is_acknowledged(start):
    rank = start()
    sampling = SamplingParams(max_new_tokens=5, logprobs=2)
    rank.send(generate(1, "abc", sampling_params=sampling), generate(2, tokens=5))
    assert rank.wait_for_end(2) == LENGTH
    for has in (2, 5):
        assert rank.compare({1: has, 2: 5}, resend=[1, 2]) == [1, 2]
        row = rank.hear_rebuilt(1).row
        assert (row.ids, row.finish) == (list(b"abcab")[has:], LENGTH)
        batch = row.batch
        assert batch.numbers == [1, 2]
        assert (batch.prompt_tokens, batch.completion_tokens, batch.cached_tokens) == ([3, 3], [5, 5], [0, 0])
        logprobs, nothing = batch.extras.output_token_logprobs
        assert logprobs == [simulated_logprob(token, has + i) for i, token in enumerate(row.ids)]
        assert nothing is None
        assert [len(top) for top in batch.extras.output_top_logprobs[0]] == [2] * len(row.ids)
        times = batch.extras.time_stats[0]
        assert 0 < times.received <= times.admitted <= times.first_token <= times.finished
    rank.ack(1)
    assert rank.compare({1: 5, 2: 5}, resend=[1]) == [2]
    assert rank.inbox.is_empty()


def test_an_abort_that_its_owner_did_not_ask_for_is_told_again(slow):
    slow.send(generate(1, tokens=LONG, rid="mine"), generate(2, tokens=LONG, rid="queued"))
    slow.wait_for_first(1)
    assert slow.operate(AbortMatching()).count == 2
    assert slow.wait_for_end(2) == ABORTED
    assert slow.compare({1: 1, 2: 0}, resend=[1, 2]) == [1, 2]
    rebuilt = slow.hear_rebuilt(1)
    assert rebuilt.row.batch.finished_reasons == [ABORTED, ABORTED]
    assert rebuilt.before == list(b"a")
    slow.ack(1, 2)
    assert slow.counts() == (0, 0, 0)


def test_an_embedding_is_kept_until_it_is_acknowledged(start):
    rank = start(task="embed", engine={"embedding_size": 8})
    rank.send(embed(1, "ab"))
    first = rank.hear()
    assert rank.compare({1: 0}, resend=[1]) == [1]
    again = rank.hear()
    assert isinstance(again, BatchEmbeddingOutput)
    assert again == first
    rank.ack(1)
    assert rank.compare({1: 0}, resend=[1]) == []


def test_what_has_no_output_yet_is_known_and_not_sent(slow):
    slow.send(generate(1, tokens=LONG), generate(2, tokens=2))
    slow.wait_for_first(1)
    assert slow.compare({1: 1, 2: 0, 3: 0}, resend=[2, 3, 4]) == [1, 2]
    slow.abort(1)
    assert slow.wait_for_end(2) == LENGTH
    assert all(row.batch.extras.decode_ids is None for row in slow.rows[2] if row.batch.extras)


def test_each_detokenizer_gets_its_own(start):
    rank = start(detokenizers=2)
    rank.send(generate(1, "ab"), generate(2, "cd", detokenizer=1))
    for name in ("d0", "d1"):
        while rank.inboxes[name].next().finished_reasons is None:
            pass
    rank.compare({1: 0, 2: 0}, resend=[1, 2])
    for name, number in (("d0", 1), ("d1", 2)):
        batch = rank.inboxes[name].next()
        assert (batch.numbers, batch.extras.decode_ids) == ([number], [b""])


# Live lists


def test_what_is_on_no_list_is_ended_and_forgotten_and_other_owners_keep_theirs(start):
    rank = start(engine={"step_ms": 10}, max_running_requests=3)
    rank.send(generate(1, tokens=1), generate(2, tokens=1), generate(3, tokens=1, owner="w2.1"))
    rank.wait_for_end(3)
    rank.send(*(generate(number, tokens=LONG) for number in (4, 5)), generate(6, tokens=LONG, owner="w2.1"))
    rank.send(generate(7, tokens=LONG), generate(8, tokens=LONG, owner="w2.1"))
    rank.wait_for_first(6)
    assert rank.counts() == (3, 2, 3)
    assert rank.compare({2: 1, 5: 0}) == [2, 5]
    assert rank.wait_for_end(4) == rank.wait_for_end(7) == ABORTED
    assert rank.counts() == (3, 0, 2)
    assert rank.compare({3: 1, 6: 0, 8: 0}, owner="w2.1") == [3, 6, 8]


def test_a_list_that_makes_no_sense_is_dropped(slow):
    slow.send(generate(1, tokens=LONG))
    slow.wait_for_first(1)
    slow.send(
        LiveReq(number=3, http_worker_ipc=OWNER, upto=9, numbers=[1], token_counts=[], text_lengths=[1], resend=[1])
    )
    slow.send(LiveReq(number=3, http_worker_ipc=None, upto=9, numbers=[], token_counts=[], text_lengths=[]))
    assert slow.counts() == (1, 0, 0)
    # An owner has no more than there is.
    assert slow.compare({1: 10**9}, resend=[1, 1]) == [1]
    assert slow.hear_rebuilt(1).row.ids == []
    assert slow.compare({1: -5}, resend=[1]) == [1]
    assert slow.hear_rebuilt(1).before == []


def test_deaths_and_new_lives_of_other_parts_do_not_disturb_it(slow):
    slow.send(generate(1, tokens=5))
    for message in (PartDied("detokenizer", 0, 1), PartStarted("detokenizer", 0, 2), PartDied("router", 0, 1)):
        slow.child.send(message)
    assert slow.wait_for_end(1) == LENGTH


# A new life of a rank


@pytest.mark.parametrize("made", [1, 4, 6])
def test_a_resumed_request_goes_on_after_its_ids_as_if_nothing_had_been(start, made):
    whole = list((b"abc" * 7)[:7])
    rank = start(engine={"tokens_per_step": 2})
    sampling = SamplingParams(max_new_tokens=7, min_new_tokens=5, logprobs=0)
    rank.send(
        generate(
            1,
            "abc",
            sampling_params=sampling,
            decode_params=PARAMS,
            resumed_ids=pack(whole[:made]),
            text_length=made - 1,
        ),
        generate(2, "de", tokens=7),
    )
    rebuilt = rank.hear_rebuilt(1)
    assert (rebuilt.before, rebuilt.read_offset) == (whole[:made], made - 1)
    assert (rebuilt.row.params, rebuilt.row.first_index) == (PARAMS, made)
    assert rebuilt.row.batch.extras.decode_ids[1] is None
    assert rank.wait_for_end(1) == LENGTH
    assert rebuilt.before + [token for row in rank.rows[1] for token in row.ids] == whole
    last = rank.rows[1][-1].batch
    i = last.numbers.index(1)
    assert (last.prompt_tokens[i], last.completion_tokens[i]) == (3, 7)
    logprobs = [row.batch.extras.output_token_logprobs[row.batch.numbers.index(1)] for row in rank.rows[1]]
    assert [value for row in logprobs for value in row] == [
        simulated_logprob(token, i) for i, token in enumerate(whole)
    ][made:]
    # And again: of what this life made, and of what an earlier one did.
    rank.compare({1: made, 2: 7}, resend=[1])
    again = rank.hear_rebuilt(1)
    assert (again.before, again.row.ids, again.row.finish) == (whole[:made], whole[made:], LENGTH)
    assert again.row.batch.extras.output_token_logprobs == [[value for row in logprobs for value in row]]


def test_a_resumed_request_that_lacks_only_its_end_gets_it(start):
    rank = start()
    rank.send(generate(1, "abc", tokens=4, resumed_ids=pack(list(b"abca")), text_length=4))
    rebuilt = rank.hear_rebuilt(1)
    assert (rebuilt.before, rebuilt.row.ids, rebuilt.row.finish) == (list(b"abca"), [], LENGTH)
    assert rank.counts() == (0, 0, 1)


def test_a_resumed_request_that_is_ended_before_its_first_id_leaves_nothing(slow):
    slow.send(generate(1, tokens=LONG))
    slow.wait_for_first(1)
    slow.send(generate(2, tokens=9, resumed_ids=pack(list(b"ab")), text_length=2))
    assert slow.compare({1: 1, 2: 2}, resend=[2]) == [1, 2]
    slow.abort(2)
    assert slow.wait_for_end(2) == ABORTED
    assert slow.counts() == (1, 0, 0)


@pytest.mark.parametrize(
    ("resumed", "reason"),
    [
        (b"\1\0\0", "the ids of the output so far are cut"),
        (pack([5, VOCAB_SIZE]), "the output so far has ids outside the vocabulary"),
        (pack([5, -1]), "the output so far has ids outside the vocabulary"),
        (pack([5] * 4), "4 tokens, more than the limit of 3"),
    ],
)
def test_bad_resumed_ids_are_refused(start, resumed, reason):
    rank = start()
    rank.send(generate(1, tokens=3, resumed_ids=resumed))
    refusal = rank.wait_for_refusal(1)
    assert (refusal.status, reason in refusal.message) == (400, True)
    rank.send(msgspec.structs.replace(generate(2, tokens=3), resumed_ids=pack([97])))
    assert rank.wait_for_end(2) == LENGTH
