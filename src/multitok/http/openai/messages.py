"""Checks a conversation before a template sees it."""

from __future__ import annotations

from typing import Any

from multitok.http.errors import invalid
from multitok.http.large_body import MOST_VALUES, PIECE, LongTexts
from multitok.tokenizer.requests import RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# So short a text is not worth a closer look.
_FEW = 256
_STRINGS = ("name", "tool_call_id", "reasoning_content")


def check_messages(messages: list[dict[str, Any]], most: int) -> None:
    """Check the shape of messages; content is a string or a list of text parts, which the template takes as they are.

    Parameters
    ----------
    messages : list of dict
        As the client gave them.
    most : int
        Most messages, and most parts of a content: each has a token at least.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    if not messages:
        raise invalid("messages", "must not be an empty list")
    if len(messages) > most:
        raise invalid("messages", f"has {len(messages)} messages; at most {most} are allowed")
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]", most)


def check_arguments(messages: list[dict[str, Any]]) -> None:
    """Check how much the arguments of tool calls hold together: they are JSON inside of JSON, and decoded as well.

    Parameters
    ----------
    messages : list of dict
        Checked already; of a large body.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    texts: list[tuple[int, str]] = []
    for i, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                texts.append((i, arguments))
    if sum(len(text) for _, text in texts) <= PIECE:
        return
    values = 0
    for i, text in texts:
        values += _values(text)
        if values > MOST_VALUES:
            problem = f"the arguments of all calls may have at most {MOST_VALUES} values"
            raise invalid(f"messages[{i}].tool_calls", problem)


def _values(text: str) -> int:
    if len(text) <= _FEW:
        return text.count(",") + text.count("[") + text.count("{")
    try:
        return LongTexts(text.encode()).values
    except RequestError:
        return MOST_VALUES + 1
    except (ValueError, RecursionError):
        # Not JSON: it stays the text that it is.
        return 0


def _check_message(message: dict[str, Any], path: str, most: int) -> None:
    role = message.get("role")
    if role not in _ROLES:
        raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    for name in _STRINGS:
        if not isinstance(message.get(name, ""), str | None):
            raise invalid(f"{path}.{name}", "must be a string")
    calls = message.get("tool_calls")
    if not (calls is None or (isinstance(calls, list) and all(isinstance(call, dict) for call in calls))):
        raise invalid(f"{path}.tool_calls", "must be a list of objects")
    content = message.get("content")
    if isinstance(content, list):
        if len(content) > most:
            raise invalid(f"{path}.content", f"has {len(content)} parts; at most {most} are allowed")
        for i, part in enumerate(content):
            _check_part(part, f"{path}.content[{i}]")
    elif not isinstance(content, str) and not (content is None and role == "assistant" and calls):
        raise invalid(f"{path}.content", "must be a string or a list of text parts")


def _check_part(part: Any, path: str) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise invalid(path, "must be an object with type and text")
    if part.get("type") != "text":
        raise invalid(f"{path}.type", "only text parts are supported")
    if not isinstance(part.get("text"), str):
        raise invalid(f"{path}.text", "must be a string")
