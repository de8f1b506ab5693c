"""Messages that an owner receives: from the detokenizers, from schedulers where it decodes itself, from the router."""

from __future__ import annotations

from typing import Annotated

from multitok.messages.base import BaseBatchReq, BaseReq
from multitok.messages.columns import Rows
from multitok.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, RefusedReq, TokenOutput


class BatchStrOutput(TokenOutput, tag=18, kw_only=True):
    """New text and ids of one step, for one owner.

    Attributes
    ----------
    output_strs : list of str
        New text of each row; what it says is final.
    """

    output_strs: Annotated[list[str], Rows()]


class BatchStrIdentity(BaseBatchReq, tag=18):
    """The leading fields of a `BatchStrOutput`: whose answers are lost when the rest can't be decoded."""


class GetInternalStateReqOutput(BaseReq, tag=19, kw_only=True):
    """A scheduler's answer to `GetInternalStateReq`.

    Attributes
    ----------
    rank : int
        Who answers.
    running, queued, unacknowledged : int
        Requests in the engine, waiting for it, and finished without the owner's acknowledgement.
    kv_used : float
        Used part of the KV cache, 0 to 1.
    """

    rank: int
    running: int
    queued: int
    unacknowledged: int
    kv_used: float


class LiveReqOutput(BaseReq, tag=21, kw_only=True):
    """A scheduler's answer to `LiveReq`.

    Attributes
    ----------
    rank : int
        Who answers.
    known : list of int
        Those of the listed requests that it has: waiting, running, or ended without an acknowledgement.
    """

    rank: int
    known: list[int]


class RankDied(BaseReq, tag=22, kw_only=True):
    """A scheduler has died; whatever was sent to it before this is lost, and nothing goes to it any more.

    Attributes
    ----------
    rank : int
        Which.
    life : int
        Which life of it; 0: not said.
    """

    rank: int
    life: int = 0


class RankStarted(BaseReq, tag=23, kw_only=True):
    """A new life of a scheduler takes requests from now on; `rank` says which."""

    rank: int


ToTokenizer = (
    BatchStrOutput
    | BatchTokenIDOutput
    | BatchEmbeddingOutput
    | RefusedReq
    | GetInternalStateReqOutput
    | LiveReqOutput
    | RankDied
    | RankStarted
)
