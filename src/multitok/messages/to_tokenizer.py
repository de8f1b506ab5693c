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
    rank, life : int
        Who answers, and which life of it.
    known : list of int
        Those of the listed requests that it has: waiting, running, or ended without an acknowledgement.
    """

    rank: int
    life: int
    known: list[int]


class RankDied(BaseReq, tag=22, kw_only=True):
    """A scheduler has died; whatever was sent to it before this is lost, and nothing goes to it any more.

    Attributes
    ----------
    rank, life : int
        Which, and which life of it.
    """

    rank: int
    life: int


class RankStarted(BaseReq, tag=23, kw_only=True):
    """A life of a scheduler takes requests; every earlier one is dead, whether or not that was said.

    Attributes
    ----------
    rank, life : int
        Which, and which life of it.
    """

    rank: int
    life: int


class LiveListWanted(BaseReq, tag=24, kw_only=True):
    """A scheduler that does not read was not sent an abort or an acknowledgement: it has to hear what is live."""


ToTokenizer = (
    BatchStrOutput
    | BatchTokenIDOutput
    | BatchEmbeddingOutput
    | RefusedReq
    | GetInternalStateReqOutput
    | LiveReqOutput
    | RankDied
    | RankStarted
    | LiveListWanted
)
