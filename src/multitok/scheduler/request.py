"""A request as the scheduler keeps it: until its owner has acknowledged the end, or has died."""

from __future__ import annotations

import math
from array import array

from multitok.engines.base import EngineOutput, params_left
from multitok.messages.sampling import EngineFields, SamplingParams
from multitok.messages.to_detokenizer import TimeStats, TokenLogprobs
from multitok.messages.to_scheduler import DecodeParams, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

RequestMessage = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
_EMBEDDING_PARAMS = SamplingParams(max_new_tokens=1)
# Ids of a request that nobody reads before its end are sent on so many at a time: to decode them takes 0.1 ms.
_GATHERED = 64


class ScheduledRequest:
    """State of one request.

    Attributes
    ----------
    message : TokenizedGenerateReqInput or TokenizedEmbeddingReqInput
        As it came.
    number : int
        The request.
    owner : str
        Address that results go to.
    destination : str
        Address that its ids are sent to: a detokenizer's, or the owner's where there is none.
    prompt_tokens : int
        Prompt ids.
    output_ids : array of int32
        All ids so far: what a replaced detokenizer or owner is missing can be sent again.
    resumed, text_length : int
        How many of them an earlier life of the scheduler made, and how much of their text the owner has.
    decode_params : DecodeParams or None
        Not yet sent; None once they were.
    gathered : EngineOutput or None
        Output that has not been sent on; see `gather`.
    received, admitted, first_token, finished : float
        Moments, seconds of CLOCK_MONOTONIC.
    must_begin, must_end : float
        Its deadlines, likewise; infinite where there are none.
    is_quiet : bool
        Nobody reads its text before the end: it is not streamed, and no stop string is looked for.
    is_over : bool
        It neither waits nor runs any more.
    last : EngineOutput or None
        What its last row said, once that has been sent.
    cached_tokens : int
        Prompt ids found in the engine's cache.
    logprobs, top_logprobs : list
        Of all ids that this life made, where the request asked for them.
    unread, expected_output : int
        Its part of `OutstandingWork`.
    """

    __slots__ = (
        "admitted",
        "cached_tokens",
        "decode_params",
        "destination",
        "expected_output",
        "finished",
        "first_token",
        "gathered",
        "is_over",
        "is_quiet",
        "last",
        "logprobs",
        "message",
        "must_begin",
        "must_end",
        "number",
        "output_ids",
        "owner",
        "prompt_tokens",
        "received",
        "resumed",
        "text_length",
        "top_logprobs",
        "unread",
    )

    def __init__(self, message: RequestMessage, owner: str, destination: str, received: float) -> None:
        self.message = message
        self.number = message.number
        self.owner = owner
        self.destination = destination
        self.prompt_tokens = len(message.input_ids) // 4
        self.output_ids: array[int] = array("i")
        self.decode_params: DecodeParams | None = None
        self.is_quiet = False
        self.gathered: EngineOutput | None = None
        self.text_length = 0
        if isinstance(message, TokenizedGenerateReqInput):
            self.decode_params = message.decode_params
            self.is_quiet = not (message.decode_params.stream or message.decode_params.stop)
            self.output_ids.frombytes(message.resumed_ids)
            self.text_length = message.text_length
        self.resumed = len(self.output_ids)
        self.received = received
        self.admitted = 0.0
        self.first_token = 0.0
        self.finished = 0.0
        self.must_begin = _deadline(received - message.waited, message.queue_timeout)
        self.must_end = _deadline(received - message.spent, message.timeout)
        self.is_over = False
        self.last: EngineOutput | None = None
        self.cached_tokens = 0
        self.unread = self.expected_output = 0
        self.logprobs: list[float] | None = None
        self.top_logprobs: list[TokenLogprobs] | None = None

    @property
    def token_limit(self) -> int:
        """Most ids that it holds in the engine, prompt and output."""
        return token_limit(self.message)

    def engine_input(self) -> tuple[bytes, SamplingParams]:
        """Return the ids that the engine begins with, and what is left of its parameters after them."""
        if not isinstance(self.message, TokenizedGenerateReqInput):
            return self.message.input_ids, _EMBEDDING_PARAMS
        if not self.resumed:
            return self.message.input_ids, self.message.sampling_params
        return self.message.input_ids + self.message.resumed_ids, params_left(
            self.message.sampling_params, self.resumed
        )

    @property
    def engine_resumed(self) -> int:
        """How many of the last ids that the engine begins with are output of an earlier run, here or elsewhere."""
        before = self.message.resumed_tokens if isinstance(self.message, TokenizedGenerateReqInput) else 0
        return before + self.resumed

    @property
    def engine_fields(self) -> EngineFields | None:
        """What else the engine is told."""
        return self.message.engine_fields if isinstance(self.message, TokenizedGenerateReqInput) else None

    def gather(self, output: EngineOutput, now: float) -> EngineOutput | None:
        """Return what is to be sent on: this output, or of a quiet request that of many steps; None is nothing yet.

        Parameters
        ----------
        output : EngineOutput
            What a step made for it, or its last word.
        now : float
            Seconds of CLOCK_MONOTONIC.
        """
        if not self.is_quiet:
            return output
        self.first_token = self.first_token or now
        if (gathered := self.gathered) is not None:
            output = _joined(gathered, output)
        if output.finish is None and len(output.output_ids) < _GATHERED:
            self.gathered = output
            return None
        self.gathered = None
        return output

    def keep_logprobs(self, output: EngineOutput) -> None:
        """Keep the log probabilities of new ids, for sending them again."""
        if output.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(output.logprobs)
        if output.top_logprobs is not None:
            self.top_logprobs = self.top_logprobs or []
            self.top_logprobs.extend(output.top_logprobs)

    def has_been_heard_of(self) -> bool:
        """Whether a row of it has been sent."""
        return self.last is not None or (
            self.decode_params is None and isinstance(self.message, TokenizedGenerateReqInput)
        )

    def time_stats(self, finished: float) -> TimeStats:
        """Return the moments of its life."""
        return TimeStats(self.received, self.admitted, self.first_token, finished)


def token_limit(message: RequestMessage) -> int:
    """Return the most ids that a request holds in the engine, prompt and output."""
    prompt = len(message.input_ids) // 4
    return prompt + message.sampling_params.max_new_tokens if isinstance(message, TokenizedGenerateReqInput) else prompt


def _joined(first: EngineOutput, second: EngineOutput) -> EngineOutput:
    """Return two outputs of a request as one."""
    joined = EngineOutput(
        second.number,
        first.output_ids + second.output_ids,
        second.finish,
        cached_tokens=first.cached_tokens or second.cached_tokens,
        customized_info=second.customized_info,
    )
    if first.logprobs is not None or second.logprobs is not None:
        joined.logprobs = (first.logprobs or []) + (second.logprobs or [])
    if first.top_logprobs is not None or second.top_logprobs is not None:
        joined.top_logprobs = (first.top_logprobs or []) + (second.top_logprobs or [])
    return joined


def _deadline(begin: float, seconds: float | None) -> float:
    # In this order a NaN, which no heap could hold, is 0.
    return math.inf if seconds is None else max(0.0, begin + seconds)
