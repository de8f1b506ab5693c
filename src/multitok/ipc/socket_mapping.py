"""SocketMapping: from an address to the PUSH socket that reaches it."""

from __future__ import annotations

import logging
from typing import Any

import zmq

from multitok.config import PortArgs
from multitok.ipc.sockets import connect_push
from multitok.messages.codec import encode_frame

_log = logging.getLogger(__name__)


class SocketMapping:
    """Sends to any address of this start; a socket is opened on first use.

    Used from one thread. Sends never block: a peer that has not read `HIGH_WATER_MARK` messages loses this one, which
    its owner sees as a gap.

    Attributes
    ----------
    without_owner, undeliverable : int
        Outputs that were skipped because they had no owner, or because the owner is dead or doesn't read.
    """

    def __init__(self, port_args: PortArgs) -> None:
        self._port_args = port_args
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._dead: set[str] = set()
        self.without_owner = 0
        self.undeliverable = 0

    def __contains__(self, address: str) -> bool:
        return address in self._sockets

    def __len__(self) -> int:
        return len(self._sockets)

    def _register_ipc_mapping(self, address: str) -> None:
        if address in self._sockets:
            _log.warning("%s is registered already; skipped", address)
            return
        self._sockets[address] = connect_push(self._port_args.endpoint(address))

    def send_output(self, address: str | None, output: Any) -> bool:
        """Send a message to an address.

        Parameters
        ----------
        address : str or None
            Short address; None is logged, counted and skipped.
        output : msgspec.Struct
            The message.

        Returns
        -------
        bool
            Whether it was handed to the socket.
        """
        if address is None:
            self.without_owner += 1
            _log.error("%s has no owner; skipped", type(output).__name__)
            return False
        return self.send_frames(address, [encode_frame(self._port_args.start_token, output)])

    def send_frames(self, address: str, frames: list[bytearray] | list[bytes]) -> bool:
        """Send encoded frames to an address; see `send_output`."""
        if address not in self._sockets:
            if address in self._dead:
                self.undeliverable += 1
                return False
            try:
                self._register_ipc_mapping(address)
            except zmq.ZMQError as error:
                self.undeliverable += 1
                _log.error("%.100r is no address: %s; dropped a message", address, error)
                return False
        try:
            self._sockets[address].send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.undeliverable += 1
            _log.error("%s does not read its messages; dropped one", address)
            return False
        return True

    def drop(self, address: str) -> None:
        """Close the socket of an address whose life has ended; what is sent to it from now on is skipped."""
        self._dead.add(address)
        socket = self._sockets.pop(address, None)
        if socket is not None:
            socket.close()

    def clear_all_sockets(self) -> None:
        """Close every socket."""
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()
