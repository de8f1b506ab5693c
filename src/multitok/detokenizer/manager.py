"""DetokenizerManager: receives ids from the schedulers and sends text to the owners."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from multitok.config import PortArgs, ServerArgs
from multitok.detokenizer.incremental import TextDecoder
from multitok.detokenizer.multi_http_worker import MultiHttpWorkerDetokenizerMixin
from multitok.detokenizer.step import DetokenizerStep
from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherChannel, LauncherGone
from multitok.ipc.orders import forward_orders
from multitok.ipc.socket_mapping import SocketMapping
from multitok.ipc.sockets import bind_pull
from multitok.messages.base import BaseBatchReq, BaseReq, FinishReason
from multitok.messages.codec import FrameDecoder
from multitok.messages.split import check_columns
from multitok.messages.to_child import (
    Control,
    LauncherExited,
    OwnerDied,
    PartDied,
    PartStarted,
    Ping,
    Stop,
    ToChild,
    ToItself,
)
from multitok.messages.to_detokenizer import (
    BatchEmbeddingOutput,
    BatchIdentity,
    BatchTokenIDOutput,
    RefusedReq,
    ToDetokenizer,
)
from multitok.messages.to_launcher import Ready
from multitok.messages.to_tokenizer import BatchStrOutput

_log = logging.getLogger(__name__)


class DetokenizerManager(MultiHttpWorkerDetokenizerMixin):
    """One detokenizer process.

    Topology: scheduler(s) --BatchTokenIDOutput--> here --BatchStrOutput--> owner(s). One message comes per scheduler
    and step, and one goes out per owner that has a row in it.

    Parameters
    ----------
    server_args : ServerArgs
        The user's options.
    port_args : PortArgs
        Where the parts meet.
    channel : LauncherChannel
        To the launcher.
    controlled : Controlled
        What operators have set.
    decoders : sequence of TextDecoder
        One per model.
    beat : callable
        Called at least every second while the loop goes round, with the seconds that it was late.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        port_args: PortArgs,
        *,
        channel: LauncherChannel,
        controlled: Controlled,
        decoders: Sequence[TextDecoder],
        beat: Callable[[float], None],
    ) -> None:
        self.server_args = server_args
        self.socket_mapping = SocketMapping(port_args)
        self.step = DetokenizerStep([decoders[model] for model in port_args.model_of_rank], port_args.life)
        self._channel = channel
        self._controlled = controlled
        self._beat = beat
        address = port_args.detokenizer_ipc_names[port_args.index]
        self._endpoint = port_args.endpoint(address)
        self._start_token = port_args.start_token
        self._receive_from_scheduler = bind_pull(self._endpoint, port_args.listen_fds[address])
        self._frames: FrameDecoder[ToDetokenizer | ToChild | ToItself] = FrameDecoder(
            port_args.start_token, ToDetokenizer | ToChild | ToItself
        )
        self._identities: FrameDecoder[BatchIdentity] = FrameDecoder(port_args.start_token, BatchIdentity)
        self._stopping = False

    def event_loop(self) -> None:
        """Serve one HTTP process until told to stop: what a step yields goes to the owner of its rows as it is.

        Two lives of it are there at once while the next one takes over.
        """
        owners = self.step.owners
        for output in self.outputs():
            if isinstance(output, BatchStrOutput) and len(owners) == 1:
                (owner,) = owners
                self.socket_mapping.send_output(owner, output)
            else:
                self.fan_out(output)

    def outputs(self) -> Iterator[BaseReq | BaseBatchReq]:
        """Yield what owners are to be sent, until the launcher says stop.

        Raises
        ------
        LauncherGone
            The launcher has exited.
        """
        forward_orders(self._channel, self._endpoint, self._start_token)
        self._channel.send(Ready())
        while not self._stopping:
            output = self._handle(self._receive_from_scheduler.recv_multipart()[0])
            if output is not None:
                yield output

    def _handle(self, frame: bytes) -> BaseReq | BaseBatchReq | None:
        if not self._frames.is_ours(frame):
            return None
        try:
            message = self._frames.decode(frame)
            if isinstance(message, BatchTokenIDOutput | BatchEmbeddingOutput):
                check_columns(message)
                self.step.check_rank(message.rank)
        except (msgspec.DecodeError, ValueError) as error:
            _log.error("a step's output can't be decoded: %s", error)
            return self._failed(frame)
        match message:
            case BatchTokenIDOutput():
                return self.step(message) if message.numbers else None
            case BatchEmbeddingOutput():
                return message if message.numbers else None
            case RefusedReq():
                return message
            case _:
                self._follow(message)
        return None

    def _follow(self, order: ToChild | ToItself) -> None:
        match order:
            case Ping():
                self._beat(time.monotonic() - order.sent)
            case Control():
                self._controlled.follow(order)
            case OwnerDied():
                self.socket_mapping.drop(order.address)
                self.step.owner_died(order.address)
            case PartDied(role="scheduler"):
                self.step.rank_died(order.index, order.life)
            case PartStarted(role="scheduler"):
                self.step.rank_died(order.index, order.life - 1)
            case Stop():
                self._stopping = True
            case LauncherExited():
                raise LauncherGone

    def _failed(self, frame: bytes) -> BatchStrOutput | None:
        """Return the failure of every request in a batch that can't be decoded, if its leading fields can be."""
        try:
            batch = self._identities.decode(frame)
        except msgspec.DecodeError as error:
            _log.error("nor can the requests that it belongs to: %s", error)
            return None
        rows = len(batch.numbers)
        owners = batch.http_worker_ipcs
        if owners is None or len(owners) != rows:
            _log.error("nor is it known whose requests these are: %s", batch.numbers)
            return None
        self.step.owners.update(owners)
        return BatchStrOutput(
            numbers=batch.numbers,
            http_worker_ipcs=owners,
            output_ids=b"",
            output_lengths=[0] * rows,
            first_indexes=[0] * rows,
            finished_reasons=[FinishReason("error", None, 500, "the answer could not be decoded")] * rows,
            output_strs=[""] * rows,
        )
