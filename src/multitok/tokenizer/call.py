"""A call in progress: the sub-requests of one HTTP request, as their owner keeps them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from multitok.messages.to_scheduler import BatchTokenizedEmbeddingReqInput, BatchTokenizedGenerateReqInput
from multitok.tokenizer.requests import EmbeddingInput, EmbeddingSink, GenerateInput, GenerateSink, RequestError

_log = logging.getLogger(__name__)


class SubRequest:
    """One choice of one prompt: what the schedulers know as a request.

    Attributes
    ----------
    number : int
        The request.
    call : GenerateCall or EmbeddingCall
        What it belongs to.
    index : int
        Its choice.
    prompt_tokens, cached_tokens : int
        Prompt ids, and how many of them were in the engine's cache.
    output_ids : bytearray
        Ids received, packed int32; their number is the index of the next one.
    text_length : int
        Characters received: with `output_ids`, all that a new detokenizer needs to go on.
    """

    __slots__ = ("cached_tokens", "call", "index", "number", "output_ids", "prompt_tokens", "text_length")

    def __init__(self, number: int, call: GenerateCall | EmbeddingCall, index: int, prompt_tokens: int) -> None:
        self.number = number
        self.call = call
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.output_ids = bytearray()
        self.text_length = 0


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
    message : batch message or None
        As it was sent: until the first result the owner may send it again.
    """

    def __init__(self, request: _Input, sink: _Sink, on_abort: Callable[[Iterable[SubRequest]], None]) -> None:
        self.request: _Input = request
        self.sink: _Sink = sink
        self.prompt_ids: list[bytes] = []
        self.running: dict[int, SubRequest] = {}
        self.ended = False
        self.single = len(request.prompts) * getattr(request, "n", 1) == 1
        self.message: BatchTokenizedGenerateReqInput | BatchTokenizedEmbeddingReqInput | None = None
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
