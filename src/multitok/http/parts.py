"""Answers made part by part, so that a long one doesn't hold up the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from itertools import islice

from multitok.http.errors import internal_error
from multitok.http.exchange import HttpExchange
from multitok.http.sse import encode_json

logger = logging.getLogger(__name__)

# After so long the loop's other work gets its turn; a request that is served in a few turns waits for all of them.
_TURN_S = 0.002
# An item may be 20 log probabilities; so many of them take half a millisecond.
_ITEMS = 16


def list_parts(items: Iterable[object]) -> Iterator[bytes]:
    """JSON of a list whose items are made on the way."""
    rest = iter(items)
    before = b"["
    while some := list(islice(rest, _ITEMS)):
        yield before + encode_json(some)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def joined_parts(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """JSON of a list whose items come in parts themselves."""
    before = b"["
    for item in items:
        yield before
        yield from item
        before = b","
    yield b"[]" if before == b"[" else b"]"


def respond_in_parts(exchange: HttpExchange, parts: Iterable[bytes]) -> None:
    """Send an answer when all its parts are made; what takes long is spread over turns of the event loop.

    Parameters
    ----------
    exchange : HttpExchange
        Where the answer goes.
    parts : iterable of bytes
        Together the answer's JSON.
    """
    _go_on(exchange, iter(parts), [])


def _go_on(exchange: HttpExchange, parts: Iterator[bytes], blocks: list[bytes]) -> None:
    if exchange.disconnected or exchange.response_complete:
        return
    made: list[bytes] = []
    end = time.perf_counter() + _TURN_S
    try:
        for part in parts:
            made.append(part)
            if time.perf_counter() > end:
                blocks.append(b"".join(made))
                asyncio.get_running_loop().call_soon(_go_on, exchange, parts, blocks)
                return
    except Exception:
        logger.exception("an answer could not be written")
        exchange.send_error(internal_error())
        return
    blocks.append(b"".join(made))
    exchange.respond_in_blocks(200, blocks)
