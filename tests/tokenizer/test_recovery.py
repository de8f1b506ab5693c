"""What an owner does about its requests when another part has died, or a message was lost."""

from __future__ import annotations

import asyncio

import pytest
import zmq
from owner_under_test import engine_info, logprob_extras, owner_of, text_rows, until
from test_results import vectors

from multitok.detokenizer.incremental import TextDecoder
from multitok.detokenizer.step import DetokenizerStep
from multitok.engines.base import may_go_on
from multitok.ipc import sockets
from multitok.launcher.http_process import _Parts
from multitok.messages.base import FinishReason
from multitok.messages.sampling import Grammar, SamplingParams
from multitok.messages.to_detokenizer import BatchTokenIDOutput, OutputExtras, RefusedReq
from multitok.messages.to_scheduler import AbortReq, AckReq, DecodeParams, LiveReq, TokenizedGenerateReqInput
from multitok.messages.to_tokenizer import LiveListWanted, LiveReqOutput, RankDied, RankStarted
from multitok.router.policies import RoundRobinPolicy
from multitok.router.rank_dispatcher import RankDispatcher
from multitok.tokenizer import recovery
from multitok.tokenizer.recovery import ENGINE_DIED, NOT_RESUMED
from multitok.tokenizer.requests import RequestError
from multitok.tokenizer.worker import TokenizerWorker
from parts import byte_tokenizer, pack

LENGTH = FinishReason("length")
GREEDY = SamplingParams(max_new_tokens=9, temperature=0.0)
RESUMABLE = engine_info(resumable=["min_new_tokens", "stop_token_ids"])


@pytest.fixture
def in_loop(make_site, monkeypatch):
    """Run a coroutine function with an owner of its own; last words on their way have had their time at once."""
    monkeypatch.setattr(recovery, "_GRACE_S", 0.0)

    def run(test, *, ranks=1, detokenizers=1, resume=False, site=None, queue_timeout=None, **options):
        async def main():
            made = site or make_site(
                ranks=ranks, detokenizers=detokenizers, resume_generation=resume, queue_timeout=queue_timeout
            )
            async with owner_of(made, **options) as owner:
                await test(owner)

        asyncio.run(main())

    return run


def rebuilt(rows, offsets, **fields):
    """Text rows that say how much text was before them."""
    extras = fields.pop("extras", None) or OutputExtras()
    extras.read_offsets = offsets
    return text_rows(*rows, extras=extras, **fields)


def answer(question: LiveReq, rank: int = 0, known: list[int] | None = None, life: int = 1) -> LiveReqOutput:
    known = question.numbers if known is None else known
    return LiveReqOutput(number=question.number, http_worker_ipc="w1.1", rank=rank, life=life, known=known)


async def stream(owner, text="", rank=0, **fields):
    """Start a streamed request and deliver its first text, from one rank."""
    fields.setdefault("sampling_params", GREEDY)
    call, sink = owner.submit("abc", tokens=9, stream=True, **fields)
    number = next(iter(call.running))
    if text:
        owner.deliver(text_rows((number, text, 0, None), rank=rank, life=1))
        await until(lambda: sink.text == text)
    return number, call, sink


# A scheduler dies


def test_requests_of_a_dead_scheduler_fail_and_the_others_go_on(in_loop):
    async def test(owner):
        lost, _, sink = await stream(owner, "ab", rank=0)
        kept, _, other = await stream(owner, "xy", rank=1)
        owner.deliver(RankDied(rank=0, life=1))
        await until(lambda: sink.errors)
        assert sink.errors == [(503, ENGINE_DIED)]
        owner.deliver(text_rows((lost, "c", 2, None), (kept, "z", 2, LENGTH), rank=1, life=1))
        await until(lambda: other.text == "xyz")
        assert not other.errors
        assert sink.text == "ab"

    in_loop(test, ranks=2)


def test_without_any_scheduler_every_client_gets_an_error_and_the_next_ones_are_refused(in_loop):
    async def test(owner):
        _, _, streaming = await stream(owner, "ab")
        _, _, waiting = await stream(owner)
        call, several = owner.submit("ab", n=3)
        owner.deliver(RankDied(rank=0, life=1))
        await until(lambda: several.errors and waiting.errors and streaming.errors)
        for sink in (streaming, waiting, several):
            assert sink.errors == [(503, ENGINE_DIED)]
        assert call.ended
        assert len(owner.manager.results) == 0
        with pytest.raises(RequestError, match="the engine has died") as caught:
            owner.submit("x")
        assert caught.value.status == 503
        owner.deliver(RankStarted(rank=0, life=2))
        await until(lambda: owner.manager.results.recovery.any_rank_is_up(0))
        owner.submit("x")

    in_loop(test)


def test_what_a_dead_life_said_counts_no_more(in_loop):
    async def test(owner):
        number, _, sink = await stream(owner, "ab")
        while not isinstance(await owner.sent_one(), TokenizedGenerateReqInput):
            pass
        owner.deliver(RankDied(rank=0, life=3))
        owner.deliver(text_rows((number, "old", 2, None), rank=0, life=3))
        owner.deliver(RankStarted(rank=0, life=4))
        again = await owner.sent_one()
        assert unpacked(again.resumed_ids) == "ab"
        owner.deliver(rebuilt([(number, "new", 2, LENGTH)], [2], rank=0, life=4))
        await until(lambda: sink.text == "abnew")
        assert not sink.errors

    in_loop(test, resume=True, info=RESUMABLE)


def test_what_is_lost_after_a_pause_has_settled_does_not_go_on(in_loop):
    async def test(owner):
        _, _, waiting = await stream(owner)
        assert not owner.manager.control.has_begun()
        _, _, streaming = await stream(owner, "ab")
        assert owner.manager.control.has_begun()
        # Other weights may be loaded from now on.
        owner.manager.control.settled = True
        owner.deliver(RankDied(rank=0, life=1))
        await until(lambda: streaming.errors)
        assert streaming.errors == [(503, NOT_RESUMED)]
        # What had not begun has nothing to go on with.
        assert not waiting.errors
        assert len(owner.manager.results) == 1
        assert not owner.manager.control.has_begun()

    in_loop(test, resume=True, info=RESUMABLE)


def unpacked(ids: bytes) -> str:
    return bytes(memoryview(ids).cast("i").tolist()).decode()


def test_a_death_that_nobody_has_told_is_known_from_the_next_life(in_loop):
    async def test(owner):
        number, _, sink = await stream(owner, "ab")
        owner.deliver(RankStarted(rank=0, life=2))
        await until(lambda: sink.errors)
        assert sink.errors == [(503, ENGINE_DIED)]
        # What it had said comes late, and is nobody's.
        owner.deliver(text_rows((number, "c", 2, LENGTH), rank=0, life=1))
        kept, _, other = await stream(owner)
        owner.deliver(
            text_rows((kept, "old", 0, None), rank=0, life=1), text_rows((kept, "x", 0, None), rank=0, life=2)
        )
        await until(lambda: other.text)
        assert other.text == "x"
        assert owner.manager.is_ready()

    in_loop(test)


def test_what_runs_at_the_new_life_is_not_lost_when_the_death_of_the_last_is_told_late(in_loop):
    """The router had told nobody, when it died itself: the next one does."""

    async def test(owner):
        number, call, sink = await stream(owner)
        owner.deliver(text_rows((number, "a", 0, None), rank=0, life=2))
        await until(lambda: sink.text)
        owner.deliver(RankStarted(rank=0, life=2), text_rows((number, "b", 1, LENGTH), rank=0, life=2))
        await until(lambda: call.ended)
        assert (sink.text, sink.errors) == ("ab", [])

    in_loop(test)


def test_what_a_router_that_is_dead_had_said_of_ranks_may_come_after_the_next_ones_word(in_loop):
    async def test(owner):
        _, _, sink = await stream(owner)
        owner.deliver(RankDied(rank=0, life=1), RankStarted(rank=0, life=2))
        await until(lambda: sink.errors)
        number, call, sink = await stream(owner)
        owner.deliver(RankDied(rank=0, life=1), text_rows((number, "a", 0, None), rank=0, life=2))
        await until(lambda: sink.text)
        assert owner.manager.is_ready()
        owner.deliver(RankDied(rank=0, life=2), RankStarted(rank=0, life=2))
        await until(lambda: call.ended)
        owner.deliver(LiveListWanted())
        await until(lambda: owner.manager.results.recovery._list_wanted is False)
        assert not owner.manager.is_ready()

    in_loop(test)


# Requests that may have been at a dead rank


def test_a_request_that_no_rank_knows_is_sent_again_as_it_was(in_loop):
    async def test(owner):
        call, sink = owner.submit("ab", n=4)
        first, second = await owner.sent(0), await owner.sent(1)
        owner.deliver(RankDied(rank=0, life=1))
        question = await owner.sent_one(1)
        assert isinstance(question, LiveReq)
        assert sorted(question.numbers) == sorted(call.running)
        assert (question.token_counts, question.text_lengths, question.resend) == ([0] * 4, [0] * 4, [])
        owner.deliver(answer(question, rank=1, known=[child.number for child in second]))
        # The dispatcher here knows of no death.
        await live_req(owner, 0)
        resent = await owner.sent(0) + await owner.sent(1)
        assert sorted(resent, key=lambda m: m.number) == first
        rows = [(number, "x", 0, LENGTH) for number in call.running]
        owner.deliver(text_rows(*rows, rank=1, life=1))
        await until(lambda: call.ended)
        assert not sink.errors

    in_loop(test, ranks=2)


def test_what_has_been_heard_of_in_between_is_not_sent_again(in_loop):
    async def test(owner):
        number, call, sink = await stream(owner)
        owner.deliver(RankDied(rank=0, life=1))
        question = await live_req(owner, 1)
        owner.deliver(text_rows((number, "a", 0, None), rank=1), answer(question, rank=1, known=[]))
        owner.deliver(text_rows((number, "b", 1, LENGTH), rank=1))
        await until(lambda: call.ended)
        assert sink.text == "ab"
        assert isinstance(await owner.sent_one(1), AckReq)

    in_loop(test, ranks=2)


async def live_req(owner, rank: int = 0) -> LiveReq:
    """The next question to a rank, past what else it is sent."""
    while not isinstance(message := (await owner.sent(rank))[0], LiveReq):
        pass
    return message


def test_an_answer_tells_the_rank_so_that_its_death_is_one_of_this_request_too(in_loop):
    async def test(owner):
        _, _, sink = await stream(owner)
        owner.deliver(RankDied(rank=0, life=1))
        owner.deliver(answer(await live_req(owner, 1), rank=1))
        owner.deliver(RankDied(rank=1, life=1))
        await until(lambda: sink.errors)
        assert sink.errors == [(503, ENGINE_DIED)]

    in_loop(test, ranks=2)


def test_the_answers_of_ranks_that_die_are_not_waited_for(in_loop):
    async def test(owner):
        number, call, _ = await stream(owner)
        owner.deliver(RankDied(rank=0, life=1))
        await live_req(owner, 1)
        await live_req(owner, 2)
        owner.deliver(RankDied(rank=1, life=1))
        owner.deliver(answer(await live_req(owner, 2), rank=2, known=[]))
        await until(lambda: owner.manager.results._requests[number].was_sent_again)
        assert not call.ended

    in_loop(test, ranks=3)


def test_the_answer_of_a_life_that_is_dead_is_none(in_loop):
    async def test(owner):
        _, call, sink = await stream(owner)
        recovery = owner.manager.results.recovery
        recovery.router_started()
        question = await live_req(owner)
        recovery.rank_started(0, 2)
        # It is asked again, since it may have been lost.
        again = await live_req(owner)
        owner.deliver(answer(again, life=1), answer(question, life=2), answer(again, known=[], life=2))
        sent = await owner.sent_one()
        assert (type(sent), sent.number) == (TokenizedGenerateReqInput, again.numbers[0])
        assert not call.ended and not sink.heard

    in_loop(test)


def test_what_failed_when_nobody_was_there_is_aborted_at_whoever_gets_it(in_loop):
    """It may still be on its way to the router when that says so."""
    busy = Busy()

    async def test(owner):
        number, _, sink = await stream(owner)
        _, _, other = await stream(owner, "ab")
        taken = len(busy.taken)
        owner.deliver(RankDied(rank=0, life=1))
        await until(lambda: sink.errors and other.errors)
        (payload,) = busy.taken[taken:]
        assert owner._payloads.decode(payload) == AbortReq(number=number, http_worker_ipc="w1.1")

    in_loop(test, sender=busy)


def test_a_refusal_that_comes_after_the_request_was_sent_again_ends_it_everywhere(in_loop):
    async def test(owner):
        number, _, sink = await stream(owner)
        owner.deliver(RankDied(rank=0, life=1))
        owner.deliver(answer(await live_req(owner, 1), rank=1, known=[]))
        await until(lambda: owner.manager.results._requests[number].was_sent_again)
        owner.deliver(RefusedReq(number=number, http_worker_ipc="w1.1", status=503, message="full"))
        await until(lambda: sink.errors)
        while not isinstance(message := await owner.sent_one(1), AbortReq):
            pass
        assert message.number == number

    in_loop(test, ranks=2)


# --resume-generation


def test_a_generation_goes_on_from_its_ids_at_the_next_life(in_loop):
    async def test(owner):
        params = SamplingParams(max_new_tokens=9, temperature=0.0, min_new_tokens=2)
        number, call, sink = await stream(owner, "ab", sampling_params=params, request_id="mine")
        sent = await owner.sent_one()
        owner.deliver(RankDied(rank=0, life=1))
        owner.deliver(RankStarted(rank=0, life=2))
        again = await owner.sent_one()
        assert (again.number, unpacked(again.resumed_ids), again.text_length) == (number, "ab", 2)
        again.resumed_ids, again.text_length = b"", 0
        assert again == sent
        owner.deliver(rebuilt([(number, "c", 2, None)], [2], rank=0, life=2))
        owner.deliver(text_rows((number, "d", 3, LENGTH), rank=0, life=2))
        await until(lambda: call.ended)
        assert sink.text == "abcd"
        assert sink.outputs[-1].completion_tokens == 4

    in_loop(test, resume=True, info=RESUMABLE)


def test_a_generation_goes_on_at_another_rank_at_once(in_loop):
    async def test(owner):
        number, call, sink = await stream(owner, "ab", rank=0)
        await owner.sent_one(0)
        owner.deliver(RankDied(rank=0, life=1))
        again = await owner.sent_one(1)
        assert (again.number, unpacked(again.resumed_ids)) == (number, "ab")
        owner.deliver(rebuilt([(number, "c", 2, LENGTH)], [2], rank=1, life=1))
        await until(lambda: call.ended)
        assert sink.text == "abc"

    in_loop(test, ranks=2, resume=True, info=RESUMABLE)


def test_requests_without_a_result_begin_again_at_the_next_life_whatever_they_ask_for(in_loop):
    async def test(owner):
        params = SamplingParams(max_new_tokens=5, temperature=0.7, logprobs=0)
        call, sink = owner.submit("ab", n=2, sampling_params=params)
        await until(lambda: call.running)
        sent = await owner.sent()
        owner.deliver(RankDied(rank=0, life=1))
        owner.deliver(RankStarted(rank=0, life=2))
        again = [await owner.sent_one() for _ in sent]
        assert sorted(again, key=lambda m: m.number) == sent
        assert not sink.heard

    in_loop(test, resume=True)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=9),
        SamplingParams(max_new_tokens=9, temperature=0.0, presence_penalty=0.5),
        SamplingParams(max_new_tokens=9, temperature=0.0, logprobs=0),
    ],
)
def test_a_generation_that_would_not_be_the_same_gets_an_error(in_loop, params):
    async def test(owner):
        owner.manager.models[0].text_tools.decoder_is_loaded = True
        _, _, sink = await stream(owner, "ab", sampling_params=params)
        owner.deliver(RankDied(rank=0, life=1))
        await until(lambda: sink.errors)
        assert sink.errors == [(503, NOT_RESUMED)]

    in_loop(test, resume=True, info=engine_info(resumable=["min_new_tokens"]))


def test_a_held_request_whose_client_leaves_is_not_sent_again(in_loop):
    async def test(owner):
        _, call, _ = await stream(owner, "ab")
        owner.deliver(RankDied(rank=0, life=1))
        await until(lambda: not owner.manager.results.recovery.any_rank_is_up(0))
        call.abort()
        owner.deliver(RankStarted(rank=0, life=2))
        await until(lambda: owner.manager.results.recovery.any_rank_is_up(0))
        owner.submit("mark", request_id="mark")
        sent = [await owner.sent_one() for _ in range(3)]
        assert [type(message) for message in sent] == [TokenizedGenerateReqInput, AbortReq, TokenizedGenerateReqInput]
        assert sent[-1].rid == "mark"

    in_loop(test, resume=True, info=RESUMABLE)


def test_a_time_limit_goes_on_over_lives(in_loop, monkeypatch):
    async def test(owner):
        await stream(owner, "ab", timeout=100.0)
        _, call, _ = await stream(owner)
        for request in owner.manager.results._requests.values():
            request.call.sent_at -= 60
        assert [(await owner.sent_one()).timeout for _ in range(2)] == [100.0, None]
        owner.deliver(RankDied(rank=0, life=1), RankStarted(rank=0, life=2))
        again = {message.number: message for message in [await owner.sent_one() for _ in range(2)]}
        waiting = again.pop(next(iter(call.running)))
        (begun,) = again.values()
        # The limits are those that were set, beside the time that is gone.
        assert (waiting.timeout, waiting.queue_timeout, begun.timeout, begun.queue_timeout) == (None, 80.0, 100.0, 80.0)
        assert 60 <= begun.spent < 61
        assert 60 <= waiting.waited < 61
        # It had begun in time, and waits from now on.
        assert 0 <= begun.waited < 1

    in_loop(test, resume=True, info=RESUMABLE, queue_timeout=80.0)


@pytest.mark.parametrize("text", ["", "ab"])
@pytest.mark.parametrize(
    ("timeout", "queue_timeout", "error"),
    [
        (0.1, None, (504, "the request took longer than its limit of 0.1 seconds")),
        (None, 0.1, (503, "the request waited for more than 0.1 seconds")),
        (60.0, 0.1, (503, "the request waited for more than 0.1 seconds")),
    ],
)
def test_time_limits_are_watched_while_no_scheduler_is_up(in_loop, text, timeout, queue_timeout, error):
    async def test(owner):
        _, _, sink = await stream(owner, text, timeout=timeout)
        owner.deliver(RankDied(rank=0, life=1))
        await until(lambda: sink.errors)
        assert sink.errors == [error]
        owner.deliver(RankStarted(rank=0, life=2))
        await until(owner.manager.is_ready)
        owner.submit("mark", request_id="mark")
        assert isinstance(await owner.sent_one(), TokenizedGenerateReqInput)
        assert (await owner.sent_one()).rid == "mark"

    in_loop(test, resume=True, info=RESUMABLE, queue_timeout=queue_timeout)


@pytest.mark.parametrize(
    ("resumable", "fields", "expected"),
    [
        ([], {"temperature": 0.0}, False),
        (["seed"], {"temperature": 0.0}, True),
        (["seed"], {"temperature": 0.0, "seed": 4}, True),
        (["seed"], {"temperature": 0.0, "top_k": 4}, False),
        (["seed"], {}, False),
        (["seed", "temperature"], {}, True),
        (["seed", "temperature"], {"temperature": 0.3, "seed": 1}, True),
        (["seed"], {"temperature": 0.0, "grammar": Grammar("regex", "a")}, False),
        (["seed"], {"temperature": 0.0, "logprobs": 0}, False),
        (["seed", "logprobs"], {"temperature": 0.0, "logprobs": 0}, True),
    ],
)
def test_what_may_be_resumed_is_what_the_engine_named(resumable, fields, expected):
    assert may_go_on(SamplingParams(max_new_tokens=3, **fields), resumable) is expected


# A detokenizer starts anew


def test_a_new_detokenizer_is_told_what_its_requests_were(in_loop):
    async def test(owner):
        numbers = {}
        for text in ("é!", "x", ""):
            number, _, _ = await stream(owner, text)
            message = await owner.sent_one()
            numbers[number] = (message.detokenizer, len(text.encode()), len(text))
        owner.manager.results.recovery.detokenizer_started(0)
        question = await live_req(owner)
        said = zip(question.numbers, question.token_counts, question.text_lengths, strict=True)
        assert {n: counts for n, *counts in said} == {n: list(counts) for n, (_, *counts) in numbers.items()}
        assert question.resend == sorted(n for n, (detokenizer, *_) in numbers.items() if detokenizer == 0)

    in_loop(test, detokenizers=2)


def test_a_row_that_was_sent_again_is_cut_where_the_owner_is(in_loop):
    async def test(owner):
        owner.manager.models[0].text_tools.decoder_is_loaded = True
        params = SamplingParams(max_new_tokens=9, logprobs=0)
        number, call, sink = await stream(owner, "", sampling_params=params)
        owner.deliver(text_rows((number, "é", 0, None), extras=logprob_extras([-1.0, -2.0])))
        owner.deliver(text_rows((number, "b", 2, None), extras=logprob_extras([-3.0])))
        # It was asked for when the owner had the first two ids.
        extras = logprob_extras([-3.0, -4.0])
        owner.deliver(rebuilt([(number, "bc", 2, None)], [1], extras=extras))
        owner.deliver(rebuilt([(number, "éb", 0, None)], [0], extras=logprob_extras([-1.0, -2.0, -3.0])))
        owner.deliver(text_rows((number, "d", 4, LENGTH), extras=logprob_extras([-5.0])))
        await until(lambda: call.ended)
        assert sink.text == "ébcd"
        assert b"".join(output.output_ids for output in sink.outputs) == pack(list("ébcd".encode()))
        logprobs = [p for output in sink.outputs for p in output.logprobs or []]
        assert logprobs == [-1.0, -2.0, -3.0, -4.0, -5.0]

    in_loop(test)


def test_rows_that_were_sent_again_share_a_message_with_others(in_loop):
    async def test(owner):
        one, _, first = await stream(owner, "ab")
        two, _, second = await stream(owner, "x")
        owner.deliver(rebuilt([(one, "abc", 0, None), (two, "y", 1, None), (999, "z", 5, None)], [0, None, 2]))
        await until(lambda: first.text == "abc" and second.text == "xy")

    in_loop(test)


def test_an_end_that_was_lost_comes_with_the_rebuilt_row(in_loop):
    async def test(owner):
        number, call, sink = await stream(owner, "ab")
        owner.deliver(rebuilt([(number, "", 2, FinishReason("stop", "END"))], [2]))
        await until(lambda: call.ended)
        assert sink.outputs[-1].finish == FinishReason("stop", "END")
        assert sink.text == "ab"

    in_loop(test)


# The router starts anew


def test_a_new_router_is_told_the_live_list_and_what_was_lost_is_sent_again(in_loop):
    async def test(owner):
        begun, _, streaming = await stream(owner, "ab")
        gone, _, vanished = await stream(owner, "xy")
        lost, _, waiting = await stream(owner)
        messages = [await owner.sent_one() for _ in range(3)]
        recovery = owner.manager.results.recovery
        recovery.router_died()
        recovery.router_started()
        question = await live_req(owner)
        assert (question.numbers, question.resend) == ([begun, gone, lost], [])
        owner.deliver(answer(question, known=[begun]))
        assert await owner.sent_one() == messages[2]
        await until(lambda: vanished.errors)
        assert vanished.errors == [(500, "the request was lost when a part of the server died")]
        assert not streaming.errors
        assert not waiting.heard

    in_loop(test, manager_class=TokenizerWorker)


def test_a_new_router_is_told_that_nothing_is_live_so_that_lost_aborts_are_made_up_for(in_loop):
    async def test(owner):
        owner.manager.results.recovery.router_started()
        assert (await live_req(owner)).numbers == []

    in_loop(test)


def test_a_question_that_died_with_the_router_is_asked_anew(in_loop):
    async def test(owner):
        number, _, sink = await stream(owner, "ab")
        owner.deliver(text_rows((number, "d", 3, None)))
        first = await live_req(owner)
        assert first.resend == [number]
        recovery = owner.manager.results.recovery
        recovery.router_died()
        recovery.router_started()
        second = await live_req(owner)
        assert (second.numbers, second.resend) == ([number], [number])
        assert second.number != first.number
        # An answer to the old one is nobody's.
        owner.deliver(answer(first, known=[]), rebuilt([(number, "cd", 2, None)], [2]), answer(second))
        await until(lambda: sink.text == "abcd")
        assert not sink.errors

    in_loop(test)


def test_a_question_without_an_answer_is_asked_again_and_then_given_up(in_loop, monkeypatch, make_site, caplog):
    monkeypatch.setattr(recovery, "_ASK_AGAIN_S", 0.01)
    monkeypatch.setattr("multitok.tokenizer.manager._PATIENCE_S", 0.0)
    site = make_site(step_timeout=0.05)

    async def test(owner):
        number, _, silent = await stream(owner, "ab")
        _, _, other = await stream(owner, "xy")
        owner.deliver(text_rows((number, "d", 3, None)))
        questions = [await live_req(owner) for _ in range(3)]
        assert len({question.number for question in questions}) == 3
        assert all(question.resend == [number] for question in questions)
        await until(lambda: silent.errors and other.errors)
        assert silent.errors == [(500, "the request was lost: no scheduler has answered for it")]
        while not isinstance(message := await owner.sent_one(), AbortReq):
            pass
        assert message.number == number
        assert "scheduler(s) [0] have not said what they have" in caplog.text

    in_loop(test, site=site)


# Gaps


def test_a_gap_is_asked_for_once_for_all_requests_and_filled(in_loop):
    async def test(owner):
        one, _, first = await stream(owner, "a")
        two, _, second = await stream(owner, "x")
        owner.deliver(text_rows((one, "c", 2, None), (two, "z", 2, None)))
        owner.deliver(text_rows((one, "d", 3, None), (two, "!", 3, LENGTH)))
        question = await live_req(owner)
        assert (question.numbers, question.resend) == ([one, two], [one, two])
        assert (question.token_counts, question.text_lengths) == ([1, 1], [1, 1])
        owner.deliver(rebuilt([(one, "bcd", 1, None), (two, "yz!", 1, LENGTH)], [1, 1]), answer(question))
        owner.deliver(text_rows((one, "e", 4, LENGTH)))
        await until(lambda: first.text == "abcde")
        assert second.text == "xyz!"
        assert not first.errors
        assert not second.errors
        # One question was enough; what follows are acknowledgements.
        assert isinstance(await owner.sent_one(), AckReq)

    in_loop(test)


def test_the_same_gap_again_fails_the_request(in_loop):
    async def test(owner):
        number, call, sink = await stream(owner, "a")
        owner.deliver(text_rows((number, "c", 2, None)))
        owner.deliver(answer(await live_req(owner)))
        await until(lambda: not owner.manager.results.recovery._resend)
        owner.deliver(text_rows((number, "d", 3, None)))
        await until(lambda: call.ended)
        assert sink.errors == [(500, "a part of the answer was lost")]
        assert await owner.sent_one() == AbortReq(number=number, http_worker_ipc="w1.1")

    in_loop(test)


def test_a_later_gap_is_asked_for_too(in_loop):
    async def test(owner):
        number, call, sink = await stream(owner, "a")
        owner.deliver(text_rows((number, "c", 2, None)))
        question = await live_req(owner)
        owner.deliver(rebuilt([(number, "bc", 1, None)], [1]), answer(question))
        await until(lambda: not owner.manager.results.recovery._resend)
        owner.deliver(text_rows((number, "e", 4, LENGTH)))
        question = await live_req(owner)
        assert (question.resend, question.token_counts) == ([number], [3])
        owner.deliver(rebuilt([(number, "de", 3, LENGTH)], [3]), answer(question))
        await until(lambda: call.ended)
        assert sink.text == "abcde"
        assert not sink.errors

    in_loop(test)


# Silence


def test_a_lost_end_is_noticed(in_loop, monkeypatch):
    monkeypatch.setattr(recovery, "_SILENCE_S", 0.02)

    async def test(owner):
        number, call, sink = await stream(owner, "ab")
        question = await live_req(owner)
        assert (question.numbers, question.resend) == ([number], [number])
        owner.deliver(rebuilt([(number, "c", 2, LENGTH)], [2]), answer(question))
        await until(lambda: call.ended)
        assert sink.text == "abc"

    in_loop(test)


def test_a_lost_embedding_is_noticed(in_loop, monkeypatch):
    monkeypatch.setattr(recovery, "_SILENCE_S", 0.02)

    async def test(owner):
        call, sink = owner.submit_embedding(["ab"])
        question = await live_req(owner)
        owner.deliver(vectors((question.resend[0], b"1111", FinishReason("stop"))), answer(question))
        await until(lambda: call.ended)
        assert [output.embedding for output in sink.outputs] == [b"1111"]

    in_loop(test, info=engine_info(task="embed"))


def test_nobody_is_asked_while_results_come_or_nothing_is_awaited(in_loop, monkeypatch):
    monkeypatch.setattr(recovery, "_SILENCE_S", 1000.0)

    async def test(owner):
        look = owner.manager.results.recovery._look_for_silence
        look()
        number, call, sink = await stream(owner, "a")
        for first in range(1, 4):
            look()
            owner.deliver(text_rows((number, "a", first, LENGTH if first == 3 else None)))
            await until(lambda count=first: len(sink.outputs) > count)
        assert call.ended
        look()
        assert isinstance(await owner.sent_one(), TokenizedGenerateReqInput)
        assert isinstance(await owner.sent_one(), AckReq)

    in_loop(test)


def test_a_request_that_is_silent_for_long_is_asked_about_ever_more_rarely(in_loop, monkeypatch):
    monkeypatch.setattr(recovery, "_SILENCE_S", 1000.0)

    async def test(owner):
        await stream(owner)
        asked = []
        for look in range(30):
            owner.manager.results.recovery._look_for_silence()
            await asyncio.sleep(0)
            if owner.manager.results.recovery._timer is not None:
                question = await live_req(owner)
                owner.deliver(answer(question))
                await until(lambda: owner.manager.results.recovery._timer is None)
                asked.append(look)
        assert asked == [1, 2, 4, 8, 16, 24]

    in_loop(test)


# What can't be sent


class Busy:
    """Schedulers that do not read for a while."""

    def __init__(self) -> None:
        self.refusals = 0
        self.taken: list[bytes] = []

    def send_frames(self, frames) -> None:
        if self.refusals:
            self.refusals -= 1
            raise zmq.Again
        self.taken.append(bytes(frames[1]))


def test_aborts_that_the_schedulers_do_not_take_are_made_up_for_by_one_list(in_loop):
    busy = Busy()

    async def test(owner):
        calls = [owner.submit("ab", n=50)[0] for _ in range(3)]
        keeps, _ = owner.submit("ab")
        busy.refusals = 152
        taken = len(busy.taken)
        for call in calls:
            call.abort()
        await until(lambda: len(busy.taken) > taken)
        (payload,) = busy.taken[taken:]
        question = owner._payloads.decode(payload)
        assert isinstance(question, LiveReq)
        assert question.numbers == list(keeps.running)

    in_loop(test, sender=busy)


def test_what_a_rank_was_left_out_of_is_made_up_for_by_a_list(in_loop, monkeypatch):
    monkeypatch.setattr(recovery, "_SILENCE_S", 1000.0)

    async def test(owner):
        owner.deliver(LiveListWanted())
        first = await live_req(owner)
        assert first.numbers == []
        number, _, _ = await stream(owner)
        # The open question may be older than what was left out now.
        owner.deliver(LiveListWanted(), answer(first))
        second = await live_req(owner)
        assert second.numbers == [number]
        assert (first.upto, second.upto) == (number - 1, number)
        owner.deliver(answer(second))
        await until(lambda: owner.manager.results.recovery._question is None)
        owner.submit("mark", request_id="mark")
        assert (await owner.sent_one()).rid == "mark"

    in_loop(test)


def test_in_single_mode_a_rank_that_does_not_read_is_asked_until_it_has_answered(in_loop, make_site, monkeypatch):
    monkeypatch.setattr(recovery, "_ASK_AGAIN_S", 0.05)
    site = make_site(ranks=2)
    with monkeypatch.context() as lower:
        lower.setattr(sockets, "HIGH_WATER_MARK", 3)
        dispatcher = site.keep(RankDispatcher(site.port_args, RoundRobinPolicy()))

    async def test(owner):
        _Parts(owner.manager, dispatcher)
        # Nobody is at rank 1 yet.
        owner.schedulers.pop().socket.close(linger=0)
        calls = [owner.submit("ab")[0] for _ in range(4)]
        for call in calls:
            call.abort()
        assert dispatcher.dropped
        assert (await live_req(owner, 0)).numbers == []
        await live_req(owner, 0)
        owner.schedulers.append(site.inbox("s1", None))
        assert (await live_req(owner, 1)).numbers == []

    in_loop(test, site=site, sender=dispatcher)


def test_a_request_that_can_not_be_sent_again_fails(in_loop):
    busy = Busy()

    async def test(owner):
        _, _, sink = await stream(owner)
        recovery = owner.manager.results.recovery
        recovery.rank_died(0, 1)
        busy.refusals = 1
        recovery.rank_started(0, 2)
        assert sink.errors == [(503, ENGINE_DIED)]

    in_loop(test, sender=busy, resume=True)


# An owner that decodes for itself


def test_an_owner_that_decodes_for_itself_begins_anew_with_the_next_life(in_loop):
    step = DetokenizerStep([TextDecoder.from_tokenizer(byte_tokenizer())])

    def row(number, text, first, life, params=None, before=None, finish=None):
        ids = list(text.encode()) if isinstance(text, str) else list(text)
        extras = before and OutputExtras(decode_ids=[pack(list(before))], read_offsets=[len(before.decode())])
        return BatchTokenIDOutput(
            numbers=[number],
            http_worker_ipcs=["w1.1"],
            output_ids=pack(ids),
            output_lengths=None if len(ids) == 1 else [len(ids)],
            first_indexes=[first],
            decode_params=None if params is None else [params],
            finished_reasons=None if finish is None else [finish],
            extras=extras,
            rank=0,
            life=life,
        )

    async def test(owner):
        number, call, sink = await stream(owner)
        sent = await owner.sent_one()
        owner.deliver(row(number, "ab", 0, 1, sent.decode_params))
        await until(lambda: sink.text == "ab")
        assert len(step) == 1
        owner.deliver(RankDied(rank=0, life=1))
        await until(lambda: not len(step))
        owner.deliver(row(number, "x", 2, 1), RankStarted(rank=0, life=2))
        again = await owner.sent_one()
        assert unpacked(again.resumed_ids) == "ab"
        owner.deliver(row(number, "cd", 2, 2, DecodeParams(), b"ab"), row(number, "e", 4, 2, finish=LENGTH))
        await until(lambda: call.ended)
        assert sink.text == "abcde"
        assert not sink.errors
        assert len(step) == 0

    in_loop(test, detokenize_step=step, resume=True, info=RESUMABLE)


# Several models


def with_two_models(in_loop, make_site, test, **options):
    """Run a test whose requests are for the first model at rank 0, and for the second at ranks 1 and 2."""
    args = {name: options.pop(name) for name in ("resume_generation",) if name in options}
    in_loop(test, site=make_site(ranks=3, models=[[0], [1, 2]], **args), **options)


def test_a_dead_scheduler_takes_no_request_of_another_model_along(in_loop, make_site):
    async def test(owner):
        _, _, streaming = await stream(owner, "ab", rank=0)
        _, _, waiting = await stream(owner)
        kept, _, other = await stream(owner, "xy", rank=1, model=1)
        _, _, other_waiting = await stream(owner, model=1)
        owner.deliver(RankDied(rank=0, life=1))
        await until(lambda: streaming.errors and waiting.errors)
        with pytest.raises(RequestError, match="the engine has died"):
            owner.submit("x")
        owner.submit("x", model=1)
        owner.deliver(text_rows((kept, "z", 2, LENGTH), rank=1, life=1))
        await until(lambda: other.text == "xyz")
        assert not other.errors
        assert not other_waiting.errors

    with_two_models(in_loop, make_site, test)


def test_what_is_held_waits_for_a_rank_of_its_own_model(in_loop, make_site):
    async def test(owner):
        first, _, _ = await stream(owner, "ab", rank=0)
        second, _, _ = await stream(owner, "xy", rank=1, model=1)
        for rank in range(3):
            owner.deliver(RankDied(rank=rank, life=1))
        await until(lambda: not any(owner.manager.results.recovery.any_rank_is_up(model) for model in (0, 1)))
        owner.deliver(RankStarted(rank=2, life=2))
        while not isinstance(again := await owner.sent_one(2), TokenizedGenerateReqInput) or not again.resumed_ids:
            pass
        assert (again.number, again.model) == (second, 1)
        owner.deliver(RankStarted(rank=0, life=2))
        while not isinstance(again := await owner.sent_one(0), TokenizedGenerateReqInput) or not again.resumed_ids:
            pass
        assert (again.number, again.model) == (first, 0)

    with_two_models(in_loop, make_site, test, resume_generation=True, info=RESUMABLE)
