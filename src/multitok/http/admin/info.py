"""``GET /server_info`` and ``GET /admin/state``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from multitok.http.manager import Manager
from multitok.http.respond import json_response


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
        """Serve ``/server_info``."""
        return json_response(self._manager.server_info())

    async def admin_state(self, request: Request) -> Response:
        """Serve ``/admin/state``."""
        return json_response(self._manager.admin_state())
