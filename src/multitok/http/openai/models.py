"""``GET /v1/models``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from multitok.http.manager import Manager, Model
from multitok.http.openai.common import find_model
from multitok.http.respond import json_response
from multitok.messages.control import Adapter


class ModelRoutes:
    """Serves the list of models.

    Parameters
    ----------
    manager : Manager
        Has the models.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def _card(self, model: Model, name: str | None = None, adapter: Adapter | None = None) -> dict[str, object]:
        """Describe a model, or an adapter of it."""
        return {
            "id": name or model.name,
            "object": "model",
            "created": self._manager.created,
            "owned_by": "multitok",
            "max_model_len": model.context_length,
            "root": model.name if adapter is None else adapter.path,
            "parent": None if adapter is None else model.name,
        }

    async def list_models(self, request: Request) -> Response:
        """Serve ``GET /v1/models``."""
        models, adapters = self._manager.models, self._manager.control.state.adapters
        cards = [self._card(model) for model in models]
        cards += [self._card(models[adapter.model], name, adapter) for name, adapter in adapters.items()]
        return json_response({"object": "list", "data": cards})

    async def get_model(self, request: Request) -> Response:
        """Serve ``GET /v1/models/{model}``."""
        name = request.path_params["model"]
        adapter = self._manager.control.state.adapters.get(name)
        if adapter is None:
            return json_response(self._card(find_model(name, self._manager)))
        return json_response(self._card(self._manager.models[adapter.model], name, adapter))
