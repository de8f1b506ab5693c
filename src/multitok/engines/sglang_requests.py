"""Requests as SGLang's schedulers take them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams as SGLangSamplingParams

from multitok.engines.base import EngineRefusal
from multitok.messages.sampling import EngineFields, SamplingParams

# `normalize` asks only whether there is a tokenizer, where there are no stop strings: multitok finds those itself.
_A_TOKENIZER = object()
# SGLang's are signed, of 64 bits.
_SEEDS = 1 << 64
_GRAMMAR_FIELD = {"json_object": "json_schema", "json_schema": "json_schema", "regex": "regex", "ebnf": "ebnf"}
_ANY_OBJECT = '{"type": "object"}'


class LiveRequest(msgspec.Struct, gc=False):
    """A request in SGLang.

    Attributes
    ----------
    number : int
        The request.
    rid : str
        What SGLang calls it: never used before, and no beginning of another's.
    prompt_tokens, made : int
        Prompt ids, and output ids so far.
    logprobs : int or None
        As in `SamplingParams`.
    stops : frozenset of int
        Ids that end it here, because SGLang goes on after them.
    adapter : str or None
        LoRA adapter that it uses.
    """

    number: int
    rid: str
    prompt_tokens: int
    made: int = 0
    logprobs: int | None = None
    stops: frozenset[int] = frozenset()
    adapter: str | None = None


def sampling_of(
    params: SamplingParams, *, vocab_size: int, more_ends: Iterable[int], has_tokenizer: bool
) -> SGLangSamplingParams:
    """Return SGLang's sampling parameters, normalised and checked as its tokenizer manager does.

    Parameters
    ----------
    params : SamplingParams
        What is wanted.
    vocab_size : int
        Of the model.
    more_ends : iterable of int
        End-of-sequence ids that SGLang doesn't know of.
    has_tokenizer : bool
        Whether SGLang's schedulers have one.

    Raises
    ------
    EngineRefusal
        SGLang has no such parameters.
    """
    stops = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stops.update(more_ends)
    fields: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": min(params.min_new_tokens, params.max_new_tokens),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": stops,
        "ignore_eos": params.ignore_eos,
        "sampling_seed": None if params.seed is None else (params.seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2,
    }
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.grammar is not None:
        text = params.grammar.text if params.grammar.kind != "json_object" else _ANY_OBJECT
        fields[_GRAMMAR_FIELD[params.grammar.kind]] = text
    try:
        sampling = SGLangSamplingParams(**fields)
        sampling.normalize(_A_TOKENIZER if has_tokenizer else None)
        sampling.verify(vocab_size)
    except ValueError as error:
        raise EngineRefusal(400, str(error)) from error
    return sampling


def generate_request(
    rid: str,
    input_ids: bytes,
    params: SamplingParams,
    sampling: SGLangSamplingParams,
    fields: EngineFields,
    lora_id: str | None,
) -> TokenizedGenerateReqInput:
    """Return a request for generation, of which every step's ids are wanted."""
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=_ids(input_ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=params.logprobs is not None,
        logprob_start_len=-1,
        top_logprobs_num=params.logprobs or 0,
        token_ids_logprob=None,
        stream=True,
        lora_id=lora_id,
        lora_name=fields.adapter,
        bootstrap_host=fields.bootstrap_host,
        bootstrap_port=fields.bootstrap_port,
        bootstrap_room=fields.bootstrap_room,
    )


def embedding_request(rid: str, input_ids: bytes) -> TokenizedEmbeddingReqInput:
    """Return a request for an embedding."""
    sampling = SGLangSamplingParams(max_new_tokens=0)
    sampling.normalize(_A_TOKENIZER)
    return TokenizedEmbeddingReqInput(
        rid=rid,
        input_text=None,
        input_ids=_ids(input_ids),
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
    )


def _ids(packed: bytes) -> array[int]:
    """Return ids in the width that SGLang works with."""
    return array("q", array("i", packed))
