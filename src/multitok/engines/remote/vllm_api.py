"""vLLM: token ids in and out (``/inference/v1/generate``), or completions with prompt ids and ``return_token_ids``."""

from __future__ import annotations

from typing import Any

import msgspec

from multitok.engines.remote.api import DONE, Delta, ErrorDetail, PeerInfo, Work
from multitok.messages.base import FinishReason
from multitok.messages.sampling import Grammar, SamplingParams

TOKENS_ROUTE = "/inference/v1/generate"
COMPLETIONS_ROUTE = "/v1/completions"
_TOKEN = "token_id:"


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float


class _Chosen(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    """Both shapes: `content` of the one, the lists of the other."""

    content: list[_Chosen] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: ErrorDetail | None = None


_decoder = msgspec.json.Decoder(_Event)
_NO_LOGPROB = -9999.0


class VllmApi:
    """Requests to vLLM, and what its answers say.

    Parameters
    ----------
    info : PeerInfo
        What the engine says about itself.
    model : str
        Its model's name.
    tokens : bool
        It takes and gives token ids; otherwise completions do, which make text beside them in vain.

    Attributes
    ----------
    info : PeerInfo
        As given.
    health_route : str
        Answers 200 while the engine lives.
    """

    health_route = "/health"

    def __init__(self, info: PeerInfo, model: str, *, tokens: bool) -> None:
        self.info = info
        self._model = model
        self._tokens = tokens

    def request(self, work: Work) -> tuple[str, bytes, bool]:
        """Return route and body of a request; see `PeerApi`."""
        params, fields = work.params, work.fields
        model = self._model if fields is None or fields.adapter is None else fields.adapter
        # What a prefill engine has to say for the decode engine is in whole answers only.
        transfer = None if fields is None else fields.kv_transfer_params
        stream = transfer is None or params.max_new_tokens > 1
        sampling: dict[str, Any] = {
            "max_tokens": params.max_new_tokens,
            "min_tokens": min(params.min_new_tokens, params.max_new_tokens),
            # All of them: what is left out may have another default in the model's generation config.
            **{name: getattr(params, name) for name in _NAMED},
            "seed": work.seed(),
            "stop_token_ids": params.stop_token_ids or [],
            "ignore_eos": params.ignore_eos,
            "logprobs": params.logprobs,
        }
        if params.logit_bias:
            sampling["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if params.grammar is not None:
            sampling["structured_outputs"] = _structured(params.grammar)
        body: dict[str, Any] = {"request_id": work.rid, "model": model, "stream": stream}
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        if self._tokens:
            body |= {"token_ids": work.listed_ids(), "sampling_params": {**sampling, "detokenize": False}}
            return TOKENS_ROUTE, msgspec.json.encode(body), stream
        body |= {"prompt": work.listed_ids(), "add_special_tokens": False, "return_token_ids": True, **sampling}
        if params.logprobs is not None:
            body["return_tokens_as_token_ids"] = True
        return COMPLETIONS_ROUTE, msgspec.json.encode(body), stream

    def abort(self, rid: str) -> tuple[str, bytes] | None:
        """Nothing: closing the connection is enough; see `PeerApi`."""
        return None

    def read(self, data: bytes, have: int) -> Delta | None:
        """Return what an event, or a whole answer, adds; see `PeerApi`."""
        if DONE in data[:8]:
            return None
        event = _decoder.decode(data)
        if event.error is not None:
            return Delta([], failure=event.error.failure())
        if not event.choices:
            return None
        choice = event.choices[0]
        delta = Delta(choice.token_ids or [])
        if choice.logprobs is not None and delta.ids:
            _add_logprobs(delta, choice.logprobs)
        if choice.finish_reason is not None:
            delta.finish = _end(choice)
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            delta.cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
        if event.kv_transfer_params is not None:
            delta.customized_info = {"kv_transfer_params": event.kv_transfer_params}
        return delta if delta.ids or delta.finish is not None else None


_NAMED = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name
    in (
        *("temperature", "top_p", "top_k", "min_p"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
)


def _structured(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": grammar.text}
        case "regex":
            return {"regex": grammar.text}
        case "ebnf":
            return {"grammar": grammar.text}


def _end(choice: _Choice) -> FinishReason:
    reason = choice.finish_reason
    if reason == "stop":
        # An end-of-sequence id is not named.
        return FinishReason("stop", matched=choice.stop_reason if isinstance(choice.stop_reason, int) else None)
    if reason in ("length", "abort"):
        return FinishReason(reason)  # type: ignore[arg-type]
    raise ValueError(f"an unknown end: {reason!r}")


def _add_logprobs(delta: Delta, logprobs: _Logprobs) -> None:
    """Take log probabilities; vLLM lists the chosen id, then the likeliest, among which it may be."""
    tops: list[list[tuple[int, float]]]
    if logprobs.content is not None:
        chosen = [(item.token_id, item.logprob) for item in logprobs.content]
        tops = [[(top.token_id, top.logprob) for top in item.top_logprobs] for item in logprobs.content]
    else:
        values = [_NO_LOGPROB if value is None else value for value in logprobs.token_logprobs]
        chosen = list(zip(map(_id_of, logprobs.tokens), values, strict=True))
        tops = [[(_id_of(token), value) for token, value in (top or {}).items()] for top in logprobs.top_logprobs or []]
    if [token for token, _ in chosen] != delta.ids:
        raise ValueError("log probabilities of other ids")
    delta.logprobs = [value for _, value in chosen]
    delta.top_logprobs = [sorted(top, key=lambda pair: -pair[1]) for top in tops]


def _id_of(token: str) -> int:
    if not token.startswith(_TOKEN):
        raise ValueError(f"{token[:50]!r} is no token id")
    return int(token[len(_TOKEN) :])
