"""What every part does about the control plane: it keeps the state, and does its share of an operation."""

from __future__ import annotations

import gc
import logging

from multitok.ipc.launcher_channel import LauncherChannel, LauncherSlow
from multitok.messages.control import ControlState, FreezeGc
from multitok.messages.to_child import Control
from multitok.messages.to_launcher import OperationAck
from multitok.observability.logging import set_log_level

_log = logging.getLogger(__name__)
_OVERTAKEN = "generation was continued, or paused in another way, before everything had ended"


class Controlled:
    """A part's copy of the control state; made when its life begins, before it does anything else.

    Parameters
    ----------
    channel : LauncherChannel
        To the launcher.

    Attributes
    ----------
    state : ControlState
        As the launcher has said last.
    """

    def __init__(self, channel: LauncherChannel) -> None:
        self._channel = channel
        self.state = ControlState()
        # Orders that wait until everything has ended.
        self._held: list[Control] = []
        if (briefing := channel.take_briefing()) is not None:
            self.take(briefing)

    def follow(self, order: Control) -> None:
        """Do an operation, and say so."""
        self.take(order)
        self.acknowledge(order)

    def take(self, order: Control) -> None:
        """Take the new state, and do what every part does; a part that has more to do acknowledges it later."""
        self.state = order.state
        apply(order)

    @property
    def holds(self) -> bool:
        """Whether an order waits until everything has ended."""
        return bool(self._held)

    def hold(self, order: Control) -> None:
        """Acknowledge an order when everything has ended, or something else has overtaken it."""
        self._held.append(order)

    def everything_has_ended(self) -> None:
        """Acknowledge the orders that have waited for it."""
        self._release(200, "")

    def overtake(self) -> None:
        """Say of the orders that wait that they were not done: another one has come in between."""
        self._release(409, _OVERTAKEN)

    def _release(self, status: int, problem: str) -> None:
        held, self._held = self._held, []
        for order in held:
            self.acknowledge(order, status, problem)

    def acknowledge(self, order: Control, status: int = 200, problem: str = "", count: int = 0) -> None:
        """Say that an operation is done, or why it is not."""
        if not order.id:
            return
        try:
            self._channel.send(OperationAck(order.id, status, problem, count))
        except LauncherSlow:
            _log.error("the launcher does not read that operation %d is done", order.id)


def apply(order: Control) -> None:
    """Do in this process what an operation demands of each."""
    set_log_level(order.state.log_level)
    if isinstance(order.operation, FreezeGc):
        gc.collect()
        gc.freeze()
    _log.debug("control state: epoch %d, log level %s", order.state.epoch, order.state.log_level)
