"""ZeroMQ sockets as every part uses them: PUSH to PULL over unix sockets, never blocking, never lingering."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import cast

import zmq

# A step is one message, so this is more than a minute of a stuck peer; past it the peer counts as gone.
HIGH_WATER_MARK = 16384
# The largest legal frame: a body (--max-body-bytes, 32 MiB by default) makes at most two bytes of JSON, so 64 MiB of
# packed ids out of each, beside texts that it holds once (stop strings, a grammar): 96 MiB; and a step that sends again
# the ids of 1,000 requests of 100,000 tokens has 400 MB. What claims more is no message of ours.
MOST_FRAME_BYTES = 1 << 30
# A part that was replaced is reached again at once, where ZeroMQ would wait for 100 ms.
_RECONNECT_MS = 20
# Who connects says who it is within this time, or is cut off.
_HANDSHAKE_MS = 10_000
# The enum's own `&` costs as much as the question.
_POLLIN = int(zmq.POLLIN)


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context.instance()


def bind_pull(endpoint: str, listen_fd: int | None = None) -> zmq.Socket[bytes]:
    """Return a PULL socket bound to an endpoint.

    Parameters
    ----------
    endpoint : str
        ``ipc://PATH``.
    listen_fd : int or None
        Descriptor of the listening unix socket, where the launcher made it; messages that were sent while the last
        receiver was dead then arrive here.
    """
    socket: zmq.Socket[bytes] = _context().socket(zmq.PULL)
    socket.linger = 0
    socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MOST_FRAME_BYTES
    socket.handshake_ivl = _HANDSHAKE_MS
    if listen_fd is not None:
        socket.setsockopt(zmq.USE_FD, listen_fd)
    socket.bind(endpoint)
    if listen_fd is None:
        # The launcher's are made so.
        os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    return socket


def connect_push(endpoint: str) -> zmq.Socket[bytes]:
    """Return a PUSH socket connected to an endpoint; it queues while the peer is not there."""
    socket: zmq.Socket[bytes] = _context().socket(zmq.PUSH)
    socket.linger = 0
    socket.sndhwm = HIGH_WATER_MARK
    socket.reconnect_ivl = _RECONNECT_MS
    try:
        socket.connect(endpoint)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """Return the descriptor that an event loop watches; it is edge-triggered."""
    return cast("int", socket.getsockopt(zmq.FD))


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits.

    Asking for EVENTS costs half of what an ``Again`` exception does, and re-arms the edge-triggered descriptor.
    """
    return bool(cast("int", socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def drain(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yield waiting messages without blocking."""
    while readable(socket):
        yield socket.recv_multipart(zmq.NOBLOCK)
