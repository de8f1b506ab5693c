"""The HTTP server of one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from email.utils import formatdate

from uvicorn.config import Config

from multitok.config import ServerArgs
from multitok.http.accept import Acceptor, LoadSlot
from multitok.http.app import make_app
from multitok.http.exchange import Route
from multitok.http.manager import Manager
from multitok.http.native.generate import GenerateRoute
from multitok.http.openai.chat import ChatRoute
from multitok.http.openai.completions import CompletionRoute
from multitok.http.openai.embeddings import EmbeddingRoute
from multitok.http.protocol import DirectHttpProtocol
from multitok.http.state import DirectServerState
from multitok.http.tls import connection_options

logger = logging.getLogger(__name__)

# While draining: seconds that a kept-alive connection has for the request that is answered once more.
DRAIN_GRACE = 1.0
# Seconds that a client has to take what was written before a drain breaks its connection.
FLUSH_SECONDS = 1.0


def hot_routes(manager: Manager, limits: ServerArgs) -> dict[str, Route]:
    """Make the routes that are served without ASGI, by path.

    Parameters
    ----------
    manager : Manager
        Does the work.
    limits : ServerArgs
        What one request may hold.
    """
    return {
        "/v1/chat/completions": ChatRoute(manager, limits),
        "/v1/completions": CompletionRoute(manager, limits),
        "/v1/embeddings": EmbeddingRoute(manager, limits),
        "/generate": GenerateRoute(manager, limits),
    }


class HttpServer:
    """Accepts, serves, drains. Signals, the loop and the parts behind `manager` belong to the process's main.

    Parameters
    ----------
    server_args : ServerArgs
        Limits and time-outs.
    manager : Manager
        Does the work.
    listen_socket : socket.socket
        Bound and listening; shared with the other workers. This process's copy is closed by `drain`.
    slot : LoadSlot
        Own place on the load board.
    """

    def __init__(self, server_args: ServerArgs, manager: Manager, listen_socket: socket.socket, slot: LoadSlot) -> None:
        self._args = server_args
        self._manager = manager
        self._socket = listen_socket
        self._slot = slot
        self._acceptor: Acceptor | None = None
        self._state: DirectServerState | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self._all_closed = asyncio.Event()

    async def start(self) -> None:
        """Begin to serve.

        Raises
        ------
        OptionError
            Keys or certificate can't be read.
        """
        args = self._args
        routes = hot_routes(self._manager, args)
        hot = {path.encode(): route for path, route in routes.items()}
        state = DirectServerState(args, hot, self._on_closed)
        config = Config(
            make_app(self._manager, routes, args, lambda: state.drain_grace is not None),
            http=DirectHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=args.keep_alive_timeout,
        )
        config.load()
        loop = asyncio.get_running_loop()
        acceptor = Acceptor(
            self._socket,
            self._slot,
            lambda: DirectHttpProtocol(config, state, {}, loop),
            self._all_closed.set,
            connection_options(args),
        )
        self._state, self._acceptor = state, acceptor
        self._tick()
        acceptor.start()

    async def drain(self, timeout: float, rolling: bool = False) -> tuple[int, int]:
        """Stop accepting, let running requests finish, tell the rest, close every connection.

        Parameters
        ----------
        timeout : float
            Seconds that running requests get.
        rolling : bool
            Others go on serving. An idle connection stays open until its next request, which is answered with
            ``Connection: close``, or until its time is up: a client whose request meets a closing socket has lost it.

        Returns
        -------
        tuple of (int, int)
            Requests answered since the drain began, and requests that were cut.
        """
        state, acceptor = self._state, self._acceptor
        if state is None or acceptor is None:
            self._socket.close()
            return 0, 0
        acceptor.stop()
        self._socket.close()
        answered_before = state.total_requests
        state.drain_grace = min(self._args.keep_alive_timeout if rolling else DRAIN_GRACE, timeout)
        for connection in list(state.connections):
            connection.shutdown()
        in_time = await self._wait_closed(timeout)
        finished = state.total_requests - answered_before
        cut = 0 if in_time else self._cut(state)
        if not in_time and not await self._wait_closed(FLUSH_SECONDS):
            for connection in list(state.connections):
                connection.transport.abort()
            acceptor.abort_opening()
            await self._wait_closed(FLUSH_SECONDS)
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._tick_handle = None
        return finished, cut

    def hurry(self) -> None:
        """End a drain's wait for running requests now."""
        self._all_closed.set()

    def leave_idle_connections(self) -> None:
        """In a rolling drain: end idle connections as soon as in any other, because now all workers go."""
        if self._state is not None and self._state.drain_grace is not None:
            self._state.drain_grace = min(self._state.drain_grace, DRAIN_GRACE)
            for connection in list(self._state.connections):
                connection.shutdown()

    def _cut(self, state: DirectServerState) -> int:
        cut = sum(connection.cut() for connection in list(state.connections))  # type: ignore[union-attr]
        for task in list(state.tasks):
            task.cancel()
        return cut

    async def _wait_closed(self, timeout: float) -> bool:
        assert self._acceptor is not None
        if self._acceptor.connections == 0:
            return True
        self._all_closed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_closed.wait(), timeout)
        return self._acceptor.connections == 0

    def _on_closed(self, connection: DirectHttpProtocol) -> None:
        assert self._acceptor is not None
        self._acceptor.connection_closed(connection)

    def _tick(self) -> None:
        """Say that the loop goes round, and keep the Date header fresh, once per second as uvicorn's server does."""
        assert self._state is not None
        self._slot.beat(self._args.hang_timeout)
        now = time.time()
        date = formatdate(now, usegmt=True).encode()
        self._state.default_headers = [(b"date", date)]
        self._state.date_line = b"date: %b\r\n" % date
        self._tick_handle = asyncio.get_running_loop().call_later(1.0 - now % 1.0, self._tick)
