"""What reaches a rank too late, or in the wrong order, and what it can't say."""

from __future__ import annotations

import time

import pytest
from rank_under_test import LONG, OWNER, Rank, generate, rows_of

from multitok.ipc.sockets import HIGH_WATER_MARK, connect_push
from multitok.messages.base import FinishReason
from multitok.messages.codec import encode_frame
from multitok.messages.to_detokenizer import BatchTokenIDOutput, ToDetokenizer
from multitok.messages.to_scheduler import AbortReq, GetInternalStateReq, LiveReq, header_of, life_mark
from multitok.messages.to_tokenizer import LiveReqOutput, ToTokenizer
from parts import DEADLINE_S

ABORTED = FinishReason("abort")
LENGTH = FinishReason("length")


@pytest.fixture
def start(make_site):
    def start(engine: dict[str, object] | None = None, **options) -> Rank:
        arguments = [f"{key}={value}" for key, value in (engine or {}).items()]
        return Rank(make_site(engine_arg=arguments, **options))

    return start


def pairs(rank: Rank, *messages) -> list[bytes]:
    frames: list[bytes] = []
    for message in messages:
        frames += [bytes(encode_frame(rank.site.token, part)) for part in (header_of(message), message)]
    return frames


def test_what_was_meant_for_an_earlier_life_is_dropped(start):
    rank = start()
    rank.site.kill(rank.child)
    # It waits in the socket.
    rank.send(generate(1))
    rank.child, rank.life = rank.site.next_life(rank.child, ["s0"]), 2
    rank.send(generate(2))
    assert rank.wait_for_end(2) == LENGTH
    rank.site.send_pairs("s0", pairs(rank, generate(3), AbortReq(number=2)), life=1)
    rank.site.send_pairs("s0", pairs(rank, generate(4)), life=3)
    assert rank.counts() == (0, 0, 1)
    assert set(rank.rows) == {2}
    assert rank.refusals == {}


def test_a_live_list_that_overtakes_requests_of_an_old_router_waits_for_them(start):
    """They wait in another connection, all the time that a step takes; more of them than are handled at once."""
    rank = start(engine={"step_ms": 400}, max_running_requests=1)
    answers = rank.site.inbox(OWNER, ToTokenizer)
    mark = life_mark(rank.site.token, 1)
    with connect_push(rank.site.port_args.endpoint("s0")) as old_router:
        old_router.send_multipart([mark, *pairs(rank, generate(1, tokens=8))])
        rank.send(generate(2, owner="w2.1"))
        rank.wait_for_first(1)
        numbers = [1, *range(3, 1000)]
        for number in [*numbers[1:], 1000]:
            old_router.send_multipart([mark, *pairs(rank, generate(number))])
        # 1000 was aborted, and that was lost; 1001 is sent after the list.
        zeros = [0] * len(numbers)
        rank.send(
            LiveReq(number=5, http_worker_ipc=OWNER, upto=1000, numbers=numbers, token_counts=zeros, text_lengths=zeros)
        )
        rank.send(generate(1001))
        answer = answers.next()
        assert (answer.number, answer.known) == (5, numbers)
        assert rank.wait_for_end(1000) == ABORTED
        assert rank.counts() == (1, len(numbers) + 1, 0)


def test_a_list_does_not_end_what_its_owner_has_sent_after_it(start):
    rank = start(engine={"step_ms": 10}, max_running_requests=1)
    rank.send(generate(1, tokens=LONG), generate(2), generate(3))
    rank.wait_for_first(1)
    assert rank.compare({1: 0}, upto=2) == [1]
    assert rank.wait_for_end(2) == ABORTED
    assert rank.counts() == (1, 1, 0)


def test_the_newest_list_of_an_owner_counts(start):
    rank = start(engine={"step_ms": 10}, max_running_requests=1)
    answers = rank.site.inbox(OWNER, ToTokenizer)
    rank.send(generate(1, tokens=LONG), generate(2))
    rank.wait_for_first(1)
    lists = [
        LiveReq(number=n, http_worker_ipc=OWNER, upto=2, numbers=[1, n], token_counts=[0, 0], text_lengths=[0, 0])
        for n in (1, 2)
    ]
    rank.send(*lists)
    assert answers.next() == LiveReqOutput(number=2, http_worker_ipc=OWNER, rank=0, life=1, known=[1, 2])
    assert rank.counts() == (1, 1, 0)


def test_last_words_that_a_detokenizer_had_no_room_for_are_said_again(make_site):
    """It would keep the state of these requests for ever."""
    site = make_site(engine_arg=["step_ms=20"])
    site.ready_child("scheduler", ["s0"])
    asker = site.inbox("w9.1", ToTokenizer)

    def send(*messages) -> None:
        site.send_pairs("s0", [bytes(encode_frame(site.token, p)) for m in messages for p in (header_of(m), m)])

    def wait_until_all_is_handled() -> None:
        send(GetInternalStateReq(number=1, http_worker_ipc="w9.1"))
        asker.next()

    send(generate(1, tokens=LONG), generate(2, tokens=LONG, owner="w2.1"))
    wait_until_all_is_handled()
    # Nobody reads the refusals yet.
    send(*(generate(number, tokens=0) for number in range(3, 3 + HIGH_WATER_MARK)))
    wait_until_all_is_handled()
    send(AbortReq(number=1, http_worker_ipc=OWNER))
    wait_until_all_is_handled()
    detokenizer = site.inbox("d0", ToDetokenizer)
    until = time.monotonic() + DEADLINE_S
    ends: dict[int, FinishReason] = {}
    while 1 not in ends:
        assert time.monotonic() < until
        message = detokenizer.next()
        if isinstance(message, BatchTokenIDOutput):
            ends |= {row.number: row.finish for row in rows_of(message) if row.finish is not None}
    assert ends[1] == ABORTED
