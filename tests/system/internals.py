"""What the parts of a running server hold, asked for by their own messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from server import STOP_S, Server, eventually

from multitok.config import PortArgs
from multitok.ipc.sender_wrapper import SenderWrapper
from multitok.ipc.sockets import bind_pull, connect_push
from multitok.launcher.shared_memory import read_from_shared_memory
from multitok.messages.codec import FrameDecoder
from multitok.messages.to_scheduler import GetInternalStateReq, life_mark
from multitok.messages.to_tokenizer import GetInternalStateReqOutput, ToTokenizer

# No worker's: they begin with w and a number. None is used again: what is sent to one that was closed may be lost.
_ADDRESSES = (f"test{number}" for number in itertools.count())


class _Sender:
    """Sends to where requests go in, as an owner does."""

    def __init__(self, server: Server, ports: PortArgs) -> None:
        addresses = [ports.router_ipc_name] if ports.router_ipc_name is not None else ports.scheduler_ipc_names
        self.sockets = [connect_push(ports.endpoint(address)) for address in addresses]
        # A scheduler is told which life of it is meant.
        self._marks: list[list[bytes]] = [[]]
        if ports.router_ipc_name is None:
            lives = [server.processes()[f"scheduler:{rank}"]["life"] for rank in range(len(addresses))]
            self._marks = [[life_mark(ports.start_token, life)] for life in lives]

    def send_frames(self, frames: list[bytes | bytearray]) -> None:
        for socket, mark in zip(self.sockets, self._marks, strict=True):
            socket.send_multipart([*mark, *frames])


@contextmanager
def _asking(server: Server) -> Iterator[Callable[[], list[GetInternalStateReqOutput]]]:
    """Ask the schedulers what they say of themselves."""
    (block,) = [name for name in server.blocks() if name.endswith("-port_args")]
    ports = read_from_shared_memory(block, PortArgs)
    address = next(_ADDRESSES)
    inbox = bind_pull(ports.endpoint(address))
    sockets = _Sender(server, ports)
    sender = SenderWrapper(sockets, address, ports.start_token)
    decoder: FrameDecoder[ToTokenizer] = FrameDecoder(ports.start_token, ToTokenizer)

    def ask() -> list[GetInternalStateReqOutput]:
        sender.send(GetInternalStateReq(number=1))
        states: list[GetInternalStateReqOutput] = []
        while len(states) < len(ports.scheduler_ipc_names):
            assert inbox.poll(int(STOP_S * 1000)), "a scheduler does not answer"
            (frame,) = inbox.recv_multipart()
            assert decoder.is_ours(frame)
            state = decoder.decode(frame)
            # A part may be owed other news, as every owner is.
            if isinstance(state, GetInternalStateReqOutput):
                states.append(state)
        return states

    try:
        yield ask
    finally:
        for socket in [inbox, *sockets.sockets]:
            socket.close()
        Path(ports.runtime_dir, address).unlink(missing_ok=True)


def wait_until_nothing_is_held(server: Server, within: float) -> None:
    """Wait until no table of a scheduler or of an HTTP worker has a request in it."""

    server.wait_until_idle(within)
    with _asking(server) as ask:
        eventually(
            lambda: not any(state.running or state.queued or state.unacknowledged for state in ask()),
            within,
            "the schedulers have forgotten all requests",
        )
    for name, figures in server.processes().items():
        role, _, worker = name.partition(":")
        if role != "tokenizer_worker":
            continue
        with server.connection_to(int(worker), life=figures["life"]) as client:
            eventually(
                lambda client=client: not client.get("/server_info").json()["worker"]["running_requests"],
                within,
                f"{name} has forgotten all requests",
            )
