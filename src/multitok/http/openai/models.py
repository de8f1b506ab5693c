"""``GET /v1/models``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from multitok.http.manager import Manager
from multitok.http.openai.common import check_model
from multitok.http.respond import json_response


class ModelRoutes:
    """Serves the list of models.

    Parameters
    ----------
    manager : Manager
        Knows the model.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def _card(self) -> dict[str, object]:
        return {
            "id": self._manager.served_model_name,
            "object": "model",
            "created": self._manager.created,
            "owned_by": "multitok",
            "max_model_len": self._manager.context_length,
        }

    async def list_models(self, request: Request) -> Response:
        """Serve ``GET /v1/models``."""
        return json_response({"object": "list", "data": [self._card()]})

    async def get_model(self, request: Request) -> Response:
        """Serve ``GET /v1/models/{model}``."""
        check_model(request.path_params["model"], self._manager)
        return json_response(self._card())
