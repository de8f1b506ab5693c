"""MultiTokenizerRouter: between several HTTP workers and the scheduler(s)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from multitok.config import PortArgs
from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherChannel, LauncherGone
from multitok.ipc.orders import forward_orders
from multitok.ipc.socket_mapping import SocketMapping
from multitok.ipc.sockets import bind_pull, connect_push
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.to_child import (
    Control,
    LauncherExited,
    OwnerDied,
    OwnerStarted,
    PartDied,
    PartStarted,
    Ping,
    Stop,
    ToChild,
    ToItself,
)
from multitok.messages.to_detokenizer import RefusedReq
from multitok.messages.to_launcher import Ready
from multitok.messages.to_scheduler import Header, Kind
from multitok.messages.to_tokenizer import LiveListWanted, RankDied, RankStarted
from multitok.router.policies import RoutingPolicy
from multitok.router.rank_dispatcher import RankDispatcher, Undelivered

_log = logging.getLogger(__name__)
_News = RankDied | RankStarted | RefusedReq | LiveListWanted


class MultiTokenizerRouter:
    """Forwards requests to ranks, and control replies to workers, without decoding a payload.

    Topology: HTTP workers --receive_from_worker--> here --send_to_scheduler (per rank)--> schedulers, and schedulers
    --recv_from_detokenizer--> here --SocketMapping--> workers. The two directions are two threads with sockets of
    their own, so that neither waits for the other; results of requests don't pass here at all.

    Parameters
    ----------
    port_args : PortArgs
        Where the parts meet.
    channel : LauncherChannel
        To the launcher.
    policy : RoutingPolicy
        Chooses ranks.
    beat : callable
        Called at least every second while the loop goes round, with the seconds that it was late.
    """

    def __init__(
        self, port_args: PortArgs, channel: LauncherChannel, policy: RoutingPolicy, beat: Callable[[float], None]
    ) -> None:
        if port_args.router_ipc_name is None or port_args.control_ipc_name is None:
            raise ValueError("single mode has no router")
        self._port_args = port_args
        self._channel = channel
        self._controlled = Controlled(channel)
        self._beat = beat
        self._stopping = False
        self._endpoint = port_args.endpoint(port_args.router_ipc_name)
        self.receive_from_worker = bind_pull(self._endpoint, port_args.listen_fds[port_args.router_ipc_name])
        self.send_to_scheduler = RankDispatcher(port_args, policy)
        self.send_to_scheduler.on_dropped = lambda owner: self._tell(owner, LiveListWanted())
        control = port_args.endpoint(port_args.control_ipc_name)
        self.recv_from_detokenizer = bind_pull(control, port_args.listen_fds[port_args.control_ipc_name])
        # Main thread to handle_loop: refusals and deaths go through the same socket as everything else for workers.
        self._to_handle_loop = connect_push(control)
        self.socket_mapping = SocketMapping(port_args)
        self._headers: FrameDecoder[Header] = FrameDecoder(port_args.start_token, Header)
        self._orders: FrameDecoder[ToChild | ToItself] = FrameDecoder(port_args.start_token, ToChild | ToItself)
        self.live_owners: set[str] = set()

    def run(self) -> None:
        """Serve until the launcher says stop.

        Raises
        ------
        LauncherGone
            The launcher has exited.
        """
        handle_loop = threading.Thread(target=self.handle_loop, name="handle_loop", daemon=True)
        handle_loop.start()
        try:
            self.router_worker_obj()
        finally:
            self._to_handle_loop.send(self._port_args.start_token)
            handle_loop.join(timeout=1)

    def router_worker_obj(self) -> None:
        """Forward from the workers to the schedulers, and follow the launcher, until it says stop."""
        # What there is to know from the start comes before what workers have sent to the last life.
        for order in self._channel.receive():
            self._follow(order)
        # The launcher's orders come on the same address, one frame each: a loop that waits for one socket makes two
        # system calls per message.
        forward_orders(self._channel, self._endpoint, self._port_args.start_token)
        self._channel.send(Ready())
        while not self._stopping:
            frames = self.receive_from_worker.recv_multipart()
            if len(frames) == 1:
                self._follow_frame(frames[0])
                continue
            try:
                self.send_to_scheduler.send_frames(frames)
            except Undelivered as undelivered:
                self._refuse(undelivered)

    def handle_loop(self) -> None:
        """Forward control replies to the workers that they belong to, until the main thread says stop."""
        while True:
            frames = self.recv_from_detokenizer.recv_multipart()
            if frames == [self._port_args.start_token]:
                self.socket_mapping.clear_all_sockets()
                return
            self.distribute_result_to_workers(frames)

    def distribute_result_to_workers(self, frames: list[bytes]) -> None:
        """Send a reply on to the owner that its header names; a header alone means that this owner has died.

        Parameters
        ----------
        frames : list of bytes
            Header and payload.
        """
        if not self._headers.is_ours(frames[0]):
            return
        try:
            header = self._headers.decode(frames[0])
        except msgspec.DecodeError as error:
            _log.error("dropped a reply whose header can't be decoded: %s", error)
            return
        if header.owner is None:
            self.socket_mapping.without_owner += 1
            _log.error("a reply has no owner; skipped")
        elif len(frames) == 1:
            self.socket_mapping.drop(header.owner)
        else:
            self.socket_mapping.send_frames(header.owner, frames[1:])

    def _follow_frame(self, frame: bytes) -> None:
        if not self._orders.is_ours(frame):
            return
        try:
            self._follow(self._orders.decode(frame))
        except msgspec.DecodeError as error:
            _log.error("dropped an order that can't be decoded: %s", error)

    def _follow(self, order: ToChild | ToItself) -> None:
        match order:
            case Ping():
                self._beat(time.monotonic() - order.sent)
            case Control():
                self._controlled.follow(order)
            case OwnerStarted():
                self.live_owners.add(order.address)
                down = self.send_to_scheduler.down
                for rank, life in enumerate(self.send_to_scheduler.lives):
                    if rank in down:
                        self._tell(order.address, RankDied(rank=rank, life=life))
                    elif life > 1:
                        # The last life may have died, and this one come, while there was no router to say so.
                        self._tell(order.address, RankStarted(rank=rank, life=life))
            case OwnerDied():
                self.live_owners.discard(order.address)
                self.send_to_scheduler.owner_died(order.address)
                self._send_to_handle_loop(Header(Kind.CONTROL, 0, order.address))
            # Only when nothing goes to a rank any more, or goes there again, are the owners told.
            case PartDied(role="scheduler"):
                self.send_to_scheduler.rank_died(order.index, order.life)
                self._tell_all(RankDied(rank=order.index, life=order.life))
            case PartStarted(role="scheduler"):
                self.send_to_scheduler.rank_started(order.index, order.life)
                self._tell_all(RankStarted(rank=order.index, life=order.life))
            case Stop():
                self._stopping = True
            case LauncherExited():
                raise LauncherGone

    def _tell_all(self, message: RankDied | RankStarted) -> None:
        for owner in self.live_owners:
            self._tell(owner, message)

    def _refuse(self, undelivered: Undelivered) -> None:
        for header in undelivered.headers:
            self._tell(header.owner, RefusedReq(number=header.number, status=503, message=undelivered.reason))

    def _tell(self, owner: str | None, message: _News) -> None:
        message.http_worker_ipc = owner
        self._send_to_handle_loop(Header(Kind.CONTROL, message.number, owner), message)

    def _send_to_handle_loop(self, *messages: Header | _News) -> None:
        self._to_handle_loop.send_multipart([encode_frame(self._port_args.start_token, m) for m in messages])
