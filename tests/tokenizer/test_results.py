from __future__ import annotations

import asyncio

import pytest
from owner_under_test import Sink, engine_info, logprob_extras, owner_of, text_rows, until

from multitok.detokenizer.incremental import TextDecoder
from multitok.detokenizer.step import DetokenizerStep
from multitok.messages.base import FinishReason
from multitok.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, OutputExtras, RefusedReq
from multitok.messages.to_scheduler import AbortReq, AckReq, DecodeParams
from multitok.messages.to_tokenizer import GetInternalStateReqOutput
from multitok.tokenizer.requests import EmbeddingInput
from parts import byte_tokenizer, pack

LENGTH = FinishReason("length")
STOP_STRING = FinishReason("stop", "END")


@pytest.fixture
def in_loop(make_site):
    """Run a coroutine function with an owner of its own."""

    def run(test, *, site=None, **options):
        async def main():
            async with owner_of(site or make_site(), **options) as owner:
                await test(owner)

        asyncio.run(main())

    return run


# Delivery


def test_a_steps_results_reach_their_sinks_and_each_call_hears_of_the_end_once(in_loop):
    async def test(owner):
        _, double = owner.submit("ab", n=2)
        one, two = [child.number for child in await owner.sent()]
        three, _, single = await owner.start_one()
        owner.deliver(text_rows((one, "a", 0, None), (three, "x", 0, None), (two, "b", 0, None)))
        await until(lambda: single.heard[-1:] == ["step end"])
        assert [getattr(event, "text", event) for event in double.heard] == ["a", "b", "step end"]
        assert [output.index for output in double.outputs] == [0, 1]
        assert [getattr(event, "text", event) for event in single.heard] == ["x", "step end"]

    in_loop(test)


def test_an_output_has_its_ids_and_counts(in_loop):
    async def test(owner):
        number, call, sink = await owner.start_one()
        extras = OutputExtras(
            output_token_logprobs=[[-1.0, -2.0]], output_top_logprobs=[[[(1, -0.5)], []]], reasoning_tokens=[4]
        )
        owner.deliver(text_rows((number, "ab", 0, None), extras=extras, cached_tokens=[2]))
        owner.deliver(text_rows((number, "c", 2, LENGTH), extras=logprob_extras([-3.0])))
        await until(lambda: call.ended)
        first, last = sink.outputs
        assert (first.output_ids, first.completion_tokens, first.finish) == (pack(list(b"ab")), 2, None)
        assert (first.logprobs, first.top_logprobs) == ([-1.0, -2.0], [[(1, -0.5)], []])
        assert (last.output_ids, last.completion_tokens, last.finish) == (pack(list(b"c")), 3, LENGTH)
        assert (last.prompt_tokens, last.cached_tokens, last.logprobs) == (3, 2, [-3.0])
        assert first.reasoning_tokens == 4

    in_loop(test)


def test_results_that_came_before_the_loop_watched_are_delivered(in_loop):
    async def test(owner):
        number, _, sink = await owner.start_one()
        owner.deliver(text_rows((number, "a", 0, None)))
        await until(lambda: owner.manager.results._socket.poll(0))
        owner.manager.start()
        await until(lambda: sink.heard)
        assert sink.text == "a"

    in_loop(test, start=False)


def test_no_result_is_left_when_more_come_than_are_taken_at_once(in_loop):
    async def test(owner):
        number, _, sink = await owner.start_one()
        for first in range(2000):
            owner.deliver(text_rows((number, "x", first, None)))
        await until(lambda: len(sink.outputs) == 2000)
        assert sink.outputs[-1].completion_tokens == 2000

    in_loop(test)


def test_others_have_their_turn_between_many_results(in_loop, monkeypatch):
    waiting = [[b"result"] for _ in range(20)]
    turns: list[int] = [0]
    taken: list[int] = []

    def drain(socket):
        while waiting:
            yield waiting.pop()

    def turn():
        turns[0] += 1
        if waiting:
            asyncio.get_running_loop().call_soon(turn)

    async def test(owner):
        results = owner.manager.results
        monkeypatch.setattr("multitok.tokenizer.results._TURN_S", 0.0)
        monkeypatch.setattr("multitok.tokenizer.results.drain", drain)
        monkeypatch.setattr(results, "_take", lambda frame: taken.append(turns[0]))
        turn()
        # Edges that come meanwhile are no turns of their own.
        for _ in range(5):
            results._on_readable()
        await until(lambda: not waiting)
        assert taken == list(range(1, 21))

    in_loop(test)


def test_what_cannot_be_decoded_or_is_foreign_or_unasked_for_is_dropped_and_the_rest_goes_on(in_loop, caplog):
    async def test(owner):
        number, _, sink = await owner.start_one()
        token = owner.site.token
        for frame in (b"not-ours", b"", token + b"\xc1", token + b"\x92\x12" + b"\x91" * 100_000):
            owner.site.send_frames("w1.1", [frame])
        owner.deliver(GetInternalStateReqOutput(number=1, rank=0, running=0, queued=0, unacknowledged=0, kv_used=0.0))
        owner.deliver(BatchTokenIDOutput(numbers=[number], output_ids=b"\0\0\0\0", first_indexes=[0]))
        owner.deliver(text_rows((number, "a", 0, None)))
        await until(lambda: sink.heard)
        assert sink.text == "a"
        for message in (
            "results can't be used",
            "not of this start",
            "GetInternalStateReqOutput came, which nobody asked for",
            "ids came to an owner that does not decode",
        ):
            assert message in caplog.text

    in_loop(test)


def test_an_owner_may_decode_for_itself(in_loop):
    step = DetokenizerStep([TextDecoder.from_tokenizer(byte_tokenizer())])

    async def test(owner):
        number, call, sink = await owner.start_one()
        ids = list("é!".encode())
        for first, token_id in enumerate(ids):
            owner.deliver(
                BatchTokenIDOutput(
                    numbers=[number],
                    http_worker_ipcs=["w1.1"],
                    output_ids=pack([token_id]),
                    first_indexes=[first],
                    decode_params=None if first else [DecodeParams()],
                    finished_reasons=[LENGTH] if token_id == ids[-1] else None,
                )
            )
        await until(lambda: call.ended)
        assert [output.text for output in sink.outputs] == ["", "é", "!"]
        assert len(step) == 0

    in_loop(test, detokenize_step=step)


# Repeats


def test_results_that_come_again_are_dropped(in_loop):
    async def test(owner):
        number, call, sink = await owner.start_one()
        first, second = text_rows((number, "ab", 0, None)), text_rows((number, "c", 2, None))
        owner.deliver(first, first, second, first, second, text_rows((number, "d", 3, LENGTH)))
        await until(lambda: call.ended)
        assert sink.text == "abcd"
        assert [output.completion_tokens for output in sink.outputs] == [2, 3, 4]

    in_loop(test)


# Ends


def test_a_stop_strings_end_is_told_to_the_engine_at_once(in_loop):
    async def test(owner):
        number, call, sink = await owner.start_one()
        owner.deliver(text_rows((number, "a", 0, STOP_STRING)))
        assert await owner.sent_one() == AbortReq(number=number, http_worker_ipc="w1.1")
        assert call.ended
        (output,) = sink.outputs
        assert (output.finish, output.prompt_tokens, output.completion_tokens) == (STOP_STRING, 3, 1)

    in_loop(test)


def test_ends_are_acknowledged_in_batches(in_loop):
    async def test(owner):
        numbers = []
        for _ in range(10):
            number, _, _ = await owner.start_one()
            numbers.append(number)
        for number in numbers:
            owner.deliver(text_rows((number, "a", 0, FinishReason("stop", 97))))
        assert await owner.sent_one() == AckReq(numbers=numbers, http_worker_ipc="w1.1")
        assert owner.has_sent_nothing()

    in_loop(test)


def test_many_ends_are_acknowledged_without_waiting(in_loop, monkeypatch):
    monkeypatch.setattr("multitok.tokenizer.results._ACK_DELAY_S", 1000.0)

    async def test(owner):
        owner.submit("a", n=100)
        numbers = [child.number for child in await owner.sent()]
        owner.deliver(text_rows(*((number, "x", 0, LENGTH) for number in numbers)))
        message = await owner.sent_one()
        assert isinstance(message, AckReq)
        assert message.numbers == numbers[:64]
        # The others are said when the owner closes, at the latest.
        await until(lambda: len(owner.manager.results) == 0)
        owner.manager.results.close()
        assert (await owner.sent_one()).numbers == numbers[64:]
        owner.manager.results.close = lambda: None

    in_loop(test)


def test_the_end_of_a_request_that_nobody_waits_for_is_acknowledged(in_loop):
    async def test(owner):
        owner.deliver(text_rows((12345, "a", 7, LENGTH)))
        assert (await owner.sent_one()).numbers == [12345]

    in_loop(test)


@pytest.mark.parametrize(
    ("finish", "error", "said"),
    [
        (FinishReason("error", None, 500, "the engine failed"), (500, "the engine failed"), AbortReq),
        (FinishReason("error", None, 507, "no memory"), (507, "no memory"), AbortReq),
    ],
)
def test_an_end_that_is_no_answer_is_an_error_of_the_call(in_loop, finish, error, said):
    async def test(owner):
        number, call, sink = await owner.start_one()
        owner.deliver(text_rows((number, "a", 0, None)), text_rows((number, "", 1, finish)))
        await until(lambda: call.ended)
        assert sink.errors == [error]
        assert sink.heard[-1].status == error[0]
        assert len(owner.manager.results) == 0
        assert await owner.sent_one() == said(number=number, http_worker_ipc="w1.1")

    in_loop(test)


def test_an_abort_by_somebody_else_is_an_end_with_what_came_so_far(in_loop):
    async def test(owner):
        number, call, sink = await owner.start_one()
        owner.deliver(text_rows((number, "a", 0, None)), text_rows((number, "b", 1, FinishReason("abort"))))
        await until(lambda: call.ended)
        assert sink.text == "ab"
        assert sink.outputs[-1].finish == FinishReason("abort")
        assert sink.outputs[-1].completion_tokens == 2
        assert not sink.errors
        assert len(owner.manager.results) == 0
        # The scheduler keeps nothing of it, so nothing is said.
        owner.submit("mark", request_id="mark")
        assert (await owner.sent_one()).rid == "mark"

    in_loop(test)


def test_a_refusal_of_one_choice_fails_the_call_and_ends_the_others(in_loop):
    async def test(owner):
        call, sink = owner.submit("ab", n=3)
        one, two, three = [child.number for child in await owner.sent()]
        owner.deliver(RefusedReq(number=two, http_worker_ipc="w1.1", status=503, message="too many"))
        await until(lambda: call.ended)
        assert sink.errors == [(503, "too many")]
        assert {(await owner.sent_one()).number for _ in range(2)} == {one, three}
        owner.deliver(RefusedReq(number=one, http_worker_ipc="w1.1", status=503, message="too many"))
        owner.deliver(RefusedReq(number=999, http_worker_ipc="w1.1", status=503, message="who?"))
        other, _, other_sink = await owner.start_one()
        owner.deliver(text_rows((other, "x", 0, None)))
        await until(lambda: other_sink.heard)
        assert len(sink.heard) == 1

    in_loop(test)


# Sinks that fail


class Failing(Sink):
    """Fails where it is told to."""

    def __init__(self, *where: str) -> None:
        super().__init__()
        self.where = where

    def _fail(self, name: str) -> None:
        if name in self.where:
            raise ConnectionResetError(f"the client is gone, in {name}")

    def on_output(self, output) -> None:
        self._fail("on_output")
        super().on_output(output)

    def on_step_end(self) -> None:
        self._fail("on_step_end")
        super().on_step_end()

    def on_error(self, error) -> None:
        super().on_error(error)
        self._fail("on_error")


@pytest.mark.parametrize("where", [("on_output",), ("on_step_end",), ("on_output", "on_error")])
def test_a_sink_that_fails_ends_its_own_call_and_no_other(in_loop, where):
    async def test(owner):
        one, bad_call, bad = await owner.start_one(Failing(*where))
        two, _, good = await owner.start_one()
        owner.deliver(text_rows((one, "a", 0, None), (two, "b", 0, None)))
        await until(lambda: good.heard[-1:] == ["step end"])
        assert good.text == "b"
        assert bad_call.ended
        ((status, message),) = bad.errors
        assert (status, "the client is gone" in message) == (500, True)
        assert (await owner.sent_one()).number == one
        owner.deliver(text_rows((one, "c", 1, None), (two, "d", 1, LENGTH)))
        await until(lambda: good.outputs[-1].finish)
        assert len(bad.errors) == 1

    in_loop(test)


def test_a_sink_that_fails_at_a_failure_ends_no_other(in_loop):
    async def test(owner):
        one, _, bad = await owner.start_one(Failing("on_error"))
        two, _, good = await owner.start_one()
        failed = FinishReason("error", None, 500, "x")
        owner.deliver(text_rows((one, "", 0, failed), (two, "b", 0, None)))
        await until(lambda: good.heard[-1:] == ["step end"])
        assert bad.errors == [(500, "x")]
        assert (await owner.sent_one()).number == one
        three, _, refused = await owner.start_one(Failing("on_error"))
        owner.deliver(RefusedReq(number=three, status=503, message="full"), text_rows((two, "c", 1, None)))
        await until(lambda: good.text == "bc")
        assert refused.errors == [(503, "full")]

    in_loop(test)


def test_a_sink_may_abort_from_inside(in_loop):
    class Leaving(Sink):
        def on_output(self, output) -> None:
            super().on_output(output)
            self.call.abort()

    async def test(owner):
        sink = Leaving()
        sink.call, _ = owner.submit("ab", sink, n=2)
        one, two = [child.number for child in await owner.sent()]
        other, _, good = await owner.start_one()
        owner.deliver(text_rows((one, "a", 0, None), (two, "b", 0, None), (other, "c", 0, None)))
        await until(lambda: good.heard)
        assert [output.text for output in sink.heard] == ["a"]
        assert {(await owner.sent_one()).number for _ in range(2)} == {one, two}

    in_loop(test)


# Embeddings


def vectors(*rows: tuple[int, bytes | None, FinishReason]) -> BatchEmbeddingOutput:
    embeddings = [embedding for _, embedding, _ in rows]
    return BatchEmbeddingOutput(
        numbers=[number for number, *_ in rows],
        http_worker_ipcs=["w1.1"] * len(rows),
        embeddings=embeddings if any(embeddings) else None,
        finished_reasons=[finish for *_, finish in rows],
        prompt_tokens=[1] * len(rows),
    )


STOP = FinishReason("stop")


def test_embeddings_come_back_with_their_index_and_are_acknowledged(in_loop):
    async def test(owner):
        call, sink = owner.submit_embedding(["ab", "cde"])
        one, two = [child.number for child in await owner.sent()]
        owner.deliver(vectors((two, b"2222", STOP)))
        owner.deliver(vectors((one, b"1111", STOP), (777, b"xxxx", STOP)))
        await until(lambda: call.ended)
        assert [(o.index, o.embedding, o.prompt_tokens) for o in sink.outputs] == [(1, b"2222", 3), (0, b"1111", 2)]
        assert (await owner.sent_one()).numbers == [two, one, 777]

    in_loop(test, info=engine_info(task="embed"))


def test_an_embedding_that_failed_fails_the_call_and_ends_the_others(in_loop):
    async def test(owner):
        call, sink = owner.submit_embedding(["ab", "cd", "ef"])
        numbers = [child.number for child in await owner.sent()]
        failed = FinishReason("error", None, 500, "no luck")
        owner.deliver(vectors((numbers[0], b"1111", STOP), (numbers[1], None, failed)))
        await until(lambda: call.ended)
        assert sink.errors == [(500, "no luck")]
        aborted = {(await owner.sent_one()).number for _ in range(2)}
        assert aborted == set(numbers[1:])
        assert len(owner.manager.results) == 0

    in_loop(test, info=engine_info(task="embed"))


def test_a_sink_that_fails_at_an_embedding_ends_no_other(in_loop):
    async def test(owner):
        bad = Failing("on_output")
        owner.manager.submit_embedding(EmbeddingInput(prompts=["ab"]), bad)
        bad_number = (await owner.sent_one()).number
        _, good = owner.submit_embedding(["cd"])
        good_number = (await owner.sent_one()).number
        owner.deliver(vectors((bad_number, b"1111", STOP), (good_number, b"2222", STOP)))
        await until(lambda: good.outputs)
        assert len(owner.manager.results) == 0

    in_loop(test, info=engine_info(task="embed"))
