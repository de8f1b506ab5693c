"""ControlClient: an HTTP worker's way to the control plane, and its copy of the control state."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherGone
from multitok.messages.control import ControlOperation, ControlState, Settle
from multitok.messages.to_child import Control, ControlReqOutput
from multitok.messages.to_launcher import ControlReq
from multitok.tokenizer.requests import RequestError

# What the launcher may take for an answer beyond the operation's own time limit.
_PATIENCE_S = 5.0
# How often a pause looks whether the last request has ended that had begun before it: some may go on in a new engine.
_LOOK_S = 0.005


class ControlClient:
    """Asks for operations; from within the event loop.

    Parameters
    ----------
    controlled : Controlled
        This worker as one of the parts.
    send : callable
        Sends to the launcher.

    Attributes
    ----------
    has_begun : callable
        Whether a request of this worker's is running of which ids have come.
    settled : bool
        During a pause: this worker has said that there is none.
    """

    def __init__(self, controlled: Controlled, send: Callable[[ControlReq], None]) -> None:
        self._controlled = controlled
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[ControlReqOutput]] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self.has_begun: Callable[[], bool] = lambda: False
        self.settled = False

    @property
    def state(self) -> ControlState:
        """What operators have set, as far as this worker has heard."""
        return self._controlled.state

    def follow(self, order: Control | ControlReqOutput) -> None:
        """Take what the launcher says."""
        if isinstance(order, Control):
            self._follow_control(order)
        elif (future := self._waiting.get(order.number)) is not None and not future.done():
            future.set_result(order)

    def _follow_control(self, order: Control) -> None:
        if not isinstance(order.operation, Settle):
            self._controlled.follow(order)
        else:
            self._controlled.take(order)
            self._controlled.hold(order)
        if self.state.paused in (None, "keep"):
            self.settled = False
            self._controlled.overtake()
        elif self._next_look is None:
            self._settle()

    def _settle(self) -> None:
        self._next_look = None
        if not self._controlled.holds:
            return
        if self.has_begun():
            self._next_look = asyncio.get_running_loop().call_later(_LOOK_S, self._settle)
        else:
            self.settled = True
            self._controlled.everything_has_ended()

    async def operate(self, operation: ControlOperation, timeout: float) -> ControlReqOutput:
        """Have an operation carried out in every part that it concerns.

        Parameters
        ----------
        operation : ControlOperation
            What to do.
        timeout : float
            Seconds.

        Returns
        -------
        ControlReqOutput
            Who has done it.

        Raises
        ------
        RequestError
            It was refused (4xx), or some have not answered in time (504, with their names).
        """
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(ControlReq(number, operation, timeout))
            answer: ControlReqOutput = await asyncio.wait_for(future, timeout + _PATIENCE_S)
        except LauncherGone:
            raise RequestError(503, "the launcher can't be reached; try again later") from None
        except TimeoutError:
            raise RequestError(504, "the launcher does not answer; nobody knows what was done") from None
        finally:
            del self._waiting[number]
        if answer.status != 200:
            raise RequestError(answer.status, answer.message)
        return answer


def described(state: ControlState, models: Sequence[str]) -> dict[str, object]:
    """Return a control state as people read it, with the names of the models."""
    return {
        "epoch": state.epoch,
        "paused": state.paused,
        "log_level": state.log_level,
        "adapters": {name: {"path": its.path, "model": models[its.model]} for name, its in state.adapters.items()},
        "weights": {models[i]: {"path": its.path, "version": its.version} for i, its in state.weights.items()},
    }
