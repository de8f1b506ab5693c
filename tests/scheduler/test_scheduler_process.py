from __future__ import annotations

import msgspec
import numpy
import pytest
from rank_under_test import LONG, OWNER, Rank, embed, generate, rows_of

from multitok.engines.base import EngineInfo
from multitok.messages.base import FinishReason
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.control import AbortMatching
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_child import OwnerDied, Stop
from multitok.messages.to_detokenizer import BatchEmbeddingOutput, RefusedReq
from multitok.messages.to_launcher import Hello, Ready
from multitok.messages.to_scheduler import DecodeParams, GetInternalStateReq, Header, Kind, header_of
from multitok.messages.to_tokenizer import GetInternalStateReqOutput
from parts import EOS, VOCAB_SIZE, unpack, wait_until

ABORTED = FinishReason("abort")
LENGTH = FinishReason("length")


@pytest.fixture
def start(make_site):
    """Start a scheduler; `engine` are options of the simulated engine."""

    def start(index: int = 0, engine: dict[str, object] | None = None, **options) -> Rank:
        arguments = [f"{key}={value}" for key, value in (engine or {}).items()]
        return Rank(make_site(engine_arg=arguments, **options), index)

    return start


@pytest.fixture
def slow(start):
    """One request runs at a time, one id per 10 ms."""
    return start(engine={"step_ms": 10}, max_running_requests=1)


# Output


def test_a_request_gets_its_ids_and_its_end(start):
    rank = start(engine={"tokens_per_step": 2})
    params = DecodeParams(stop=["x"])
    rank.send(generate(5, "abc", tokens=5, decode_params=params))
    assert rank.wait_for_end(5) == LENGTH
    assert rank.ids(5) == list(b"abcab")
    rows = rank.rows[5]
    assert [row.params for row in rows] == [params, None, None]
    assert [row.owner for row in rows] == [OWNER] * 3
    last = rows[-1].batch
    assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == ([3], [5], [0])
    (times,) = last.extras.time_stats
    assert 0 < times.received <= times.admitted <= times.first_token <= times.finished
    assert rank.counts() == (0, 0, 1)


def test_log_probabilities_come_with_their_ids(start):
    rank = start()
    rank.send(
        generate(1, tokens=2, sampling_params=SamplingParams(max_new_tokens=2, logprobs=3)), generate(2, tokens=2)
    )
    rank.wait_for_end(2)
    for row, other in zip(rank.rows[1], rank.rows[2], strict=True):
        assert row.batch is other.batch
        logprobs, nothing = row.batch.extras.output_token_logprobs
        top, _ = row.batch.extras.output_top_logprobs
        assert len(logprobs) == len(top) == len(row.ids) == 1
        assert len(top[0]) == 3
        assert nothing is None


def test_a_step_is_one_message_per_detokenizer(start):
    rank = start(detokenizers=2, engine={"tokens_per_step": "1,2"})
    rank.send(generate(1, "aa"), generate(2, "bb", detokenizer=1), generate(3, "cc"), generate(4, "dd", detokenizer=1))
    for name, numbers in (("d0", [1, 3]), ("d1", [2, 4])):
        steps = [rank.inboxes[name].next() for _ in range(2)]
        assert [step.numbers for step in steps] == [numbers] * 2
        assert [step.output_lengths for step in steps] == [None, [2, 2]]
        assert [row.finish for row in rows_of(steps[1])] == [LENGTH] * 2
        assert rank.inboxes[name].is_empty()


def test_a_detokenizer_that_there_is_not_is_taken_round(start):
    rank = start(detokenizers=1)
    rank.send(generate(1, detokenizer=5))
    assert rank.wait_for_end(1) == LENGTH


def test_owners_that_decode_for_themselves_get_their_ids(start):
    rank = start(detokenizers=0)
    rank.send(generate(1), generate(2, []))
    assert rank.wait_for_refusal(2).status == 400
    assert rank.wait_for_end(1) == LENGTH
    assert rank.ids(1) == list(b"abc")


def test_an_embedding_is_one_row(start):
    rank = start(task="embed", engine={"embedding_size": 8})
    rank.send(embed(1, "ab"), embed(2, "abc", owner="w2.1"))
    batch = rank.hear()
    assert isinstance(batch, BatchEmbeddingOutput)
    assert (batch.numbers, batch.http_worker_ipcs) == ([1, 2], [OWNER, "w2.1"])
    assert batch.prompt_tokens == [2, 3]
    assert [finish.type for finish in batch.finished_reasons] == ["stop", "stop"]
    for embedding in batch.embeddings:
        vector = numpy.frombuffer(embedding, numpy.float32)
        assert vector.shape == (8,)
        assert numpy.linalg.norm(vector) == pytest.approx(1.0)
    assert rank.counts() == (0, 0, 2)
    rank.ack(1, 2)
    assert rank.counts() == (0, 0, 0)


def test_a_rank_knows_which_one_it_is(start):
    rank = start(index=1, ranks=2)
    rank.send(generate(1))
    assert rank.wait_for_first(1).batch.rank == 1
    assert rank.state().rank == 1


def test_ready_says_what_the_engine_is(make_site):
    site = make_site(max_running_requests=3)
    child = site.child("scheduler", ["s0"])
    assert isinstance(site.hear(child), Hello)
    ready = site.hear(child)
    assert isinstance(ready, Ready)
    info = msgspec.msgpack.decode(ready.info, type=EngineInfo)
    assert (info.name, info.simulated, info.task, info.vocab_size) == ("simulated", True, "generate", VOCAB_SIZE)
    assert (info.eos_token_ids, info.context_length, info.max_running_requests) == ([EOS], 100, 3)


def test_the_board_shows_what_runs_and_what_waits(slow):
    board = slow.site.board()
    slow.send(*(generate(number, tokens=LONG) for number in (1, 2, 3)))
    wait_until(lambda: board.figures("scheduler", 0) == {"life": 0, "load": 1, "waiting": 2})
    assert slow.operate(AbortMatching()).count == 3
    wait_until(lambda: board.figures("scheduler", 0) == {"life": 0, "load": 0, "waiting": 0})


def test_the_board_shows_the_work_that_is_left(slow):
    """Prompts until the first output, and the expected output until the end; the count of requests never goes back."""
    board = slow.site.board()
    slow.send(*(generate(number, "abcd", tokens=LONG) for number in (1, 2, 3)))
    slow.wait_for_first(1)
    # One runs, whose prompt has been read, and two wait.
    wait_until(lambda: board.rank_work(0)[:2] == (3, 3 * LONG + 2 * 4))
    slow.send(generate(1, "abcd"), generate(9, []))
    wait_until(lambda: board.rank_work(0)[:2] == (5, 3 * LONG + 2 * 4))
    for number in (1, 2, 3):
        slow.abort(number)
    wait_until(lambda: board.rank_work(0)[:2] == (5, 0))


def test_the_board_shows_how_long_an_output_is_expected_to_be(start):
    rank = start()
    board = rank.site.board()
    wait_until(lambda: board.rank_work(0)[2] == 256)
    for number in range(1, 200):
        rank.send(generate(number, tokens=7))
        rank.wait_for_end(number)
    wait_until(lambda: board.rank_work(0)[2] == 7)


def test_in_multi_mode_an_answer_goes_through_the_router(make_site):
    site = make_site(workers=2)
    rank = Rank(site)
    router = site.inbox("control", GetInternalStateReqOutput)
    question = GetInternalStateReq(number=6, http_worker_ipc="w2.1")
    rank.send(question)
    header, answer = router.frames()
    assert FrameDecoder(site.token, Header).decode(header) == Header(Kind.CONTROL, 6, "w2.1")
    state = FrameDecoder(site.token, GetInternalStateReqOutput).decode(answer)
    assert (state.number, state.running, state.kv_used) == (6, 0, 0.0)


# Admission


def test_what_runs_and_what_waits_is_limited_and_the_rest_is_refused_at_once(start):
    rank = start(engine={"step_ms": 10}, max_running_requests=1, max_queued_requests=1)
    rank.send(*(generate(number, tokens=LONG, owner=f"w{number}.1") for number in (1, 2, 3, 4)))
    for number in (3, 4):
        refusal = rank.wait_for_refusal(number)
        assert (refusal.status, refusal.http_worker_ipc) == (503, f"w{number}.1")
        assert "too many requests are waiting" in refusal.message
    rank.wait_for_first(1)
    assert rank.counts() == (1, 1, 0)
    # There is room again when one has ended.
    rank.abort(2)
    rank.send(generate(5))
    rank.abort(1)
    assert rank.wait_for_end(5) == LENGTH
    assert set(rank.refusals) == {3, 4}
    assert not rank.rows[2][-1].ids


def test_more_requests_than_the_engine_takes_wait_for_it(start):
    rank = start(engine={"max_running": 2}, max_running_requests=50)
    rank.send(*(generate(number, tokens=4) for number in range(1, 8)))
    for number in range(1, 8):
        assert rank.wait_for_end(number) == LENGTH
    assert rank.refusals == {}
    sizes = {len(row.batch.numbers) for rows in rank.rows.values() for row in rows}
    assert max(sizes) == 2


def test_priority_decides_who_is_next(slow):
    slow.send(generate(1, tokens=LONG))
    slow.wait_for_first(1)
    for number, priority in ((2, 0), (3, 5), (4, -1), (5, 5), (6, 0)):
        slow.send(generate(number, tokens=1, priority=priority))
    assert slow.counts() == (1, 5, 0)
    slow.abort(1)
    slow.wait_for_end(4)
    assert list(slow.rows) == [1, 3, 5, 2, 6, 4]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (generate(1, []), "the prompt is empty"),
        (generate(1, [5, VOCAB_SIZE]), f"outside the vocabulary of {VOCAB_SIZE}"),
        (generate(1, [5, -1]), "outside the vocabulary"),
        (generate(1, "a" * 90, tokens=11), "prompt and output of 101 tokens exceed the context of 100"),
        (msgspec.structs.replace(generate(1), input_ids=b"\1\0\0\0\1"), "the ids of the prompt are cut"),
        (embed(1), "the model does not embed"),
    ],
)
def test_what_the_engine_cannot_take_is_refused_and_says_why(start, message, reason):
    rank = start()
    rank.send(message)
    refusal = rank.wait_for_refusal(1)
    assert (refusal.status, refusal.http_worker_ipc) == (400, OWNER)
    assert reason in refusal.message
    assert rank.counts() == (0, 0, 0)
    # What just fits is taken.
    rank.send(generate(2, "a" * 90, tokens=10))
    assert rank.wait_for_end(2) == LENGTH


def test_an_encoder_does_not_generate(start):
    rank = start(task="embed")
    rank.send(generate(1))
    refusal = rank.wait_for_refusal(1)
    assert (refusal.status, refusal.message) == (400, "the model does not generate")


def test_what_the_engine_itself_refuses_reaches_the_owner(start):
    rank = start(engine={"kv_tokens": 20})
    rank.send(generate(1, tokens=50, rid="x"), generate(2, tokens=3, rid="y"))
    assert "the KV cache has 20" in rank.wait_for_refusal(1).message
    assert rank.wait_for_end(2) == LENGTH
    # Its id is free.
    rank.send(generate(3, tokens=3, rid="x"))
    assert rank.wait_for_end(3) == LENGTH
    assert rank.counts() == (0, 0, 2)


# Repeats


def test_a_request_that_comes_again_is_dropped_at_every_stage(start):
    rank = start(engine={"step_ms": 5}, max_running_requests=1)
    rank.send(generate(1, "ab", tokens=LONG), generate(2, "cd", tokens=2))
    rank.wait_for_first(1)
    rank.send(generate(1, "ab", tokens=LONG), generate(2, "cd", tokens=2))
    assert rank.counts() == (1, 1, 0)
    rank.abort(1)
    assert rank.wait_for_end(2) == LENGTH
    # Ended, and not acknowledged: the owner may not have heard of it yet.
    rank.send(generate(2, "cd", tokens=2))
    assert rank.counts() == (0, 0, 1)
    assert rank.ids(2) == list(b"cd")
    assert rank.refusals == {}


def test_an_acknowledged_request_is_forgotten(start):
    rank = start()
    rank.send(generate(1), generate(2))
    rank.wait_for_end(2)
    rank.ack(1, 55)
    assert rank.counts() == (0, 0, 1)
    # Nothing of it is left: its number is like any other.
    rank.rows.clear()
    rank.send(generate(1))
    assert rank.wait_for_end(1) == LENGTH


def test_an_id_is_refused_while_it_runs_and_free_after_its_end(slow):
    slow.send(generate(1, tokens=LONG, rid="mine"), generate(2, rid="mine"), generate(3, rid="other"))
    refusal = slow.wait_for_refusal(2)
    assert (refusal.status, "'mine' is running already" in refusal.message) == (400, True)
    slow.abort(1)
    slow.send(generate(4, tokens=2, rid="mine"))
    assert slow.wait_for_end(4) == LENGTH
    slow.send(generate(5, tokens=2, rid="mine"))
    assert slow.wait_for_end(5) == LENGTH
    assert set(slow.refusals) == {2}


def test_the_id_of_a_call_is_taken_whether_it_has_one_request_or_several(slow):
    slow.send(generate(1, tokens=LONG, rid="one"))
    slow.send(generate(2, rid="many-0", group="many"), generate(3, rid="many-1", group="many"))
    slow.send(generate(4, rid="one-0", group="one"), generate(5, rid="many"))
    for number, taken in ((4, "one"), (5, "many")):
        refusal = slow.wait_for_refusal(number)
        assert (refusal.status, refusal.message) == (400, f"a request with the id {taken!r} is running already")
    assert slow.counts() == (1, 2, 0)
    slow.operate(AbortMatching("many"))
    slow.operate(AbortMatching("one"))
    slow.send(generate(6, rid="one-0", group="one"), generate(7, rid="many"))
    assert slow.wait_for_end(6) == slow.wait_for_end(7) == LENGTH
    assert set(slow.refusals) == {4, 5}


# Aborts


@pytest.mark.parametrize("stage", ["queued", "prefill", "running"])
def test_an_aborted_request_gets_a_last_word_at_every_stage(start, stage):
    options = {"step_ms": 10, "prefill_chunk": 1} if stage == "prefill" else {"step_ms": 5}
    rank = start(engine=options, max_running_requests=1)
    if stage == "queued":
        rank.send(generate(1, tokens=LONG))
        rank.wait_for_first(1)
    rank.send(generate(2, "a" * 50, tokens=50))
    if stage == "running":
        rank.wait_for_first(2)
    wait_until(lambda: rank.counts() == ((1, 1, 0) if stage == "queued" else (1, 0, 0)))
    rank.abort(2)
    assert rank.wait_for_end(2) == ABORTED
    last = rank.rows[2][-1]
    assert last.ids == []
    made = len(rank.ids(2))
    assert (made > 0) is (stage == "running")
    i = last.batch.numbers.index(2)
    assert (last.batch.prompt_tokens[i], last.batch.completion_tokens[i]) == (50, made)
    # Its place is free, and nothing has to be acknowledged.
    assert rank.counts() == ((1, 0, 0) if stage == "queued" else (0, 0, 0))
    rank.abort(1)
    rank.send(generate(3, tokens=1))
    rank.wait_for_first(3)


def test_an_abort_by_number_acknowledges_a_request_that_has_ended(start):
    rank = start()
    rank.send(generate(1))
    rank.wait_for_end(1)
    rank.abort(1)
    assert rank.counts() == (0, 0, 0)
    assert rank.inbox.is_empty()


def test_an_abort_of_an_unknown_request_is_nothing(slow):
    slow.send(generate(1, tokens=LONG, rid="a"))
    slow.wait_for_first(1)
    slow.abort(2)
    assert slow.operate(AbortMatching("b")).count == 0
    assert slow.counts() == (1, 0, 0)


def test_an_abort_by_id_ends_that_request_and_its_sub_requests_and_no_other(start):
    rank = start(engine={"step_ms": 10}, max_running_requests=3)
    # Sub-requests say whose they are; an id that only looks like one of theirs is somebody else's.
    ids = [("r-0", "r"), ("r-1", "r"), ("r-10", "r"), ("r-2", None), ("rr-1", "rr"), ("s", None), (None, None)]
    rank.send(*(generate(n, tokens=LONG, rid=rid, group=group) for n, (rid, group) in enumerate(ids, start=1)))
    assert sum(rank.counts()[:2]) == 7
    assert rank.operate(AbortMatching("r")).count == 3
    for number in (1, 2, 3):
        assert rank.wait_for_end(number) == ABORTED
    assert sum(rank.counts()[:2]) == 4
    assert rank.operate(AbortMatching("s")).count == 1
    assert rank.wait_for_end(6) == ABORTED
    assert sum(rank.counts()[:2]) == 3
    # Their owners have yet to say that they know.
    rank.ack(1, 2, 3, 6)
    assert rank.counts() == (3, 0, 0)


def test_all_can_be_aborted_at_once(start):
    rank = start(engine={"step_ms": 10}, max_running_requests=2)
    rank.send(*(generate(number, tokens=LONG, owner=f"w{number}.1") for number in range(1, 6)))
    rank.wait_for_first(2)
    assert rank.operate(AbortMatching()).count == 5
    for number in range(1, 6):
        assert rank.wait_for_end(number) == ABORTED
        assert rank.rows[number][-1].owner == f"w{number}.1"
    rank.ack(*range(1, 6))
    assert rank.counts() == (0, 0, 0)


def test_the_death_of_an_owner_aborts_and_forgets_its_requests_and_no_other(start):
    rank = start(engine={"step_ms": 5}, max_running_requests=2)
    rank.send(generate(1, tokens=1, owner="w1.1"), generate(2, tokens=1, owner="w2.1"))
    rank.wait_for_end(2)
    assert rank.counts() == (0, 0, 2)
    rank.send(generate(3, tokens=LONG, owner="w1.1", rid="mine"), generate(4, tokens=LONG, owner="w2.1"))
    rank.send(generate(5, tokens=LONG, owner="w1.1"), generate(6, tokens=2, owner="w2.1"))
    assert sum(rank.counts()) == 6
    rank.child.send(OwnerDied("w1.1"))
    assert rank.wait_for_end(3) == rank.wait_for_end(5) == ABORTED
    assert rank.wait_for_end(6) == LENGTH
    # What it sent before it died, and what comes late, is not begun; its ids are free for others.
    rank.send(generate(7, owner="w1.1"), generate(8, tokens=1, owner="w2.1", rid="mine"))
    assert rank.wait_for_end(8) == LENGTH
    assert rank.counts() == (1, 0, 3)
    assert 7 not in rank.rows
    assert 7 not in rank.refusals


# What goes wrong


def test_a_payload_that_cannot_be_decoded_is_refused_to_its_owner_and_the_loop_goes_on(start):
    rank = start()
    token = rank.site.token
    header = encode_frame(token, Header(Kind.GENERATE, 7, "w2.1"))
    deep = b"\x9a\x01" + b"\x91" * 100_000
    for number, payload in enumerate([b"\xc1", b"", msgspec.msgpack.encode([1, 1, 2]), deep], start=7):
        header = encode_frame(token, Header(Kind.GENERATE, number, "w2.1"))
        good = generate(number + 100)
        rank.site.send_pairs(
            "s0",
            [header, token + payload, encode_frame(token, header_of(good)), encode_frame(token, good)],
        )
        assert rank.wait_for_refusal(number) == RefusedReq(
            number=number, http_worker_ipc="w2.1", status=500, message="the request could not be decoded"
        )
        assert rank.wait_for_end(number + 100) == LENGTH


def test_frames_that_belong_to_nobody_are_dropped(start):
    rank = start()
    token = rank.site.token
    request = generate(1)
    header, payload = encode_frame(token, header_of(request)), encode_frame(token, request)
    rank.site.send_pairs("s0", [b"not-ours" + header[8:], payload])
    rank.site.send_pairs("s0", [header, b"not-ours" + payload[8:]])
    rank.site.send_pairs("s0", [token + b"\xc1", payload])
    rank.site.send_pairs("s0", [header])
    rank.site.send_frames("s0", [b""])
    rank.site.send_frames("s0", [header, payload])
    rank.site.send_frames("s0", [b"not-ours" + header[8:], header, payload])
    ownerless = generate(2, owner=None)
    rank.send(ownerless)
    assert rank.counts() == (0, 0, 0)
    assert rank.inbox.is_empty()


def test_a_failed_request_is_an_error_of_its_own(start):
    rank = start(engine={"fail_on_id": ord("!")})
    rank.send(generate(1, "a!"), generate(2, "ab"))
    finish = rank.wait_for_end(1)
    assert (finish.type, finish.status) == ("error", 500)
    assert rank.wait_for_end(2) == LENGTH
    rank.abort(1)
    assert rank.counts() == (0, 0, 1)


def test_when_the_engine_crashes_every_request_is_told_and_the_launcher_too(start):
    rank = start(engine={"crash_after_steps": 4}, max_running_requests=20)
    rank.send(*(generate(number, tokens=50) for number in range(1, 41)))
    failed = FinishReason("error", None, 500, "the engine failed")
    for number in range(1, 41):
        assert rank.wait_for_end(number) == failed
    assert len(rank.ids(1)) == 3
    assert rank.ids(40) == []
    failure = rank.site.hear_failure(rank.child)
    assert "simulated crash at step 4" in failure.message
    assert failure.exit_status == 1
    assert rank.site.ending(rank.child) == "exited with status 1"


def test_stop_ends_it_whatever_runs(slow):
    slow.send(generate(1, tokens=LONG), generate(2, tokens=LONG))
    slow.wait_for_first(1)
    slow.child.send(Stop())
    assert slow.site.ending(slow.child) == "exited with status 0"


def test_ids_of_a_waiting_request_are_not_lost_by_an_abort_of_another(slow):
    slow.send(generate(1, "xyz", tokens=4), generate(2, tokens=LONG), generate(3, "uvw", tokens=4))
    slow.abort(2)
    assert slow.wait_for_end(3) == LENGTH
    assert (slow.ids(1), slow.ids(3)) == (list(b"xyzx"), list(b"uvwu"))
    assert unpack(slow.rows[2][-1].batch.output_ids) == slow.rows[2][-1].ids == []
