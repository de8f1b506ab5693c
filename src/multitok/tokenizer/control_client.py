"""ControlClient: an HTTP worker's way to the control plane, and its copy of the control state."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherGone
from multitok.messages.control import ControlOperation, ControlState
from multitok.messages.to_child import Control, ControlReqOutput
from multitok.messages.to_launcher import ControlReq
from multitok.tokenizer.requests import RequestError

# What the launcher may take for an answer beyond the operation's own time limit.
_PATIENCE_S = 5.0


class ControlClient:
    """Asks for operations; from within the event loop.

    Parameters
    ----------
    controlled : Controlled
        This worker as one of the parts.
    send : callable
        Sends to the launcher.
    """

    def __init__(self, controlled: Controlled, send: Callable[[ControlReq], None]) -> None:
        self._controlled = controlled
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[ControlReqOutput]] = {}

    @property
    def state(self) -> ControlState:
        """What operators have set, as far as this worker has heard."""
        return self._controlled.state

    def follow(self, order: Control | ControlReqOutput) -> None:
        """Take what the launcher says."""
        if isinstance(order, Control):
            self._controlled.follow(order)
        elif (future := self._waiting.get(order.number)) is not None and not future.done():
            future.set_result(order)

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
