"""A call in progress: the sub-requests of one HTTP request, as their owner keeps them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from multitok.messages.to_scheduler import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from multitok.tokenizer.requests import EmbeddingInput, EmbeddingSink, GenerateInput, GenerateSink, RequestError

_log = logging.getLogger(__name__)


class SubRequest:
    """One choice of one prompt: what the schedulers know as a request.

    Attributes
    ----------
    number : int
        The request.
    message : TokenizedGenerateReqInput or TokenizedEmbeddingReqInput
        As it was sent: until the first result the owner may send it again.
    call : GenerateCall or EmbeddingCall
        What it belongs to.
    index : int
        Its choice.
    rank, life : int or None
        The scheduler that has it, once it is known, and which life of it.
    prompt_tokens, cached_tokens : int
        Prompt ids, and how many of them were in the engine's cache.
    output_ids : bytearray
        Ids received, packed int32; their number is the index of the next one.
    text_length : int
        Characters received: with `output_ids`, all that a new detokenizer needs to go on.
    asked_at : int
        Length of `output_ids` at which something was found to be missing, and asked for; -1: nowhere.
    was_sent_again : bool
        Two schedulers may have it.
    waiting_at, waiting_since : int, float or None
        Since when it waits for the engine, with how much in `output_ids`; None: since it was sent.
    """

    __slots__ = (
        "asked_at",
        "cached_tokens",
        "call",
        "index",
        "life",
        "message",
        "number",
        "output_ids",
        "prompt_tokens",
        "rank",
        "text_length",
        "waiting_at",
        "waiting_since",
        "was_sent_again",
    )

    def __init__(
        self,
        message: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput,
        call: GenerateCall | EmbeddingCall,
        index: int,
    ) -> None:
        self.number = message.number
        self.message = message
        self.call = call
        self.index = index
        self.rank: int | None = None
        self.life = 0
        self.prompt_tokens = len(message.input_ids) // 4
        self.cached_tokens = 0
        self.output_ids = bytearray()
        self.text_length = 0
        self.asked_at = -1
        self.was_sent_again = False
        self.waiting_at = 0
        self.waiting_since: float | None = None


_Input = TypeVar("_Input", GenerateInput, EmbeddingInput)
_Sink = TypeVar("_Sink", GenerateSink, EmbeddingSink)


class _Call(Generic[_Input, _Sink]):
    """What calls of both kinds have in common: a `Submission`.

    Attributes
    ----------
    prompt_ids : list of bytes
        Packed int32 ids of each prompt; empty until tokenization is done.
    running : dict of int to SubRequest
        Sub-requests that have not ended, by number.
    single : bool
        It has one sub-request.
    ended : bool
        The sink hears nothing more.
    sent_at : float
        When it was sent to the schedulers, in seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, request: _Input, sink: _Sink, on_abort: Callable[[Iterable[SubRequest]], None]) -> None:
        self.request: _Input = request
        self.sink: _Sink = sink
        self.prompt_ids: list[bytes] = []
        self.running: dict[int, SubRequest] = {}
        self.ended = False
        self.single = len(request.prompts) * getattr(request, "n", 1) == 1
        self.sent_at = 0.0
        self._on_abort = on_abort

    def abort(self) -> None:
        """End whatever of it still runs; the sink hears nothing more. Harmless at any time."""
        if not self.ended:
            self.ended = True
            running, self.running = self.running, {}
            self._on_abort(running.values())

    def fail(self, error: RequestError) -> None:
        """Tell the sink of the call's failure, once, and end what still runs."""
        if not self.ended:
            self.abort()
            try:
                self.sink.on_error(error)
            except Exception:
                _log.exception("a failure could not be handed to its connection")


class GenerateCall(_Call[GenerateInput, GenerateSink]):
    """A call for generation."""


class EmbeddingCall(_Call[EmbeddingInput, EmbeddingSink]):
    """A call for embeddings."""
