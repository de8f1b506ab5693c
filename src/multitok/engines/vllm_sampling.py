"""Sampling parameters in the form of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VLLMSamplingParams

from multitok.messages.sampling import EngineFields, Grammar, SamplingParams

SAMPLING = [
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "logit_bias",
    "grammar",
]
GRAMMARS = ["json_object", "json_schema", "regex", "ebnf"]
# What vLLM can't do together with speculative decoding.
NOT_SPECULATIVE = {"min_p", "logit_bias"}

# vLLM takes less than this for greedy, but only after it has raised all that is above 0 to 0.01.
_GREEDY_TEMPERATURE = 1e-5
# vLLM takes -1 for no seed at all, so that seed gets another's random numbers.
_SEED_OF_MINUS_ONE = 0x5EED_5EED_5EED_5EED


def vllm_sampling_params(params: SamplingParams, eos_token_ids: Sequence[int], fields: EngineFields | None) -> Any:
    """Return vLLM's form of sampling parameters, in the state in which its own input processor leaves them.

    Parameters
    ----------
    params : SamplingParams
        A request's parameters.
    eos_token_ids : sequence of int
        The model's end-of-sequence ids.
    fields : EngineFields or None
        What goes with them to vLLM's KV connectors.

    Raises
    ------
    ValueError or VLLMClientError
        A value is outside the range that vLLM takes.
    """
    extra = None
    if fields is not None and fields.kv_transfer_params is not None:
        extra = {"kv_transfer_params": fields.kv_transfer_params}
    result = VLLMSamplingParams(
        max_tokens=params.max_new_tokens,
        min_tokens=min(params.min_new_tokens, params.max_new_tokens),
        temperature=params.temperature if params.temperature >= _GREEDY_TEMPERATURE else 0.0,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=_SEED_OF_MINUS_ONE if params.seed == -1 else params.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        logit_bias=params.logit_bias,
        structured_outputs=None if params.grammar is None else _structured_outputs(params.grammar),
        extra_args=extra,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    # The core ends a request at one id and at the stop ids; all of them are held back by `min_tokens`.
    first = eos_token_ids[0] if eos_token_ids else None
    result.update_from_generation_config({"eos_token_id": list(eos_token_ids)}, first)
    return result


def _structured_outputs(grammar: Grammar) -> Any:
    if grammar.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    field = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}[grammar.kind]
    return StructuredOutputsParams(**{field: grammar.text})
