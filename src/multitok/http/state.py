"""What all connections of a process share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from uvicorn.server import ServerState

from multitok.config import ServerArgs
from multitok.http.auth import ApiKeys
from multitok.http.cors import Cors

if TYPE_CHECKING:
    from multitok.http.exchange import Route
    from multitok.http.protocol import DirectHttpProtocol


class DirectServerState(ServerState):
    """uvicorn's shared state, and what the connections need beside it.

    Parameters
    ----------
    args : ServerArgs
        Limits, keys and origins.
    routes : mapping of bytes to callable
        Hot routes by path; they take POST.
    on_closed : callable
        Called with each connection that has ended.

    Attributes
    ----------
    max_body_bytes, max_header_bytes, max_request_id_length, receive_timeout, slow_client_timeout
        As in `ServerArgs`.
    keys : ApiKeys or None
        Read when the state is made; None: everything is open.
    cors : Cors or None
        None: no other origins.
    date_line : bytes
        The Date header's line, kept fresh by the server.
    drain_grace : float or None
        While draining: seconds that a connection without a request stays open.

    Raises
    ------
    OptionError
        The keys can't be read.
    """

    def __init__(
        self, args: ServerArgs, routes: Mapping[bytes, Route], on_closed: Callable[[DirectHttpProtocol], None]
    ) -> None:
        super().__init__()
        self.routes = routes
        self.on_closed = on_closed
        self.max_body_bytes = args.max_body_bytes
        self.max_header_bytes = args.max_header_bytes
        self.max_request_id_length = args.max_request_id_length
        self.receive_timeout = args.receive_timeout
        self.slow_client_timeout = args.slow_client_timeout
        self.keys = ApiKeys.load(args)
        self.cors = Cors(args.cors_origin) if args.cors_origin else None
        self.date_line = b""
        self.drain_grace: float | None = None
