"""The Engine protocol: token ids in, token ids out, step by step.

An engine is driven by one thread, the scheduler's loop: `add_request` and `abort` between steps, then `step`. Nothing
here knows about text, HTTP or owners.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, Protocol

import msgspec

from multitok.messages.base import FinishReason
from multitok.messages.operations import EngineOperation, name_of
from multitok.messages.sampling import EngineFields, SamplingParams

Task = Literal["generate", "embed"]


class EngineRefusal(Exception):
    """A request that this engine can't take; nothing of it was started.

    Parameters
    ----------
    status : int
        HTTP status: 400 when the request is at fault, 503 when there is no room.
    message : str
        What is wrong, in words meant for the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is and can do; constant for its life.

    Attributes
    ----------
    name : str
        Value of ``--engine``.
    simulated : bool
        True for an engine that runs no model.
    version : str
        Version of the library that does the work.
    task : {'generate', 'embed'}
        Which of the two kinds of request it takes.
    vocab_size : int
        Ids are in ``[0, vocab_size)``.
    context_length : int
        Most prompt ids plus output ids of one request; may be lower than the model's, where memory is short.
    eos_token_ids : list of int
        Ids that end a generation unless ``ignore_eos``.
    sampling : list of str
        Fields of `SamplingParams` that it honours.
    grammars : list of str
        Kinds of `Grammar` that it enforces.
    top_logprobs : int
        Most likeliest ids per position whose log probability it can give; 0: only the chosen id's.
    max_running_requests : int
        Requests that it works on at once; more are held back by the scheduler.
    embedding_size : int
        Length of an embedding; 0 for ``generate``.
    resumable : list of str
        Fields of `SamplingParams` that may differ from their default in a request that is to go on from its prompt and
        the ids so far with exactly the ids of an undisturbed run, as the conformance test shows; empty: it can't.
        Greedy is meant throughout: a `temperature` above 0 only where ``temperature`` is named.
    fields : list of str
        Fields of `EngineFields` that it takes; a request with another one is refused.
    operations : list of str
        Tags of the `EngineOperation` that it does.
    """

    name: str
    version: str
    task: Task
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    sampling: list[str]
    simulated: bool = False
    grammars: list[str] = []
    top_logprobs: int = 0
    max_running_requests: int = 256
    embedding_size: int = 0
    resumable: list[str] = []
    fields: list[str] = []
    operations: list[str] = []


def no_such_operation(info: EngineInfo, operation: EngineOperation | type[EngineOperation]) -> EngineRefusal:
    """Return the refusal of an operation that an engine doesn't do."""
    return EngineRefusal(400, f"engine {info.name!r} has no operation {name_of(operation)!r}")


def params_left(params: SamplingParams, resumed: int) -> SamplingParams:
    """Return what is left of a request's parameters when it goes on after `resumed` output ids, fewer than its limit.

    See `Engine.add_request`.
    """
    return msgspec.structs.replace(
        params,
        max_new_tokens=params.max_new_tokens - resumed,
        min_new_tokens=max(0, params.min_new_tokens - resumed),
    )


def may_go_on(params: SamplingParams, resumable: Collection[str]) -> bool:
    """Whether a generation that has begun can go on from its ids with exactly those of an undisturbed run.

    Parameters
    ----------
    params : SamplingParams
        Its own.
    resumable : collection of str
        As in `EngineInfo`.
    """
    if not resumable or (params.temperature > 0 and "temperature" not in resumable):
        return False
    changed = {
        field.name
        for field in msgspec.structs.fields(params)
        if not field.required and getattr(params, field.name) != field.default
    }
    return changed - {"temperature"} <= set(resumable)


class EngineOutput(msgspec.Struct, gc=False):
    """What one step made for one request.

    Attributes
    ----------
    number : int
        The request.
    output_ids : list of int
        New ids, in order; may be empty only with `finish` or `embedding`.
    finish : FinishReason or None
        Set in the request's last output. A stop id that ended it is in `output_ids` and in ``finish.matched``.
    logprobs : list of float or None
        Natural-log probability of each new id.
    top_logprobs : list of list of (int, float) or None
        The likeliest ids of each new position, likeliest first.
    cached_tokens : int
        Prompt ids found in the prefix cache, in the first or the last output; 0 where the engine can't tell.
    embedding : bytes or None
        Packed float32, in the last output of an embedding request.
    customized_info : dict of str to Any or None
        What the engine adds to the answer, by name, in the last output; values of JSON.
    """

    number: int
    output_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0
    embedding: bytes | None = None
    customized_info: dict[str, Any] | None = None


class EngineLoad(msgspec.Struct, gc=False, frozen=True):
    """Load figures of an engine at one moment.

    Attributes
    ----------
    running, waiting : int
        Requests inside the engine that have, and have not, a slot.
    kv_used : float
        Used part of the KV cache, 0 to 1.
    reachable : bool
        False while an engine that runs elsewhere can't be reached, and so takes no requests.
    """

    running: int
    waiting: int
    kv_used: float
    reachable: bool = True


class Engine(Protocol):
    """Token ids in, token ids out."""

    @property
    def info(self) -> EngineInfo:
        """What this engine is and can do."""
        ...

    @property
    def wakeup(self) -> int | None:
        """Descriptor of an engine that works by itself, readable while `step` has something to return.

        Its `step` never waits. None: the work is done inside `step`, which is called as long as `has_unfinished`.
        """
        ...

    def add_request(
        self,
        number: int,
        input_ids: bytes,
        params: SamplingParams,
        resumed: int = 0,
        fields: EngineFields | None = None,
    ) -> None:
        """Take a request; for ``embed`` engines `params` is ignored.

        What can only be found out later ends the request with a finish reason ``error``.

        Parameters
        ----------
        number : int
            The request; unique among those in the engine.
        input_ids : bytes
            Packed int32 in native order, checked against the vocabulary and the context length by the caller.
        params : SamplingParams
            Only with fields that ``info.sampling`` names.
        resumed : int
            How many of the last `input_ids` are output of an earlier run of this request, which goes on after them;
            `params` counts only what is still to come. An engine whose output follows from the ids alone ignores it.
        fields : EngineFields or None
            What else the engine is told; only with fields that ``info.fields`` names.

        Raises
        ------
        EngineRefusal
            When it can't be taken.
        """
        ...

    def abort(self, number: int) -> None:
        """Free all that a request holds; no output for it follows. An unknown number is ignored."""
        ...

    def step(self) -> list[EngineOutput]:
        """Run one iteration and return what it made; at most one output per request."""
        ...

    def has_unfinished(self) -> bool:
        """Whether a `step` would have anything to do."""
        ...

    def load(self) -> EngineLoad:
        """Return load figures."""
        ...

    def operate(self, operation: EngineOperation) -> None:
        """Do something that an operator asked for, between two steps; only what ``info.operations`` names.

        A new engine is brought to what operators have set (adapters, weights) in the same way, before any request.

        Raises
        ------
        EngineRefusal
            It can't be done, and nothing has changed.
        """
        ...

    def shutdown(self) -> None:
        """Cancel what runs and release the model; called once."""
        ...
