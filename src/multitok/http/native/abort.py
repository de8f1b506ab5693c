"""``POST /abort_request``."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from multitok.config import ServerArgs
from multitok.http.body_route import read_body
from multitok.http.decode import decode_body
from multitok.http.errors import invalid
from multitok.http.limits import check_request_id
from multitok.http.manager import Manager
from multitok.http.respond import json_response


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of ``/abort_request``."""

    rid: str | None = None
    abort_all: bool | None = None


_decoder = msgspec.json.Decoder(AbortRequest)


class AbortRoute:
    """Ends requests by id.

    Parameters
    ----------
    manager : Manager
        Does the work.
    limits : ServerArgs
        What one request may hold.
    """

    def __init__(self, manager: Manager, limits: ServerArgs) -> None:
        self._manager = manager
        self._longest_id = limits.max_request_id_length

    async def abort_request(self, request: Request) -> Response:
        """Serve one request; an id that is not running is no error, since it may just have ended."""
        body = await read_body(self._read, request)
        self._manager.abort_by_id(None if body.abort_all else body.rid, bool(body.abort_all))
        return json_response({"success": True})

    def _read(self, data: bytes) -> AbortRequest:
        body = decode_body(_decoder, data)
        if not body.rid and not body.abort_all:
            raise invalid("rid", "or abort_all is required")
        if body.rid is not None:
            check_request_id(body.rid, "rid", self._longest_id)
        return body
