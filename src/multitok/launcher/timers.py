"""Timers of the launcher's loop."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable


class Timers:
    """What is to be done later, by one loop: it waits `seconds_left` at most, then calls `run_due`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Have a function called once."""
        heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._order), function))

    def seconds_left(self) -> float | None:
        """Return how long nothing is due; None: for ever."""
        return max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None

    def run_due(self) -> None:
        """Call what is due by now."""
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
