"""RankDispatcher: sends each request to one rank, and everything else to all; reads headers only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
import zmq

from multitok.config import PortArgs
from multitok.ipc.sockets import connect_push
from multitok.messages.codec import FrameDecoder
from multitok.messages.to_scheduler import REQUEST_KINDS, Header, life_mark
from multitok.router.policies import RoutingPolicy

_log = logging.getLogger(__name__)
STUCK = "the scheduler does not take requests at the moment; try again later"
RESTARTING = "the engine is restarting; try again later"


def _nobody(owner: str | None) -> None:
    """Stand in for whoever wants to know."""


class RankDispatcher:
    """One PUSH socket per rank that is up; hosted by the router, or by the one HTTP process where there is none.

    Nothing waits for a rank that doesn't read: requests to it are refused, and what goes to all ranks leaves it out;
    the owner is told, so that the rank hears of it in the next `LiveReq`. Each message says which life of a rank is
    meant.

    Parameters
    ----------
    port_args : PortArgs
        Where the schedulers are.
    policy : RoutingPolicy
        Chooses ranks.
    lives : sequence of int or None
        The newest life of each rank, as far as is known; None: the first.

    Attributes
    ----------
    lives : list of int
        Likewise.
    dropped : int
        Messages to all ranks that one of them was not sent, because it doesn't read.
    on_dropped : callable
        Called then, with the owner.
    """

    def __init__(self, port_args: PortArgs, policy: RoutingPolicy, lives: Sequence[int] | None = None) -> None:
        self._policy = policy
        self._start_token = port_args.start_token
        self._endpoints = [port_args.endpoint(address) for address in port_args.scheduler_ipc_names]
        self._send_to_scheduler = {rank: connect_push(endpoint) for rank, endpoint in enumerate(self._endpoints)}
        self._model_of_rank = port_args.model_of_rank
        self._note_who_is_up()
        self._headers: FrameDecoder[Header] = FrameDecoder(port_args.start_token, Header)
        self._dead_owners: set[str | None] = set()
        self.lives = [1] * len(self._endpoints) if lives is None else [*lives]
        self.dropped = 0
        self.on_dropped: Callable[[str | None], None] = _nobody

    @property
    def down(self) -> list[int]:
        """The ranks that are not up."""
        return [rank for rank in range(len(self._endpoints)) if rank not in self._send_to_scheduler]

    def rank_died(self, rank: int, life: int) -> None:
        """Send nothing to a rank any more; what is still queued is lost, and stale for its next life."""
        socket = self._send_to_scheduler.pop(rank, None)
        if socket is not None:
            socket.close()
            self._note_who_is_up()
            self.lives[rank] = life

    def rank_started(self, rank: int, life: int) -> None:
        """Send to this life of a rank, which is ready."""
        if 0 <= rank < len(self._endpoints):
            self.lives[rank] = life
            if rank not in self._send_to_scheduler:
                self._send_to_scheduler[rank] = connect_push(self._endpoints[rank])
                self._note_who_is_up()
                self._policy.rank_started(rank)

    def owner_died(self, address: str) -> None:
        """Drop requests of an owner: a scheduler that begins to live now will not know that it is dead."""
        self._dead_owners.add(address)

    def _note_who_is_up(self) -> None:
        self._up = sorted(self._send_to_scheduler)
        self._up_by_model: dict[int, list[int]] = {}
        for rank in self._up:
            self._up_by_model.setdefault(self._model_of_rank[rank], []).append(rank)

    def send_frames(self, frames: Sequence[bytes | bytearray]) -> None:
        """Send header and payload of each child on; what isn't such a pair of this start is dropped, with a log line.

        Raises
        ------
        Undelivered
            Some requests were not sent; nothing else that was not is worth an error.
        """
        if len(frames) % 2:
            _log.error("dropped a message of %d frames: headers and payloads come in pairs", len(frames))
            return
        per_rank: dict[int, list[bytes | bytearray]] = {}
        requests: dict[int, list[Header]] = {}
        homeless: list[Header] = []
        # Of all children: they come from one.
        owner: str | None = None
        for i in range(0, len(frames), 2):
            header = self._header(bytes(frames[i]))
            if header is None:
                continue
            owner = header.owner
            ranks = self._up
            if header.kind in REQUEST_KINDS:
                up = self._up_by_model.get(header.model)
                if up is None:
                    homeless.append(header)
                    continue
                ranks = [self._choose(header, up)]
                # At once, so that the next of a batch is chosen with this one in mind.
                self._policy.sent(ranks[0], header)
                requests.setdefault(ranks[0], []).append(header)
            for rank in ranks:
                per_rank.setdefault(rank, []).extend(frames[i : i + 2])
        undelivered: list[Header] = []
        for rank, rank_frames in per_rank.items():
            try:
                mark = life_mark(self._start_token, self.lives[rank])
                self._send_to_scheduler[rank].send_multipart([mark, *rank_frames], zmq.NOBLOCK)
            except zmq.Again:
                its = requests.get(rank, [])
                undelivered += its
                self._policy.taken_back(rank, len(its))
                dropped = len(rank_frames) // 2 - len(its)
                self._count_dropped(rank, dropped)
                if dropped:
                    self.on_dropped(owner)
        if homeless:
            raise Undelivered(homeless, RESTARTING)
        if undelivered:
            raise Undelivered(undelivered, STUCK)

    def _choose(self, header: Header, up: Sequence[int]) -> int:
        """Return the rank that the owner wants, or what the policy says."""
        wanted = header.rank
        if wanted is None or not 0 <= wanted < len(self._endpoints):
            return self._policy.choose(header, up)
        # Whoever wants the same rank gets the same one, also while it is down.
        return wanted if wanted in up else up[wanted % len(up)]

    def _count_dropped(self, rank: int, messages: int) -> None:
        before, self.dropped = self.dropped, self.dropped + messages
        # The 1st, 2nd, 4th, 8th, ...
        if before.bit_length() != self.dropped.bit_length():
            _log.error("scheduler %d does not read its messages; dropped %d so far", rank, self.dropped)

    def _header(self, frame: bytes) -> Header | None:
        """Return the header of what is to be sent on."""
        if not self._headers.is_ours(frame):
            return None
        try:
            header = self._headers.decode(frame)
        except msgspec.DecodeError as error:
            _log.error("dropped a message whose header can't be decoded: %s", error)
            return None
        return None if header.owner in self._dead_owners and header.kind in REQUEST_KINDS else header


class Undelivered(zmq.Again):
    """Some requests of a message could not be sent.

    Attributes
    ----------
    headers : list of Header
        Theirs.
    reason : str
        Why, in words meant for the client.
    """

    def __init__(self, headers: list[Header], reason: str) -> None:
        super().__init__()
        self.headers = headers
        self.reason = reason
