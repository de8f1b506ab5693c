"""What all connections of a process share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from uvicorn.server import ServerState

if TYPE_CHECKING:
    from multitok.http.exchange import Route
    from multitok.http.protocol import DirectHttpProtocol


class DirectServerState(ServerState):
    """uvicorn's shared state, and what the hot routes need beside it.

    Attributes
    ----------
    routes : mapping of bytes to callable
        Hot routes by path; they take POST.
    max_body_bytes : int
        Largest request body.
    on_closed : callable
        Called with each connection that has ended.
    date_line : bytes
        The Date header's line, kept fresh by the server.
    drain_grace : float or None
        While draining: seconds that a connection without a request stays open.
    """

    def __init__(
        self, routes: Mapping[bytes, Route], max_body_bytes: int, on_closed: Callable[[DirectHttpProtocol], None]
    ) -> None:
        super().__init__()
        self.routes = routes
        self.max_body_bytes = max_body_bytes
        self.on_closed = on_closed
        self.date_line = b""
        self.drain_grace: float | None = None
