"""What the kinds of engines have in common: `PeerApi`, and what one of them says about itself and about a request."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np

from multitok.messages.base import FinishReason
from multitok.messages.sampling import EngineFields, SamplingParams

# Server's seeds are not negative; what differs in more than the sign stays different.
_SEED_MASK = 2**63 - 1
DONE = b"[DONE]"

GREEDY_RESUMABLE = [
    *("max_new_tokens", "min_new_tokens", "stop_token_ids", "ignore_eos", "logprobs"),
    # Without an effect where the likeliest id is taken.
    *("top_p", "top_k", "min_p", "seed"),
]


class Failure(msgspec.Struct, frozen=True):
    """Why an attempt came to nothing.

    Attributes
    ----------
    status : int
        HTTP status that the engine gave, or that fits.
    message : str
        Why: of a 400 in words meant for the client, otherwise for the log.
    """

    status: int
    message: str

    @property
    def blames_the_request(self) -> bool:
        """Whether no other engine would do it either; all else is between this engine and multitok."""
        return self.status in (400, 413, 422)


class Delta(msgspec.Struct, gc=False):
    """What an event adds to a request.

    Attributes
    ----------
    ids : list of int
        New output ids.
    finish : FinishReason or None
        In the last one; of a stop id without ``matched`` the last id is meant.
    logprobs : list of float or None
        As in `EngineOutput`.
    top_logprobs : list of list of (int, float) or None
        As in `EngineOutput`.
    cached_tokens : int
        As in `EngineOutput`.
    customized_info : dict of str to Any or None
        As in `EngineOutput`.
    failure : Failure or None
        It has failed; nothing else is set.
    """

    ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0
    customized_info: dict[str, Any] | None = None
    failure: Failure | None = None


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says about itself; see `EngineInfo`.

    Attributes
    ----------
    kind : str
        What it is, for the log: 'multitok', 'sglang', 'vllm'.
    version : str
        Its version.
    model : str or None
        The last part of its model's name.
    vocab_size, context_length, max_running : int or None
        None where it doesn't say.
    eos_token_ids : list of int or None
        Likewise.
    sampling, grammars, fields, resumable : list of str
        As in `EngineInfo`.
    top_logprobs : int
        As in `EngineInfo`.
    simulated : bool
        As in `EngineInfo`.
    hint : str
        What would make it better, for the log.
    """

    kind: str
    version: str
    model: str | None = None
    vocab_size: int | None = None
    context_length: int | None = None
    max_running: int | None = None
    eos_token_ids: list[int] | None = None
    sampling: list[str]
    grammars: list[str] = []
    fields: list[str] = []
    resumable: list[str] = []
    top_logprobs: int = 0
    simulated: bool = False
    hint: str = ""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is asked for.

    Attributes
    ----------
    ids : bytes
        Packed int32: the prompt, and the output so far.
    params : SamplingParams
        What is left of them.
    resumed : int
        How many of the last ids are output.
    fields : EngineFields or None
        What else it is told.
    rid : str
        Its name; none is the beginning of another.
    """

    ids: bytes
    params: SamplingParams
    resumed: int
    fields: EngineFields | None
    rid: str

    def listed_ids(self) -> list[int]:
        """Return the ids as JSON has them."""
        ids: list[int] = np.frombuffer(self.ids, np.int32).tolist()
        return ids

    def seed(self) -> int | None:
        """Return the seed as a number that every server takes."""
        return None if self.params.seed is None else self.params.seed & _SEED_MASK


class PeerApi(Protocol):
    """How one kind of engine is spoken to; one object per address."""

    info: PeerInfo
    health_route: str

    def request(self, work: Work) -> tuple[str, bytes, bool]:
        """Return route and body of a request, and whether the answer is a stream of events."""
        ...

    def read(self, data: bytes, have: int) -> Delta | None:
        """Return what an event, or a whole answer, adds; None: nothing.

        Parameters
        ----------
        data : bytes
            JSON.
        have : int
            Output ids of this attempt so far.

        Raises
        ------
        ValueError
            It is not what such an engine says.
        """
        ...

    def abort(self, rid: str) -> tuple[str, bytes] | None:
        """Return route and body of the request that ends another one; None: closing its connection does."""
        ...


def failure_of(status: int, body: bytes) -> Failure:
    """Return what an answer that is no success says.

    Parameters
    ----------
    status : int
        Its status.
    body : bytes
        Its body: in most cases a JSON object with a message somewhere.
    """
    message = body[:500].decode(errors="replace").strip() or f"status {status}"
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        inner = answer.get("error", answer.get("detail", answer))
        if isinstance(inner, dict):
            inner = inner.get("message", message)
        if isinstance(inner, str) and inner:
            message = inner
    return Failure(status, message[:500])


class ErrorDetail(msgspec.Struct):
    """An error in a stream."""

    message: str = ""
    type: str | None = None
    code: int | str | None = None

    def failure(self) -> Failure:
        """Return it with a status: its code, or what its type says."""
        if isinstance(self.code, int):
            status = self.code
        elif self.type == "overloaded_error":
            status = 503
        elif self.type == "rate_limit_error":
            status = 429
        else:
            status = 400 if self.type in ("invalid_request_error", "BadRequestError") else 500
        return Failure(status, self.message[:500] or "an error without words")
