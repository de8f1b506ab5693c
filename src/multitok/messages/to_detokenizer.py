"""Messages that a detokenizer receives from the schedulers: a step's output as columns."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from multitok.messages.base import BaseBatchReq, BaseReq, FinishReason
from multitok.messages.columns import Columns, Group, Lengths, Packed, Rows, Shared
from multitok.messages.to_scheduler import DecodeParams

TokenLogprobs = list[tuple[int, float]]


class TimeStats(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Moments in a request's life, in seconds of CLOCK_MONOTONIC; 0.0 where it has not come to pass."""

    received: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


class OutputExtras(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """Columns that are rarely in use; a batch without any carries one byte for all.

    Attributes
    ----------
    reasoning_tokens : list of (int or None)
        Output ids that were reasoning, in a request's last row.
    output_token_logprobs : list of (list of float or None)
        Log probability of each new id.
    output_top_logprobs : list of (list of TokenLogprobs or None)
        Likeliest ids of each new position.
    output_token_ids_logprobs : list of (list of TokenLogprobs or None)
        Ids that the user asked about, per new position.
    input_token_logprobs, input_top_logprobs, input_token_ids_logprobs : likewise
        Of the prompt's ids.
    spec_verify_ct, spec_accepted_tokens : list of (int or None)
        Verification steps and accepted draft ids of speculative decoding.
    decoded_texts : list of (str or None)
        Text before this row, where an engine knows it.
    decode_ids : list of (bytes or None)
        Output ids before this row, packed int32, in a row that makes or rebuilds a detokenizer's state in the middle
        of a request; it has `decode_params` too, and its ids go on to the newest.
    read_offsets : list of (int or None)
        Characters of text that the owner has of `decode_ids`; passed on to the owner with the text that follows them.
    retraction_counts : list of (int or None)
        How often the engine took a request back into its queue.
    weight_version : str or None
        Version of the weights that made this step.
    output_hidden_states : list of (bytes or None)
        Packed float32.
    customized_info : dict of list
        Columns that an engine adds.
    time_stats : list of (TimeStats or None)
        In a request's last row.
    """

    reasoning_tokens: Annotated[list[int | None] | None, Rows()] = None
    output_token_logprobs: Annotated[list[list[float] | None] | None, Rows(optional=True)] = None
    output_top_logprobs: Annotated[list[list[TokenLogprobs] | None] | None, Rows(optional=True)] = None
    output_token_ids_logprobs: Annotated[list[list[TokenLogprobs] | None] | None, Rows(optional=True)] = None
    input_token_logprobs: Annotated[list[list[float] | None] | None, Rows(optional=True)] = None
    input_top_logprobs: Annotated[list[list[TokenLogprobs] | None] | None, Rows(optional=True)] = None
    input_token_ids_logprobs: Annotated[list[list[TokenLogprobs] | None] | None, Rows(optional=True)] = None
    spec_verify_ct: Annotated[list[int | None] | None, Rows()] = None
    spec_accepted_tokens: Annotated[list[int | None] | None, Rows()] = None
    decoded_texts: Annotated[list[str | None] | None, Rows()] = None
    decode_ids: Annotated[list[bytes | None] | None, Rows()] = None
    read_offsets: Annotated[list[int | None] | None, Rows()] = None
    retraction_counts: Annotated[list[int | None] | None, Rows()] = None
    weight_version: Annotated[str | None, Shared()] = None
    output_hidden_states: Annotated[list[bytes | None] | None, Rows(optional=True)] = None
    customized_info: Annotated[dict[str, list[Any]] | None, Columns()] = None
    time_stats: Annotated[list[TimeStats | None] | None, Rows()] = None


class TokenOutput(BaseBatchReq, kw_only=True):
    """What a step's output is, before and after its ids became text.

    Attributes
    ----------
    output_ids : bytes
        New ids of all rows, packed int32.
    first_indexes : list of int
        Index of each row's first new id in the request's output: a receiver drops what it has and sees a gap.
    output_lengths : list of int or None
        New ids of each row; None: one each.
    rank : int
        The scheduler that made it.
    life : int
        Which life of it; 0: not said. What a dead life has said may arrive late, and counts no more.
    finished_reasons : list of (FinishReason or None) or None
        Set in the last row of a request.
    prompt_tokens, completion_tokens, cached_tokens : list of (int or None) or None
        Totals, in the last row of a request.
    extras : OutputExtras or None
        Rare columns.
    """

    output_ids: Annotated[bytes, Packed(lengths="output_lengths", itemsize=4)]
    first_indexes: Annotated[list[int], Rows()]
    output_lengths: Annotated[list[int] | None, Lengths()] = None
    rank: Annotated[int, Shared()] = 0
    life: Annotated[int, Shared()] = 0
    finished_reasons: Annotated[list[FinishReason | None] | None, Rows()] = None
    prompt_tokens: Annotated[list[int | None] | None, Rows()] = None
    completion_tokens: Annotated[list[int | None] | None, Rows()] = None
    cached_tokens: Annotated[list[int | None] | None, Rows()] = None
    extras: Annotated[OutputExtras | None, Group()] = None


class BatchTokenIDOutput(TokenOutput, tag=16, kw_only=True):
    """New ids of one step, for one detokenizer (or for an owner that decodes for itself).

    Attributes
    ----------
    decode_params : list of (DecodeParams or None) or None
        In the first row of a request.
    """

    decode_params: Annotated[list[DecodeParams | None] | None, Rows()] = None


class BatchEmbeddingOutput(BaseBatchReq, tag=17, kw_only=True):
    """Embeddings of one step.

    Attributes
    ----------
    embeddings : list of (bytes or None) or None
        Packed float32; None in a row that failed.
    finished_reasons : list of FinishReason
        ``stop``, or why the row failed.
    prompt_tokens : list of int
        Prompt ids.
    rank : int
        The scheduler that made it.
    extras : OutputExtras or None
        Rare columns.
    """

    embeddings: Annotated[list[bytes | None] | None, Rows()] = None
    finished_reasons: Annotated[list[FinishReason], Rows()]
    prompt_tokens: Annotated[list[int], Rows()]
    rank: Annotated[int, Shared()] = 0
    extras: Annotated[OutputExtras | None, Group()] = None


class BatchIdentity(BaseBatchReq, tag=16, kw_only=True):
    """The leading fields of a `BatchTokenIDOutput`: whom to tell when the rest can't be decoded."""


class RefusedReq(BaseReq, tag=20, kw_only=True):
    """A scheduler won't take a request; nothing of it was started. No batch: it goes to its one owner.

    Attributes
    ----------
    status : int
        HTTP status.
    message : str
        Why, in words meant for the client.
    """

    status: int
    message: str


ToDetokenizer = BatchTokenIDOutput | BatchEmbeddingOutput | RefusedReq
