"""Scheduler: admits requests, drives the engine step by step and sends out what it makes."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import msgspec
import numpy
import zmq

from multitok.config import PortArgs, ServerArgs
from multitok.engines.base import Engine, EngineOutput, EngineRefusal
from multitok.ipc.launcher_channel import LauncherChannel
from multitok.ipc.socket_mapping import SocketMapping
from multitok.ipc.sockets import bind_pull, drain
from multitok.messages.base import BaseReq, FinishReason
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_child import OwnerDied, Stop
from multitok.messages.to_detokenizer import RefusedReq
from multitok.messages.to_launcher import Ready
from multitok.messages.to_scheduler import (
    AbortReq,
    AckReq,
    GetInternalStateReq,
    Header,
    Kind,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from multitok.messages.to_tokenizer import GetInternalStateReqOutput
from multitok.scheduler.admission import WaitingQueue
from multitok.scheduler.request import ScheduledRequest
from multitok.scheduler.step_output import Row, embedding_batch, token_batch

_log = logging.getLogger(__name__)
_EMBEDDING_PARAMS = SamplingParams(max_new_tokens=1)
# How long an idle loop waits at most before it says that it goes round.
_BEAT_MS = 1000


class LoadSlot(Protocol):
    """A rank's place on the load board."""

    def publish_load(self, load: int, waiting: int, waiting_tokens: int = 0) -> None:
        """Put down running and waiting requests, and the prompt ids of the latter."""
        ...

    def beat(self, allowance: float) -> None:
        """Say that this process goes round, and counts as dead when it is silent for more seconds than this."""
        ...


class Scheduler:
    """One rank.

    Topology: HTTP workers (through the router in multi mode) --> here --one batch per step and detokenizer-->
    detokenizers, or owners that decode for themselves. One thread: an engine's step may hold the GIL, so sockets are
    drained between steps, without blocking while there is work.

    Parameters
    ----------
    server_args : ServerArgs
        The user's options.
    port_args : PortArgs
        Where the parts meet.
    channel : LauncherChannel
        To the launcher.
    engine : Engine
        Loaded and idle.
    slot : LoadSlot
        This rank's place on the load board.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        port_args: PortArgs,
        *,
        channel: LauncherChannel,
        engine: Engine,
        slot: LoadSlot,
    ) -> None:
        self._port_args = port_args
        self._rank = port_args.index
        self._channel = channel
        self._engine = engine
        self._slot = slot
        self._hang_timeout = server_args.hang_timeout
        self._step_timeout = server_args.step_timeout
        address = port_args.scheduler_ipc_names[self._rank]
        self._receive = bind_pull(port_args.endpoint(address), port_args.listen_fds[address])
        self._mapping = SocketMapping(port_args)
        self._headers: FrameDecoder[Header] = FrameDecoder(port_args.start_token, Header)
        self._payloads: FrameDecoder[ToScheduler] = FrameDecoder(port_args.start_token, ToScheduler)
        self._waiting = WaitingQueue()
        self._running: dict[int, ScheduledRequest] = {}
        # Ended, but the owner has not said that it knows.
        self._unacknowledged: dict[int, ScheduledRequest] = {}
        self._numbers_by_rid: dict[str, int] = {}
        self._dead_owners: set[str] = set()
        limit = engine.info.max_running_requests
        self._max_running = min(limit, server_args.max_running_requests or limit)
        self._max_admitted = self._max_running + server_args.max_queued_requests
        self._stopping = False

    def event_loop(self) -> None:
        """Serve until the launcher says stop.

        Raises
        ------
        LauncherGone
            The launcher has exited.
        """
        poller = zmq.Poller()
        poller.register(self._receive, zmq.POLLIN)
        poller.register(self._channel.fileno(), zmq.POLLIN)
        self._channel.send(Ready(msgspec.msgpack.encode(self._engine.info)))
        while not self._stopping:
            busy = bool(self._waiting) or self._engine.has_unfinished()
            self._slot.beat(self._step_timeout if busy else self._hang_timeout)
            for source, _ in poller.poll(0 if busy else _BEAT_MS):
                if source == self._channel.fileno():
                    self._follow_launcher()
                else:
                    for frames in drain(self._receive):
                        self._handle_message(frames)
            self._admit()
            if self._engine.has_unfinished():
                if not busy:
                    self._slot.beat(self._step_timeout)
                try:
                    outputs = self._engine.step()
                except Exception:
                    self._fail_all("the engine failed")
                    raise
                self._emit(outputs)
            self._slot.publish_load(len(self._running), len(self._waiting))

    # Messages

    def _follow_launcher(self) -> None:
        for message in self._channel.receive():
            if isinstance(message, OwnerDied):
                self._forget_owner(message.address)
            elif isinstance(message, Stop):
                self._stopping = True

    def _handle_message(self, frames: list[bytes]) -> None:
        for i in range(0, len(frames) - 1, 2):
            if not (self._headers.is_ours(frames[i]) and self._payloads.is_ours(frames[i + 1])):
                continue
            try:
                header = self._headers.decode(frames[i])
            except msgspec.DecodeError as error:
                _log.error("dropped a message whose header can't be decoded: %s", error)
                continue
            try:
                self._handle(self._payloads.decode(frames[i + 1]), header)
            except msgspec.DecodeError as error:
                _log.error("request %d can't be decoded: %s", header.number, error)
                self._refuse(header, 500, "the request could not be decoded")

    def _handle(self, message: ToScheduler, header: Header) -> None:
        match message:
            case TokenizedGenerateReqInput() | TokenizedEmbeddingReqInput():
                self._take(message, header)
            case AckReq():
                for number in message.numbers:
                    self._unacknowledged.pop(number, None)
            case AbortReq():
                self._abort(message)
            case GetInternalStateReq():
                self._reply(message, self._internal_state(message.number))

    def _take(self, message: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput, header: Header) -> None:
        number, owner = message.number, message.http_worker_ipc
        if owner is None:
            self._mapping.without_owner += 1
            _log.error("request %d has no owner; dropped", number)
            return
        if owner in self._dead_owners or any(
            number in known for known in (self._running, self._waiting, self._unacknowledged)
        ):
            return
        if (refusal := self._reason_to_refuse(message)) is not None:
            self._refuse(header, *refusal)
            return
        request = ScheduledRequest(message, owner, self._destination(header), time.monotonic())
        if message.rid is not None:
            self._numbers_by_rid[message.rid] = number
        self._waiting.push(request)

    def _reason_to_refuse(
        self, message: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
    ) -> tuple[int, str] | None:
        info = self._engine.info
        task = "generate" if isinstance(message, TokenizedGenerateReqInput) else "embed"
        if task != info.task:
            return 400, f"the model does not {task}"
        if message.rid is not None and message.rid in self._numbers_by_rid:
            return 400, f"a request with the id {message.rid!r} is running already"
        if len(message.input_ids) % 4:
            return 400, "the prompt's ids are cut"
        ids = numpy.frombuffer(message.input_ids, numpy.int32)
        if not len(ids):
            return 400, "the prompt is empty"
        if ids.min() < 0 or ids.max() >= info.vocab_size:
            return 400, f"the prompt has ids outside the vocabulary of {info.vocab_size}"
        longest = len(ids)
        if isinstance(message, TokenizedGenerateReqInput):
            longest += message.sampling_params.max_new_tokens
        if longest > info.context_length:
            return 400, f"prompt and output of {longest} tokens exceed the context of {info.context_length}"
        if len(self._waiting) + len(self._running) >= self._max_admitted:
            return 503, "too many requests are waiting; try again later"
        return None

    def _destination(self, header: Header) -> str:
        detokenizers = self._port_args.detokenizer_ipc_names
        if detokenizers:
            return detokenizers[header.detokenizer % len(detokenizers)]
        return header.owner or ""

    def _refuse(self, header: Header, status: int, message: str) -> None:
        refusal = RefusedReq(number=header.number, http_worker_ipc=header.owner, status=status, message=message)
        self._mapping.send_output(self._destination(header), refusal)

    def _reply(self, question: BaseReq, answer: BaseReq) -> None:
        """Answer a control message: through the router where there is one."""
        router = self._port_args.control_ipc_name
        if router is None:
            self._mapping.send_output(question.http_worker_ipc, answer)
            return
        token = self._port_args.start_token
        header = Header(Kind.CONTROL, question.number, question.http_worker_ipc)
        self._mapping.send_frames(router, [encode_frame(token, header), encode_frame(token, answer)])

    def _internal_state(self, number: int) -> GetInternalStateReqOutput:
        return GetInternalStateReqOutput(
            number=number,
            rank=self._rank,
            running=len(self._running),
            queued=len(self._waiting),
            unacknowledged=len(self._unacknowledged),
            kv_used=self._engine.load().kv_used,
        )

    # Ends

    def _abort(self, message: AbortReq) -> None:
        known = [*self._running.values(), *self._waiting]
        if message.abort_all:
            self._end_aborted([request.number for request in known])
        elif message.rid is not None:
            self._end_aborted([r.number for r in known if message.rid in (r.message.rid, r.message.group)])
        else:
            self._unacknowledged.pop(message.number, None)
            self._end_aborted([message.number])

    def _fail_all(self, message: str) -> None:
        finish = FinishReason("error", None, 500, message)
        requests = [*self._running.values(), *(self._waiting.pop() for _ in range(len(self._waiting)))]
        self._send([(request, EngineOutput(request.number, [], finish)) for request in requests])

    def _end_aborted(self, numbers: list[int]) -> None:
        """End requests, and give the last word on them to whoever holds their state."""
        rows: list[Row] = []
        for number in numbers:
            request = self._waiting.remove(number) or self._running.pop(number, None)
            if request is None:
                continue
            if request.admitted:
                self._engine.abort(number)
            self._forget_rid(request)
            rows.append((request, EngineOutput(number, [], FinishReason("abort"))))
        self._send(rows)

    def _forget_owner(self, address: str) -> None:
        self._dead_owners.add(address)
        self._end_aborted([r.number for r in [*self._running.values(), *self._waiting] if r.owner == address])
        for number in [n for n, r in self._unacknowledged.items() if r.owner == address]:
            del self._unacknowledged[number]
        self._mapping.drop(address)

    def _forget_rid(self, request: ScheduledRequest) -> None:
        rid = request.message.rid
        if rid is not None and self._numbers_by_rid.get(rid) == request.number:
            del self._numbers_by_rid[rid]

    # Steps

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting.pop()
            message = request.message
            params = message.sampling_params if isinstance(message, TokenizedGenerateReqInput) else _EMBEDDING_PARAMS
            try:
                self._engine.add_request(request.number, message.input_ids, params)
            except EngineRefusal as refusal:
                self._refuse_waiting(request, refusal.status, refusal.message)
                continue
            except Exception:
                _log.exception("the engine could not take request %d", request.number)
                self._refuse_waiting(request, 500, "the engine could not take the request")
                continue
            request.admitted = time.monotonic()
            self._running[request.number] = request

    def _refuse_waiting(self, request: ScheduledRequest, status: int, message: str) -> None:
        self._forget_rid(request)
        refusal = RefusedReq(number=request.number, http_worker_ipc=request.owner, status=status, message=message)
        self._mapping.send_output(request.destination, refusal)

    def _emit(self, outputs: list[EngineOutput]) -> None:
        rows: list[Row] = []
        for output in outputs:
            request = self._running.get(output.number)
            if request is None:
                _log.error("the engine made output for request %d, which does not run", output.number)
                continue
            rows.append((request, output))
            if output.finish is not None:
                del self._running[output.number]
                self._forget_rid(request)
                self._unacknowledged[output.number] = request
        self._send(rows)

    def _send(self, rows: list[Row]) -> None:
        by_destination: dict[str, list[Row]] = {}
        for row in rows:
            by_destination.setdefault(row[0].destination, []).append(row)
        make_batch = token_batch if self._engine.info.task == "generate" else embedding_batch
        now = time.monotonic()
        for destination, its_rows in by_destination.items():
            self._mapping.send_output(destination, make_batch(its_rows, self._rank, now))
