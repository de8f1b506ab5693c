"""Answers of the ASGI routes."""

from __future__ import annotations

from starlette.responses import Response

from multitok.http.errors import RETRY_AFTER_SECONDS, error_body, wants_retry
from multitok.http.sse import encode_json
from multitok.tokenizer.requests import RequestError


def json_response(value: object, status: int = 200) -> Response:
    """Make a JSON answer."""
    return Response(encode_json(value), status, media_type="application/json")


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """Make an error answer, in the format of the hot routes."""
    headers = dict(headers or {})
    if wants_retry(error.status):
        headers["retry-after"] = str(RETRY_AFTER_SECONDS)
    return Response(error_body(error), error.status, headers, "application/json")
