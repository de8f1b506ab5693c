"""``GET /server_info``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from multitok.http.manager import Manager
from multitok.http.respond import json_response

_SECRET = ("api_key", "admin_api_key")
_HIDDEN = "hidden"


class InfoRoute:
    """Says what is running.

    Parameters
    ----------
    manager : Manager
        Knows.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def server_info(self, request: Request) -> Response:
        """Serve one request; of keys it says only that there are some."""
        info = self._manager.server_info()
        args = info.get("server_args")
        if isinstance(args, dict):
            info["server_args"] = args | {name: _HIDDEN for name in _SECRET if args.get(name)}
        return json_response(info)
