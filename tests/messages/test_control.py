from __future__ import annotations

import msgspec
import pytest

from multitok.messages.control import (
    AbortMatching,
    Adapter,
    Continue,
    ControlOperation,
    ControlState,
    FreezeGc,
    Pause,
    SetLogLevel,
    Weights,
    is_for_ranks_only,
    state_after,
    state_without,
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
    assert state_without(BEFORE, operation, BEFORE) is BEFORE


def test_every_operation_is_one_of_the_two():
    assert {*map(type, KEPT), *map(type, PASSING)} == set(ControlOperation.__args__)


@pytest.mark.parametrize("operation", [op for op in KEPT if not isinstance(op, SetLogLevel | Continue)], ids=repr)
def test_what_is_taken_back_leaves_what_came_later(operation):
    after = state_after(state_after(BEFORE, operation, 9), SetLogLevel("debug"), 10)
    assert state_without(after, operation, BEFORE) == msgspec.structs.replace(BEFORE, epoch=7, log_level="debug")


@pytest.mark.parametrize("operation", [None, *KEPT, *PASSING], ids=repr)
def test_a_part_is_told_the_state_and_the_operation(operation):
    message = Control(BEFORE, 3, operation)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToChild) == message
