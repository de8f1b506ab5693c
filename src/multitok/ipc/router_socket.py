"""The socket from an HTTP worker to the router."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from multitok.ipc.sockets import connect_push


class RouterSocket:
    """Sends frames to the router.

    Parameters
    ----------
    endpoint : str
        The router's.
    """

    def __init__(self, endpoint: str) -> None:
        self._socket = connect_push(endpoint)

    def send_frames(self, frames: Sequence[bytes | bytearray]) -> None:
        """Send the frames of one message; raises ``zmq.Again`` when the router doesn't read."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)
