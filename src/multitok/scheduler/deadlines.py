"""Deadlines: which requests have waited or run for too long, without looking at the others."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from multitok.scheduler.request import ScheduledRequest

# Below it nobody cares how many entries are of requests that are over.
_SMALL = 1024


class Deadlines:
    """One entry per request that has a deadline; those of requests that are over are thrown out by and by."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ScheduledRequest]] = []
        self._entries = 0
        self._tidy_at = _SMALL

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: ScheduledRequest) -> None:
        """Watch a request, if it has a deadline."""
        when = request.must_end if request.admitted else min(request.must_begin, request.must_end)
        if when == math.inf:
            return
        if len(self._heap) >= self._tidy_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_over]
            heapq.heapify(self._heap)
            # Twice what is left, so that this costs a request no more than a few steps of a loop.
            self._tidy_at = max(_SMALL, 2 * len(self._heap))
        self._entries += 1
        heapq.heappush(self._heap, (when, self._entries, request))

    def ms_left(self, now: float, most: int) -> int:
        """Return how many milliseconds there are until the first one, which may be of a request that is over."""
        # Rounded up, so that nobody looks too early again and again.
        return min(most, max(0, math.ceil((self._heap[0][0] - now) * 1000))) if self._heap else most

    def overdue(self, now: float) -> Iterator[ScheduledRequest]:
        """Yield the requests that should have begun, or ended, by now, and watch them no more."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            request = heapq.heappop(heap)[2]
            if request.is_over:
                continue
            if request.admitted and now < request.must_end:
                # It has begun in time.
                self.add(request)
                heap = self._heap
                continue
            yield request
