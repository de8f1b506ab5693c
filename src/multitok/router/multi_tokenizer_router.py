"""MultiTokenizerRouter: between several HTTP workers and the scheduler(s)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec
import zmq

from multitok.config import PortArgs
from multitok.ipc.launcher_channel import LauncherChannel
from multitok.ipc.socket_mapping import SocketMapping
from multitok.ipc.sockets import bind_pull, connect_push, drain
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.to_child import OwnerDied, OwnerStarted, Stop
from multitok.messages.to_detokenizer import RefusedReq
from multitok.messages.to_launcher import Ready
from multitok.messages.to_scheduler import REQUEST_KINDS, Header, Kind
from multitok.router.rank_dispatcher import RankDispatcher, RoundRobinPolicy, Undelivered

_log = logging.getLogger(__name__)
# How long the loop waits at most before it says that it goes round.
_BEAT_MS = 1000


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
    beat : callable
        Called at least every second while the loop goes round.
    """

    def __init__(self, port_args: PortArgs, channel: LauncherChannel, beat: Callable[[], None]) -> None:
        if port_args.router_ipc_name is None or port_args.control_ipc_name is None:
            raise ValueError("single mode has no router")
        self._port_args = port_args
        self._channel = channel
        self._beat = beat
        self.receive_from_worker = bind_pull(
            port_args.endpoint(port_args.router_ipc_name), port_args.listen_fds[port_args.router_ipc_name]
        )
        self.send_to_scheduler = RankDispatcher(port_args, RoundRobinPolicy(len(port_args.scheduler_ipc_names)))
        control = port_args.endpoint(port_args.control_ipc_name)
        self.recv_from_detokenizer = bind_pull(control, port_args.listen_fds[port_args.control_ipc_name])
        # Main thread to handle_loop: refusals and deaths go through the same socket as everything else for workers.
        self._to_handle_loop = connect_push(control)
        self.socket_mapping = SocketMapping(port_args)
        self._headers: FrameDecoder[Header] = FrameDecoder(port_args.start_token, Header)
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
            self._to_handle_loop.send(b"")
            handle_loop.join(timeout=1)

    def router_worker_obj(self) -> None:
        """Forward from the workers to the schedulers, and follow the launcher, until it says stop."""
        poller = zmq.Poller()
        poller.register(self.receive_from_worker, zmq.POLLIN)
        poller.register(self._channel.fileno(), zmq.POLLIN)
        self._channel.send(Ready())
        while True:
            self._beat()
            for source, _ in poller.poll(_BEAT_MS):
                if source == self._channel.fileno():
                    if self._follow_launcher():
                        return
                    continue
                for frames in drain(self.receive_from_worker):
                    try:
                        self.send_to_scheduler.send_frames(frames)
                    except Undelivered as undelivered:
                        self._refuse(undelivered.headers)

    def handle_loop(self) -> None:
        """Forward control replies to the workers that they belong to, until an empty message comes."""
        while frames := self.recv_from_detokenizer.recv_multipart():
            if frames == [b""]:
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

    def _follow_launcher(self) -> bool:
        for message in self._channel.receive():
            if isinstance(message, OwnerStarted):
                self.live_owners.add(message.address)
            elif isinstance(message, OwnerDied):
                self.live_owners.discard(message.address)
                self._send_to_handle_loop(Header(Kind.CONTROL, 0, message.address))
            elif isinstance(message, Stop):
                return True
        return False

    def _refuse(self, headers: list[Header]) -> None:
        for header in headers:
            if header.kind in REQUEST_KINDS:
                refusal = RefusedReq(
                    number=header.number,
                    http_worker_ipc=header.owner,
                    status=503,
                    message="the scheduler does not take requests at the moment",
                )
                self._send_to_handle_loop(header, refusal)

    def _send_to_handle_loop(self, *messages: Header | RefusedReq) -> None:
        self._to_handle_loop.send_multipart([encode_frame(self._port_args.start_token, m) for m in messages])
