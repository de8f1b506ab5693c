"""``GET /openapi.json``: the API as OpenAPI 3.1, made from the types that the routes decode."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from multitok import __version__
from multitok.config import ServerArgs
from multitok.http.admin.control import OPERATIONS, OperationAnswer
from multitok.http.answers import (
    AdminState,
    ChatCompletion,
    Completion,
    Detokenized,
    EmbeddingList,
    Generation,
    ModelCard,
    ModelList,
    ServerInfo,
    Status,
    Tokenized,
)
from multitok.http.errors import ErrorBody
from multitok.http.native.generate import GenerateRequest, NativeSampling
from multitok.http.native.tokens import DetokenizeRequest, TokenizeRequest
from multitok.http.openai.types import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    StreamOptions,
    unsupported_fields,
)

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_EVENTS = "text/event-stream"

# Path: what it does, what it takes, what it answers, whether it can stream.
_POSTS: dict[str, tuple[str, type[msgspec.Struct], Any, bool]] = {
    "/v1/chat/completions": ("Answer a conversation", ChatRequest, ChatCompletion, True),
    "/v1/completions": ("Complete a text", CompletionRequest, Completion, True),
    "/v1/embeddings": ("Make embeddings", EmbeddingRequest, EmbeddingList, False),
    "/generate": ("Complete a text, in SGLang's shape", GenerateRequest, Generation | list[Generation], True),
    "/tokenize": ("Turn text into ids", TokenizeRequest, Tokenized, False),
    "/detokenize": ("Turn ids into text", DetokenizeRequest, Detokenized, False),
    **{path: (summary, kind, OperationAnswer, False) for path, (summary, kind, _) in OPERATIONS.items()},
}
_GETS: dict[str, tuple[str, Any]] = {
    "/v1/models": ("List the models", ModelList),
    "/v1/models/{model}": ("Show a model", ModelCard),
    "/health": ("Whether this process answers", Status),
    "/ready": ("Whether the models can be used", Status),
    "/health_generate": ("Whether a token of each model goes all the way round", Status),
    "/server_info": ("Show what is running", ServerInfo),
    "/admin/state": ("Show what operators have set, and how the processes do", AdminState),
}
_WITH_UNSUPPORTED: tuple[type[msgspec.Struct], ...] = (
    *(ChatRequest, CompletionRequest, EmbeddingRequest, GenerateRequest, NativeSampling, StreamOptions),
    *(kind for _, kind, _ in OPERATIONS.values()),
)
# Of all models, unless the query names one.
_OF_ONE_MODEL = ("/ready", "/health_generate")


def document(keys: bool = False) -> dict[str, Any]:
    """Return the OpenAPI document.

    Parameters
    ----------
    keys : bool
        Whether clients must show an API key.
    """
    requests = [request for _, request, _, _ in _POSTS.values()]
    answers = [answer for _, _, answer, _ in _POSTS.values()] + [answer for _, answer in _GETS.values()]
    schemas, components = msgspec.json.schema_components([*requests, *answers, ErrorBody], ref_template=_REF)
    request_of, answer_of = dict(zip(_POSTS, schemas, strict=False)), schemas[len(_POSTS) :]
    for kind in _WITH_UNSUPPORTED:
        for name, neutral in unsupported_fields(kind):
            components[kind.__name__]["properties"][name] = {
                "enum": [None, *neutral],
                "description": "Not supported by this server.",
                "default": None,
            }
    paths: dict[str, Any] = {}
    for (path, (summary, _, _, streams)), schema in zip(_POSTS.items(), answer_of, strict=False):
        content = {_JSON: {"schema": schema}}
        if streams:
            # No type: for some programs an event is an object, for others the whole stream is a string.
            content[_EVENTS] = {"schema": {"description": "Events whose data is JSON; that of the last is [DONE]."}}
        operation = _operation(path, summary, content)
        # No body is one without fields.
        required = path not in OPERATIONS or any(field.required for field in msgspec.structs.fields(_POSTS[path][1]))
        operation["requestBody"] = {"required": required, "content": {_JSON: {"schema": request_of[path]}}}
        paths[path] = {"post": operation}
        if path in OPERATIONS and OPERATIONS[path][2]:
            plain = _operation(path, summary, content)
            paths[path]["get"] = {**plain, "operationId": "get_" + plain["operationId"]}
    for (path, (summary, _)), schema in zip(_GETS.items(), answer_of[len(_POSTS) :], strict=False):
        operation = _operation(path, summary, {_JSON: {"schema": schema}})
        if "{model}" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        elif path in _OF_ONE_MODEL:
            operation["parameters"] = [{"name": "model", "in": "query", "schema": {"type": "string"}}]
        paths[path] = {"get": operation}
    error = {"description": "An error", "content": {_JSON: {"schema": {"$ref": _REF.format(name="ErrorBody")}}}}
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "multitok", "version": __version__, "description": "Serves a language model."},
        "paths": paths,
        "components": {"schemas": components, "responses": {"Error": error}},
    }
    if keys:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def _operation(path: str, summary: str, content: dict[str, Any]) -> dict[str, Any]:
    error = {"$ref": "#/components/responses/Error"}
    return {
        "operationId": path.strip("/").replace("/", "_").translate({ord("{"): None, ord("}"): None}),
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, "4XX": error, "5XX": error},
    }


class OpenApiRoute:
    """Serves the document.

    Parameters
    ----------
    args : ServerArgs
        Say whether there are API keys.
    """

    def __init__(self, args: ServerArgs) -> None:
        self._keys = bool(args.api_key or args.api_key_file)

    @functools.cached_property
    def _body(self) -> bytes:
        return msgspec.json.encode(document(self._keys))

    async def openapi(self, request: Request) -> Response:
        """Serve one request."""
        return Response(self._body, media_type=_JSON)
