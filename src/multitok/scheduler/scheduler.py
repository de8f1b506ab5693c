"""Scheduler: admits requests, drives the engine step by step and sends out what it makes."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec
import zmq

from multitok.config import PortArgs, ServerArgs
from multitok.engines.base import Engine, EngineOutput, EngineRefusal
from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherChannel
from multitok.ipc.socket_mapping import SocketMapping
from multitok.ipc.sockets import bind_pull, readable
from multitok.messages.base import BaseReq, FinishReason
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.time_limits import took_too_long, waited_too_long
from multitok.messages.to_child import Control, OwnerDied, Stop
from multitok.messages.to_detokenizer import RefusedReq
from multitok.messages.to_launcher import Ready
from multitok.messages.to_scheduler import (
    REQUEST_KINDS,
    AbortReq,
    AckReq,
    GetInternalStateReq,
    Header,
    Kind,
    LiveReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    ToScheduler,
    life_mark,
)
from multitok.messages.to_tokenizer import GetInternalStateReqOutput, LiveReqOutput
from multitok.scheduler.rank_control import RankControl
from multitok.scheduler.request import RequestMessage, ScheduledRequest
from multitok.scheduler.request_table import RequestTable
from multitok.scheduler.resend import missing_of, rebuilding_batches
from multitok.scheduler.step_output import Row, embedding_batch, token_batch
from multitok.scheduler.validation import problem_of

_log = logging.getLogger(__name__)
# How long an idle loop waits at most before it says that it goes round, and how often a busy one says how it does.
_BEAT_MS = 1000
_BEAT_S = 1.0
# How long messages may keep the engine from its next step, how many are handled between two looks at the clock (so that
# a few that come together begin together, also where this process has to wait for a core), and how many may be in hand.
_TURN_S = 0.005
_AT_A_TIME = 64
_MOST_UNHANDLED = 4096
# How long a flood of messages keeps an owner's live list from being compared.
_LONGEST_FLOOD_S = 5.0
# How often last words are said again that a detokenizer had no room for.
_SAY_AGAIN_S = 1.0


class LoadSlot(Protocol):
    """A rank's place on the load board."""

    def publish_load(self, load: int, waiting: int, waiting_tokens: int = 0) -> None:
        """Put down running and waiting requests, and the prompt ids of the latter."""
        ...

    def publish_work(self, taken: int, tokens: int, expected_output: int) -> None:
        """Put down requests taken, tokens to work on, and output ids that a request makes."""
        ...

    def beat(self, allowance: float) -> None:
        """Say that this process goes round, and counts as dead when it is silent for more seconds than this."""
        ...

    def publish_details(
        self, lag: float, requests: int, tokens: int, oldest: float, kv_used: float, reachable: bool
    ) -> None:
        """Put down what is said once a second."""
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
    controlled : Controlled
        What operators have set.
    model_path : str
        Where the engine's weights come from.
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
        controlled: Controlled,
        model_path: str,
        slot: LoadSlot,
    ) -> None:
        self._port_args = port_args
        self._rank = port_args.index
        self._life = port_args.life
        self._channel = channel
        self._engine = engine
        self._slot = slot
        self._hang_timeout = server_args.hang_timeout
        self._step_timeout = server_args.step_timeout
        address = port_args.scheduler_ipc_names[self._rank]
        self._receive = bind_pull(port_args.endpoint(address), port_args.listen_fds[address])
        self._mark = life_mark(port_args.start_token, self._life)
        # Received, but not yet looked at: a header and a payload each.
        self._unhandled: deque[tuple[bytes, bytes]] = deque()
        # The newest live list of each owner, until nothing waits any more that may have been sent before it; and when
        # that has taken too long.
        self._live_lists: dict[str, LiveReq] = {}
        self._compare_by = 0.0
        # Last words that could not be sent, on requests that nobody will ask about; and when to try again.
        self._unsaid: list[ScheduledRequest] = []
        self._say_again_at = 0.0
        self._mapping = SocketMapping(port_args)
        self._headers: FrameDecoder[Header] = FrameDecoder(port_args.start_token, Header)
        self._payloads: FrameDecoder[ToScheduler] = FrameDecoder(port_args.start_token, ToScheduler)
        limit = engine.info.max_running_requests
        self._table = RequestTable(server_args, min(limit, server_args.max_running_requests or limit))
        self._control = RankControl(
            controlled,
            engine,
            self._table,
            model=port_args.model_of_rank[self._rank],
            model_path=model_path,
            refuse=server_args.when_paused == "refuse",
            end_early=self._end_early,
            before_long_work=lambda: slot.beat(self._step_timeout),
        )
        self._admit_early = server_args.max_queued_tokens is not None
        self._dead_owners: set[str] = set()
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
        self._control.begin()
        self._follow_launcher()
        self._channel.send(Ready(msgspec.msgpack.encode(self._engine.info)))
        wakeup = self._engine.wakeup
        if wakeup is not None:
            poller.register(wakeup, zmq.POLLIN)
        table, control = self._table, self._control
        say_details_at = longest_turn = 0.0
        while not self._stopping:
            busy = bool(self._unhandled) or self._may_begin or (wakeup is None and self._may_step)
            self._slot.beat(self._step_timeout if busy else self._hang_timeout)
            woken = False
            for source, _ in poller.poll(0 if busy else table.ms_to_deadline(_BEAT_MS)):
                if source == self._channel.fileno():
                    self._follow_launcher()
                elif source == wakeup:
                    woken = True
                else:
                    self._receive_messages()
                    # What an operator was told before a request was sent is known before that is looked at.
                    self._follow_launcher()
            begun = time.monotonic()
            self._handle_messages()
            if self._live_lists:
                self._compare_live_lists()
            if self._unsaid:
                self._say_again()
            self._end_overdue()
            self._admit()
            if woken or self._may_step:
                if not busy:
                    self._slot.beat(self._step_timeout)
                try:
                    outputs = self._engine.step()
                except Exception:
                    self._fail_all("the engine failed")
                    raise
                self._emit(outputs)
            control.settle()
            self._slot.publish_load(len(table.running), len(table.waiting), table.waiting.tokens)
            self._slot.publish_work(table.work.taken, table.work.tokens, table.work.expected_output)
            now = time.monotonic()
            longest_turn = max(longest_turn, now - begun)
            if now >= say_details_at:
                load = self._engine.load()
                self._slot.publish_details(longest_turn, *table.in_flight(now), load.kv_used, load.reachable)
                say_details_at, longest_turn = now + _BEAT_S, 0.0

    @property
    def _may_begin(self) -> bool:
        control, table = self._control, self._table
        return table.may_begin and (not control.paused or (control.paused == "wait" and table.waiting.next_has_begun))

    @property
    def _may_step(self) -> bool:
        return not self._control.still and self._engine.has_unfinished()

    # Messages

    def _follow_launcher(self) -> None:
        for message in self._channel.receive():
            if isinstance(message, OwnerDied):
                self._forget_owner(message.address)
            elif isinstance(message, Control):
                self._control.follow(message)
            elif isinstance(message, Stop):
                self._stopping = True

    def _receive_messages(self) -> None:
        # What is not yet looked at bounds what is taken in: the rest waits in the socket, whose other end has a limit.
        while len(self._unhandled) < _MOST_UNHANDLED and readable(self._receive):
            mark, *frames = self._receive.recv_multipart(zmq.NOBLOCK)
            if mark == self._mark:
                self._unhandled.extend(zip(frames[::2], frames[1::2], strict=False))
            else:
                # Of another start, which is counted, or meant for a life that is dead.
                self._headers.is_ours(mark)

    def _handle_messages(self) -> None:
        """Handle messages for a limited time, so that no flood of them keeps the engine from its next step."""
        until = time.monotonic() + _TURN_S
        while self._unhandled and time.monotonic() < until:
            for _ in range(min(_AT_A_TIME, len(self._unhandled))):
                self._handle_frames(*self._unhandled.popleft())

    def _handle_frames(self, header_frame: bytes, payload: bytes) -> None:
        if not (self._headers.is_ours(header_frame) and self._payloads.is_ours(payload)):
            return
        try:
            header = self._headers.decode(header_frame)
        except msgspec.DecodeError as error:
            _log.error("dropped a message whose header can't be decoded: %s", error)
            return
        if header.kind in REQUEST_KINDS:
            self._table.work.taken += 1
        try:
            self._handle(self._payloads.decode(payload), header)
        except msgspec.DecodeError as error:
            _log.error("request %d can't be decoded: %s", header.number, error)
            if header.kind in REQUEST_KINDS:
                self._refuse(header, 500, "the request could not be decoded")

    def _handle(self, message: ToScheduler, header: Header) -> None:
        match message:
            case TokenizedGenerateReqInput() | TokenizedEmbeddingReqInput():
                self._take(message, header)
            case AckReq():
                for number in message.numbers:
                    self._table.acknowledge(number)
            case AbortReq():
                self._abort(message)
            case GetInternalStateReq():
                self._reply(message, self._internal_state(message.number))
            case LiveReq() if message.http_worker_ipc is not None:
                if not self._live_lists:
                    self._compare_by = time.monotonic() + _LONGEST_FLOOD_S
                self._live_lists[message.http_worker_ipc] = message

    def _take(self, message: RequestMessage, header: Header) -> None:
        number, owner = message.number, message.http_worker_ipc
        if owner is None:
            self._mapping.without_owner += 1
            _log.error("request %d has no owner; dropped", number)
            return
        if owner in self._dead_owners or self._table.find(number) is not None:
            return
        problem = problem_of(message, self._engine.info)
        if problem is not None:
            self._refuse(header, 400, problem)
            return
        if (refusal := self._control.problem_of(message)) is not None:
            self._refuse(header, *refusal)
            return
        if self._admit_early:
            # So that the ids of those that came just before, and need not wait, don't count as waiting.
            self._admit()
        if (refusal := self._table.reason_to_refuse(message)) is not None:
            self._refuse(header, *refusal)
            return
        request = ScheduledRequest(message, owner, self._destination(header), time.monotonic())
        self._table.add(request)
        if isinstance(message, TokenizedGenerateReqInput) and request.resumed >= message.sampling_params.max_new_tokens:
            # Its last id was made, but the engine that made it did not live to say so.
            self._end_early([request], FinishReason("length"))
        elif request.resumed and self._control.paused == "abort":
            self._end_early([request], FinishReason("abort"))

    def _compare_live_lists(self) -> None:
        """Compare what owners wait for with what there is, once everything that was sent before has been handled.

        A list that comes by a new router overtakes what the last one had sent: it waits in another connection.
        """
        if (self._unhandled or readable(self._receive)) and time.monotonic() < self._compare_by:
            return
        lists, self._live_lists = self._live_lists, {}
        for owner, live in lists.items():
            if owner not in self._dead_owners:
                self._compare(owner, live)

    def _compare(self, owner: str, live: LiveReq) -> None:
        """End what its owner doesn't wait for, send it again what it lacks, and say what there is."""
        table = self._table
        if not len(live.numbers) == len(live.token_counts) == len(live.text_lengths):
            _log.error("dropped a list of live requests of %s, whose columns disagree", owner)
            return
        listed = set(live.numbers)

        def is_unwanted(request: ScheduledRequest) -> bool:
            return request.owner == owner and request.number not in listed and request.number <= live.upto

        self._end_early([*filter(is_unwanted, table.live())], FinishReason("abort"), acknowledged=True)
        for request in [*filter(is_unwanted, table.unacknowledged.values())]:
            table.acknowledge(request.number)
        for destination, batch in rebuilding_batches(missing_of(live, table), self._rank, self._life):
            self._mapping.send_output(destination, batch)
        known = [number for number in live.numbers if table.find(number) is not None]
        answer = LiveReqOutput(number=live.number, http_worker_ipc=owner, rank=self._rank, life=self._life, known=known)
        self._reply(live, answer)

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
            running=len(self._table.running),
            queued=len(self._table.waiting),
            unacknowledged=len(self._table.unacknowledged),
            kv_used=self._engine.load().kv_used,
        )

    # Ends

    def _abort(self, message: AbortReq) -> None:
        self._table.acknowledge(message.number)
        request = self._table.find_live(message.number)
        if request is not None:
            self._end_early([request], FinishReason("abort"), acknowledged=True)

    def _end_overdue(self) -> None:
        for request in self._table.overdue():
            message = request.message
            if time.monotonic() < request.must_end:
                self._refuse_waiting(request, *waited_too_long(message))
            else:
                self._end_early([request], FinishReason("error", None, *took_too_long(message)))

    def _fail_all(self, message: str) -> None:
        self._send(_last_rows(self._table.live(), FinishReason("error", None, 500, message)))

    def _end_early(self, requests: list[ScheduledRequest], finish: FinishReason, *, acknowledged: bool = False) -> None:
        """End requests, and give the last word on them to whoever holds their state.

        Parameters
        ----------
        requests : list of ScheduledRequest
            Live ones.
        finish : FinishReason
            Why.
        acknowledged : bool
            Their owner knows: it has asked for it, or is dead.
        """
        for request in requests:
            if request.admitted:
                self._engine.abort(request.number)
            self._table.end(request, acknowledged=acknowledged)
        unsent = self._send(_last_rows(requests, finish))
        if acknowledged:
            self._unsaid += unsent

    def _say_again(self) -> None:
        """Say again what a detokenizer had no room for: it keeps the state of these requests until then."""
        now = time.monotonic()
        if now >= self._say_again_at:
            self._say_again_at = now + _SAY_AGAIN_S
            aborted = FinishReason("abort")
            # Of an owner that is dead the detokenizers have forgotten everything.
            unsaid = [request for request in self._unsaid if request.owner not in self._dead_owners]
            self._unsaid = self._send(_last_rows(unsaid, aborted))

    def _forget_owner(self, address: str) -> None:
        self._dead_owners.add(address)
        table = self._table
        self._end_early(
            [request for request in table.live() if request.owner == address],
            FinishReason("abort"),
            acknowledged=True,
        )
        for number in [n for n, r in table.unacknowledged.items() if r.owner == address]:
            table.acknowledge(number)
        self._mapping.drop(address)

    # Steps

    def _admit(self) -> None:
        while self._may_begin:
            request = self._table.begin_next()
            if (problem := self._control.problem_of_adapter(request.message)) is not None:
                self._refuse_waiting(request, *problem)
                continue
            ids, params = request.engine_input()
            try:
                self._engine.add_request(request.number, ids, params, request.engine_resumed, request.engine_fields)
            except EngineRefusal as refusal:
                self._refuse_waiting(request, refusal.status, refusal.message)
            except Exception:
                _log.exception("the engine could not take request %d", request.number)
                self._refuse_waiting(request, 500, "the engine could not take the request")

    def _refuse_waiting(self, request: ScheduledRequest, status: int, message: str) -> None:
        self._table.end(request, acknowledged=True)
        refusal = RefusedReq(number=request.number, http_worker_ipc=request.owner, status=status, message=message)
        self._mapping.send_output(request.destination, refusal)

    def _emit(self, outputs: list[EngineOutput]) -> None:
        rows: list[Row] = []
        now = time.monotonic()
        for output in outputs:
            request = self._table.running.get(output.number)
            if request is None:
                _log.error("the engine made output for request %d, which does not run", output.number)
                continue
            if request.unread:
                self._table.work.begun(request)
            if (gathered := request.gather(output, now)) is None:
                continue
            rows.append((request, gathered))
            if output.finish is not None:
                self._table.work.learn(len(request.output_ids) + len(gathered.output_ids))
                self._table.end(request, acknowledged=False)
        self._send(rows)

    def _send(self, rows: list[Row]) -> list[ScheduledRequest]:
        """Send rows to their destinations; returns the requests of those that were not taken."""
        by_destination: dict[str, list[Row]] = {}
        for row in rows:
            by_destination.setdefault(row[0].destination, []).append(row)
        generates = self._engine.info.task == "generate"
        now = time.monotonic()
        unsent: list[ScheduledRequest] = []
        for destination, its_rows in by_destination.items():
            batch = (
                token_batch(its_rows, self._rank, self._life, now)
                if generates
                else embedding_batch(its_rows, self._rank, now)
            )
            if not self._mapping.send_output(destination, batch):
                unsent += [request for request, _ in its_rows]
        return unsent


def _last_rows(requests: Iterable[ScheduledRequest], finish: FinishReason) -> list[Row]:
    """Return the last word on requests that do not end by themselves, behind what has not been sent on of them."""
    rows: list[Row] = []
    for request in requests:
        last = request.gather(EngineOutput(request.number, [], finish), time.monotonic())
        assert last is not None
        rows.append((request, last))
    return rows
