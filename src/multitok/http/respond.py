"""Answers of the ASGI routes."""

from __future__ import annotations

from starlette.responses import Response

from multitok.http.errors import error_body, error_headers
from multitok.http.sse import encode_json
from multitok.tokenizer.requests import RequestError


def json_response(value: object, status: int = 200) -> Response:
    """Make a JSON answer."""
    return Response(encode_json(value), status, media_type="application/json")


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """Make an error answer, in the format of the hot routes."""
    return Response(
        error_body(error), error.status, {**(headers or {}), **error_headers(error.status)}, "application/json"
    )
