"""Requests of both kinds: those that the connection serves itself, and those that go through ASGI."""

from __future__ import annotations

from typing import Any

import msgspec
from http_double import Answer, Connection, chat

HOT: list[tuple[str, str, Any]] = [
    ("POST", "/v1/chat/completions", chat()),
    ("POST", "/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 4}}),
]
ASGI: list[tuple[str, str, Any]] = [
    ("GET", "/v1/models", None),
    ("POST", "/tokenize", {"prompt": "ab"}),
]
CONTROL: list[tuple[str, str, Any]] = [
    ("GET", "/server_info", None),
    ("GET", "/admin/state", None),
    ("POST", "/abort_request", {"rid": "x"}),
    ("POST", "/pause_generation", {"mode": "wait"}),
    ("GET", "/flush_cache", None),
]
CLIENT = HOT + ASGI
ALL = CLIENT + CONTROL


def head(method: str, path: str, headers: str = "", length: int | None = None) -> bytes:
    lines = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}"
    if length is not None:
        lines += f"Content-Length: {length}\r\n"
    return lines.encode("latin-1") + b"\r\n"


def message(method: str, path: str, body: Any, headers: str = "") -> bytes:
    if body is None:
        return head(method, path, headers)
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return head(method, path, headers, len(data)) + data


def call(connection: Connection, route: tuple[str, str, Any], headers: str = "") -> Answer:
    connection.send(message(*route, headers))
    return connection.read()


def error(answer: Answer) -> tuple[int, str]:
    """Status of an error in the API's format, and its message."""
    detail = answer.json()["error"]
    assert set(detail) == {"message", "type", "param", "code"}
    return answer.status, detail["message"]
