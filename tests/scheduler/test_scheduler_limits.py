"""Limits: how much may wait, for how long, and of whom."""

from __future__ import annotations

from collections import Counter

import pytest
from rank_under_test import LONG, OWNER, Rank, embed, generate

from multitok.messages.base import FinishReason
from multitok.messages.sampling import SamplingParams
from parts import wait_until

LENGTH = FinishReason("length")


@pytest.fixture
def start(make_site):
    def start(engine: dict[str, object] | None = None, **options) -> Rank:
        arguments = [f"{key}={value}" for key, value in (engine or {}).items()]
        return Rank(make_site(engine_arg=arguments, **options))

    return start


def test_one_running_and_one_waiting_of_two_hundred_at_once(start):
    rank = start(engine={"step_ms": 1}, max_running_requests=1, max_queued_requests=1)
    for worker in range(4):
        rank.send(*(generate(worker * 100 + i, tokens=9, owner=f"w{worker + 1}.1") for i in range(1, 51)))
    numbers = [worker * 100 + i for worker in range(4) for i in range(1, 51)]
    answers: Counter[int] = Counter()
    for number in numbers:
        while number not in rank.refusals and not (number in rank.rows and rank.rows[number][-1].finish):
            rank.hear()
        if number in rank.refusals:
            refusal = rank.refusals[number]
            assert refusal.http_worker_ipc == f"w{number // 100 + 1}.1"
            answers[refusal.status] += 1
        else:
            assert rank.ids(number) == list((b"abc" * 3)[:9])
            answers[200] += 1
    assert sum(answers.values()) == answers[200] + answers[503] == 200
    assert answers[200] >= 2
    assert rank.counts()[:2] == (0, 0)


def test_prompt_ids_that_wait_are_limited(start):
    rank = start(engine={"step_ms": 10}, max_running_requests=1, max_queued_tokens=10)
    # The first need not wait, so its ids don't count.
    rank.send(*(generate(number, "a" * length, tokens=80) for number, length in ((1, 20), (2, 6), (3, 5), (4, 4))))
    refusal = rank.wait_for_refusal(3)
    assert (refusal.status, "prompt tokens are waiting" in refusal.message) == (503, True)
    rank.wait_for_first(1)
    assert rank.counts() == (1, 2, 0)
    board = rank.site.board()
    wait_until(lambda: board.figures("scheduler", 0)["waiting"] == 2)
    rank.abort(2)
    rank.send(generate(5, "a" * 6, tokens=1))
    rank.abort(1)
    rank.abort(4)
    assert rank.wait_for_end(5) == LENGTH
    assert set(rank.refusals) == {3}


def test_whoever_has_waited_for_too_long_is_refused(start):
    rank = start(engine={"step_ms": 10}, max_running_requests=1)
    rank.send(
        generate(1, tokens=LONG, queue_timeout=0.1),
        generate(2, tokens=2, queue_timeout=0.2, rid="mine"),
        generate(3, tokens=2, queue_timeout=60.0),
    )
    refusal = rank.wait_for_refusal(2)
    assert (refusal.status, refusal.http_worker_ipc) == (503, OWNER)
    assert "waited for more than 0.2 seconds" in refusal.message
    rank.send(generate(4, tokens=2, rid="mine"))
    # Its time in the queue is up, but it had begun in time.
    assert rank.wait_for_end(1) == LENGTH
    assert rank.wait_for_end(3) == rank.wait_for_end(4) == LENGTH
    assert set(rank.refusals) == {2}


def test_a_request_that_takes_too_long_is_ended_with_an_error_and_frees_its_place(start):
    rank = start(engine={"step_ms": 20}, max_running_requests=1)
    rank.send(
        generate(1, tokens=LONG, timeout=0.3, rid="mine"),
        generate(2, tokens=LONG, timeout=0.3),
        generate(3, tokens=2, timeout=60.0),
    )
    for number in (1, 2):
        finish = rank.wait_for_end(number)
        assert (finish.type, finish.status) == ("error", 504)
        assert finish.message == "the request took longer than its limit of 0.3 seconds"
    assert rank.ids(1)
    assert rank.ids(2) == []
    assert rank.wait_for_end(3) == LENGTH
    rank.send(generate(4, tokens=1, rid="mine"))
    assert rank.wait_for_end(4) == LENGTH
    # The owner acknowledges an error by an abort.
    rank.abort(1)
    rank.abort(2)
    assert rank.counts() == (0, 0, 2)


def test_time_that_a_request_has_spent_elsewhere_counts_and_its_limit_is_the_one_that_was_set(start):
    rank = start(engine={"step_ms": 10}, max_running_requests=1)
    rank.send(
        generate(1, tokens=LONG),
        generate(2, tokens=LONG, timeout=60.0, spent=59.9),
        generate(3, tokens=LONG, queue_timeout=60.0, waited=59.9),
        generate(4, tokens=2, timeout=60.0, spent=1.0, queue_timeout=60.0, waited=1.0),
    )
    refusal = rank.wait_for_refusal(3)
    assert (refusal.status, refusal.message) == (503, "the request waited for more than 60 seconds")
    assert rank.wait_for_end(2) == FinishReason(
        "error", None, 504, "the request took longer than its limit of 60 seconds"
    )
    rank.abort(1)
    assert rank.wait_for_end(4) == LENGTH


def test_an_embedding_that_waits_for_too_long_is_refused(start):
    rank = start(task="embed", engine={"step_ms": 400}, max_running_requests=1)
    rank.send(embed(1), embed(2, queue_timeout=0.05), embed(3, timeout=0.05))
    assert rank.wait_for_refusal(2).status == 503
    while (batch := rank.hear()).numbers != [3]:
        pass
    assert (batch.embeddings, batch.finished_reasons[0].status) == (None, 504)


def test_a_key_has_its_limits_and_others_are_served(start):
    rank = start(engine={"step_ms": 5}, max_running_requests=8, max_requests_per_key=2, max_tokens_per_key=150)
    rank.send(*(generate(number, tokens=40, tenant=7) for number in (1, 2, 3)))
    refusal = rank.wait_for_refusal(3)
    assert (refusal.status, "2 requests in flight" in refusal.message) == (429, True)
    rank.send(generate(4, tokens=90, tenant=8), generate(5, tokens=60, tenant=8), generate(6, tokens=90))
    refusal = rank.wait_for_refusal(5)
    assert (refusal.status, "63 tokens" in refusal.message) == (429, True)
    # However it ends, its share is free.
    rank.abort(1)
    rank.send(generate(7, tokens=1, tenant=7))
    assert rank.wait_for_end(7) == LENGTH
    rank.send(generate(8, tokens=1, tenant=7))
    assert rank.wait_for_end(8) == rank.wait_for_end(6) == LENGTH
    assert set(rank.refusals) == {3, 5}


def test_a_flood_of_messages_does_not_keep_the_engine_from_its_steps(start):
    """Ten thousand requests come in one message: ids of the first go on coming between the refusals of the others."""
    rank = start(max_running_requests=1, max_queued_requests=0)
    rank.send(*(generate(number, "ab" * 20, tokens=9) for number in range(1, 10_001)))
    assert rank.wait_for_end(1) == LENGTH
    assert 2 in rank.refusals
    assert 10_000 not in rank.refusals
    assert rank.wait_for_refusal(10_000).status == 503


def test_ten_thousand_that_wait_leave_as_fast_as_they_came(start):
    rank = start(engine={"step_ms": 1}, max_running_requests=1, max_queued_requests=10_000)
    rank.send(generate(0, "a", sampling_params=SamplingParams(max_new_tokens=99)))
    for block in range(10):
        rank.send(*(generate(block * 1000 + i, tokens=9, timeout=600.0) for i in range(1, 1001)))
    rank.send(generate(20_000))
    board = rank.site.board()
    wait_until(lambda: board.figures("scheduler", 0)["waiting"] > 9000)
    for number in range(1, 10_001):
        rank.abort(number)
    rank.abort(20_000)
    wait_until(lambda: board.figures("scheduler", 0)["waiting"] == 0)
    assert rank.counts()[1] == 0
