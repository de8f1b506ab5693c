"""RankDispatcher: sends each request to one rank, and everything else to all; reads headers only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from multitok.config import PortArgs
from multitok.ipc.sockets import connect_push
from multitok.messages.codec import FrameDecoder
from multitok.messages.to_scheduler import REQUEST_KINDS, Header

_log = logging.getLogger(__name__)


class RoutingPolicy(Protocol):
    """Chooses the rank of a request."""

    def choose(self, header: Header) -> int:
        """Return a rank."""
        ...


class RoundRobinPolicy:
    """Ranks in turn.

    Parameters
    ----------
    ranks : int
        How many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._last = -1

    def choose(self, header: Header) -> int:
        """Return the rank that the owner wants, or the next in turn."""
        if header.rank is not None and 0 <= header.rank < self._ranks:
            return header.rank
        self._last = (self._last + 1) % self._ranks
        return self._last


class RankDispatcher:
    """One PUSH socket per rank; hosted by the router, or by the one HTTP process where there is none.

    Parameters
    ----------
    port_args : PortArgs
        Where the schedulers are.
    policy : RoutingPolicy
        Chooses ranks.
    """

    def __init__(self, port_args: PortArgs, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._send_to_scheduler = [connect_push(port_args.endpoint(a)) for a in port_args.scheduler_ipc_names]
        self._headers: FrameDecoder[Header] = FrameDecoder(port_args.start_token, Header)

    def send_frames(self, frames: Sequence[bytes | bytearray]) -> None:
        """Send header and payload of each child on; what isn't such a pair of this start is dropped, with a log line.

        Raises
        ------
        Undelivered
            Ranks don't read; their requests were not sent.
        """
        if len(frames) % 2:
            _log.error("dropped a message of %d frames: headers and payloads come in pairs", len(frames))
            return
        per_rank: dict[int, list[bytes | bytearray]] = {}
        headers: dict[int, list[Header]] = {}
        for i in range(0, len(frames), 2):
            header = self._header(bytes(frames[i]))
            if header is None:
                continue
            ranks = (
                [self._policy.choose(header)] if header.kind in REQUEST_KINDS else range(len(self._send_to_scheduler))
            )
            for rank in ranks:
                per_rank.setdefault(rank, []).extend(frames[i : i + 2])
                headers.setdefault(rank, []).append(header)
        undelivered: list[Header] = []
        for rank, rank_frames in per_rank.items():
            try:
                self._send_to_scheduler[rank].send_multipart(rank_frames, zmq.NOBLOCK)
            except zmq.Again:
                _log.error("scheduler %d does not read its messages", rank)
                undelivered += headers[rank]
        if undelivered:
            raise Undelivered(undelivered)

    def _header(self, frame: bytes) -> Header | None:
        if not self._headers.is_ours(frame):
            return None
        try:
            return self._headers.decode(frame)
        except msgspec.DecodeError as error:
            _log.error("dropped a message whose header can't be decoded: %s", error)
            return None


class Undelivered(zmq.Again):
    """Some children of a message could not be sent.

    Attributes
    ----------
    headers : list of Header
        Theirs.
    """

    def __init__(self, headers: list[Header]) -> None:
        super().__init__()
        self.headers = headers
