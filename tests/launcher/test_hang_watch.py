from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path

import pytest

from multitok.launcher.hang_watch import CHECK_S, HangWatch
from multitok.launcher.load_board import LoadBoard
from multitok.launcher.shared_memory import block_name
from parts import wait_until

START_TIMEOUT = 60.0


@pytest.fixture
def board():
    block = LoadBoard.create(block_name(secrets.token_hex(4), "board"), 1, 1, 2)
    yield LoadBoard(block.name, 1, 1, 2)
    block.remove()


class Rounds:
    """A watch that is asked once a second, in a time of its own."""

    def __init__(self, board, children):
        self.now = 1000.0
        self.children = children
        self.watch = HangWatch(board, START_TIMEOUT, self.now)

    def next(self, late=0.0):
        self.now += CHECK_S + late
        return [(child.name, how) for child, how in self.watch.find_hung(self.children.all(), self.now)]


def stop(child):
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


@pytest.mark.parametrize("ready", [True, False])
def test_a_stopped_process_counts_as_dead_when_it_is_still_stopped_a_second_later(family, board, ready):
    child, _ = family.add("scheduler", ready=ready), family.add("detokenizer")
    child.started_at = 1000.0
    rounds = Rounds(board, family.children)
    stop(child)
    assert rounds.next() == []
    assert rounds.next() == [("scheduler:0", "is stopped (state T)")]


def test_a_process_that_goes_on_in_between_does_not(family, board):
    child = family.add("scheduler")
    rounds = Rounds(board, family.children)
    for _ in range(2):
        stop(child)
        assert rounds.next() == []
        os.kill(child.pid, signal.SIGCONT)
        wait_until(lambda: "T" not in Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0])
        assert rounds.next() == []


def test_a_silent_process_counts_as_dead(family, board):
    child, other = family.add("scheduler"), family.add("detokenizer")
    board.slot("detokenizer", 0).beat(100)
    board.slot("scheduler", 0).beat(-1)
    rounds = Rounds(board, family.children)
    assert rounds.next() == []
    assert rounds.next() == [(child.name, "has been silent for too long")]
    board.slot("scheduler", 0).beat(100)
    assert rounds.next() == []
    assert other.ready


def test_loading_is_no_silence_but_has_a_limit(family, board):
    child = family.add("scheduler", ready=False)
    board.slot("scheduler", 0).beat(-1)
    rounds = Rounds(board, family.children)
    child.started_at = rounds.now
    for _ in range(int(START_TIMEOUT)):
        assert rounds.next() == []
    assert [rounds.next(), rounds.next()] == [[], [("scheduler:0", "does not become ready")]]


def test_a_round_that_comes_late_kills_nobody(family, board):
    child = family.add("scheduler")
    rounds = Rounds(board, family.children)
    stop(child)
    board.slot("scheduler", 0).beat(-1)
    assert rounds.next() == []
    # As after Ctrl-Z and fg of everything: the children get a round to go on.
    assert rounds.next(late=1.5) == []
    assert rounds.next() == []
    assert rounds.next() != []
