"""ControlPlane: carries out what operators ask for, in every part, and keeps the state that it leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from multitok.ipc import controlled
from multitok.launcher.child_process import ChildProcess, part_name
from multitok.launcher.children import SCHEDULER, WORKER, Children
from multitok.launcher.load_board import LoadBoard
from multitok.launcher.timers import Timers
from multitok.messages.control import (
    ControlJournal,
    ControlOperation,
    ControlState,
    LogLevel,
    Pause,
    Settle,
    is_for_ranks_only,
    model_to_try_at,
    state_after,
)
from multitok.messages.operations import name_of
from multitok.messages.to_child import Control, ControlReqOutput
from multitok.messages.to_launcher import ControlReq, OperationAck

_log = logging.getLogger(__name__)

LAUNCHER = "launcher"
# Each packet to a child carries the whole state, and has a limit of 64 KiB.
_MOST_STATE_BYTES = 32 * 1024
_MOST_OPEN = 256
# What came in between is no refusal: nothing is taken back.
_OVERTAKEN = 409


class _Open:
    """An operation that some parts have not answered yet.

    Attributes
    ----------
    id : int
        The operation.
    asked_as : int
        The id that parts answer under; in the second half of a pause it has another one.
    operation : ControlOperation or None
        What it is; None: the taking back of another.
    state : ControlState
        After it.
    caller : ChildProcess or None
        Who waits for the answer; None once it has it.
    number : int
        The caller's question.
    awaited : dict of int to str
        Names of the parts that have not answered, by process id.
    done, died : list of str
        Those that have, and those that ended first.
    refusals : list of (str, int, str)
        Part, status, and why.
    count : int
        Requests that it has ended.
    """

    def __init__(self, operation_id: int, operation: ControlOperation | None, state: ControlState) -> None:
        self.id = self.asked_as = operation_id
        self.operation = operation
        self.state = state
        self.caller: ChildProcess | None = None
        self.number = 0
        self.awaited: dict[int, str] = {}
        self.done: list[str] = []
        self.died: list[str] = []
        self.refusals: list[tuple[str, int, str]] = []
        self.count = 0

    @property
    def name(self) -> str:
        """Its name for people."""
        return "undo" if self.operation is None else name_of(self.operation)


class ControlPlane:
    """One line of operations for the whole server.

    It lives with the launcher, because what operators set must outlive every child, and because only the launcher knows
    every life, ready or not. All goes over the channels: HTTP worker --ControlReq--> here --Control--> every part
    --OperationAck--> here --ControlReqOutput--> HTTP worker. A channel keeps its order, so every part does operations
    in the order of their ids, and a new life, whose channel begins with the state, has it before its first request. A
    life that is not ready yet is told, and not waited for. Nothing here waits.

    Parameters
    ----------
    children : Children
        All.
    timers : Timers
        Of the launcher's loop.
    board : LoadBoard
        On which each part's epoch is put down.
    log_level : {'debug', 'info', 'warning', 'error'}
        As the server was started with.
    resumes : bool
        Whether requests may go on after a scheduler's death: a pause has to wait for them, too.
    model_of_rank : sequence of int
        Which model each rank serves.

    Attributes
    ----------
    state : ControlState
        The newest.
    """

    def __init__(
        self,
        children: Children,
        timers: Timers,
        board: LoadBoard,
        log_level: LogLevel,
        resumes: bool,
        model_of_rank: Sequence[int],
    ) -> None:
        self._children = children
        self._timers = timers
        self._board = board
        self._resumes = resumes
        self._model_of_rank = model_of_rank
        self.state = ControlState(log_level=log_level)
        self._journal = ControlJournal(self.state)
        self._ids = 0
        self._open: dict[int, _Open] = {}

    @property
    def briefing(self) -> Control:
        """What a new life is told first."""
        return Control(self.state)

    def became_ready(self, child: ChildProcess) -> None:
        """Put down which state a part begins with."""
        self._board.set_epoch(child.role, child.slot, self.state.epoch)

    # Operations

    def ask(self, caller: ChildProcess, request: ControlReq) -> None:
        """Begin an operation; the caller gets one answer, now or later."""
        operation = request.operation
        state = state_after(self.state, operation, self._ids + 1)
        if len(self._open) >= _MOST_OPEN:
            return self._refuse(caller, request, 503, "too many operations are under way; try again later")
        if state is not self.state and len(msgspec.msgpack.encode(state)) > _MOST_STATE_BYTES:
            return self._refuse(caller, request, 400, "there is no room for so many adapters")
        ready = [child for child in self._children.of(SCHEDULER) if child.ready]
        if is_for_ranks_only(operation) and not ready:
            return self._refuse(caller, request, 503, "no scheduler is up; try again later")
        model = model_to_try_at(operation)
        if model is not None and not any(self._model_of_rank[child.index] == model for child in ready):
            return self._refuse(caller, request, 503, "no scheduler of the model is up; try again later")
        current = self._begin(operation, state)
        current.caller, current.number = caller, request.number
        _log.info("operation %d: %s by %s, epoch %d", current.id, current.name, caller.name, state.epoch)
        if current.awaited:
            self._timers.call_later(request.timeout, lambda: self._time_is_up(current))
        else:
            self._end(current)

    def _begin(self, operation: ControlOperation | None, state: ControlState) -> _Open:
        """Keep the state, and tell every part that an operation concerns."""
        self._ids += 1
        current = self._open[self._ids] = _Open(self._ids, operation, state)
        if operation is not None and state is not self.state:
            self._journal.add(self._ids, operation)
        self.state = state
        order = Control(state, current.id, operation)
        if operation is not None and is_for_ranks_only(operation):
            concerned = self._children.of(SCHEDULER)
        else:
            concerned = self._children.all()
            controlled.apply(order)
            self._board.set_epoch(LAUNCHER, 0, state.epoch)
            current.done.append(LAUNCHER)
        self._tell(concerned, order, current)
        return current

    @staticmethod
    def _tell(children: list[ChildProcess], order: Control, current: _Open) -> None:
        for child in children:
            child.send(order)
            if child.ready:
                current.awaited[child.pid] = _name(child)

    def acknowledged(self, child: ChildProcess, ack: OperationAck) -> None:
        """A part has answered."""
        current = self._open.get(ack.id)
        if current is None:
            return
        self._board.set_epoch(child.role, child.slot, current.state.epoch)
        name = current.awaited.pop(child.pid, None)
        if name is None:
            return
        current.count += ack.count
        if ack.status == 200:
            current.done.append(name)
        else:
            current.refusals.append((name, ack.status, ack.problem))
        self._end_if_nobody_is_awaited(current)

    def buried(self, child: ChildProcess) -> None:
        """A part has ended, and holds nothing up: its next life begins with the state."""
        for current in list(self._open.values()):
            if (name := current.awaited.pop(child.pid, None)) is not None:
                current.died.append(name)
                self._end_if_nobody_is_awaited(current)

    def _end_if_nobody_is_awaited(self, current: _Open) -> None:
        if not current.awaited:
            self._end(current)

    def _end(self, current: _Open) -> None:
        del self._open[current.asked_as]
        if self._has_a_second_half(current):
            return self._begin_second_half(current)
        refusals = current.refusals
        if not refusals and (untried := self._died_before_trying(current)):
            refusals += [(name, 503, "died before it had done it; try again later") for name in untried]
        why = "; ".join(f"{name}: {problem}" for name, _, problem in refusals)
        if any(status != _OVERTAKEN for _, status, _ in refusals):
            state = self._journal.take_back(current.id, self.state)
            is_undone = state is not self.state
            fate = "refused and taken back" if is_undone else "refused"
            _log.warning("operation %d (%s) is %s: %s", current.id, current.name, fate, why)
            if is_undone:
                self._begin(None, state)
        else:
            self._journal.settle(current.id)
        self._answer(current, max((status for _, status, _ in refusals), default=200), why)

    def _died_before_trying(self, current: _Open) -> list[str]:
        """Return the ranks that died if none is left that knows whether the model's engine takes what is new.

        Kept all the same, it could be something with which no next life can begin.
        """
        model = None if current.operation is None else model_to_try_at(current.operation)
        if model is None:
            return []
        ranks = {part_name(SCHEDULER, rank) for rank, its in enumerate(self._model_of_rank) if its == model}
        return [] if ranks.intersection(current.done) else sorted(ranks.intersection(current.died))

    def _has_a_second_half(self, current: _Open) -> bool:
        return (
            self._resumes
            and isinstance(current.operation, Pause)
            and not current.refusals
            and current.asked_as == current.id
            and self.state.paused in ("wait", "abort")
        )

    def _begin_second_half(self, current: _Open) -> None:
        """Wait for requests that no rank had: a scheduler has died, and they are yet to go on in another life."""
        self._ids += 1
        current.asked_as = self._ids
        self._open[self._ids] = current
        self._tell(self._children.of(WORKER), Control(self.state, self._ids, Settle()), current)
        self._end_if_nobody_is_awaited(current)

    def _time_is_up(self, current: _Open) -> None:
        """Tell the caller who has not answered; the operation stays, and whoever is late does it when it can."""
        if current.asked_as in self._open and current.caller is not None:
            late = ", ".join(sorted(current.awaited.values()))
            message = f"operation {current.id} ({current.name}) was not done in time by {late}"
            _log.warning("%s", message)
            self._answer(current, 504, message)

    def _answer(self, current: _Open, status: int, message: str) -> None:
        caller, current.caller = current.caller, None
        if caller is None:
            return
        answer = ControlReqOutput(current.number, current.id, current.state.epoch, status, message)
        answer.done, answer.died = sorted({*current.done}.difference(current.died)), sorted(current.died)
        answer.late = sorted(current.awaited.values())
        answer.count = current.count
        caller.send(answer)

    @staticmethod
    def _refuse(caller: ChildProcess, request: ControlReq, status: int, message: str) -> None:
        caller.send(ControlReqOutput(request.number, status=status, message=message))


def _name(child: ChildProcess) -> str:
    """Return a part's name; of an HTTP worker two lives may be there."""
    return f"{child.name} (draining)" if child.role == WORKER and child.draining else child.name
