"""Deaths of real parts in the middle of answers, and lost messages: the text is that of an undisturbed run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from owner_under_test import Owner, Sink, engine_info, owner_of, until

from multitok.messages.base import FinishReason
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_child import PartDied
from multitok.router.policies import RoundRobinPolicy
from multitok.router.rank_dispatcher import RankDispatcher
from multitok.tokenizer.recovery import ENGINE_DIED
from parts import Site, unpack

TOKENS = 60


class Streams:
    """Requests of many kinds, and what each of them must say: the engine repeats the prompt."""

    def __init__(self, owner: Owner) -> None:
        self.expected: list[tuple[Sink, str, FinishReason, Any]] = []
        for i, prompt in enumerate(["plain text, ", "héllo wörld ", "鸚鵡🦜の話", "a🦜b", "x"] * 4):
            text = (prompt.encode() * TOKENS)[:TOKENS].decode(errors="replace")
            stop = text[12:16] if i % 3 == 2 and len(set(prompt)) > 1 else None
            params = SamplingParams(
                max_new_tokens=TOKENS,
                temperature=0.0,
                # Earlier ones don't count.
                min_new_tokens=len(text[:15].encode()) if stop else 0,
                ignore_eos=True,
            )
            stops = [stop] if stop else []
            call, sink = owner.submit(
                [prompt], tokens=TOKENS, stream=i % 2 == 0, stop=stops, raw=i % 4 < 2, sampling_params=params
            )
            finish = FinishReason("stop", stop) if stop else FinishReason("length")
            self.expected.append((sink, text[:12] if stop else text, finish, call))

    def are_under_way(self) -> bool:
        return all(len(sink.text) > 1 for sink, *_ in self.expected[::2])

    def none_has_ended(self) -> bool:
        return not any(call.ended for *_, call in self.expected)

    async def must_end_well(self) -> None:
        await until(lambda: all(call.ended for *_, call in self.expected))
        for sink, text, finish, _ in self.expected:
            assert sink.errors == []
            assert sink.text == text
            assert [output.finish for output in sink.outputs if output.finish is not None] == [finish]
            ids = [i for output in sink.outputs for i in unpack(output.output_ids)]
            assert len(ids) == sink.outputs[-1].completion_tokens
            assert finish.type == "stop" or len(ids) == TOKENS


@pytest.fixture
def run(make_site):
    """Run a coroutine function with an owner of single mode, a real scheduler and real detokenizers."""

    def run_test(test, *, detokenizers: int = 1, resume: bool = False) -> None:
        site: Site = make_site(detokenizers=detokenizers, resume_generation=resume, engine_arg=["step_ms=10"])
        scheduler = site.ready_child("scheduler", ["s0"])
        children = [site.ready_child("detokenizer", [f"d{i}"], i) for i in range(detokenizers)]
        dispatcher = site.keep(RankDispatcher(site.port_args, RoundRobinPolicy()))
        info = engine_info(resumable=["min_new_tokens", "ignore_eos"])

        async def main() -> None:
            async with owner_of(site, sender=dispatcher, real_schedulers=True, info=info) as owner:
                await test(owner, dispatcher, scheduler, children)

        asyncio.run(main())

    return run_test


async def kill_scheduler(owner, dispatcher, scheduler, detokenizers) -> None:
    owner.site.kill(scheduler)
    for detokenizer in detokenizers:
        detokenizer.send(PartDied("scheduler", 0, 1))
    dispatcher.rank_died(0, 1)
    owner.manager.results.rank_died(0, 1)


async def start_scheduler(owner, dispatcher, scheduler) -> None:
    await asyncio.to_thread(owner.site.next_life, scheduler, ["s0"])
    dispatcher.rank_started(0, 2)
    owner.manager.results.rank_started(0, 2)


def test_the_streams_of_a_killed_detokenizer_go_on(run):
    async def test(owner, dispatcher, scheduler, detokenizers):
        streams = Streams(owner)
        await until(streams.are_under_way)
        assert streams.none_has_ended()
        owner.site.kill(detokenizers[0])
        # Meanwhile the scheduler makes ids that nobody decodes.
        await asyncio.to_thread(owner.site.next_life, detokenizers[0], ["d0"])
        owner.manager.results.recovery.detokenizer_started(0)
        await streams.must_end_well()

    run(test, detokenizers=2)


def test_streams_go_on_at_the_next_life_of_a_killed_scheduler(run):
    async def test(owner, dispatcher, scheduler, detokenizers):
        streams = Streams(owner)
        await until(streams.are_under_way)
        assert streams.none_has_ended()
        await kill_scheduler(owner, dispatcher, scheduler, detokenizers)
        await start_scheduler(owner, dispatcher, scheduler)
        await streams.must_end_well()

    run(test, resume=True)


def test_without_resumption_a_killed_scheduler_is_an_error_and_the_next_life_serves(run):
    async def test(owner, dispatcher, scheduler, detokenizers):
        streams = Streams(owner)
        await until(streams.are_under_way)
        assert streams.none_has_ended()
        await kill_scheduler(owner, dispatcher, scheduler, detokenizers)
        for sink, *_ in streams.expected:
            assert sink.errors == [(503, ENGINE_DIED)]
        await start_scheduler(owner, dispatcher, scheduler)
        await Streams(owner).must_end_well()

    run(test)


def test_messages_that_are_lost_on_the_way_to_the_owner_are_made_up_for(run, monkeypatch):
    """Every seventh is thrown away, and every second of those that hold an end."""
    monkeypatch.setattr("multitok.tokenizer.recovery._SILENCE_S", 0.3)

    async def test(owner, dispatcher, scheduler, detokenizers):
        results = owner.manager.results
        handle = results._handle_text
        taken = lost = 0

        def lossy(batch) -> None:
            nonlocal taken, lost
            taken += 1
            if taken % 7 == 3 or (batch.finished_reasons is not None and taken % 2):
                lost += 1
            else:
                handle(batch)

        results._handle_text = lossy
        await Streams(owner).must_end_well()
        assert lost > 5

    run(test)
