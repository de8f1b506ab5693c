"""Admission: which requests wait for the engine, in which order, and how much each key has in flight."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from multitok.scheduler.request import ScheduledRequest

# Below it nobody cares how many entries are of requests that have left.
_SMALL = 64


class WaitingQueue:
    """Requests in order of priority, then arrival; in front of them those that had begun in another life.

    Attributes
    ----------
    tokens : int
        Prompt ids of all that wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, ScheduledRequest]] = []
        self._waiting: dict[int, ScheduledRequest] = {}
        self._arrivals = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def __iter__(self) -> Iterator[ScheduledRequest]:
        """Go through the requests that wait, in order of arrival."""
        return iter(self._waiting.values())

    def get(self, number: int) -> ScheduledRequest | None:
        """Return the request of this number, if it waits."""
        return self._waiting.get(number)

    def push(self, request: ScheduledRequest) -> None:
        """Add a request."""
        self._arrivals += 1
        self._waiting[request.number] = request
        self.tokens += request.prompt_tokens
        heapq.heappush(self._heap, (not request.resumed, -request.message.priority, self._arrivals, request))

    def remove(self, number: int) -> ScheduledRequest | None:
        """Take a request out, wherever it is; None when it doesn't wait."""
        request = self._waiting.pop(number, None)
        if request is not None:
            self.tokens -= request.prompt_tokens
            # One that was removed stays in the heap until it comes up, or until those are the most.
            if len(self._heap) > 2 * len(self._waiting) + _SMALL or not self._waiting:
                self._heap = [entry for entry in self._heap if self._waits(entry[-1])]
                heapq.heapify(self._heap)
        return request

    @property
    def next_has_begun(self) -> bool:
        """Whether the next request had begun in another life of a scheduler."""
        while self._heap and not self._waits(self._heap[0][-1]):
            heapq.heappop(self._heap)
        return bool(self._heap) and self._heap[0][-1].resumed > 0

    def pop(self) -> ScheduledRequest:
        """Take the next request.

        Raises
        ------
        IndexError
            Nobody waits.
        """
        while True:
            request = heapq.heappop(self._heap)[-1]
            if self._waits(request):
                del self._waiting[request.number]
                self.tokens -= request.prompt_tokens
                return request

    def _waits(self, request: ScheduledRequest) -> bool:
        # A number may have left and come again.
        return self._waiting.get(request.number) is request


class TenantUsage:
    """Requests and ids in flight per API key.

    Parameters
    ----------
    max_requests, max_tokens : int or None
        Limits of each key; None: no limit.
    """

    def __init__(self, max_requests: int | None, max_tokens: int | None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._in_flight: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Return how many keys have something in flight."""
        return len(self._in_flight)

    def problem_of(self, tenant: int, tokens: int) -> str | None:
        """Return which limit of its key one more request would pass, in words meant for the client."""
        if not tenant:
            return None
        requests, in_flight = self._in_flight.get(tenant, (0, 0))
        if self._max_requests is not None and requests >= self._max_requests:
            return f"this API key has {requests} requests in flight, which is its limit; try again later"
        if self._max_tokens is not None and in_flight + tokens > self._max_tokens:
            return (
                f"this request counts as {tokens} tokens (prompt and token limit) and this API key has {in_flight} in "
                f"flight, but its limit is {self._max_tokens}"
            )
        return None

    def add(self, tenant: int, tokens: int) -> None:
        """Count a request."""
        if tenant:
            requests, in_flight = self._in_flight.get(tenant, (0, 0))
            self._in_flight[tenant] = (requests + 1, in_flight + tokens)

    def remove(self, tenant: int, tokens: int) -> None:
        """Count a request no more."""
        if tenant:
            requests, in_flight = self._in_flight.pop(tenant)
            if requests > 1:
                self._in_flight[tenant] = (requests - 1, in_flight - tokens)
