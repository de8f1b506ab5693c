from __future__ import annotations

import asyncio
import threading
import zlib

import pytest
import zmq
from owner_under_test import Sink, engine_info, owner_of, text_rows, until

from multitok.ipc import sockets
from multitok.messages.base import FinishReason
from multitok.messages.numbers import owner_of as life_of
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_scheduler import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from multitok.router.policies import RoundRobinPolicy
from multitok.router.rank_dispatcher import RankDispatcher
from multitok.tokenizer.backends import ReferenceBackend
from multitok.tokenizer.requests import RequestError
from multitok.tokenizer.worker import TokenizerWorker
from parts import byte_tokenizer, pack

LENGTH = FinishReason("length")
# More characters than are tokenized inside the event loop.
LONG_TEXT = "x" * 5000


@pytest.fixture
def in_loop(make_site):
    """Run a coroutine function with an owner of its own."""

    def run(test, *, ranks=1, detokenizers=1, site=None, **options):
        async def main():
            async with owner_of(site or make_site(ranks=ranks, detokenizers=detokenizers), **options) as owner:
                await test(owner)

        asyncio.run(main())

    return run


# Sending


def test_a_text_is_sent_as_ids_with_the_owners_address_and_number(in_loop):
    async def test(owner):
        call, _ = owner.submit("héllo", stop=["x"], skip_special_tokens=False, stream=True, request_id="mine")
        message = await owner.sent_one()
        assert isinstance(message, TokenizedGenerateReqInput)
        assert message.input_ids == pack(list("héllo".encode()))
        assert call.prompt_ids == [message.input_ids]
        assert life_of(message.number) == "w1.1"
        assert message.rid == "mine"
        assert message.sampling_params == SamplingParams(max_new_tokens=5)
        params = message.decode_params
        assert (params.stop, params.skip_special_tokens, params.stream) == (["x"], False, True)
        assert params.prompt_tail == message.input_ids

    in_loop(test)


def test_text_with_log_probabilities_comes_step_by_step_whether_it_is_streamed_or_not(in_loop):
    async def test(owner):
        for logprobs, stream, in_steps in ((None, False, False), (None, True, True), (0, False, True), (2, True, True)):
            params = SamplingParams(max_new_tokens=5, logprobs=logprobs)
            owner.submit("a", sampling_params=params, stream=stream)
            assert (await owner.sent_one()).decode_params.stream == in_steps

    in_loop(test)


def test_only_a_raw_completion_goes_on_with_the_end_of_its_prompt(in_loop):
    async def test(owner):
        owner.submit("abcdefghijklmnopqrstuvwxyz")
        owner.submit("abcdefghijklmnopqrstuvwxyz", raw=False)
        raw, chat = await owner.sent_one(), await owner.sent_one()
        assert raw.decode_params.prompt_tail == pack(list(b"klmnopqrstuvwxyz"))
        assert chat.decode_params.prompt_tail == b""

    in_loop(test)


def test_several_prompts_and_choices_are_one_message_in_order_with_seeds_of_their_own(in_loop):
    async def test(owner):
        params = SamplingParams(max_new_tokens=5, seed=40)
        call, sink = owner.submit(["ab", pack([1, 2]), "cd"], n=2, sampling_params=params, request_id="r", priority=3)
        children = await owner.sent()
        prompts = [pack(list(b"ab")), pack([1, 2]), pack(list(b"cd"))]
        assert [child.input_ids for child in children] == [prompt for prompt in prompts for _ in range(2)]
        assert call.prompt_ids == prompts
        assert [child.rid for child in children] == [f"r-{i}" for i in range(6)]
        assert [child.sampling_params.seed for child in children] == [40, 41] * 3
        assert {child.priority for child in children} == {3}
        assert len({child.number for child in children}) == 6
        # Whatever order they end in, each is told which choice it is.
        for i in (4, 0, 5, 2, 1, 3):
            owner.deliver(text_rows((children[i].number, str(i), 0, LENGTH)))
        await until(lambda: len(sink.outputs) == 6)
        assert [(output.index, output.text) for output in sink.outputs] == [(i, str(i)) for i in (4, 0, 5, 2, 1, 3)]
        assert call.ended
        assert len(owner.manager.results) == 0

    in_loop(test)


def test_without_a_seed_the_engine_chooses(in_loop):
    async def test(owner):
        owner.submit("ab", n=3)
        assert [child.sampling_params.seed for child in await owner.sent()] == [None] * 3

    in_loop(test)


def test_children_of_one_call_go_to_different_ranks(in_loop):
    async def test(owner):
        owner.submit("ab", n=4)
        ranks = [await owner.sent(0), await owner.sent(1)]
        assert [len(children) for children in ranks] == [2, 2]

    in_loop(test, ranks=2)


def test_detokenizers_are_taken_in_turn(in_loop):
    async def test(owner):
        owner.submit("ab", n=4)
        owner.submit("cd", n=2)
        chosen = [child.detokenizer for _ in range(2) for child in await owner.sent()]
        assert sorted(chosen[:3]) == [0, 1, 2]
        assert chosen[3:] == chosen[:3]

    in_loop(test, detokenizers=3)


# Limits


def refused(owner, *arguments, **options) -> tuple[int, str, str | None]:
    sink = Sink()
    with pytest.raises(RequestError) as caught:
        owner.submit(*arguments, sink, **options)
    assert sink.heard == []
    assert owner.has_sent_nothing()
    assert len(owner.manager.results) == 0
    error = caught.value
    return error.status, error.message, error.param


def test_what_does_not_fit_is_refused_and_nothing_is_sent(in_loop):
    async def test(owner):
        for prompt in ("", b""):
            assert refused(owner, [prompt]) == (400, "the prompt is empty", "prompt")
        status, message, param = refused(owner, "x" * 100)
        assert (status, param) == (400, "prompt")
        assert "leaves no room in the context of 100" in message
        status, message, param = refused(owner, "x" * 90, tokens=11)
        assert (status, param) == (400, "max_tokens")
        assert "has room for 10 after the prompt of 90, and 11 were asked for" in message
        # One wrong prompt among several refuses all of them.
        assert refused(owner, ["ab", "", "cd"])[0] == 400

    in_loop(test)


def test_a_prompt_that_is_longer_than_the_operator_wants_is_refused(make_site, in_loop):
    async def generates(owner):
        expected = (400, "the prompt of 11 tokens is longer than the limit of 10", "prompt")
        assert refused(owner, "x" * 11) == expected
        assert refused(owner, [pack([1] * 11)]) == expected
        owner.submit("x" * 10)
        _, sink = owner.submit(LONG_TEXT)
        await until(lambda: sink.errors)
        assert sink.errors[0][0] == 400

    async def embeds(owner):
        with pytest.raises(RequestError, match="the input of 11 tokens exceeds the limit of 10"):
            owner.submit_embedding(["x" * 11])
        owner.submit_embedding(["x" * 20 + "!"], truncate=True)
        assert (await owner.sent_one()).input_ids == pack(list(b"x" * 9 + b"!"))

    in_loop(generates, site=make_site(max_prompt_tokens=10))
    in_loop(embeds, site=make_site(max_prompt_tokens=10), info=engine_info(task="embed"))


def test_nothing_is_tokenized_while_no_scheduler_has_room(in_loop):
    backend = GatedBackend()
    full = [True]

    async def test(owner):
        status, message, _ = refused(owner, "ab")
        assert (status, message) == (503, "too many requests are waiting; try again later")
        assert backend.threads == []
        full[0] = False
        owner.submit("ab")
        assert (await owner.sent_one()).input_ids == pack(list(b"ab"))

    in_loop(test, backend=backend, is_full=lambda: full[0])


@pytest.mark.parametrize(
    ("option", "wanted", "expected"),
    [(None, None, None), (None, 3.0, 3.0), (5.0, None, 5.0), (5.0, 3.0, 3.0), (2.0, 3.0, 2.0)],
)
def test_the_shorter_time_limit_counts_and_the_tenant_is_told(make_site, in_loop, option, wanted, expected):

    async def generates(owner):
        owner.submit("ab", timeout=wanted, tenant=77)
        message = await owner.sent_one()
        assert (message.timeout, message.queue_timeout, message.tenant) == (expected, 7.0, 77)

    async def embeds(owner):
        owner.submit_embedding(["ab"], timeout=wanted, tenant=77)
        message = await owner.sent_one()
        assert (message.timeout, message.queue_timeout, message.tenant) == (expected, 7.0, 77)

    in_loop(generates, site=make_site(request_timeout=option, queue_timeout=7.0))
    # A place of its own: a socket that closes takes its address along, some time later.
    in_loop(embeds, site=make_site(request_timeout=option, queue_timeout=7.0), info=engine_info(task="embed"))


def test_the_same_id_has_the_same_rank_whoever_sends_it(in_loop):
    async def test(owner):
        for _ in range(5):
            owner.submit("ab", request_id="mine", id_is_given=True)
            owner.submit("ab", n=2, request_id="mi", id_is_given=True)
        at: dict[str, set[int]] = {}
        for rank, scheduler in enumerate(owner.schedulers):
            while scheduler.socket.poll(200):
                for child in await owner.sent(rank):
                    at.setdefault(child.rid, set()).add(rank)
        assert at == {rid: {zlib.crc32(rid.encode()) % 3} for rid in ("mine", "mi-0", "mi-1")}

    in_loop(test, ranks=3)


def test_without_a_limit_of_its_own_a_request_has_the_room_that_is_left(in_loop):
    async def test(owner):
        owner.submit(["x" * 90, "y" * 99], tokens=None)
        assert [child.sampling_params.max_new_tokens for child in await owner.sent()] == [10, 1]
        owner.submit("x" * 90, tokens=10)
        assert (await owner.sent_one()).sampling_params.max_new_tokens == 10

    in_loop(test)


def test_a_model_of_the_other_kind_refuses(in_loop):
    async def generates(owner):
        with pytest.raises(RequestError, match="only generates text"):
            owner.submit_embedding(["a"])

    async def embeds(owner):
        assert refused(owner, "a")[:2] == (400, "the model bytes only makes embeddings")

    in_loop(generates)
    in_loop(embeds, info=engine_info(task="embed"))


def test_an_embedding_that_is_too_long_is_cut_only_where_that_is_wanted(in_loop):
    async def test(owner):
        with pytest.raises(RequestError, match="the input of 101 tokens exceeds the limit of 100"):
            owner.submit_embedding(["x" * 101])
        call, _ = owner.submit_embedding(["x" * 120 + "!", "ab"], truncate=True, request_id="e")
        children = await owner.sent()
        assert all(isinstance(child, TokenizedEmbeddingReqInput) for child in children)
        assert [child.input_ids for child in children] == [pack(list(b"x" * 99 + b"!")), pack(list(b"ab"))]
        assert call.prompt_ids == [child.input_ids for child in children]
        assert [child.rid for child in children] == ["e-0", "e-1"]

    in_loop(test, info=engine_info(task="embed"))


def test_a_scheduler_that_does_not_read_is_a_503(make_site, monkeypatch, in_loop):
    monkeypatch.setattr(sockets, "HIGH_WATER_MARK", 2)
    site = make_site()

    async def test(owner):
        owner.schedulers[0].socket.close(linger=0)
        taken = 0
        with pytest.raises(RequestError, match="does not take requests at the moment") as caught:
            while taken < 100:
                owner.submit("ab")
                taken += 1
        assert caught.value.status == 503
        assert len(owner.manager.results) == taken

    in_loop(test, site=site)


def test_a_call_of_many_requests_is_sent_in_parts_and_ends_as_one(in_loop, monkeypatch):
    monkeypatch.setattr("multitok.tokenizer.manager._SENT_AT_ONCE", 3)

    async def test(owner):
        call, sink = owner.submit("ab", n=8, request_id="r")
        children = await owner.sent()
        # The first part has ended before the second is sent.
        owner.deliver(text_rows(*((child.number, "x", 0, LENGTH) for child in children)))
        children += await owner.sent() + await owner.sent()
        assert [child.rid for child in children] == [f"r-{i}" for i in range(8)]
        await until(lambda: len(sink.outputs) == 3)
        assert not call.ended
        owner.deliver(text_rows(*((child.number, "x", 0, LENGTH) for child in children[3:])))
        await until(lambda: call.ended)
        assert [output.index for output in sink.outputs] == list(range(8))
        # What is left of a call that was aborted is not sent.
        call, _ = owner.submit("ab", n=8)
        call.abort()
        parts = [await owner.sent() for _ in range(9)]
        assert [len(part) for part in parts] == [3, *[1] * 8]
        assert {type(message) for part in parts[1:] for message in part} == {AbortReq}
        assert owner.has_sent_nothing()

    in_loop(test)


@pytest.mark.parametrize("read", [0, 1])
def test_a_call_whose_later_parts_are_not_taken_fails(in_loop, monkeypatch, read):
    monkeypatch.setattr("multitok.tokenizer.manager._SENT_AT_ONCE", 3)

    async def test(owner):
        send = owner.manager._sender.send
        sent = []

        def refuse(message, given_id=False):
            if isinstance(message, BatchTokenizedGenerateReqInput):
                if len(sent) == read:
                    raise zmq.Again
                sent.append(message)
            send(message, given_id)

        monkeypatch.setattr(owner.manager._sender, "send", refuse)
        if not read:
            with pytest.raises(RequestError, match="does not take requests at the moment"):
                owner.submit("ab", n=8)
        else:
            call, sink = owner.submit("ab", n=8)
            await until(lambda: sink.errors)
            assert sink.errors[0][0] == 503
            assert call.ended
        assert len(owner.manager.results) == 0

    in_loop(test)


def test_what_reached_one_rank_of_a_refused_call_is_aborted_there(make_site, monkeypatch, in_loop):
    site = make_site(ranks=2)
    sender = site.keep(RankDispatcher(site.port_args, RoundRobinPolicy()))
    sender._send_to_scheduler[1].close()
    monkeypatch.setattr(sockets, "HIGH_WATER_MARK", 4)
    sender._send_to_scheduler[1] = sockets.connect_push(site.port_args.endpoint("s1"))
    monkeypatch.undo()

    async def test(owner):
        owner.schedulers.pop().socket.close(linger=0)
        accepted = set()
        with pytest.raises(RequestError):
            for _ in range(100):
                call, _ = owner.submit("ab", n=2)
                accepted |= set(call.running)
                await owner.sent()
        orphan = await owner.sent_one()
        assert isinstance(orphan, TokenizedGenerateReqInput)
        assert orphan.number not in accepted
        assert await owner.sent_one() == AbortReq(number=orphan.number, http_worker_ipc="w1.1")
        assert set(owner.manager.results._requests) == accepted

    in_loop(test, site=site, sender=sender)


# Tokenization


class GatedBackend(ReferenceBackend):
    """Tokenizes long texts when it is let."""

    def __init__(self) -> None:
        super().__init__(byte_tokenizer())
        self.entered, self.gate = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        self.threads.append(threading.current_thread().name)
        return super().encode(text, add_special_tokens)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        assert self.gate.wait(30)
        return super().encode_batch(texts, add_special_tokens)


def test_a_long_text_is_tokenized_beside_the_loop_and_a_short_one_at_once(in_loop):
    backend = GatedBackend()

    async def test(owner):
        call, _ = owner.submit([LONG_TEXT, "ab"], tokens=None)
        await until(backend.entered.is_set)
        assert owner.has_sent_nothing()
        assert call.prompt_ids == []
        # The loop is free: another request passes.
        owner.submit("short")
        assert (await owner.sent_one()).input_ids == pack(list(b"short"))
        backend.gate.set()
        long, short = await owner.sent()
        assert (len(long.input_ids), short.input_ids) == (4 * len(LONG_TEXT), pack(list(b"ab")))
        assert backend.threads == ["tokenize_0", threading.current_thread().name]

    in_loop(test, backend=backend, info=engine_info(context_length=10_000))


def test_a_call_that_is_aborted_before_its_tokenization_is_done_is_never_sent(in_loop):
    backend = GatedBackend()

    async def test(owner):
        call, sink = owner.submit(LONG_TEXT)
        await until(backend.entered.is_set)
        call.abort()
        backend.gate.set()
        other, _ = owner.submit(LONG_TEXT, tokens=7)
        assert (await owner.sent_one()).sampling_params.max_new_tokens == 7
        assert owner.has_sent_nothing()
        assert sink.heard == []
        assert call.prompt_ids == []
        assert not other.ended

    in_loop(test, backend=backend, info=engine_info(context_length=10_000))


def test_what_goes_wrong_in_a_late_tokenization_reaches_the_sink_once(in_loop, caplog):
    class Broken(ReferenceBackend):
        def encode_batch(self, texts, add_special_tokens):
            raise RuntimeError("out of letters")

    async def too_long(owner):
        call, sink = owner.submit(LONG_TEXT)
        await until(lambda: sink.heard)
        assert sink.errors[0][0] == 400
        assert len(sink.heard) == 1
        assert call.ended

    async def broken(owner):
        _, sink = owner.submit(LONG_TEXT)
        await until(lambda: sink.heard)
        assert sink.errors == [(500, "tokenization failed: out of letters")]

    in_loop(too_long)
    in_loop(broken, backend=Broken(byte_tokenizer()))


def test_tokenizing_and_detokenizing_for_their_own_sake(in_loop):
    async def test(owner):
        manager = owner.manager.models[0]
        for text in ("héllo", LONG_TEXT, ""):
            assert await manager.tokenize([text, "x"]) == [pack(list(text.encode())), pack([ord("x")])]
            assert await manager.detokenize([pack(list(text.encode())), pack([ord("x")])]) == [text, "x"]
        with pytest.raises(RequestError, match="more than the limit"):
            await manager.tokenize(["a" * 600_000, "b" * 600_000])

    in_loop(test)


# Aborts


def test_an_aborted_call_is_ended_in_the_engine_and_hears_nothing_more(in_loop):
    async def test(owner):
        call, sink = owner.submit("ab", n=2)
        first, second = [child.number for child in await owner.sent()]
        owner.deliver(text_rows((first, "x", 0, None), (second, "y", 0, LENGTH)))
        await until(lambda: sink.heard[-1:] == ["step end"])
        heard = list(sink.heard)
        call.abort()
        call.abort()
        # Only what still runs.
        message = await owner.sent_one()
        assert message == AbortReq(number=first, http_worker_ipc="w1.1")
        other, _, other_sink = await owner.start_one()
        owner.deliver(text_rows((first, "z", 1, FinishReason("abort"))), text_rows((other, "o", 0, None)))
        await until(lambda: other_sink.heard)
        assert sink.heard == heard
        assert len(owner.manager.results) == 1

    in_loop(test)


# The rest


def test_server_info_tells_who_answers(in_loop):
    async def test(owner):
        await owner.start_one()
        info = owner.manager.server_info()
        assert (info["model"], info["engine"]["name"], info["chat_template"]) == ("bytes", "simulated", False)
        assert info["worker"] == {"worker_id": 1, "address": "w1.1", "running_requests": 1}

    in_loop(test)


def test_a_worker_starts_no_bootstrap_server_and_tells_the_real_mode(make_site, in_loop):
    async def test(owner):
        worker = owner.manager
        assert worker.disaggregation_mode == "null"
        assert worker.server_info()["server_args"]["disaggregation_mode"] == "decode"
        message = AbortReq(number=1)
        worker.attach_multi_http_worker_info(message)
        assert message.http_worker_ipc == worker.tokenizer_ipc_name == "w1.1"

    in_loop(test, site=make_site(disaggregation_mode="decode"), manager_class=TokenizerWorker)


def test_the_decoder_for_log_probabilities_is_loaded_off_the_loop(in_loop):
    async def test(owner):
        tools = owner.manager.models[0].text_tools
        await owner.start_one(sampling_params=SamplingParams(max_new_tokens=5, logprobs=0))
        assert tools.decoder_is_loaded
        assert tools.decoder_thread.startswith("tokenize")

    in_loop(test)
