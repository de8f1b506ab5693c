"""Admission: which requests wait for the engine, and in which order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from multitok.scheduler.request import ScheduledRequest


class WaitingQueue:
    """Requests in order of priority, then arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, ScheduledRequest]] = []
        self._waiting: dict[int, ScheduledRequest] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def __iter__(self) -> Iterator[ScheduledRequest]:
        """Go through the requests that wait, in order of arrival."""
        return iter(self._waiting.values())

    def push(self, request: ScheduledRequest) -> None:
        """Add a request."""
        self._arrivals += 1
        self._waiting[request.number] = request
        heapq.heappush(self._heap, (-request.message.priority, self._arrivals, request))

    def remove(self, number: int) -> ScheduledRequest | None:
        """Take a request out, wherever it is; None when it doesn't wait."""
        request = self._waiting.pop(number, None)
        if not self._waiting:
            self._heap.clear()
        return request

    def pop(self) -> ScheduledRequest:
        """Take the next request.

        Raises
        ------
        IndexError
            Nobody waits.
        """
        while True:
            request = heapq.heappop(self._heap)[2]
            # One that was removed stays in the heap until it comes up, even when its number has come again.
            if self._waiting.get(request.number) is request:
                del self._waiting[request.number]
                return request
