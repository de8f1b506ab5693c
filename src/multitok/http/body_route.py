"""A hot route in two halves, so that a large body doesn't hold up the event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from starlette.requests import Request

from multitok.http.decode import decode_body
from multitok.http.exchange import HttpExchange
from multitok.http.manager import Manager

# Measured: decoding, checking and rendering take about 6 ms per MB.
LARGE_BODY = 96 * 1024
_HUGE_BODY = 4 * 1024 * 1024
# One thread each: the event loop waits for its turn with the interpreter's lock behind each thread that wants it.
_large = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-body")
_huge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="huge-body")

T = TypeVar("T")
Start = Callable[[], None]


async def read_body(decoder: msgspec.json.Decoder[T], request: Request) -> T:
    """Decode the body of an ASGI request, a large one in a thread; see `decode_body`."""
    body = await request.body()
    if len(body) <= LARGE_BODY:
        return decode_body(decoder, body)
    return await asyncio.get_running_loop().run_in_executor(_threads_for(body), decode_body, decoder, body)


def _threads_for(body: bytes | bytearray) -> ThreadPoolExecutor:
    return _large if len(body) <= _HUGE_BODY else _huge


class BodyRoute(ABC):
    """A route that reads its body, and then starts the work that the body asks for.

    Parameters
    ----------
    manager : Manager
        Does the work.
    max_prompts : int
        Most prompts, and most choices, of one request.
    """

    def __init__(self, manager: Manager, max_prompts: int) -> None:
        self._manager = manager
        self._max_prompts = max_prompts

    def __call__(self, exchange: HttpExchange) -> None:
        """Serve one request; a large body is read in a thread, and other requests go on meanwhile."""
        if len(exchange.body) <= LARGE_BODY:
            self.read(exchange)()
        else:
            exchange.run(self._serve_large(exchange))

    @abstractmethod
    def read(self, exchange: HttpExchange) -> Start:
        """Decode and check the body; may run in a thread.

        Returns
        -------
        callable
            Starts the work, in the event loop's thread.

        Raises
        ------
        RequestError
            The body is not acceptable.
        """

    async def _serve_large(self, exchange: HttpExchange) -> None:
        start = await asyncio.get_running_loop().run_in_executor(_threads_for(exchange.body), self.read, exchange)
        start()
