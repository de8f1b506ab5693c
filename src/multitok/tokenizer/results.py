"""ResultReceiver: takes each step's results off the socket and calls the sinks; says what has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Protocol

import msgspec
import zmq

from multitok.ipc.sender_wrapper import SenderWrapper
from multitok.ipc.sockets import descriptor, drain
from multitok.messages.base import FinishReason
from multitok.messages.codec import FrameDecoder
from multitok.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, OutputExtras, RefusedReq
from multitok.messages.to_scheduler import AbortReq, AckReq
from multitok.messages.to_tokenizer import (
    BatchStrIdentity,
    BatchStrOutput,
    LiveListWanted,
    LiveReqOutput,
    RankDied,
    RankStarted,
    ToTokenizer,
)
from multitok.tokenizer.call import EmbeddingCall, GenerateCall, SubRequest
from multitok.tokenizer.rebuilt_rows import cut_known_beginnings
from multitok.tokenizer.recovery import Recovery
from multitok.tokenizer.requests import EmbeddingOutput, GenerateOutput, RequestError

_log = logging.getLogger(__name__)
_ACK_BATCH = 64
_ACK_DELAY_S = 0.5
# After so long others have their turn in the loop: one message may be 2,048 rows, or as many log probabilities.
_TURN_S = 0.005
_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs")


class DetokenizeStep(Protocol):
    """Decodes batches of ids."""

    def __call__(self, batch: BatchTokenIDOutput) -> BatchStrOutput | None:
        """Return the text, if there is anything to tell."""
        ...

    def rank_died(self, rank: int, life: int) -> None:
        """Forget what a dead scheduler had begun."""
        ...


class ResultReceiver:
    """The owner's side of every running request.

    Parameters
    ----------
    socket : zmq.Socket
        PULL socket of this owner's address.
    sender : SenderWrapper
        For acknowledgements and aborts.
    start_token : bytes
        Mark of this start.
    detokenize_step : DetokenizeStep or None
        Decodes batches of ids, where no detokenizer does.
    requests : dict of int to SubRequest
        The running requests, by number; shared with `recovery`.
    recovery : Recovery
        What to do when a part has died, or a message was lost.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        sender: SenderWrapper,
        start_token: bytes,
        detokenize_step: DetokenizeStep | None,
        requests: dict[int, SubRequest],
        recovery: Recovery,
    ) -> None:
        self._socket = socket
        self._sender = sender
        self._detokenize_step = detokenize_step
        self._frames: FrameDecoder[ToTokenizer] = FrameDecoder(start_token, ToTokenizer)
        self._identities: FrameDecoder[BatchStrIdentity] = FrameDecoder(start_token, BatchStrIdentity)
        self._requests = requests
        self.recovery = recovery
        self._ended: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turn_is_due = False

    def __len__(self) -> int:
        """Return how many sub-requests are running."""
        return len(self._requests)

    def has_begun(self) -> bool:
        """Whether a request is running of which ids have come."""
        return any(request.output_ids for request in self._requests.values())

    def in_flight(self) -> tuple[int, int, float]:
        """Return how many sub-requests are running, how many ids they have, and for how long the oldest has run."""
        requests = self._requests.values()
        tokens = sum(request.prompt_tokens + len(request.output_ids) // 4 for request in requests)
        oldest = next((time.monotonic() - request.call.sent_at for request in requests), 0.0)
        return len(requests), tokens, oldest

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to receive."""
        self._loop = loop
        self.recovery.start(loop)
        loop.add_reader(descriptor(self._socket), self._on_readable)
        # The descriptor is edge-triggered: what came before it was watched shows no edge.
        loop.call_soon(self._on_readable)

    def close(self) -> None:
        """Stop receiving; say first what has ended."""
        if self._loop is not None:
            self._loop.remove_reader(descriptor(self._socket))
        self._acknowledge()
        self.recovery.close()
        self._socket.close()

    def add(self, request: SubRequest) -> None:
        """Expect results of a request."""
        self._requests[request.number] = request
        request.call.running[request.number] = request

    def abort(self, requests: Iterable[SubRequest]) -> None:
        """End requests in the engine, and expect nothing more of them."""
        for request in requests:
            self._requests.pop(request.number, None)
            self._say(AbortReq(number=request.number))

    def rank_died(self, rank: int, life: int) -> None:
        """A scheduler has died, and nothing goes to it any more."""
        if self._detokenize_step is not None:
            self._detokenize_step.rank_died(rank, life)
        self.recovery.rank_died(rank, life)

    def rank_started(self, rank: int, life: int) -> None:
        """A life of a scheduler takes requests; every earlier one is dead."""
        if self._detokenize_step is not None:
            self._detokenize_step.rank_died(rank, life - 1)
        self.recovery.rank_started(rank, life)

    # Receiving

    def _on_readable(self) -> None:
        # Otherwise a turn that is due takes it all; one more for each edge would be a long one together.
        if not self._turn_is_due:
            self._take_turn()

    def _take_turn(self) -> None:
        self._turn_is_due = False
        if self._socket.closed:
            return  # this call was due when it was closed
        until = time.monotonic() + _TURN_S
        for frames in drain(self._socket):
            self._take(frames[0])
            if time.monotonic() > until and self._loop is not None:
                # The descriptor shows no edge for what is still there.
                self._turn_is_due = True
                self._loop.call_soon(self._take_turn)
                return

    def _take(self, frame: bytes) -> None:
        if not self._frames.is_ours(frame):
            return
        try:
            self._handle(self._frames.decode(frame))
        except Exception as error:
            # Not to be decoded, or columns that disagree.
            _log.error("results can't be used: %s", error, exc_info=not isinstance(error, msgspec.DecodeError))
            self._fail_batch(frame)

    def _handle(self, message: ToTokenizer) -> None:
        match message:
            case BatchStrOutput():
                if not self.recovery.is_late(message.rank, message.life):
                    self._handle_text(message)
            case BatchTokenIDOutput():
                if self._detokenize_step is None:
                    _log.error("ids came to an owner that does not decode")
                elif (decoded := self._detokenize_step(message)) is not None:
                    self._handle_text(decoded)
            case BatchEmbeddingOutput():
                self._handle_embeddings(message)
            case RefusedReq():
                request = self._requests.get(message.number)
                if request is not None and not (message.status == 503 and self.recovery.hold_refused(request)):
                    del self._requests[message.number]
                    request.call.running.pop(message.number, None)
                    request.call.fail(RequestError(message.status, message.message))
                    if request.was_sent_again:
                        # The refusal may have been on its way when nobody knew the request; then somebody has it now.
                        self._say(AbortReq(number=message.number))
            case LiveReqOutput() | RankDied() | RankStarted() | LiveListWanted():
                self._handle_recovery(message)
            case _:
                _log.error("%s came, which nobody asked for", type(message).__name__)

    def _handle_recovery(self, message: LiveReqOutput | RankDied | RankStarted | LiveListWanted) -> None:
        match message:
            case LiveReqOutput():
                self.recovery.heard(message)
            case RankDied():
                self.rank_died(message.rank, message.life)
            case RankStarted():
                self.rank_started(message.rank, message.life)
            case LiveListWanted():
                self.recovery.list_wanted()

    def _fail_batch(self, frame: bytes) -> None:
        """Fail every request in a batch that can't be decoded, if its leading fields can be."""
        try:
            numbers = self._identities.decode(frame).numbers
        except msgspec.DecodeError as error:
            _log.error("nor can the requests that they belong to: %s", error)
            return
        for number in numbers:
            request = self._requests.get(number)
            if request is not None:
                self._finish(request, number, None)
                request.call.fail(RequestError(500, "a part of the answer could not be decoded"))

    def _handle_text(self, batch: BatchStrOutput) -> None:  # noqa: PLR0912, PLR0915  (it runs per token)
        ids, lengths, finished = batch.output_ids, batch.output_lengths, batch.finished_reasons
        cached, extras, requests = batch.cached_tokens, batch.extras, self._requests
        if extras is not None and extras.read_offsets is not None:
            cut_known_beginnings(batch, requests)
            ids, lengths = batch.output_ids, batch.output_lengths
        # Rare columns that say something of single tokens; those of a request's end come with its finish reason.
        detailed = extras is not None and any(getattr(extras, name) is not None for name in _PER_TOKEN)
        touched: dict[int, GenerateCall] = {}
        end = 0
        rows = zip(batch.numbers, batch.first_indexes, batch.output_strs, strict=True)
        for i, (number, first, text) in enumerate(rows):
            start, end = end, end + (4 if lengths is None else 4 * lengths[i])
            finish = None if finished is None else finished[i]
            request = requests.get(number)
            if request is None:
                if finish is not None:
                    self._end(number, finish)
                continue
            call = request.call
            assert isinstance(call, GenerateCall)
            row_ids = ids[start:end]
            have = len(request.output_ids)
            if first * 4 != have and not self._continues(request, first, row_ids, finish):
                continue
            if not have:
                request.rank, request.life = batch.rank, batch.life
            request.output_ids += row_ids
            request.text_length += len(text)
            if finish is None and text and call.single and not detailed:
                try:
                    if call.sink.write_delta(text):
                        continue
                except Exception as error:
                    self._not_delivered(call, error)
                    continue
            output = GenerateOutput(request.index, text, row_ids, finish, 0, (have + len(row_ids)) // 4)
            if cached is not None:
                request.cached_tokens = cached[i] or request.cached_tokens
            if extras is not None:
                _add_extras(output, extras, i)
            if finish is not None:
                self._finish(request, number, finish)
                if finish.type == "error":
                    call.fail(_error_of(finish))
                    continue
                output.prompt_tokens = request.prompt_tokens
                output.cached_tokens = request.cached_tokens
            try:
                call.sink.on_output(output)
                if call.single:
                    call.sink.on_step_end()
                    call.ended = call.ended or not call.running
                else:
                    touched[id(call)] = call
            except Exception as error:
                self._not_delivered(call, error)
        self._end_step(touched.values())

    def _continues(self, request: SubRequest, first: int, row_ids: bytes, finish: FinishReason | None) -> bool:
        """Whether a row that is out of place can be taken all the same; what is missing is asked for."""
        have = len(request.output_ids)
        if not row_ids and (finish is None or finish.type in ("error", "abort")):
            return True
        # A last row without ids shows a gap too.
        if (first * 4 + len(row_ids) <= have and finish is None) or self.recovery.missed(request):
            return False
        _log.error("request %d: output %d came where %d was due", request.number, first, have // 4)
        self._finish(request, request.number, finish)
        request.call.fail(RequestError(500, "a part of the answer was lost"))
        return False

    def _end_step(self, calls: Iterable[GenerateCall]) -> None:
        for call in calls:
            if not call.ended:
                try:
                    call.sink.on_step_end()
                except Exception as error:
                    self._not_delivered(call, error)
                call.ended = call.ended or not call.running

    def _not_delivered(self, call: GenerateCall | EmbeddingCall, error: Exception) -> None:
        _log.error("a result could not be handed to its connection", exc_info=error)
        call.fail(RequestError(500, f"the answer could not be written: {error}"))

    def _handle_embeddings(self, batch: BatchEmbeddingOutput) -> None:
        for i, number in enumerate(batch.numbers):
            finish = batch.finished_reasons[i]
            request = self._requests.get(number)
            if request is None:
                self._end(number, finish)
                continue
            self._finish(request, number, finish)
            call = request.call
            assert isinstance(call, EmbeddingCall)
            embedding = None if batch.embeddings is None else batch.embeddings[i]
            if embedding is None:
                call.fail(_error_of(finish))
                continue
            call.ended = not call.running
            try:
                call.sink.on_output(EmbeddingOutput(request.index, embedding, request.prompt_tokens))
            except Exception as error:
                self._not_delivered(call, error)

    # Ends

    def _finish(self, request: SubRequest, number: int, finish: FinishReason | None) -> None:
        del self._requests[number]
        request.call.running.pop(number, None)
        if finish is None:
            self._say(AbortReq(number=number))
        else:
            self._end(number, finish)

    def _end(self, number: int, finish: FinishReason) -> None:
        """Let the scheduler forget a request; one that a stop string has ended still runs there."""
        if isinstance(finish.matched, str) or finish.type == "error":
            self._say(AbortReq(number=number))
        else:
            # An abort, too: the scheduler keeps the end of one that this owner did not ask for.
            self._ended.append(number)
            if len(self._ended) >= _ACK_BATCH:
                self._acknowledge()
            elif self._timer is None and self._loop is not None:
                self._timer = self._loop.call_later(_ACK_DELAY_S, self._acknowledge)

    def _acknowledge(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ended:
            ended, self._ended = self._ended, []
            self._say(AckReq(numbers=ended))

    def _say(self, message: AbortReq | AckReq) -> None:
        try:
            self._sender.send(message)
        except zmq.Again:
            self.recovery.fell_behind()


def _add_extras(output: GenerateOutput, extras: OutputExtras, i: int) -> None:
    if extras.output_token_logprobs is not None:
        output.logprobs = extras.output_token_logprobs[i]
    if extras.output_top_logprobs is not None:
        output.top_logprobs = extras.output_top_logprobs[i]
    if extras.customized_info is not None:
        info = {name: value for name, column in extras.customized_info.items() if (value := column[i]) is not None}
        output.customized_info = info or None
    if extras.reasoning_tokens is not None:
        output.reasoning_tokens = extras.reasoning_tokens[i] or 0


def _error_of(finish: FinishReason) -> RequestError:
    if finish.type == "abort":
        # Not a status that clients try again by themselves.
        return RequestError(400, finish.message or "the request was aborted")
    return RequestError(finish.status or 500, finish.message or "the engine failed")
