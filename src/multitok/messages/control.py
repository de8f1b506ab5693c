"""The control plane: what operators ask for, and the state that it leaves behind."""

from __future__ import annotations

from typing import Literal

import msgspec

from multitok.messages.operations import (
    FlushCache,
    LoadAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)

PauseMode = Literal["wait", "abort", "keep"]
LogLevel = Literal["debug", "info", "warning", "error"]


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """A loaded LoRA adapter: its folder or file, and the index of the model that it belongs to."""

    path: str
    model: int = 0


class Weights(msgspec.Struct, array_like=True, frozen=True):
    """What took the place of a model's own weights, and what the operator, or else the operation's number, calls it."""

    path: str
    version: str


class ControlState(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What operators have set; every part has a copy, and the launcher's outlives them all.

    Attributes
    ----------
    epoch : int
        Its version: each operation that changes it adds one.
    paused : {'wait', 'abort', 'keep'} or None
        No request begins; ``keep``: nor does the engine take a step.
    log_level : {'debug', 'info', 'warning', 'error'}
        Least severe messages shown.
    adapters : dict of str to Adapter
        The loaded LoRA adapters, by name.
    weights : dict of int to Weights
        What the models have that do not have their own weights any more, by index.
    """

    epoch: int = 0
    paused: PauseMode | None = None
    log_level: LogLevel = "info"
    adapters: dict[str, Adapter] = {}
    weights: dict[int, Weights] = {}


class Pause(msgspec.Struct, tag="pause", frozen=True):
    """Let no request begin; those that come are held.

    Attributes
    ----------
    mode : {'wait', 'abort', 'keep'}
        What becomes of those that run: they end by themselves, which is waited for; they are aborted; or they stay
        where they are, and the engine takes no step. Those that go on after a scheduler's death count as running.
    """

    mode: PauseMode = "wait"


class Continue(msgspec.Struct, tag="continue", frozen=True):
    """End a pause."""


class Settle(msgspec.Struct, tag="settle", frozen=True):
    """To HTTP workers, of the launcher: say when no request is left that had begun before a pause.

    Ranks have said so before; a request that was lost with one is its owner's, who has it go on elsewhere.
    """


class SetLogLevel(msgspec.Struct, tag="set_log_level", frozen=True):
    """Show messages of this level and above, in every process."""

    level: LogLevel


class FreezeGc(msgspec.Struct, tag="freeze_gc", frozen=True):
    """Collect garbage, and never again look at what is there now, in every process."""


class AbortMatching(msgspec.Struct, tag="abort", frozen=True):
    """End requests, whoever owns them.

    Attributes
    ----------
    rid : str or None
        The user's id, a request's own or its call's; None: all.
    prefix : bool
        Every id that begins so.
    model : int or None
        Index of the only model whose requests are meant; None: those of all.
    """

    rid: str | None = None
    prefix: bool = False
    model: int | None = None


ControlOperation = (
    Pause
    | Continue
    | SetLogLevel
    | FreezeGc
    | AbortMatching
    | FlushCache
    | LoadAdapter
    | UnloadAdapter
    | UpdateWeights
    | StartProfile
    | StopProfile
)


def state_after(state: ControlState, operation: ControlOperation, operation_id: int) -> ControlState:
    """Return the state that an operation leaves behind: the same object where it changes nothing that is kept."""
    match operation:
        case Pause():
            changes: dict[str, object] = {"paused": operation.mode}
        case Continue():
            changes = {"paused": None}
        case SetLogLevel():
            changes = {"log_level": operation.level}
        case LoadAdapter():
            changes = {"adapters": {**state.adapters, operation.name: Adapter(operation.path, operation.model)}}
        case UnloadAdapter():
            changes = {"adapters": {name: its for name, its in state.adapters.items() if name != operation.name}}
        case UpdateWeights():
            new = Weights(operation.path, operation.version or str(operation_id))
            changes = {"weights": {**state.weights, operation.model: new}}
        case _:
            return state
    return msgspec.structs.replace(state, epoch=state.epoch + 1, **changes)


class ControlJournal:
    """The operations that are not over, on top of the state before them: any of them can be taken back.

    A state that one of them was asked for in is no state to go back to, since it may hold what another one, which is
    refused as well, has set.
    """

    def __init__(self, state: ControlState) -> None:
        self._settled = state
        # By number, in order; True: every part has answered.
        self._operations: dict[int, tuple[ControlOperation, bool]] = {}

    def add(self, operation_id: int, operation: ControlOperation) -> None:
        """Take an operation in, the newest."""
        self._operations[operation_id] = operation, False

    def settle(self, operation_id: int) -> None:
        """Keep an operation: all have answered. One that isn't here has changed nothing."""
        if operation_id in self._operations:
            self._operations[operation_id] = self._operations[operation_id][0], True
        for first, (oldest, is_over) in list(self._operations.items()):
            if not is_over:
                break
            self._settled = state_after(self._settled, oldest, first)
            del self._operations[first]

    def take_back(self, operation_id: int, newest: ControlState) -> ControlState:
        """Return the state without an operation: the newest itself where it has left nothing behind."""
        self._operations.pop(operation_id, None)
        state = self._settled
        for number, (operation, _) in self._operations.items():
            state = state_after(state, operation, number)
        state = msgspec.structs.replace(state, epoch=newest.epoch)
        return newest if state == newest else msgspec.structs.replace(state, epoch=newest.epoch + 1)


def is_for_ranks_only(operation: ControlOperation) -> bool:
    """Whether an operation concerns the schedulers and nobody else, and changes no state."""
    return isinstance(operation, AbortMatching | FlushCache | StartProfile | StopProfile)


def model_to_try_at(operation: ControlOperation) -> int | None:
    """Return the model whose engine has to show that it takes what is new, before new lives begin with it; or None."""
    return operation.model if isinstance(operation, LoadAdapter | UpdateWeights) else None
