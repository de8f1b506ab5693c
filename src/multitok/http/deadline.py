"""A deadline that moves with every request and is hardly ever missed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

# The loop's timers fire up to a millisecond early.
_EARLY = 0.001


def _nothing() -> None:
    """Stand in for the callback of a deadline that was closed."""


class Deadline:
    """Calls back when its time has come, unless it was moved before.

    To move it is a store: the loop's timer stays where it is, looks at the deadline when it fires, and goes on from
    there. A timer that is made and cancelled per request costs as much as a tenth of a small request's parsing.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
        Runs the timer.
    on_due : callable
        Called when the time has come; the deadline is clear then.
    """

    __slots__ = ("_armed", "_due", "_handle", "_loop", "_on_due")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        self._due = self._armed = math.inf
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Move it to so many seconds from now."""
        self._due = due = self._loop.time() + seconds
        if due < self._armed:
            self._arm(due)

    def clear(self) -> None:
        """Have no deadline."""
        self._due = math.inf

    def close(self) -> None:
        """Never call back any more, and let go of whom it calls."""
        self._due = math.inf
        self._on_due = _nothing
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._armed = when
        self._handle = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self._handle = None
        self._armed = math.inf
        if self._due == math.inf:
            return
        if self._loop.time() + _EARLY < self._due:
            self._arm(self._due)
        else:
            self._due = math.inf
            self._on_due()
