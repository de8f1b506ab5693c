"""``POST /generate``: SGLang's, and that of another multitok.

SGLang's events carry all ids so far, or with ``--incremental-streaming-output`` the new ones, as multitok's do.
``completion_tokens`` counts all in both cases, so either is understood.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from multitok.engines.remote.api import DONE, Delta, ErrorDetail, Failure, PeerInfo, Work
from multitok.messages.base import FinishReason
from multitok.messages.sampling import Grammar

ROUTE = "/generate"
_ANY_OBJECT = '{"type": "object"}'
# Of `SamplingParams` and of ``sampling_params``: those that mean the same and may be left out.
_SAME = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop_token_ids", "ignore_eos"),
)


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int | None = None
    finish_reason: _Finish | None = None
    cached_tokens: int | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    output_top_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: ErrorDetail | None = None


_decoder = msgspec.json.Decoder(_Event)
_NO_LOGPROB = -9999.0


class GenerateApi:
    """Requests to ``/generate``, and what its answers say.

    Parameters
    ----------
    info : PeerInfo
        What the engine says about itself.

    Attributes
    ----------
    info : PeerInfo
        As given.
    health_route : str
        Answers 200 while it can generate.
    """

    health_route = "/health"
    # The name of the seed, and the value of `top_k` that means all.
    _seed_name = "seed"
    _all_ids = 0

    def __init__(self, info: PeerInfo) -> None:
        self.info = info

    def request(self, work: Work) -> tuple[str, bytes, bool]:
        """Return route and body of a request; see `PeerApi`."""
        params = work.params
        sampling: dict[str, Any] = {"max_new_tokens": params.max_new_tokens, "temperature": params.temperature}
        for field in msgspec.structs.fields(params):
            if field.name in _SAME and (value := getattr(params, field.name)) != field.default:
                sampling[field.name] = value
        if params.min_new_tokens:
            sampling["min_new_tokens"] = min(params.min_new_tokens, params.max_new_tokens)
        if params.top_k:
            sampling["top_k"] = params.top_k
        if (seed := work.seed()) is not None:
            sampling[self._seed_name] = seed
        if params.logit_bias:
            sampling["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if params.grammar is not None:
            name, text = _grammar(params.grammar)
            sampling[name] = text
        body: dict[str, Any] = {
            "rid": work.rid,
            "input_ids": work.listed_ids(),
            "sampling_params": sampling,
            "stream": True,
        }
        if params.logprobs is not None:
            body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": params.logprobs}
        if work.fields is not None:
            body |= {
                ("lora_path" if name == "adapter" else name): getattr(work.fields, name)
                for name in work.fields.in_use()
            }
        self._add(body, work)
        return ROUTE, msgspec.json.encode(body), True

    def _add(self, body: dict[str, Any], work: Work) -> None:
        """Add what only one of the two knows."""

    def abort(self, rid: str) -> tuple[str, bytes] | None:
        """Nothing: closing the connection is enough; see `PeerApi`."""
        return None

    def read(self, data: bytes, have: int) -> Delta | None:
        """Return what an event adds; see `PeerApi`."""
        if DONE in data[:8]:
            return None
        event = _decoder.decode(data)
        meta = event.meta_info
        if meta is None:
            if event.error is None:
                raise ValueError("an event without meta_info")
            return Delta([], failure=event.error.failure())
        reason = meta.finish_reason
        if reason is not None and reason.type == "abort" and reason.status_code is not None:
            return Delta([], failure=Failure(reason.status_code, reason.message or "aborted by the engine"))
        ids = event.output_ids
        total = have + len(ids) if meta.completion_tokens is None else meta.completion_tokens
        delta = Delta(_new(ids, have, total) if ids else ids)
        if delta.ids and meta.output_token_logprobs is not None:
            _add_logprobs(delta, meta, have, total)
        if reason is not None:
            delta.finish = _end(reason)
        if meta.cached_tokens:
            delta.cached_tokens = meta.cached_tokens
        return delta if delta.ids or delta.finish is not None else None


def _new(items: list[Any], have: int, total: int) -> list[Any]:
    """Return the new ones of a list of all, or of the new ones; one of all may have grown on its way out."""
    if len(items) >= total:
        return items[have:total]
    if len(items) < total - have:
        raise ValueError(f"{len(items)} items of {total}, after {have}")
    return items[len(items) - (total - have) :]


def _add_logprobs(delta: Delta, meta: _Meta, have: int, total: int) -> None:
    chosen = _new(meta.output_token_logprobs or [], have, total)
    if [token for _, token, _ in chosen] != delta.ids:
        raise ValueError("log probabilities of other ids")
    delta.logprobs = [_NO_LOGPROB if value is None else value for value, _, _ in chosen]
    if meta.output_top_logprobs is not None:
        delta.top_logprobs = [
            [(token, _NO_LOGPROB if value is None else value) for value, token, _ in top or ()]
            for top in _new(meta.output_top_logprobs, have, total)
        ]


def _end(reason: _Finish) -> FinishReason:
    if reason.type == "stop":
        return FinishReason("stop", matched=reason.matched if isinstance(reason.matched, int) else None)
    if reason.type in ("length", "abort"):
        return FinishReason(reason.type)  # type: ignore[arg-type]
    raise ValueError(f"an unknown end: {reason.type!r}")


def _grammar(grammar: Grammar) -> tuple[str, str]:
    if grammar.kind == "json_object":
        return "json_schema", _ANY_OBJECT
    return grammar.kind, grammar.text


class MultitokApi(GenerateApi):
    """Another multitok.

    Parameters
    ----------
    info : PeerInfo
        What it says about that model.
    model : str
        The name that it has there; others, if there are any, are no business of ours.
    """

    def __init__(self, info: PeerInfo, model: str) -> None:
        super().__init__(info)
        self._model = model
        self.health_route = f"/ready?model={quote(model, safe='')}"

    def _add(self, body: dict[str, Any], work: Work) -> None:
        body["model"] = self._model
        # SGLang's way of saying that prompts need no log probabilities is a default here.
        body.pop("logprob_start_len", None)
        # With an id of ours a hash would pick the rank there, in place of its policy.
        del body["rid"]
        if work.resumed:
            body["resumed_tokens"] = work.resumed


class SglangApi(GenerateApi):
    """SGLang, of version 0.5.23."""

    _seed_name = "sampling_seed"

    def abort(self, rid: str) -> tuple[str, bytes] | None:
        """Return SGLang's request for it: of a closed connection it learns seconds later; see `PeerApi`."""
        return "/abort_request", msgspec.json.encode({"rid": rid})
