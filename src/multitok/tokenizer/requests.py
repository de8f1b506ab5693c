"""What an HTTP route hands to `TokenizerManager`, and what it gets back.

Everything is a call: a route submits an input with a sink, and the manager calls the sink from the loop's reader
callback, once per step and choice. There is no task, future or queue between a step's message and the connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from multitok.messages.base import FinishReason
from multitok.messages.sampling import EngineFields, SamplingParams


class RequestError(Exception):
    """A request that is refused or has failed.

    Parameters
    ----------
    status : int
        HTTP status.
    message : str
        What is wrong, in words meant for the client.
    param : str or None
        The field at fault.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


class GenerateInput(msgspec.Struct, kw_only=True):
    """One call for generation: one or several prompts, each `n` times.

    Attributes
    ----------
    prompts : list of (str or bytes)
        Text, or packed int32 ids in native order, which the caller has checked against the vocabulary.
    model : int
        Index of the model.
    sampling_params : SamplingParams
        For every sub-request; sub-request i of a prompt gets ``seed + i``.
    max_new_tokens : int or None
        None: as many as the context has room for; otherwise equal to ``sampling_params.max_new_tokens``.
    raw : bool
        A raw completion: text is what the prompt's text goes on with (promise 1), so the prompt's tail is given to the
        detokenizer. False for chat: text is the decode of the output alone.
    n : int
        Choices per prompt.
    stop : list of str
        Stop strings.
    skip_special_tokens : bool
        Leave special tokens out of the text.
    stream : bool
        False lets the detokenizer keep its text until the request ends.
    add_special_tokens : bool
        Whether tokenizing text adds BOS and the like; False for a rendered chat template.
    request_id : str or None
        Its id, unique among running requests; sub-requests get ``-i`` appended where there are several.
    id_is_given : bool
        The id is the user's, so that it may be in use.
    priority : int
        Larger first.
    tenant : int
        Whose limits it counts against; 0 where there are no keys.
    timeout : float or None
        Seconds that it may take.
    engine_fields : EngineFields or None
        What else the engine is told, of every sub-request.
    resumed_tokens : int
        See `TokenizedGenerateReqInput`.
    """

    prompts: list[str | bytes]
    model: int = 0
    sampling_params: SamplingParams
    max_new_tokens: int | None = None
    raw: bool = True
    n: int = 1
    stop: list[str] = []
    skip_special_tokens: bool = True
    stream: bool = False
    add_special_tokens: bool = True
    request_id: str | None = None
    id_is_given: bool = False
    priority: int = 0
    tenant: int = 0
    timeout: float | None = None
    engine_fields: EngineFields | None = None
    resumed_tokens: int = 0


class EmbeddingInput(msgspec.Struct, kw_only=True):
    """One call for embeddings by the model of an index: text, or packed int32 ids of its vocabulary, one row each.

    Text longer than the model's limit is cut when `truncate` is set, else refused.
    """

    prompts: list[str | bytes]
    model: int = 0
    request_id: str | None = None
    id_is_given: bool = False
    truncate: bool = False
    priority: int = 0
    tenant: int = 0
    timeout: float | None = None


class GenerateOutput(msgspec.Struct, gc=False):
    """News of one choice.

    Attributes
    ----------
    index : int
        Choice: ``prompt_index * n + i``.
    text : str
        New text; may be empty.
    output_ids : bytes
        New ids, packed int32.
    finish : FinishReason or None
        Set in the last output of a choice, with the counts below. ``error`` never comes here: `on_error` gets it.
    prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens : int
        Totals; `completion_tokens` is always set, the others in the last output.
    logprobs : sequence of float or None
        Of each new id.
    top_logprobs : iterable of list of (int, float) or None
        Likeliest ids of each new position.
    customized_info : dict of str to Any or None
        What the engine adds to the answer, in the last output.
    """

    index: int
    text: str
    output_ids: bytes
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    logprobs: Sequence[float] | None = None
    top_logprobs: Iterable[Sequence[tuple[int, float]]] | None = None
    customized_info: dict[str, Any] | None = None


class EmbeddingOutput(msgspec.Struct, gc=False):
    """One embedding: packed float32, and the number of prompt ids."""

    index: int
    embedding: bytes
    prompt_tokens: int


class GenerateSink(Protocol):
    """Receives one call's results, in the event loop's thread."""

    def write_delta(self, text: str) -> bool:
        """Take text and nothing else of the only choice: the short way for what most steps bring.

        Returns
        -------
        bool
            False when it can't go out by itself; then the whole output comes by `on_output`.
        """
        ...

    def on_output(self, output: GenerateOutput) -> None:
        """Take news of one choice."""
        ...

    def on_step_end(self) -> None:
        """All outputs of one message were delivered; write what was collected."""
        ...

    def on_error(self, error: RequestError) -> None:
        """Take the call's failure; comes at most once, and nothing comes after it."""
        ...


class EmbeddingSink(Protocol):
    """Receives one call's embeddings, in the event loop's thread."""

    def on_output(self, output: EmbeddingOutput) -> None:
        """Take one embedding."""
        ...

    def on_error(self, error: RequestError) -> None:
        """Take the call's failure; comes at most once, and nothing comes after it."""
        ...


class Submission(Protocol):
    """A call in progress, as its route holds it.

    Attributes
    ----------
    prompt_ids : list of bytes
        Packed int32 ids of each prompt; complete before the first output.
    prompt_texts : list of (str or bytes)
        As given.
    """

    prompt_ids: list[bytes]

    def abort(self) -> None:
        """End whatever of it still runs; the sink hears nothing more. Harmless at any time."""
        ...
