"""What came for the scheduler's thread: one merged output per request, and a descriptor that tells of it."""

from __future__ import annotations

import contextlib
import os
import threading

from multitok.engines.base import EngineOutput
from multitok.engines.remote.api import Delta


class Pending:
    """One request's output that the scheduler has not taken; at most all that the request may get.

    Attributes
    ----------
    number : int
        The request.
    output : EngineOutput or None
        None when there is nothing new.
    """

    __slots__ = ("number", "output")

    def __init__(self, number: int) -> None:
        self.number = number
        self.output: EngineOutput | None = None


class Outbox:
    """Between the thread that speaks HTTP and the scheduler's.

    Attributes
    ----------
    wakeup : int
        An eventfd, readable while there is something to take, and after a `signal`.
    """

    def __init__(self) -> None:
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._ready: list[Pending] = []

    def put(self, pending: Pending, delta: Delta) -> None:
        """Add to a request's output; `signal` tells the other side."""
        with self._lock:
            output = pending.output
            if output is None:
                pending.output = EngineOutput(
                    pending.number,
                    delta.ids,
                    delta.finish,
                    delta.logprobs,
                    delta.top_logprobs,
                    delta.cached_tokens,
                    None,
                    delta.customized_info,
                )
                self._ready.append(pending)
                return
            output.output_ids = output.output_ids + delta.ids
            output.finish = delta.finish
            if delta.logprobs is not None:
                output.logprobs = (output.logprobs or []) + delta.logprobs
            if delta.top_logprobs is not None:
                output.top_logprobs = (output.top_logprobs or []) + delta.top_logprobs
            output.cached_tokens = delta.cached_tokens or output.cached_tokens
            output.customized_info = delta.customized_info or output.customized_info

    def signal(self) -> None:
        """Wake the other side."""
        os.eventfd_write(self.wakeup, 1)

    def take(self) -> list[tuple[Pending, EngineOutput]]:
        """Return all that came."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        with self._lock:
            ready, self._ready = self._ready, []
            taken = [(pending, pending.output) for pending in ready]
            for pending in ready:
                pending.output = None
        return [(pending, output) for pending, output in taken if output is not None]

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.wakeup)
