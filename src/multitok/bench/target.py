"""The server under load: where it is, what it calls its model, and how a request to it looks."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_BODY_SHOWN = 300


class BenchError(Exception):
    """A benchmark can't go on; the message says why and what to do."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server.

    Attributes
    ----------
    host, port : str, int
        Where it listens.
    secure : bool
        Whether it speaks TLS.
    prefix : str
        Path in front of ``/v1``.
    api_key : str or None
        Sent as a bearer token.
    """

    host: str
    port: int
    secure: bool = False
    prefix: str = ""
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """Read a URL; a path that ends in ``/v1`` is taken for what it is.

        Raises
        ------
        BenchError
            When it is no URL of a server.
        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise BenchError(f"{url}: the port is not a number between 0 and 65535") from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise BenchError(f"{url}: expected a URL such as http://127.0.0.1:30000")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            host=parts.hostname, port=port or (443 if secure else 80), secure=secure, prefix=prefix, api_key=api_key
        )

    @property
    def url(self) -> str:
        """The address as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.prefix}"

    @property
    def local(self) -> bool:
        """Whether it runs on this machine, as far as its name says."""
        return self.host in {"localhost", "::1"} or self.host.startswith("127.")

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS settings of a connection."""
        return ssl.create_default_context() if self.secure else None

    def head(self, path: str, length: int) -> bytes:
        """Return the first line and the headers of a POST request."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"POST {self.prefix}{path} HTTP/1.1\r\nHost: {host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Accept: */*\r\n{key}Content-Length: {length}\r\n\r\n"
        ).encode()

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 60.0) -> dict[str, Any]:
        """Send one request outside the load, and return the JSON object that it is answered with.

        Raises
        ------
        BenchError
            When nobody listens, or the answer is an error or no JSON object.
        """
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=timeout)
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        try:
            payload = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", self.prefix + path, payload, headers)
            response = connection.getresponse()
            data = response.read()
        except ConnectionRefusedError:
            raise BenchError(f"nothing listens on {self.url}; start the server, or give its address by --url") from None
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
        if response.status != 200:
            shown = data[:_BODY_SHOWN].decode(errors="replace")
            raise BenchError(f"{self.url}{path} answered HTTP {response.status}: {shown}")
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise BenchError(f"{self.url}{path} answered no JSON object; is this an OpenAI-compatible server?")
        return answer


class ServedModel(msgspec.Struct, frozen=True):
    """What ``/v1/models`` says about a model."""

    name: str
    context_length: int | None


def find_model(target: Target, name: str | None = None) -> ServedModel:
    """Ask the server for its models, and return the named one, or the first.

    Raises
    ------
    BenchError
        When the server isn't there, or has no such model.
    """
    rows = target.call("/v1/models").get("data")
    models = [row for row in rows if isinstance(row, dict) and "id" in row] if isinstance(rows, list) else []
    names = [str(row["id"]) for row in models]
    if name is not None and name not in names:
        raise BenchError(f"{target.url} has no model {name!r}; it has {', '.join(names) or 'none'}")
    if not models:
        raise BenchError(f"{target.url}/v1/models lists no model")
    row = models[names.index(name) if name is not None else 0]
    # multitok, SGLang and vLLM all say it under this name.
    length = row.get("max_model_len")
    return ServedModel(str(row["id"]), length if isinstance(length, int) else None)
