"""Sampling parameters in the form of OpenVINO GenAI."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import openvino_genai as genai

from multitok.engines.base import EngineRefusal
from multitok.engines.openvino_errors import error_text
from multitok.engines.openvino_grammar_compiler import structured_output_config
from multitok.messages.sampling import SamplingParams

# Below this, dividing by the temperature leaves the range of float32, and the choice is the greedy one anyway.
GREEDY_TEMPERATURE = 1e-5

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
    "grammar",
]

# In a greedy request, see `EngineInfo.resumable`. The presence and frequency penalties count output ids only, so they
# would take the ids of an earlier run for a part of the prompt; the repetition penalty counts both alike. Those that
# choose among likely ids are out of use in a greedy request.
RESUMABLE = [
    "max_new_tokens",
    "min_new_tokens",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
]


def generation_config(params: SamplingParams, eos_token_ids: Sequence[int]) -> Any:
    """Return OpenVINO's form of sampling parameters.

    Parameters
    ----------
    params : SamplingParams
        A request's parameters.
    eos_token_ids : sequence of int
        The model's end-of-sequence ids.

    Raises
    ------
    EngineRefusal
        A value is outside the range that the pipeline takes.
    """
    config = genai.GenerationConfig()
    config.max_new_tokens = params.max_new_tokens
    config.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
    config.repetition_penalty = params.repetition_penalty
    config.presence_penalty = params.presence_penalty
    config.frequency_penalty = params.frequency_penalty
    if params.temperature > GREEDY_TEMPERATURE:
        config.do_sample = True
        config.temperature = params.temperature
        config.top_p = params.top_p
        # 1.0, only the likeliest id, is outside the range that the pipeline takes.
        config.min_p = min(params.min_p, 1 - 1e-6)
        if params.top_k:
            config.top_k = params.top_k
        # The generator takes 32 bits. Without a seed of its own every request would get the same one.
        config.rng_seed = random.getrandbits(32) if params.seed is None else params.seed & 0xFFFFFFFF
    _set_stops(config, params, eos_token_ids)
    if params.logprobs:
        raise EngineRefusal(400, "this engine gives only the chosen token's log probability: top_logprobs must be 0")
    if params.logit_bias:
        raise EngineRefusal(400, "this engine has no logit_bias")
    if params.logprobs is not None:
        config.logprobs = 1
    if params.grammar is not None:
        config.structured_output_config = structured_output_config(params.grammar)
    try:
        config.validate()
    except RuntimeError as error:
        raise EngineRefusal(400, error_text(error)) from error
    return config


def _set_stops(config: Any, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Set the ids that end the request.

    The pipeline's ``ignore_eos`` ignores the other stop ids too, and it wants the end-of-sequence id among the stop
    ids; so with ``ignore_eos`` one of the stop ids plays the end-of-sequence id.
    """
    stops = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stops.update(eos_token_ids)
    if not stops:
        config.ignore_eos = True
        return
    config.eos_token_id = eos_token_ids[0] if eos_token_ids and not params.ignore_eos else min(stops)
    config.stop_token_ids = stops
