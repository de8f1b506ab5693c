"""Messages that a scheduler receives, through the router in multi mode.

On the wire each is a pair of frames, header and payload; a message of several pairs is a batch whose children may go
to different ranks. The router reads headers only. What reaches a scheduler begins with one frame more, its `life_mark`.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from multitok.messages.base import BaseBatchReq, BaseReq
from multitok.messages.sampling import EngineFields, SamplingParams


class Kind(IntEnum):
    """What a pair of frames is, for the router: a request goes to one rank, anything else to all."""

    GENERATE = 1
    EMBEDDING = 2
    ABORT = 3
    ACK = 4
    CONTROL = 5


REQUEST_KINDS = frozenset({Kind.GENERATE, Kind.EMBEDDING})


def life_mark(start_token: bytes, life: int) -> bytes:
    """Return the frame in front of a message to a scheduler that says which life of it is meant: any other drops it.

    A socket to a scheduler that was killed may reach the next one before it is closed.
    """
    return start_token + life.to_bytes(4, "little")


class Header(msgspec.Struct, array_like=True, gc=False):
    """What routing needs to know.

    Attributes
    ----------
    kind : int
        A `Kind`.
    number : int
        The request.
    owner : str or None
        Address that answers go to.
    model, detokenizer : int
        Index of the model, and of the detokenizer that the owner chose.
    rank : int or None
        Rank that is wanted, if any.
    prompt_length, token_limit : int
        Prompt ids, and most output ids.
    prefix_hashes : bytes or None
        Hash chain of the prompt's first blocks, 8 bytes each.
    priority : int
        Larger first.
    """

    kind: int
    number: int
    owner: str | None
    model: int = 0
    detokenizer: int = 0
    rank: int | None = None
    prompt_length: int = 0
    token_limit: int = 0
    prefix_hashes: bytes | None = None
    priority: int = 0


class DecodeParams(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """How a request's ids become text; travels to the detokenizer with the request's first ids.

    Attributes
    ----------
    prompt_tail : bytes
        Last prompt ids, packed int32, for raw completions; empty for chat.
    stop : list of str or None
        Stop strings.
    skip_special_tokens : bool
        Leave special tokens out.
    min_new_tokens : int
        No stop string counts before this many output ids.
    stream : bool
        False: text is held until the request ends.
    """

    prompt_tail: bytes = b""
    stop: list[str] | None = None
    skip_special_tokens: bool = True
    min_new_tokens: int = 0
    stream: bool = True


class TokenizedGenerateReqInput(BaseReq, tag=1, kw_only=True):
    """A tokenized request for generation.

    Attributes
    ----------
    rid : str or None
        The user's id.
    group : str or None
        The id of the call that it is a part of, where that has several.
    input_ids : bytes
        Prompt, packed int32 in native order.
    sampling_params : SamplingParams
        How ids are chosen.
    decode_params : DecodeParams
        How they become text.
    detokenizer : int
        Index of the detokenizer that the owner chose.
    model : int
        Index of the model.
    priority : int
        Larger first.
    tenant : int
        Whose limits it counts against: a hash of the API key; 0 where there are no keys.
    timeout, queue_timeout : float or None
        Seconds until it is ended, and until it must have begun.
    spent, waited : float
        How many of each had passed before this scheduler got it: another has died, or has lost it.
    resumed_ids : bytes
        Output ids of an earlier life of the scheduler, packed int32: the engine takes them behind the prompt, and the
        output goes on after them. `sampling_params` still counts them.
    text_length : int
        Characters of text that the owner has of `resumed_ids`.
    engine_fields : EngineFields or None
        What else the engine is told.
    resumed_tokens : int
        How many of the last `input_ids` are output of an earlier run elsewhere, which `sampling_params` doesn't count.
    """

    rid: str | None = None
    group: str | None = None
    input_ids: bytes
    sampling_params: SamplingParams
    decode_params: DecodeParams = DecodeParams()
    detokenizer: int = 0
    model: int = 0
    priority: int = 0
    tenant: int = 0
    timeout: float | None = None
    queue_timeout: float | None = None
    spent: float = 0.0
    waited: float = 0.0
    resumed_ids: bytes = b""
    text_length: int = 0
    engine_fields: EngineFields | None = None
    resumed_tokens: int = 0


class TokenizedEmbeddingReqInput(BaseReq, tag=2, kw_only=True):
    """A tokenized request for one embedding; attributes as in `TokenizedGenerateReqInput`."""

    rid: str | None = None
    group: str | None = None
    input_ids: bytes
    detokenizer: int = 0
    model: int = 0
    priority: int = 0
    tenant: int = 0
    timeout: float | None = None
    queue_timeout: float | None = None
    spent: float = 0.0
    waited: float = 0.0


class AbortReq(BaseReq, tag=3, kw_only=True):
    """End the request that `number` names, or acknowledge its end when it has already finished."""


class AckReq(BaseReq, tag=4, kw_only=True):
    """The owner has the ends of these requests; the scheduler may forget them."""

    numbers: list[int] = []


class GetInternalStateReq(BaseReq, tag=5, kw_only=True):
    """Ask each scheduler for its state; `number` identifies the question."""


class LiveReq(BaseReq, tag=6, kw_only=True):
    """Everything that an owner still waits for; sent to all ranks when a part has begun a new life, or after a gap.

    A rank ends what it has of this owner and is not in the list, sends again what is missing of `resend`, and answers
    with a `LiveReqOutput`; `number` identifies the question. It comes after the requests that it names where they take
    the same way; those that went through a router that has died since may come later.

    Attributes
    ----------
    upto : int
        Newest request number that the owner had given out: what it sends after this is not in the list, and not meant.
    numbers : list of int
        The owner's live requests, at whatever rank.
    token_counts, text_lengths : list of int
        Output ids and characters of text that the owner has of each.
    resend : list of int
        Those whose output after that has been lost on the way: a detokenizer has no state of them, or a message was
        dropped.
    """

    upto: int
    numbers: list[int]
    token_counts: list[int]
    text_lengths: list[int]
    resend: list[int] = []


class BatchTokenizedGenerateReqInput(BaseBatchReq, kw_only=True):
    """Sub-requests that fan out from one call; on the wire they are just their children."""

    batch: list[TokenizedGenerateReqInput]


class BatchTokenizedEmbeddingReqInput(BaseBatchReq, kw_only=True):
    """Sub-requests for embeddings that fan out from one call."""

    batch: list[TokenizedEmbeddingReqInput]


ToScheduler = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | AbortReq | AckReq | GetInternalStateReq | LiveReq
KIND_OF: dict[type[ToScheduler], Kind] = {
    TokenizedGenerateReqInput: Kind.GENERATE,
    TokenizedEmbeddingReqInput: Kind.EMBEDDING,
    AbortReq: Kind.ABORT,
    AckReq: Kind.ACK,
    GetInternalStateReq: Kind.CONTROL,
    LiveReq: Kind.CONTROL,
}


def header_of(message: ToScheduler) -> Header:
    """Return the header of a message."""
    header = Header(KIND_OF[type(message)], message.number, message.http_worker_ipc)
    if isinstance(message, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput):
        header.model = message.model
        header.detokenizer = message.detokenizer
        header.prompt_length = len(message.input_ids) // 4
        header.priority = message.priority
        if isinstance(message, TokenizedGenerateReqInput):
            header.token_limit = message.sampling_params.max_new_tokens
    return header
