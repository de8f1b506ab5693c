from __future__ import annotations

import msgspec
import pytest

from multitok.messages.control import (
    AbortMatching,
    Adapter,
    Continue,
    ControlJournal,
    ControlOperation,
    ControlState,
    FreezeGc,
    Pause,
    SetLogLevel,
    Weights,
    is_for_ranks_only,
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
from multitok.messages.to_child import Control, ToChild

BEFORE = ControlState(epoch=4, adapters={"a": Adapter("/a"), "b": Adapter("/b", 1)}, weights={0: Weights("/w", "3")})
KEPT = {
    Pause("keep"): {"paused": "keep"},
    Continue(): {"paused": None},
    SetLogLevel("error"): {"log_level": "error"},
    LoadAdapter("c", "/c", 1): {"adapters": {**BEFORE.adapters, "c": Adapter("/c", 1)}},
    LoadAdapter("a", "/new"): {"adapters": {"a": Adapter("/new"), "b": Adapter("/b", 1)}},
    UnloadAdapter("b", 1): {"adapters": {"a": Adapter("/a")}},
    UpdateWeights("/v"): {"weights": {0: Weights("/v", "9")}},
    UpdateWeights("/v", "mine", 1): {"weights": {0: Weights("/w", "3"), 1: Weights("/v", "mine")}},
}
PASSING = [FreezeGc(), AbortMatching("x"), FlushCache(), StartProfile(), StopProfile()]


@pytest.mark.parametrize("operation", KEPT, ids=repr)
def test_an_operation_that_is_kept_raises_the_epoch_and_changes_nothing_else(operation):
    expected = msgspec.structs.replace(BEFORE, epoch=5, **KEPT[operation])
    assert state_after(BEFORE, operation, 9) == expected
    assert not is_for_ranks_only(operation)


@pytest.mark.parametrize("operation", PASSING, ids=repr)
def test_any_other_operation_leaves_the_state_as_it_is(operation):
    assert state_after(BEFORE, operation, 9) is BEFORE


def test_every_operation_is_one_of_the_two():
    assert {*map(type, KEPT), *map(type, PASSING)} == set(ControlOperation.__args__)


@pytest.mark.parametrize("operation", [op for op in KEPT if not isinstance(op, SetLogLevel | Continue)], ids=repr)
def test_what_is_taken_back_leaves_what_came_later(operation):
    journal = ControlJournal(BEFORE)
    after = state_after(state_after(BEFORE, operation, 9), SetLogLevel("debug"), 10)
    journal.add(9, operation)
    journal.add(10, SetLogLevel("debug"))
    journal.settle(10)
    assert journal.take_back(9, after) == msgspec.structs.replace(BEFORE, epoch=7, log_level="debug")


@pytest.mark.parametrize("order", [[9, 10], [10, 9]])
@pytest.mark.parametrize("operation", [Pause("keep"), LoadAdapter("c", "/none"), UpdateWeights("/none")], ids=repr)
def test_two_refused_at_once_leave_nothing_behind(operation, order):
    journal = ControlJournal(BEFORE)
    state = BEFORE
    for number in (9, 10):
        journal.add(number, operation)
        state = state_after(state, operation, number)
    for number in order:
        state = journal.take_back(number, state)
    assert state == msgspec.structs.replace(BEFORE, epoch=state.epoch)


def test_what_took_the_place_of_a_refused_operation_stays():
    journal = ControlJournal(BEFORE)
    state = BEFORE
    for number, path in ((9, "/none"), (10, "/good")):
        journal.add(number, UpdateWeights(path))
        state = state_after(state, UpdateWeights(path), number)
    assert journal.take_back(9, state) is state
    journal.settle(10)
    journal.add(11, Pause("keep"))
    journal.add(12, Continue())
    newest = state_after(state_after(state, Pause("keep"), 11), Continue(), 12)
    assert journal.take_back(11, newest) is newest
    assert newest.weights == {0: Weights("/good", "10")}


@pytest.mark.parametrize("operation", [None, *KEPT, *PASSING], ids=repr)
def test_a_part_is_told_the_state_and_the_operation(operation):
    message = Control(BEFORE, 3, operation)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToChild) == message
