"""One address: what is there, whether it is well, and how much it has to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from multitok.engines.remote.api import PeerApi, PeerInfo
from multitok.engines.remote.connection import ConnectionPool
from multitok.engines.remote.fetch import fetch
from multitok.engines.remote.options import Address, RemoteOptions
from multitok.engines.remote.probe import NotReady, WrongEngine, probe

_log = logging.getLogger(__name__)
# So many checks in a row must fail; one that nobody listens for is enough.
_FAILURES = 2
# How long after a failed check the next one comes while it isn't down yet.
_RECHECK_S = 0.5
_ABORT_TIMEOUT_S = 5.0


class Peer:
    """One address.

    Parameters
    ----------
    address : Address
        Where.
    options : RemoteOptions
        The user's.
    accept : callable
        Raises `WrongEngine` for an engine that doesn't fit.
    on_down : callable
        Called when it has gone silent; what runs there is lost. One that refuses connections ends what runs.

    Attributes
    ----------
    api : PeerApi or None
        How it is spoken to; None until it has been up.
    up : bool
        Whether requests are sent to it.
    work : int
        Prompt ids and output ids still to come of its requests.
    running : int
        Its requests.
    problem : str
        Why it is not up.
    """

    def __init__(
        self,
        address: Address,
        options: RemoteOptions,
        *,
        accept: Callable[[PeerInfo], None],
        on_down: Callable[[Peer], None],
    ) -> None:
        self.address = address
        self.pool = ConnectionPool(address, options.api_key, options.connect_timeout)
        self.api: PeerApi | None = None
        self.up = False
        self.work = 0
        self.running = 0
        self.problem = "it has not been asked yet"
        self._options = options
        self._accept = accept
        self._on_down = on_down
        self._failures = 0
        self._look_now = asyncio.Event()
        self._last_look = -_RECHECK_S
        self.pool.on_idle_closed = self._look_soon
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Its address, for the log."""
        return self.address.url

    @property
    def suspect(self) -> bool:
        """Whether something has gone wrong since it was last seen well."""
        return self._failures > 0

    async def find_out(self) -> None:
        """Ask what it is, and take requests to it if it fits.

        Raises
        ------
        OSError
            It doesn't answer.
        WrongEngine
            It doesn't fit.
        """
        try:
            api = await probe(self.pool, self._options.api)
            status, _ = await fetch(self.pool, "GET", api.health_route, b"", self._options.health_timeout)
            if status != 200:
                raise NotReady(f"{api.health_route} answers {status}")
            self._accept(api.info)
        except (OSError, WrongEngine) as error:
            self.problem = str(error)
            raise
        if self.api is None and api.info.hint:
            _log.warning("%s: %s", self.url, api.info.hint)
        self.api = api
        self._failures = 0
        self.up = True

    async def watch(self) -> None:
        """Check its health, for ever."""
        options = self._options
        while True:
            delay = _RECHECK_S if self.up and self._failures else options.health_period
            try:
                async with asyncio.timeout(delay):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            self._look_now.clear()
            self._last_look = asyncio.get_running_loop().time()
            self.pool.close_old()
            try:
                await (self._check() if self.up else self._look_again())
            except Exception:
                # It must go on, whatever an engine answers.
                _log.exception("%s: a health check failed", self.url)

    async def _check(self) -> None:
        assert self.api is not None
        route = self.api.health_route
        try:
            status, _ = await fetch(self.pool, "GET", route, b"", self._options.health_timeout)
        except OSError as error:
            # One that drains takes no connections, but ends what runs; where one has died, its connections end, too.
            refused = isinstance(error, ConnectionRefusedError)
            self._count_failure(str(error), at_once=refused, silent=not refused)
            return
        if status == 200:
            self._failures = 0
        else:
            self._count_failure(f"{route} answers {status}")

    def _count_failure(self, reason: str, *, at_once: bool = False, silent: bool = False) -> None:
        self._failures += 1
        if self.up and (at_once or self._failures >= _FAILURES):
            self.up = False
            self.problem = reason
            _log.error("%s is down: %s; it had %d requests", self.url, reason, self.running)
            self.pool.close_idle()
            if silent:
                self._on_down(self)

    async def _look_again(self) -> None:
        before = self.problem
        try:
            await self.find_out()
        except WrongEngine as error:
            if self.problem != before:
                _log.error("%s is up, but can't be used: %s", self.url, error)
        except OSError as error:
            _log.debug("%s is still down: %s", self.url, error)
        else:
            assert self.api is not None
            _log.warning("%s is up: %s %s", self.url, self.api.info.kind, self.api.info.version)

    def _look_soon(self) -> None:
        """Look whether anybody listens there still: what begins to listen after that may be another engine.

        Some servers close each connection soon, so it must not be at once every time.
        """
        loop = asyncio.get_running_loop()
        loop.call_at(max(loop.time(), self._last_look + _RECHECK_S), self._look_now.set)

    def report_failure(self, reason: str) -> None:
        """Note that a request came to nothing: it is looked at now, and others come first."""
        if self.up:
            _log.warning("%s: %s", self.url, reason)
            self._failures = max(1, self._failures)
        self._look_now.set()

    def abort(self, rid: str) -> None:
        """Have it end a request where it would not notice soon by itself."""
        request = None if self.api is None else self.api.abort(rid)
        if request is not None and self.up:
            task = asyncio.get_running_loop().create_task(self._send_abort(*request))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, route: str, body: bytes) -> None:
        try:
            await fetch(self.pool, "POST", route, body, _ABORT_TIMEOUT_S)
        except OSError as error:
            _log.debug("%s: %s: %s", self.url, route, error)
