"""A rank under control: pauses, adapters, weights, aborts, in a real process."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
from rank_under_test import LONG, OWNER, Rank, embed, generate

from multitok.messages.base import FinishReason
from multitok.messages.control import (
    AbortMatching,
    Adapter,
    Continue,
    ControlState,
    FreezeGc,
    Pause,
    SetLogLevel,
    Weights,
    state_after,
)
from multitok.messages.operations import (
    FlushCache,
    LoadAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)
from multitok.messages.sampling import EngineFields
from multitok.messages.to_child import Control
from multitok.messages.to_launcher import Hello, OperationAck, Ready
from parts import pack, unpack, wait_until

ABORTED = FinishReason("abort")
PAUSED = {mode: ControlState(epoch=1, paused=mode) for mode in ("wait", "abort", "keep")}
GOING = ControlState(epoch=2)


def pause(rank: Rank, mode: str) -> OperationAck:
    return rank.operate(Pause(mode), PAUSED[mode])


def go_on(rank: Rank) -> OperationAck:
    return rank.operate(Continue(), GOING)


@pytest.fixture
def start(make_site):
    def start(engine: dict[str, object] | None = None, **options) -> Rank:
        arguments = [f"{key}={value}" for key, value in (engine or {}).items()]
        return Rank(make_site(engine_arg=arguments, **options))

    return start


@pytest.mark.parametrize("mode", PAUSED)
def test_no_request_begins_during_a_pause_and_all_begin_after_it(start, mode):
    rank = start()
    assert pause(rank, mode).status == 200
    rank.send(*(generate(number, tokens=3) for number in range(1, 9)))
    assert rank.counts() == (0, 8, 0)
    assert rank.inbox.is_empty()
    assert go_on(rank).status == 200
    for number in range(1, 9):
        assert rank.wait_for_end(number) == FinishReason("length")


def test_a_pause_that_waits_is_acknowledged_when_nothing_runs_any_more(start):
    rank = start(engine={"step_ms": 2}, max_running_requests=1)
    rank.send(generate(1, tokens=20), generate(2, tokens=2))
    rank.wait_for_first(1)
    assert pause(rank, "wait").status == 200
    rank.wait_for_end(1)
    assert rank.counts() == (0, 1, 1)
    go_on(rank)
    rank.wait_for_end(2)


def test_a_pause_that_aborts_ends_what_runs_and_holds_what_waits(start):
    rank = start(engine={"step_ms": 5}, max_running_requests=1)
    rank.send(generate(1, tokens=LONG), generate(2, tokens=2))
    rank.wait_for_first(1)
    assert pause(rank, "abort").count == 1
    assert rank.wait_for_end(1) == ABORTED
    assert rank.counts() == (0, 1, 1)
    go_on(rank)
    rank.wait_for_end(2)


def resumed(number: int, tokens: int):
    return generate(number, "abcd", tokens=tokens, resumed_ids=pack(list(b"ab")), text_length=2)


def test_what_had_begun_in_another_life_ends_during_a_pause_that_waits(start):
    rank = start(engine={"step_ms": 2}, max_running_requests=1)
    pause(rank, "wait")
    rank.send(generate(1, tokens=3), resumed(2, tokens=20), resumed(3, tokens=20))
    rank.wait_for_first(2)
    # Nor is a second pause done before the other one has begun and ended, too.
    assert pause(rank, "wait").status == 200
    assert rank.wait_for_end(2) == rank.wait_for_end(3) == FinishReason("length")
    for number in (2, 3):
        assert [token for row in rank.rows[number] for token in row.ids] == list(b"cdab" * 5)[:18]
    assert rank.counts() == (0, 1, 2)
    go_on(rank)
    rank.wait_for_end(1)


def test_what_had_begun_in_another_life_is_aborted_during_a_pause_that_aborts(start):
    rank = start()
    pause(rank, "abort")
    rank.send(generate(1, tokens=3), resumed(2, tokens=20))
    assert rank.wait_for_end(2) == ABORTED
    assert rank.counts() == (0, 1, 1)
    go_on(rank)
    assert rank.wait_for_end(1) == FinishReason("length")


def test_what_had_begun_in_another_life_is_held_during_a_pause_that_keeps(start):
    rank = start()
    pause(rank, "keep")
    rank.send(resumed(1, tokens=4))
    assert rank.counts() == (0, 1, 0)
    go_on(rank)
    rank.wait_for_end(1)


def test_a_pause_that_keeps_stops_the_engine_where_it_is(start):
    rank = start(engine={"step_ms": 5})
    rank.send(generate(1, "abcd", tokens=40))
    rank.wait_for_first(1)
    assert pause(rank, "keep").status == 200
    rank.send(generate(2))
    assert rank.counts() == (1, 1, 0)
    # What was made before; an engine that went on would not fall silent before the end.
    while rank.inbox.socket.poll(200):
        rank.hear()
    assert len(rank.ids(1)) < 40
    go_on(rank)
    assert rank.wait_for_end(1) == FinishReason("length")
    assert rank.ids(1) == list(b"abcd" * 10)


def test_a_rank_that_is_paused_does_not_burn_its_core(start):
    rank = start(engine={"step_ms": 1})
    rank.send(generate(1, tokens=LONG))
    rank.wait_for_first(1)
    pause(rank, "keep")
    rank.send(*(generate(number) for number in range(2, 50)))
    assert sum(rank.counts()[:2]) == 49

    def turns() -> int:
        status = Path(f"/proc/{rank.child.pid}/status").read_text()
        return int(status.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def ticks() -> int:
        return sum(map(int, Path(f"/proc/{rank.child.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    def wait_for_a_turn() -> None:
        before = turns()
        wait_until(lambda: turns() > before)

    begun, used = time.monotonic(), ticks()
    # It goes round once a second; a turn that came before may be the last message's.
    while time.monotonic() - begun < 0.5:
        wait_for_a_turn()
    assert ticks() - used <= 100 * (time.monotonic() - begun) / 2


def test_aborts_owners_and_deadlines_go_on_during_a_pause(start):
    rank = start(engine={"step_ms": 5})
    rank.send(generate(1, tokens=LONG, rid="runs"))
    rank.wait_for_first(1)
    pause(rank, "keep")
    rank.send(generate(2, rid="waits"), generate(3, timeout=0.05), generate(4, queue_timeout=0.05), generate(5))
    assert rank.wait_for_refusal(4).status == 503
    finish = rank.wait_for_end(3)
    assert (finish.type, finish.status) == ("error", 504)
    assert rank.operate(AbortMatching("runs"), PAUSED["keep"]).count == 1
    assert rank.operate(AbortMatching("wai", prefix=True), PAUSED["keep"]).count == 1
    assert rank.wait_for_end(1) == rank.wait_for_end(2) == ABORTED
    assert rank.compare({5: 0}) == [5]


def test_an_abort_for_another_model_ends_nothing(start):
    rank = start(engine={"step_ms": 5})
    rank.send(generate(1, tokens=LONG))
    rank.wait_for_first(1)
    assert rank.operate(AbortMatching(model=1)).count == 0
    assert rank.operate(AbortMatching(model=0)).count == 1
    assert rank.wait_for_end(1) == ABORTED


def test_a_pause_that_waits_is_overtaken_by_continuing(start):
    rank = start(engine={"step_ms": 5})
    rank.send(generate(1, tokens=LONG))
    rank.wait_for_first(1)
    rank.begin(Pause(), PAUSED["wait"])
    rank.begin(Continue(), GOING)
    acks = {ack.id: ack for ack in (rank.hear_ack(), rank.hear_ack())}
    assert [acks[1].status, acks[2].status] == [409, 200]
    rank.wait_for_end(1)


def test_two_pauses_that_wait_are_both_acknowledged(start):
    rank = start(engine={"step_ms": 2})
    rank.send(generate(1, tokens=20))
    rank.wait_for_first(1)
    rank.begin(Pause(), PAUSED["wait"])
    rank.begin(Pause(), PAUSED["wait"])
    assert {rank.hear_ack().id, rank.hear_ack().id} == {1, 2}


def test_where_it_is_wanted_requests_that_come_during_a_pause_are_refused(start):
    rank = start(engine={"step_ms": 5}, max_running_requests=1, when_paused="refuse")
    rank.send(generate(1, tokens=LONG), generate(2))
    rank.wait_for_first(1)
    pause(rank, "keep")
    rank.send(generate(3))
    refusal = rank.wait_for_refusal(3)
    assert (refusal.status, refusal.message) == (503, "generation is paused; try again later")
    assert rank.counts() == (1, 1, 0)
    go_on(rank)
    rank.wait_for_end(2)


def test_embeddings_are_held_too(start):
    rank = start(task="embed", engine={"embedding_size": 8})
    pause(rank, "wait")
    rank.send(embed(1))
    assert rank.counts() == (0, 1, 0)
    go_on(rank)
    assert rank.hear().numbers == [1]


def with_adapter(number: int, name: str = "poet", **fields):
    return generate(number, "abc", engine_fields=EngineFields(adapter=name), **fields)


def test_a_request_gets_the_adapter_that_it_names(start, tmp_path):
    rank = start()
    rank.send(with_adapter(1))
    assert (rank.wait_for_refusal(1).status, "'poet'" in rank.refusals[1].message) == (404, True)
    load = LoadAdapter("poet", str(tmp_path))
    loaded = state_after(ControlState(), load, 1)
    assert rank.operate(load, loaded).status == 200
    rank.send(with_adapter(2), generate(3, "abc"))
    rank.wait_for_end(2)
    assert rank.ids(2) == list(b"cba")
    # What waits for an adapter that goes is refused when its turn comes.
    rank.operate(Pause(), paused := state_after(loaded, Pause(), 2))
    rank.send(with_adapter(4))
    assert rank.counts()[1] == 1
    unload = UnloadAdapter("poet")
    gone = state_after(paused, unload, 3)
    assert rank.operate(unload, gone).status == 200
    rank.operate(Continue(), state_after(gone, Continue(), 4))
    assert rank.wait_for_refusal(4).status == 404


def test_what_the_engine_refuses_is_said_and_nothing_else_is_disturbed(start, tmp_path):
    rank = start(engine={"step_ms": 5})
    rank.send(generate(1, tokens=LONG))
    rank.wait_for_first(1)
    load = LoadAdapter("poet", str(tmp_path / "nothing"))
    state = state_after(ControlState(), load, 1)
    ack = rank.operate(load, state)
    assert (ack.status, "there is nothing at" in ack.problem) == (400, True)
    # Whatever comes before it is taken back.
    assert rank.operate(SetLogLevel("info"), state_after(state, SetLogLevel("info"), 2)).status == 200
    update = UpdateWeights(str(tmp_path / "nothing"))
    assert rank.operate(update, broken := state_after(state, update, 3)).status == 400
    assert rank.operate(FreezeGc(), broken).status == 200
    assert rank.operate(None, ControlState(epoch=9)).status == 200
    assert rank.wait_for_end(1) == FinishReason("length")


@pytest.mark.parametrize("kind", [UpdateWeights, partial(LoadAdapter, "poet")])
def test_a_path_that_no_file_can_have_is_a_refusal_and_no_failure(start, kind):
    # Fewer characters than a path may have, but more bytes than a name may.
    load = kind("/" + "é" * 200)
    ack = start().operate(load, state_after(ControlState(), load, 1))
    assert (ack.status, ack.problem.split(":")[0]) == (400, "File name too long")


def test_operations_that_an_engine_lacks_are_refused_by_name(start):
    rank = start(task="embed", engine={"embedding_size": 8})
    ack = rank.operate(FlushCache())
    assert (ack.status, ack.problem) == (400, "engine 'simulated' has no operation 'flush_cache'")


def test_profiles_begin_and_end(start):
    rank = start()
    assert [rank.operate(operation).status for operation in (StopProfile(), StartProfile(), StartProfile())] == [
        *(400, 200, 400)
    ]
    assert rank.operate(StopProfile()).status == 200


def next_life(rank: Rank, state: ControlState):
    """The next life of the process, whose channel begins with a state."""
    site = rank.site
    listeners = {rank.address: site._listeners[rank.address]}
    site.kill(rank.child)
    blocks = [block.name for block in site._blocks]
    child = type(rank.child).spawn("scheduler", 0, 2, blocks, listeners, [Control(state)])
    site.children.append(child)
    rank.child, rank.life = child, 2
    return child


def test_a_new_life_begins_with_the_state(start, tmp_path):
    rank = start()
    rank.send(generate(1))
    rank.wait_for_end(1)
    state = ControlState(
        epoch=5,
        paused="wait",
        adapters={"poet": Adapter(str(tmp_path)), "other": Adapter("/nothing", 1)},
        weights={0: Weights(str(tmp_path), "v2")},
    )
    # It is there before anything else.
    child = next_life(rank, state)
    rank.send(with_adapter(2))
    assert isinstance(rank.site.hear(child), Hello)
    assert isinstance(rank.site.hear(child), Ready)
    assert rank.counts() == (0, 1, 0)
    rank.operate(Continue(), state_after(state, Continue(), 1))
    rank.wait_for_end(2)
    assert rank.ids(2) == list(b"cba")


def test_a_new_life_without_an_adapter_goes_on_and_one_without_the_weights_does_not(start, tmp_path):
    rank = start()
    nothing = str(tmp_path / "nothing")
    child = next_life(rank, ControlState(epoch=5, adapters={"poet": Adapter(nothing)}))
    assert isinstance(rank.site.hear(child), Hello)
    assert isinstance(rank.site.hear(child), Ready)
    rank.send(with_adapter(1), generate(2))
    assert rank.wait_for_refusal(1).status == 404
    rank.wait_for_end(2)
    child = next_life(rank, ControlState(epoch=5, weights={0: Weights(nothing, "v2")}))
    failure = rank.site.hear_failure(child)
    assert failure.exit_status == 2
    assert "weights" in failure.message


def test_the_board_says_how_a_rank_does(start):
    rank = start(engine={"step_ms": 5}, max_running_requests=1)
    board = rank.site.board()
    rank.send(generate(1, tokens=LONG), generate(2, tokens=LONG))
    details = wait_until(lambda: (d := board.details("scheduler", 0)).requests == 2 and d)
    assert details.tokens >= 6
    assert details.oldest >= 0.0
    assert details.lag < 30
    assert unpack(rank.wait_for_first(1).batch.output_ids)
    rank.abort(1)
    rank.abort(2)
    wait_until(lambda: board.details("scheduler", 0).requests == 0)
    assert OWNER
