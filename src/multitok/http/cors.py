"""Web pages of other origins: which ones a browser lets call the API (CORS)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multitok.http.exchange import HttpExchange

Headers = list[tuple[bytes, bytes]]

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]+")
# Seconds that a browser remembers a preflight's answer.
_MAX_AGE = b"600"


class Cors:
    """Says to browsers which origins may read answers. Keys go in headers; cookies are not used, and not allowed.

    Parameters
    ----------
    origins : iterable of str
        As in the ``Origin`` header; ``*`` for all.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = {origin.rstrip("/").lower().encode() for origin in origins}
        self._all = b"*" in self._origins

    def headers(self, origin: bytes | None) -> Headers:
        """Return the headers of an answer to a page of this origin; none when it may not read it."""
        if origin is None:
            return []
        if self._all:
            allowed = [(b"access-control-allow-origin", b"*")]
        elif origin.lower() in self._origins:
            allowed = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        else:
            return []
        return [*allowed, (b"access-control-expose-headers", b"x-request-id, retry-after")]

    @staticmethod
    def preflight(exchange: HttpExchange) -> None:
        """Answer a browser's question whether a page may send a request; the origin has been checked."""
        lines = b"access-control-allow-methods: GET, POST\r\naccess-control-max-age: %b\r\n" % _MAX_AGE
        asked = exchange.header(b"access-control-request-headers")
        if asked is not None and _HEADER_NAMES.fullmatch(asked):
            lines += b"access-control-allow-headers: %b\r\n" % asked
        exchange.respond_no_content(lines)


def as_lines(headers: Headers) -> bytes:
    """Write headers as an answer's head has them."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)
