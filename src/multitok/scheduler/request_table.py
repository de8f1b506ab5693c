"""RequestTable: all requests of a rank, by stage, and everything that they are found by."""

from __future__ import annotations

import time
from collections.abc import Iterator

from multitok.config import ServerArgs
from multitok.scheduler.admission import TenantUsage, WaitingQueue
from multitok.scheduler.deadlines import Deadlines
from multitok.scheduler.request import RequestMessage, ScheduledRequest, token_limit
from multitok.scheduler.work import OutstandingWork


class RequestTable:
    """Requests that wait, run, or have ended without their owner's acknowledgement.

    Whatever leaves the engine leaves through `end`, so that no index, count or deadline of it stays behind.

    Parameters
    ----------
    server_args : ServerArgs
        The limits.
    max_running : int
        Requests that the engine is given at once.

    Attributes
    ----------
    waiting : WaitingQueue
        For the engine.
    running : dict of int to ScheduledRequest
        In the engine.
    unacknowledged : dict of int to ScheduledRequest
        Ended, but the owner has not said that it knows.
    work : OutstandingWork
        Of those that wait and run.
    """

    def __init__(self, server_args: ServerArgs, max_running: int) -> None:
        self.waiting = WaitingQueue()
        self.running: dict[int, ScheduledRequest] = {}
        self.unacknowledged: dict[int, ScheduledRequest] = {}
        self.work = OutstandingWork()
        self._max_running = max_running
        self._max_admitted = max_running + server_args.max_queued_requests
        self._max_queued_tokens = server_args.max_queued_tokens
        self._tenants = TenantUsage(server_args.max_requests_per_key, server_args.max_tokens_per_key)
        self._deadlines = Deadlines()
        self._numbers_by_rid: dict[str, int] = {}
        self._numbers_by_group: dict[str, set[int]] = {}

    # Finding

    def find(self, number: int) -> ScheduledRequest | None:
        """Return a request, whatever its stage."""
        return self.find_live(number) or self.unacknowledged.get(number)

    def find_live(self, number: int) -> ScheduledRequest | None:
        """Return a request that waits or runs."""
        return self.running.get(number) or self.waiting.get(number)

    def live(self) -> Iterator[ScheduledRequest]:
        """Go through all that run and wait."""
        yield from self.running.values()
        yield from self.waiting

    def named(self, rid: str) -> list[ScheduledRequest]:
        """Return the live requests with the user's id `rid`, their own or their call's."""
        numbers = [*self._numbers_by_group.get(rid, ())]
        if rid in self._numbers_by_rid:
            numbers.append(self._numbers_by_rid[rid])
        return [request for number in numbers if (request := self.find_live(number)) is not None]

    def named_from(self, prefix: str) -> list[ScheduledRequest]:
        """Return the live requests whose id, their own or their call's, begins so."""
        return [
            request
            for request in self.live()
            if (request.message.rid or "").startswith(prefix) or (request.message.group or "").startswith(prefix)
        ]

    def in_flight(self, now: float) -> tuple[int, int, float]:
        """Return how many requests run and wait, how many ids they have, and for how long the first has waited.

        Parameters
        ----------
        now : float
            Seconds of CLOCK_MONOTONIC.
        """
        tokens = sum(request.prompt_tokens + len(request.output_ids) for request in self.live())
        oldest = next((now - request.received for request in self.waiting), 0.0)
        return len(self.running) + len(self.waiting), tokens, oldest

    def overdue(self) -> Iterator[ScheduledRequest]:
        """Yield the live requests that should have begun or ended by now."""
        return self._deadlines.overdue(time.monotonic()) if len(self._deadlines) else iter(())

    def ms_to_deadline(self, most: int) -> int:
        """Return how many milliseconds there are until the first deadline, or `most`."""
        return self._deadlines.ms_left(time.monotonic(), most)

    # Coming

    def reason_to_refuse(self, message: RequestMessage) -> tuple[int, str] | None:
        """Return why there is no room for a request: HTTP status, and words meant for the client."""
        if (taken := self._taken_id(message)) is not None:
            return 400, f"a request with the id {taken!r} is running already"
        problem = self._tenants.problem_of(message.tenant, token_limit(message))
        if problem is not None:
            return 429, problem
        admitted = len(self.waiting) + len(self.running)
        if admitted >= self._max_admitted:
            return 503, "too many requests are waiting; try again later"
        if admitted >= self._max_running and self._max_queued_tokens is not None:
            tokens = len(message.input_ids) // 4
            if self.waiting.tokens + tokens > self._max_queued_tokens:
                return 503, "too many prompt tokens are waiting; try again later"
        return None

    def _taken_id(self, message: RequestMessage) -> str | None:
        rid, group = message.rid, message.group
        if rid is not None and (rid in self._numbers_by_rid or rid in self._numbers_by_group):
            return rid
        return group if group is not None and group in self._numbers_by_rid else None

    def add(self, request: ScheduledRequest) -> None:
        """Let a request wait."""
        message = request.message
        if message.rid is not None:
            self._numbers_by_rid[message.rid] = request.number
        if message.group is not None:
            self._numbers_by_group.setdefault(message.group, set()).add(request.number)
        self._tenants.add(message.tenant, request.token_limit)
        self._deadlines.add(request)
        self.work.add(request)
        self.waiting.push(request)

    @property
    def may_begin(self) -> bool:
        """Whether a request waits and the engine takes one more."""
        return bool(self.waiting) and len(self.running) < self._max_running

    def begin_next(self) -> ScheduledRequest:
        """Move the next request from those that wait to those that run; see `may_begin`."""
        request = self.waiting.pop()
        request.admitted = time.monotonic()
        self.running[request.number] = request
        return request

    # Going

    def end(self, request: ScheduledRequest, *, acknowledged: bool) -> None:
        """Let a request wait or run no more.

        Parameters
        ----------
        request : ScheduledRequest
            One that is not over.
        acknowledged : bool
            False keeps what its owner may yet have to be told.
        """
        number, message = request.number, request.message
        if self.running.pop(number, None) is None:
            self.waiting.remove(number)
        request.is_over = True
        self.work.end(request)
        if message.rid is not None:
            del self._numbers_by_rid[message.rid]
        if message.group is not None:
            numbers = self._numbers_by_group[message.group]
            numbers.discard(number)
            if not numbers:
                del self._numbers_by_group[message.group]
        self._tenants.remove(message.tenant, request.token_limit)
        if not acknowledged:
            self.unacknowledged[number] = request

    def acknowledge(self, number: int) -> None:
        """Forget a request that has ended; any other number is ignored."""
        self.unacknowledged.pop(number, None)
