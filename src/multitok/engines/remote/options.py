"""Options of the ``remote`` engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

import msgspec

from multitok.engines.options import OptionReader

ApiName = Literal["auto", "multitok", "sglang", "vllm"]
API_NAMES: tuple[ApiName, ...] = ("auto", "multitok", "sglang", "vllm")


class Address(msgspec.Struct, frozen=True):
    """Where an engine is.

    Attributes
    ----------
    url : str
        As it is shown in the log.
    host : str
        Name or number.
    port : int
        TCP port.
    tls : bool
        Whether it is ``https``.
    path : str
        In front of every route; empty or beginning with ``/``.
    """

    url: str
    host: str
    port: int
    tls: bool
    path: str

    @property
    def host_header(self) -> str:
        """Value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options, read and checked.

    Attributes
    ----------
    addresses : list of Address
        At least one; each once.
    api : str
        One of `API_NAMES`.
    api_key : str or None
        Sent as ``Authorization: Bearer``; never logged.
    wait : float
        Seconds that the first engine gets to answer at the start.
    connect_timeout : float
        Seconds that a connection may take.
    health_period, health_timeout : float
        Seconds between two health checks of an engine, and that one may take.
    max_running : int or None
        Most requests at each address; None: what it says itself, or 256.
    """

    addresses: list[Address]
    api: ApiName = "auto"
    api_key: str | None = None
    wait: float = 60.0
    connect_timeout: float = 5.0
    health_period: float = 5.0
    health_timeout: float = 20.0
    max_running: int | None = None


def read_options(options: Mapping[str, str]) -> RemoteOptions:
    """Read ``--engine-arg`` options.

    Parameters
    ----------
    options : mapping of str to str
        What the user gave.

    Raises
    ------
    ValueError
        One is unknown, missing or wrong.
    """
    read = OptionReader("remote", options)
    urls = read.text("url")
    api = read.choice("api", API_NAMES)
    key, key_file = read.text("api_key"), read.text("api_key_file")
    numbers = {name: read.number(name) for name in ("wait", "connect_timeout", "health_period", "health_timeout")}
    max_running = read.integer("max_running", minimum=1)
    read.done()
    if urls is None:
        raise ValueError("engine 'remote' needs the address of an engine: --engine-arg url=http://HOST:PORT")
    if key is not None and key_file is not None:
        raise ValueError("options 'api_key' and 'api_key_file' of engine 'remote' exclude each other")
    addresses = [_address(url.strip()) for url in urls.split(",")]
    if len({(a.host, a.port, a.path) for a in addresses}) < len(addresses):
        raise ValueError("option 'url' of engine 'remote' names an address twice")
    for name in ("connect_timeout", "health_period", "health_timeout"):
        if numbers[name] == 0:
            raise ValueError(f"option {name!r} of engine 'remote' must be above 0")
    return RemoteOptions(
        addresses=addresses,
        api=cast("ApiName", api or "auto"),
        api_key=_checked_key(_read_key(key_file) if key_file is not None else key),
        max_running=max_running,
        **{name: value for name, value in numbers.items() if value is not None},
    )


def _address(url: str) -> Address:
    problem = f"option 'url' of engine 'remote': {url!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from None
    if parts.username is not None or parts.password is not None:
        # Without the text, which has a secret in it.
        raise ValueError("option 'url' of engine 'remote' must not hold a user or a password; give api_key_file")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{problem} has not the form http://HOST:PORT")
    if parts.query or parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"{problem} must be an address and nothing more")
    tls = parts.scheme == "https"
    return Address(url.rstrip("/"), parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


def _read_key(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"option 'api_key_file' of engine 'remote': {file} can't be read: {error}") from None


def _checked_key(key: str | None) -> str | None:
    # What isn't would end the header, and begin another.
    if key is not None and (not key or not key.isascii() or not key.isprintable()):
        raise ValueError("the key of engine 'remote' must be a line of printable ASCII characters")
    return key
