"""Checks a conversation before a template sees it."""

from __future__ import annotations

from typing import Any

from multitok.http.errors import invalid

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_STRINGS = ("name", "tool_call_id", "reasoning_content")


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and bring their content into one string each.

    Content in parts is joined by line breaks; parts that are no text are refused.

    Parameters
    ----------
    messages : list of dict
        As the client gave them.

    Returns
    -------
    list of dict
        For the chat template.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    if not messages:
        raise invalid("messages", "must not be an empty list")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: dict[str, Any], path: str) -> dict[str, Any]:
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
    if isinstance(content, str):
        return message
    if content is None:
        if role != "assistant" or not calls:
            raise invalid(f"{path}.content", "must be a string or a list of text parts")
        return {**message, "content": ""}
    if not isinstance(content, list):
        raise invalid(f"{path}.content", "must be a string or a list of text parts")
    return {**message, "content": "\n".join(_read_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))}


def _read_part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise invalid(path, "must be an object with type and text")
    if part.get("type") != "text":
        raise invalid(f"{path}.type", "only text parts are supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{path}.text", "must be a string")
    return text
