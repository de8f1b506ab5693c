"""Sockets that the launcher opens and its children inherit."""

from __future__ import annotations

import os
import socket

_BACKLOG = 1024


def bind_http(host: str, port: int) -> socket.socket:
    """Return the HTTP socket, bound; it listens when the workers are about to be ready.

    Raises
    ------
    OSError
        The address is taken or unknown.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def listen_http(sock: socket.socket) -> None:
    """Let clients connect."""
    sock.listen(_BACKLOG)


def listen_unix(path: str) -> socket.socket:
    """Return a listening unix socket, for ZeroMQ (``zmq.USE_FD``) in a child; only this user can connect."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    os.chmod(path, 0o600)
    sock.listen(_BACKLOG)
    return sock
