"""``GET /v1/models``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from multitok.http.manager import Manager, Model
from multitok.http.openai.common import find_model
from multitok.http.respond import json_response


class ModelRoutes:
    """Serves the list of models.

    Parameters
    ----------
    manager : Manager
        Has the models.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def _card(self, model: Model) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._manager.created,
            "owned_by": "multitok",
            "max_model_len": model.context_length,
        }

    async def list_models(self, request: Request) -> Response:
        """Serve ``GET /v1/models``."""
        return json_response({"object": "list", "data": [self._card(model) for model in self._manager.models]})

    async def get_model(self, request: Request) -> Response:
        """Serve ``GET /v1/models/{model}``."""
        return json_response(self._card(find_model(request.path_params["model"], self._manager)))
