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

    def _card(self, name: str, adapter: str | None = None) -> dict[str, object]:
        """Describe the model, or the adapter at a path."""
        manager = self._manager
        return {
            "id": name,
            "object": "model",
            "created": manager.created,
            "owned_by": "multitok",
            "max_model_len": manager.context_length,
            "root": adapter or manager.served_model_name,
            "parent": None if adapter is None else manager.served_model_name,
        }

    async def list_models(self, request: Request) -> Response:
        """Serve ``GET /v1/models``."""
        adapters = self._manager.control.state.adapters
        cards = [self._card(self._manager.served_model_name)]
        cards += [self._card(name, path) for name, path in adapters.items()]
        return json_response({"object": "list", "data": cards})

    async def get_model(self, request: Request) -> Response:
        """Serve ``GET /v1/models/{model}``."""
        name = request.path_params["model"]
        adapter = self._manager.control.state.adapters.get(name)
        if adapter is None:
            check_model(name, self._manager)
            name = self._manager.served_model_name
        return json_response(self._card(name, adapter))
