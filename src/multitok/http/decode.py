"""Decoding of request bodies, with errors that name the field.

The ``Content-Type`` header is not looked at: a body is read as JSON whatever it claims to be, since ``curl -d`` and
several client libraries claim something else, and no other format is taken anywhere.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from multitok.http.large_body import PIECE, LongTexts
from multitok.tokenizer.requests import RequestError

T = TypeVar("T")

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `([^`]*)`(?: - at `\$\.?([^`]*)`)?$")
_NAMES = {"`object`": "an object", "`array`": "a list", "`str`": "a string", "`int`": "an integer"}

# A second parse that finds out what was wrong is worth it for a small body only.
_EXPLAIN_LIMIT = 256 * 1024
# Keys in a path are the client's and may be of any length.
_PATH_LIMIT = 200


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """Decode a request body.

    Parameters
    ----------
    decoder : msgspec.json.Decoder
        Decoder of the request's type.
    body : bytes or bytearray
        As received.

    Returns
    -------
    object
        The request.

    Raises
    ------
    RequestError
        400 with the field at fault in `param`, where there is one.
    """
    try:
        if len(body) > PIECE:
            texts = LongTexts(body, getattr(decoder.type, "__struct_fields__", ()))
            return cast("T", texts.put_back(decoder.decode(texts.rest)))
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _validation_error(str(exc), decoder.type) from None
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, ValueError) as exc:
        raise _malformed(body, str(exc)) from None


def _validation_error(message: str, body_type: Any) -> RequestError:
    missing = _MISSING.match(message)
    if missing is not None:
        name = ".".join(filter(None, (missing.group(2), missing.group(1))))
        return RequestError(400, f"{name}: is required", name)
    match = _PATH.search(message)
    if match is None:
        return RequestError(400, f"the body: {message}")
    problem = message[: match.start()]
    for name, words in _NAMES.items():
        problem = problem.replace(name, words)
    path = match.group(1)
    # A word that is none of those that are allowed is repeated in it.
    problem = problem[:_PATH_LIMIT]
    if problem.startswith("Invalid enum value") and (allowed := _words_of(body_type, path)):
        problem += f"; it is one of {', '.join(allowed)}"
    return RequestError(400, f"{path}: {problem}", path or None)


def _words_of(body_type: Any, field: str) -> list[str]:
    """Return the words that a field of a body may be."""

    def walk(hint: Any) -> list[str]:
        if get_origin(hint) is Literal:
            return [repr(word) for word in get_args(hint) if isinstance(word, str)]
        return [word for part in get_args(hint) for word in walk(part)]

    return walk(get_type_hints(body_type).get(field)) if isinstance(body_type, type) else []


def _malformed(body: bytes | bytearray, message: str) -> RequestError:
    if not body:
        return RequestError(400, "the body is empty; a JSON object is expected")
    if len(body) <= _EXPLAIN_LIMIT:
        try:
            found = _find_bad_value(json.loads(body))
        except (ValueError, RecursionError):
            found = None
        if found is not None:
            path, problem = found[0][:_PATH_LIMIT], found[1]
            return RequestError(400, f"{path}: {problem}", path)
    return RequestError(400, f"the body is not valid JSON: {message}")


def _find_bad_value(root: Any) -> tuple[str, str] | None:
    """Find what `json` takes and JSON does not: NaN, infinities, lone surrogates."""
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return path, "must be a finite number"
        if isinstance(value, str) and not _encodable(value):
            return path, "has a lone surrogate, which is not valid Unicode"
        if isinstance(value, dict):
            for key, item in value.items():
                if not _encodable(key):
                    return path or "the body", "has a key with a lone surrogate, which is not valid Unicode"
                stack.append((f"{path}.{key}" if path else key, item))
        elif isinstance(value, list):
            stack.extend((f"{path}[{i}]", item) for i, item in enumerate(value))
    return None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
