"""The control plane, with children that do nothing: a test answers for them."""

from __future__ import annotations

import logging
import secrets

import pytest

from multitok.launcher.control_plane import ControlPlane
from multitok.launcher.load_board import LoadBoard
from multitok.launcher.shared_memory import block_name
from multitok.launcher.timers import Timers
from multitok.messages.control import (
    AbortMatching,
    Adapter,
    Continue,
    ControlState,
    Pause,
    SetLogLevel,
    Settle,
    Weights,
)
from multitok.messages.operations import FlushCache, LoadAdapter, UpdateWeights
from multitok.messages.to_child import Control, ControlReqOutput
from multitok.messages.to_launcher import ControlReq, OperationAck

OTHERS = ["detokenizer:0", "router", "scheduler:0", "scheduler:1", "tokenizer_worker:1"]
EVERYBODY = sorted(["launcher", *OTHERS])


class Plane:
    """A server of one worker, two ranks, a detokenizer and a router, all ready."""

    def __init__(self, family, board, resumes=False):
        self.family = family
        self.timers = Timers()
        self.board = board
        self.plane = ControlPlane(family.children, self.timers, board, "info", resumes, [0, 0])
        self.worker = family.add("tokenizer_worker", 1)
        self.ranks = [family.add("scheduler", index) for index in range(2)]
        self.others = [family.add("detokenizer"), family.add("router")]

    @property
    def everybody(self):
        return [self.worker, *self.ranks, *self.others]

    def ask(self, operation, timeout=60.0, number=1):
        self.plane.ask(self.worker, ControlReq(number, operation, timeout))

    def acknowledge(self, operation_id, *children, **fields):
        for child in children:
            self.plane.acknowledged(child, OperationAck(operation_id, **fields))

    def answers(self):
        return [said for said in self.family.told(self.worker) if isinstance(said, ControlReqOutput)]

    def orders(self, child):
        return [said for said in self.family.told(child) if isinstance(said, Control)]

    def die(self, child):
        self.family.end(child)
        self.plane.buried(child)


@pytest.fixture(params=[False])
def plane(family, request):
    block = LoadBoard.create(block_name(secrets.token_hex(4), "board"), 2, 1, 2)
    level = logging.getLogger().level
    yield Plane(family, LoadBoard(block.name, 2, 1, 2), resumes=request.param)
    logging.getLogger().setLevel(level)
    block.remove()


def test_a_caller_is_answered_when_every_part_has_acknowledged(plane):
    plane.ask(Pause("abort"))
    order = Control(ControlState(epoch=1, paused="abort"), 1, Pause("abort"))
    assert [plane.orders(child) for child in plane.ranks] == [[order]] * 2
    plane.acknowledge(1, *plane.ranks, count=3)
    plane.acknowledge(1, *plane.others)
    assert plane.answers() == []
    plane.acknowledge(1, plane.worker)
    assert plane.answers() == [ControlReqOutput(1, 1, 1, done=EVERYBODY, count=6)]
    assert plane.plane.state == ControlState(epoch=1, paused="abort")
    assert plane.board.details("scheduler", 1).epoch == plane.board.details("launcher", 0).epoch == 1


def test_two_callers_at_once_get_two_answers(plane):
    plane.ask(Pause(), number=1)
    plane.ask(Pause(), number=2)
    plane.acknowledge(2, *plane.everybody)
    plane.acknowledge(1, *plane.everybody)
    assert [(answer.number, answer.id, answer.epoch) for answer in plane.answers()] == [(2, 2, 2), (1, 1, 1)]


def test_what_only_ranks_do_is_asked_of_them_alone(plane):
    plane.ask(FlushCache())
    assert [plane.orders(child) for child in (plane.worker, *plane.others)] == [[]] * 3
    plane.acknowledge(1, *plane.ranks)
    assert plane.answers() == [ControlReqOutput(1, 1, 0, done=["scheduler:0", "scheduler:1"])]


def test_what_only_ranks_do_needs_one(plane):
    for rank in plane.ranks:
        plane.die(rank)
    plane.ask(AbortMatching())
    (answer,) = plane.answers()
    assert (answer.status, answer.message) == (503, "no scheduler is up; try again later")
    # All else is kept for the next life.
    plane.ask(Pause(), number=2)
    plane.acknowledge(1, plane.worker, *plane.others)
    assert plane.answers()[0].status == 200


def test_whoever_is_late_is_named_and_the_operation_stays(plane):
    plane.ask(Pause(), timeout=0.0)
    plane.acknowledge(1, plane.worker, *plane.others)
    plane.timers.run_due()
    (answer,) = plane.answers()
    assert (answer.status, answer.late) == (504, ["scheduler:0", "scheduler:1"])
    assert "scheduler:0, scheduler:1" in answer.message
    assert plane.plane.state.paused == "wait"
    plane.acknowledge(1, *plane.ranks)
    assert plane.answers() == []


def test_a_part_that_dies_holds_nothing_up_and_its_next_life_has_the_state(plane):
    plane.ask(Pause())
    plane.acknowledge(1, *plane.others, plane.worker, plane.ranks[0])
    plane.die(plane.ranks[1])
    (answer,) = plane.answers()
    assert (answer.status, answer.died) == (200, ["scheduler:1"])
    assert plane.plane.briefing == Control(ControlState(epoch=1, paused="wait"))


RESUMES = pytest.mark.parametrize("plane", [True], indirect=True)


@RESUMES
def test_a_pause_ends_when_workers_have_nothing_left_that_a_dead_rank_had(plane):
    plane.ask(Pause())
    plane.acknowledge(1, *plane.others, plane.worker, plane.ranks[0])
    plane.die(plane.ranks[1])
    assert plane.family.told(plane.worker)[1:] == [Control(ControlState(epoch=1, paused="wait"), 2, Settle())]
    assert [order.id for order in plane.orders(plane.ranks[0])] == [1]
    # What comes late to the first half is no answer to the second.
    plane.acknowledge(1, plane.worker)
    assert plane.answers() == []
    plane.acknowledge(2, plane.worker)
    (answer,) = plane.answers()
    assert (answer.status, answer.id, answer.died) == (200, 1, ["scheduler:1"])
    assert answer.done == sorted({*EVERYBODY} - {"scheduler:1"})


@RESUMES
def test_a_worker_that_is_late_in_the_second_half_is_named(plane):
    plane.ask(Pause("abort"), timeout=0.0)
    plane.acknowledge(1, *plane.everybody)
    plane.timers.run_due()
    (answer,) = plane.answers()
    assert (answer.status, answer.late) == (504, ["tokenizer_worker:1"])
    plane.acknowledge(2, plane.worker)
    assert plane.answers() == []


@RESUMES
def test_a_worker_that_dies_in_the_second_half_holds_nothing_up(plane):
    plane.ask(Pause())
    plane.acknowledge(1, *plane.everybody)
    plane.die(plane.worker)
    assert plane.plane.state.paused == "wait"
    assert not plane.plane._open


@RESUMES
def test_a_pause_that_keeps_has_no_second_half(plane):
    plane.ask(Pause("keep"))
    plane.acknowledge(1, *plane.everybody)
    assert [answer.status for answer in plane.answers()] == [200]


def test_a_life_that_is_not_ready_is_told_and_not_waited_for(plane):
    coming = plane.family.add("tokenizer_worker", 2, ready=False)
    plane.ask(Pause())
    assert [order.state.epoch for order in plane.orders(coming)] == [1]
    plane.acknowledge(1, *plane.everybody)
    assert plane.answers()[0].done == EVERYBODY
    coming.ready_at = 1.0
    plane.plane.became_ready(coming)
    assert plane.board.details("tokenizer_worker", 2).epoch == 0  # not up, as far as the board knows
    plane.board.set_life("tokenizer_worker", 2, 1, index=2)
    assert plane.board.details("tokenizer_worker", 2).epoch == 1


def test_what_one_rank_refuses_is_taken_back_everywhere(plane):
    plane.ask(LoadAdapter("a", "/a"))
    plane.acknowledge(1, plane.ranks[0], *plane.others, plane.worker)
    plane.acknowledge(1, plane.ranks[1], status=400, problem="there is nothing")
    (answer,) = plane.answers()
    assert (answer.status, answer.message) == (400, "scheduler:1: there is nothing")
    assert plane.plane.state == ControlState(epoch=2)
    assert [order.state.adapters for order in plane.orders(plane.ranks[0])] == [{"a": Adapter("/a")}, {}]


def test_whoever_is_told_of_a_refusal_has_been_told_the_state_without_it(plane):
    plane.ask(Pause("keep"))
    plane.acknowledge(1, plane.worker, *plane.others, plane.ranks[0])
    plane.acknowledge(1, plane.ranks[1], status=400, problem="it can't stand still")
    undo, answer = plane.family.told(plane.worker)[-2:]
    assert undo == Control(ControlState(epoch=2), 2)
    assert answer.status == 400


def test_a_refusal_that_comes_late_is_taken_back_too(plane, caplog):
    plane.ask(UpdateWeights("/w"), timeout=0.0)
    plane.timers.run_due()
    assert plane.answers()[0].status == 504
    plane.acknowledge(1, plane.worker, *plane.others, plane.ranks[0])
    caplog.clear()
    plane.acknowledge(1, plane.ranks[1], status=400, problem="there is nothing")
    assert plane.plane.state == ControlState(epoch=2)
    assert [record.getMessage() for record in caplog.records] == [
        "operation 1 (update_weights_from_disk) is refused and taken back: scheduler:1: there is nothing"
    ]


@pytest.mark.parametrize("operation", [UpdateWeights("/none"), LoadAdapter("a", "/none")])
def test_what_no_engine_of_the_model_can_try_is_not_kept(plane, operation):
    for rank in plane.ranks:
        plane.die(rank)
    plane.family.add("scheduler", 0, ready=False)
    plane.ask(operation)
    (answer,) = plane.answers()
    assert (answer.status, answer.message) == (503, "no scheduler of the model is up; try again later")
    assert plane.plane.state == ControlState()


@pytest.mark.parametrize("operation", [UpdateWeights("/none"), LoadAdapter("a", "/none")])
def test_what_ranks_died_of_before_they_answered_is_taken_back(plane, operation):
    plane.ask(operation)
    plane.acknowledge(1, plane.worker, *plane.others)
    for rank in plane.ranks:
        plane.die(rank)
    (answer,) = plane.answers()
    assert (answer.status, answer.died) == (503, ["scheduler:0", "scheduler:1"])
    assert plane.plane.state == ControlState(epoch=2)


def test_what_one_rank_has_done_stays_when_the_others_die(plane):
    plane.ask(UpdateWeights("/w", "v2"))
    plane.acknowledge(1, plane.worker, *plane.others, plane.ranks[0])
    plane.die(plane.ranks[1])
    assert plane.answers()[0].status == 200
    assert plane.plane.state.weights == {0: Weights("/w", "v2")}


def test_two_pauses_that_are_refused_at_once_leave_no_pause(plane):
    for number in (1, 2):
        plane.ask(Pause("keep"), number=number)
    for operation in (1, 2):
        plane.acknowledge(operation, plane.worker, *plane.others)
        plane.acknowledge(operation, *plane.ranks, status=400, problem="it works by itself")
    assert [answer.status for answer in plane.answers()] == [400, 400]
    assert plane.plane.state.paused is None


def test_weights_that_are_loaded_stay_when_those_before_them_are_refused(plane):
    plane.ask(UpdateWeights("/none"), number=1)
    plane.ask(UpdateWeights("/good", "v2"), number=2)
    plane.acknowledge(1, *plane.ranks, status=400, problem="there is nothing")
    plane.acknowledge(1, plane.worker, *plane.others)
    plane.acknowledge(2, *plane.everybody)
    assert [answer.status for answer in plane.answers()] == [400, 200]
    assert plane.plane.state.weights == {0: Weights("/good", "v2")}


def test_what_another_operation_has_overtaken_is_not_taken_back(plane):
    plane.ask(Pause())
    plane.ask(Continue(), number=2)
    plane.acknowledge(1, *plane.ranks, status=409, problem="continued")
    plane.acknowledge(1, plane.worker, *plane.others)
    (answer,) = plane.answers()
    assert answer.status == 409
    assert plane.plane.state == ControlState(epoch=2)


def test_a_caller_that_is_gone_changes_nothing(plane):
    plane.ask(Pause())
    plane.die(plane.worker)
    plane.acknowledge(1, *plane.ranks, *plane.others)
    assert plane.plane.state.paused == "wait"


def test_the_launchers_own_log_level_is_set(plane):
    plane.ask(SetLogLevel("error"))
    assert logging.getLogger().level == logging.ERROR


def test_a_state_that_no_packet_holds_is_refused(plane):
    refused = 0
    for number in range(12):
        plane.ask(LoadAdapter(f"a{number}", "/" + "x" * 4000), number=number)
        refused += sum(answer.status == 400 for answer in plane.answers())
    assert len(plane.plane.state.adapters) + refused == 12
    assert 5 < len(plane.plane.state.adapters) < 10


def test_there_is_a_limit_of_operations_under_way(plane):
    for number in range(300):
        plane.ask(FlushCache(), number=number)
    answers = plane.answers()
    assert {answer.status for answer in answers} == {503}
    assert len(answers) == 300 - 256


def test_a_draining_life_of_a_worker_is_told_apart(plane):
    plane.worker.draining = True
    plane.family.add("tokenizer_worker", 1, 2)
    plane.ask(Pause(), timeout=0.0)
    plane.timers.run_due()
    (answer,) = plane.answers()
    assert {"tokenizer_worker:1", "tokenizer_worker:1 (draining)"} < set(answer.late)
