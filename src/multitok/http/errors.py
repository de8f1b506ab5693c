"""Errors as clients see them: OpenAI's error object, for every route.

One object for all API families, so that a client needs one error handler.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from multitok.tokenizer.requests import RequestError

RETRY_AFTER_SECONDS = 1

# Headers of an error's answer, beside those of every answer.
_RETRY = {"retry-after": str(RETRY_AFTER_SECONDS)}
_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: _RETRY, 503: _RETRY}
_LINES = {
    status: "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    for status, headers in _HEADERS.items()
}

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_CODES = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    500: "internal_error",
    503: "overloaded",
    504: "timeout",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; `param` is the field at fault, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every answer that is not a success."""

    error: ErrorDetail


def invalid(param: str, problem: str) -> RequestError:
    """Make the refusal of one field.

    Parameters
    ----------
    param : str
        The field.
    problem : str
        What is wrong with it.
    """
    return RequestError(400, f"{param}: {problem}", param)


def named_for(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return an error of `TokenizerManager` with the field's name in the client's API.

    Parameters
    ----------
    error : RequestError
        The refusal or failure.
    names : mapping of str to str
        The API's name of a field, where it is another.
    """
    name = names.get(error.param or "")
    return error if name is None else RequestError(error.status, error.message, name)


def error_type(status: int) -> str:
    """Return OpenAI's `type` word of a status."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(error: RequestError) -> bytes:
    """Encode an error.

    Parameters
    ----------
    error : RequestError
        The refusal or failure.

    Returns
    -------
    bytes
        JSON of `ErrorBody`.
    """
    code = _CODES.get(error.status)
    if error.status == 404 and error.param == "model":
        code = "model_not_found"
    detail = ErrorDetail(error.message, error_type(error.status), error.param, code)
    return msgspec.json.encode(ErrorBody(detail))


def error_headers(status: int) -> dict[str, str]:
    """Return the headers that an error's answer has: when to try again, or that a key is needed."""
    return _HEADERS.get(status, {})


def error_lines(status: int) -> bytes:
    """Return `error_headers` as the lines of a head."""
    return _LINES.get(status, b"")


def internal_error() -> RequestError:
    """Make the answer to a fault of the server's own; details are in the log only."""
    return RequestError(500, "internal server error")
