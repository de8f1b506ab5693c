"""A hot route in two halves, so that a large body doesn't hold up the event loop."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from multitok.config import ServerArgs
from multitok.http.exchange import HttpExchange
from multitok.http.manager import Manager
from multitok.tokenizer.requests import RequestError

# Measured: decoding, checking and rendering take about 6 ms per MB.
LARGE_BODY = 96 * 1024
_HUGE_BODY = 4 * 1024 * 1024
# One thread each: the event loop waits for its turn with the interpreter's lock behind each thread that wants it.
_large = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-body")
_huge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="huge-body")
# For chat templates that turned out to take long.
_slow = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slow-template")
# Seconds that a request waits for its thread.
_MOST_WAIT_S = 10.0

T = TypeVar("T")
Start = Callable[[], None]


class TakesLong(Exception):
    """A body takes too long to read in the event loop."""


async def read_body(read: Callable[[bytes], T], request: Request, empty: bytes = b"") -> T:
    """Return what `read` makes of an ASGI request's body: decoded and checked, a large one in a thread.

    `empty` stands for none.
    """
    body = await request.body() or empty
    if len(body) <= LARGE_BODY:
        return read(body)
    return await asyncio.get_running_loop().run_in_executor(_threads_for(body), read, body)


def _threads_for(body: bytes | bytearray) -> ThreadPoolExecutor:
    return _large if len(body) <= _HUGE_BODY else _huge


class BodyRoute(ABC):
    """A route that reads its body, and then starts the work that the body asks for.

    Parameters
    ----------
    manager : Manager
        Does the work.
    limits : ServerArgs
        What one request may hold.
    """

    def __init__(self, manager: Manager, limits: ServerArgs) -> None:
        self._manager = manager
        self._limits = limits

    def __call__(self, exchange: HttpExchange) -> None:
        """Serve one request; a large body is read in a thread, and other requests go on meanwhile."""
        if len(exchange.body) > LARGE_BODY:
            exchange.run(self._serve_in(_threads_for(exchange.body), exchange))
            return
        try:
            start = self.read(exchange, False)
        except TakesLong:
            exchange.run(self._serve_in(_slow, exchange))
            return
        start()

    @abstractmethod
    def read(self, exchange: HttpExchange, in_thread: bool) -> Start:
        """Decode and check the body.

        Parameters
        ----------
        exchange : HttpExchange
            The request.
        in_thread : bool
            Whether it may take more than a few milliseconds.

        Returns
        -------
        callable
            Starts the work, in the event loop's thread.

        Raises
        ------
        RequestError
            The body is not acceptable.
        TakesLong
            It takes more, and must be read in a thread.
        """

    async def _serve_in(self, threads: ThreadPoolExecutor, exchange: HttpExchange) -> None:
        deadline = time.monotonic() + _MOST_WAIT_S
        start = await asyncio.get_running_loop().run_in_executor(threads, self._read_late, exchange, deadline)
        start()

    def _read_late(self, exchange: HttpExchange, deadline: float) -> Start:
        if time.monotonic() > deadline:
            raise RequestError(503, "too many requests that take long to prepare; try again later")
        return self.read(exchange, True)
