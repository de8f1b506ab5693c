"""RankControl: what a rank does about the control plane, between two steps of its engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

from multitok.engines.base import Engine, EngineRefusal, no_such_operation
from multitok.ipc.controlled import Controlled
from multitok.messages.base import FinishReason
from multitok.messages.control import AbortMatching, ControlState, Pause, PauseMode, Weights
from multitok.messages.operations import (
    EngineOperation,
    FlushCache,
    LoadAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
    name_of,
)
from multitok.messages.to_child import Control
from multitok.messages.to_scheduler import TokenizedGenerateReqInput
from multitok.scheduler.request import RequestMessage, ScheduledRequest
from multitok.scheduler.request_table import RequestTable
from multitok.tokenizer.errors import ModelError

_log = logging.getLogger(__name__)
_OWN_VERSION = "default"
_PAUSED = "generation is paused; try again later"


class RankControl:
    """Decides whether requests begin and whether the engine takes steps, and brings the engine to the control state.

    Parameters
    ----------
    controlled : Controlled
        The state, and the way to acknowledge.
    engine : Engine
        Of this rank.
    table : RequestTable
        Of this rank.
    model : int
        Index of the model that this rank serves.
    model_path : str
        Where the engine's weights come from unless an operator has loaded others.
    refuse : bool
        Whether requests that come during a pause are refused; else they are held.
    end_early : callable
        Ends requests with a reason.
    before_long_work : callable
        Called before the engine does something that may take long.

    Attributes
    ----------
    paused : {'wait', 'abort', 'keep'} or None
        No request begins; but those that had begun in another life of a scheduler do (``wait``), or are aborted like
        all that run (``abort``).
    still : bool
        Nor does the engine take a step.
    """

    def __init__(
        self,
        controlled: Controlled,
        engine: Engine,
        table: RequestTable,
        *,
        model: int,
        model_path: str,
        refuse: bool,
        end_early: Callable[[list[ScheduledRequest], FinishReason], None],
        before_long_work: Callable[[], None],
    ) -> None:
        self._controlled = controlled
        self._engine = engine
        self._table = table
        self._model = model
        self._refuse = refuse
        self._end_early = end_early
        self._before_long_work = before_long_work
        # What the engine has.
        self._adapters: dict[str, str] = {}
        self._weights = self._own_weights = Weights(model_path, _OWN_VERSION)
        # What it would not take, by name and path (weights have no name): not asked for again until an operator does.
        self._refused: set[tuple[str | None, str]] = set()
        self.paused: PauseMode | None = None
        self.still = False

    def begin(self) -> None:
        """Bring a new engine to the state that this life begins with.

        Raises
        ------
        ModelError
            It can't have the weights that the others have.
        """
        self._reach(self._controlled.state)

    def follow(self, order: Control) -> None:
        """Do an operation; see `begin`."""
        self._controlled.take(order)
        try:
            count = self._do(order)
        except EngineRefusal as refusal:
            self._controlled.acknowledge(order, refusal.status, refusal.message)
            return
        if isinstance(order.operation, Pause) and order.operation.mode == "wait":
            self._controlled.hold(order)
            self.settle()
        else:
            self._controlled.acknowledge(order, count=count)

    def settle(self) -> None:
        """Acknowledge pauses that have waited for the last request to end."""
        if self._controlled.holds and not (self._table.running or self._table.waiting.next_has_begun):
            self._controlled.everything_has_ended()

    def problem_of(self, message: RequestMessage) -> tuple[int, str] | None:
        """Return why a request that has just come is not taken, or not held: HTTP status and words."""
        # What has begun in another life was accepted before the pause.
        begun = isinstance(message, TokenizedGenerateReqInput) and message.resumed_ids
        if self.paused and self._refuse and not begun:
            return 503, _PAUSED
        return self.problem_of_adapter(message)

    def problem_of_adapter(self, message: RequestMessage) -> tuple[int, str] | None:
        """Return why a request can't have the adapter that it names."""
        fields = message.engine_fields if isinstance(message, TokenizedGenerateReqInput) else None
        if fields is None or fields.adapter is None or fields.adapter in self._adapters:
            return None
        return 404, f"the adapter {fields.adapter[:200]!r} is not loaded"

    # Inside

    def _do(self, order: Control) -> int:
        """Do what is the rank's in an operation; returns how many requests it has ended."""
        operation, count = order.operation, 0
        if isinstance(operation, EngineOperation) and operation.model != self._model:
            operation = None
        match operation:
            case Pause(mode="keep") if self._engine.wakeup is not None:
                name = self._engine.info.name
                raise EngineRefusal(400, f"engine {name!r} works by itself and can't stand still: use mode 'wait'")
            case Pause(mode="abort"):
                count = self._end([*self._table.running.values()])
            case AbortMatching() if operation.model in (None, self._model):
                count = self._end(self._matching(operation))
            case FlushCache() | StartProfile() | StopProfile():
                self._operate(operation)
            case LoadAdapter():
                self._load(operation.name, operation.path, operation)
                self._adapters[operation.name] = operation.path
            case UpdateWeights():
                self._load(None, operation.path, operation)
                self._weights = order.state.weights.get(self._model, self._own_weights)
        self._reach(order.state)
        return count

    def _end(self, requests: list[ScheduledRequest]) -> int:
        self._end_early(requests, FinishReason("abort"))
        return len(requests)

    def _matching(self, operation: AbortMatching) -> list[ScheduledRequest]:
        if operation.rid is None:
            return [*self._table.live()]
        return self._table.named_from(operation.rid) if operation.prefix else self._table.named(operation.rid)

    def _reach(self, state: ControlState) -> None:
        """Do whatever the engine lacks to be as the state says."""
        was_paused = self.paused
        self.paused = state.paused
        self.still = state.paused == "keep" and self._engine.wakeup is None
        if was_paused and (not self.paused or self.still):
            self._controlled.overtake()
        adapters = {name: its.path for name, its in state.adapters.items() if its.model == self._model}
        for name in [name for name in self._adapters if name not in adapters]:
            self._operate(UnloadAdapter(name))
            del self._adapters[name]
        for name, path in adapters.items():
            if self._adapters.get(name) != path and (name, path) not in self._refused:
                self._bring_adapter(name, path)
        weights = state.weights.get(self._model, self._own_weights)
        if self._weights != weights and (None, weights.path) not in self._refused:
            try:
                self._operate(UpdateWeights(weights.path, weights.version))
            except EngineRefusal as refusal:
                # Answers of other weights than everybody's would be wrong without a sign of it.
                raise ModelError(f"the engine does not take the weights that an operator has set: {refusal}") from None
            self._weights = weights

    def _bring_adapter(self, name: str, path: str) -> None:
        try:
            self._load(name, path, LoadAdapter(name, path))
            self._adapters[name] = path
        except EngineRefusal as refusal:
            # Requests for it are refused; all others go on.
            _log.error("the adapter %r can't be loaded: %s", name, refusal.message)

    def _load(self, name: str | None, path: str, operation: LoadAdapter | UpdateWeights) -> None:
        try:
            self._operate(operation)
            self._refused.discard((name, path))
        except EngineRefusal:
            self._refused.add((name, path))
            raise

    def _operate(self, operation: EngineOperation) -> None:
        """Have the engine do something.

        Raises
        ------
        EngineRefusal
            It does not, or has failed.
        """
        if name_of(operation) not in self._engine.info.operations:
            raise no_such_operation(self._engine.info, operation)
        self._before_long_work()
        try:
            self._engine.operate(operation)
        except EngineRefusal:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.filename is not None:
                # What is at a path that the operator has named, or that no path can be so long.
                raise EngineRefusal(400, f"{error.strerror}: {error.filename}") from error
            _log.exception("the engine failed at %s", name_of(operation))
            raise EngineRefusal(500, f"the engine failed: {error}") from error
