"""A whole answer, for what is asked once in a while: health, what an engine is."""

from __future__ import annotations

import asyncio

from multitok.engines.remote.connection import ConnectionPool

_MOST_BYTES = 16 << 20


class FetchError(OSError):
    """There was no answer."""


class _Answer:
    """Collects an answer."""

    def __init__(self) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.stale = False
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0

    def on_head(self, status: int) -> None:
        self._status = status

    def on_piece(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= _MOST_BYTES:
            self._pieces.append(data)

    def on_complete(self) -> None:
        if self.done.done():
            return
        if self._size > _MOST_BYTES:
            self.done.set_exception(FetchError("its answer is too long"))
        else:
            self.done.set_result((self._status, b"".join(self._pieces)))

    def on_lost(self, reason: str, stale: bool) -> None:
        self.stale = stale
        if not self.done.done():
            self.done.set_exception(FetchError(reason))


async def fetch(pool: ConnectionPool, method: str, route: str, body: bytes, timeout: float) -> tuple[int, bytes]:
    """Return status and body of an answer.

    Parameters
    ----------
    pool : ConnectionPool
        To the address.
    method, route : str
        What to ask.
    body : bytes
        JSON, for POST.
    timeout : float
        Seconds that it may take.

    Raises
    ------
    OSError
        There was no answer in time.
    """
    request = pool.request(method, route, body)
    try:
        async with asyncio.timeout(timeout):
            while True:
                connection = pool.take_idle() or await pool.open()
                answer = _Answer()
                connection.send(request, answer)
                try:
                    return await answer.done
                except FetchError:
                    if not answer.stale:
                        raise
                finally:
                    if not answer.done.done() or answer.done.cancelled():
                        connection.abort()
    except TimeoutError:
        raise FetchError(f"no answer within {timeout:g} s") from None
