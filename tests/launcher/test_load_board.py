from __future__ import annotations

import secrets

import pytest

from multitok.launcher.load_board import LoadBoard, worker_slots
from multitok.launcher.shared_memory import block_name

PARTS = [
    *(("scheduler", i) for i in range(2)),
    *(("detokenizer", i) for i in range(3)),
    *(("router", 0), ("fork_server", 0)),
    *(("tokenizer_worker", i) for i in range(1, 5)),
]


@pytest.fixture
def boards():
    """The launcher's view of a board, and a child's."""
    block = LoadBoard.create(block_name(secrets.token_hex(4), "board"), 2, 3, 4)
    yield LoadBoard(block.name, 2, 3, 4), LoadBoard(block.name, 2, 3, 4)
    block.remove()


def test_every_word_is_one_parts_own(boards):
    launcher, child = boards
    launcher.set_serving(True)
    for n, (role, index) in enumerate(PARTS, start=1):
        launcher.set_life(role, index, n, index=index if role == "tokenizer_worker" else 0, pid=300 + n)
        child.slot(role, index).publish_load(100 + n, 200 + n)
    for n, (role, index) in enumerate(PARTS, start=1):
        assert launcher.figures(role, index) == {"life": n, "load": 100 + n, "waiting": 200 + n}
        assert launcher.pid(role, index) == 300 + n
    assert child.is_serving()


def test_a_new_board_says_that_nothing_is_up(boards):
    launcher, child = boards
    assert not child.is_serving()
    assert child.lowest_connections() == 0
    assert all(launcher.figures(*part) == {"life": 0, "load": 0, "waiting": 0} for part in PARTS)


def test_readiness_can_be_taken_back(boards):
    launcher, child = boards
    launcher.set_serving(True)
    launcher.set_serving(False)
    assert not child.is_serving()


def test_the_lowest_connections_are_those_of_a_worker_that_is_up(boards):
    launcher, child = boards
    slots = [child.slot("tokenizer_worker", index) for index in range(1, 5)]
    for index, connections in enumerate([7, 3, 9, 1], start=1):
        slots[index - 1].set_connections(connections)
    assert child.lowest_connections() == 0
    for index in (1, 2, 3):
        launcher.set_life("tokenizer_worker", index, 1)
    # Worker 4 has the fewest, and is not up.
    assert child.lowest_connections() == slots[0].lowest_connections() == 3
    launcher.set_life("tokenizer_worker", 2, 0)
    assert child.lowest_connections() == 7
    launcher.set_life("tokenizer_worker", 4, 2)
    assert child.lowest_connections() == 1


def test_other_roles_do_not_count_as_workers(boards):
    launcher, child = boards
    for role, index in PARTS:
        launcher.set_life(role, index, 1)
        child.slot(role, index).publish_load(5 if role == "tokenizer_worker" else 1, 0)
    assert child.lowest_connections() == 5


def test_a_new_life_begins_without_load(boards):
    launcher, child = boards
    launcher.set_life("tokenizer_worker", 1, 1, index=1)
    child.slot("tokenizer_worker", 1).publish_load(8, 3)
    child.slot("tokenizer_worker", 1)
    assert launcher.figures("tokenizer_worker", 1) == {"life": 1, "load": 0, "waiting": 0}


def test_of_two_lives_of_a_worker_the_newer_one_is_shown(boards):
    launcher, child = boards
    for slot, life in ((7, 3), (2, 4)):
        child.slot("tokenizer_worker", slot).set_connections(10 * life)
        launcher.set_life("tokenizer_worker", slot, life, index=3, pid=1000 + life)
    assert child.figures("tokenizer_worker", 3) == {"life": 4, "load": 40, "waiting": 0}
    assert child.pid("tokenizer_worker", 3) == 1004
    assert child.worker_indexes() == [3]
    launcher.set_life("tokenizer_worker", 2, 0)
    assert child.figures("tokenizer_worker", 3)["life"] == 3


def test_there_is_a_line_for_every_worker_slot(boards):
    launcher, child = boards
    for slot in range(1, worker_slots(4) + 1):
        launcher.set_life("tokenizer_worker", slot, 1, index=slot)
        child.slot("tokenizer_worker", slot).set_connections(slot)
    assert child.worker_indexes() == list(range(1, worker_slots(4) + 1))
    assert child.lowest_connections() == 1
    assert launcher.figures("fork_server", 0) == {"life": 0, "load": 0, "waiting": 0}


def test_a_process_is_overdue_when_it_is_silent_for_longer_than_it_said(boards):
    launcher, child = boards
    slot = child.slot("scheduler", 1)
    assert not launcher.is_overdue("scheduler", 1)
    slot.beat(100)
    assert not launcher.is_overdue("scheduler", 1)
    slot.beat(-1)
    assert launcher.is_overdue("scheduler", 1)
    child.slot("scheduler", 1)
    assert not launcher.is_overdue("scheduler", 1)
