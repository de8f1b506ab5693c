"""From request fields to `SamplingParams`: one mapping for every API family.

Three checks: the value makes sense; the engine honours it (`EngineInfo.sampling`), unless it is the neutral value; and
ids are in the vocabulary. Every refusal names the field as the client wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multitok.config import ServerArgs
from multitok.engines.base import EngineInfo
from multitok.http.errors import invalid
from multitok.http.openai.bounds import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_LENGTH,
    check_nested,
)
from multitok.http.openai.types import ResponseFormat, SamplingFields
from multitok.messages.sampling import Grammar, SamplingParams

INT32_MAX = 2**31 - 1
_SEED_MASK = 2**63 - 1


class FieldChecker:
    """Checks fields of one request.

    Parameters
    ----------
    info : EngineInfo
        What the engine can do.
    limits : ServerArgs
        What one request may hold.
    prefix : str
        Path of the sampling object, in front of a field's name.
    """

    __slots__ = ("info", "limits", "prefix")

    def __init__(self, info: EngineInfo, limits: ServerArgs, prefix: str = "") -> None:
        self.info = info
        self.limits = limits
        self.prefix = prefix

    def require(self, field: str, name: str) -> None:
        """Refuse a field that the engine does not honour."""
        if field not in self.info.sampling:
            raise invalid(self.prefix + name, f"is not supported by the engine {self.info.name!r}")

    def number(
        self, field: str, value: float | None, neutral: float, *, low: float, high: float, above: bool = False
    ) -> float:
        """Check a number; with `above` it must be greater than `low`.

        Raises
        ------
        RequestError
            400 that names the field.
        """
        if value is None or value == neutral:
            return neutral
        if not (low < value <= high if above else low <= value <= high):
            bounds = f"{low:g} < x <= {high:g}" if above else f"{low:g} to {high:g}"
            raise invalid(self.prefix + field, f"must be a number in the range {bounds}")
        self.require(field, field)
        return float(value)

    def count(self, name: str, value: int, low: int, high: int = INT32_MAX) -> int:
        """Check an integer."""
        if not low <= value <= high:
            raise invalid(self.prefix + name, f"must be an integer from {low} to {high}")
        return value


def read_stop(stop: str | list[str] | None, most: int, prefix: str = "") -> list[str]:
    """Check stop strings.

    Parameters
    ----------
    stop : str or list of str or None
        As the client gave them.
    most : int
        Most of them.
    prefix : str
        Path of the sampling object.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > most:
        raise invalid(prefix + "stop", f"has {len(strings)} strings; at most {most} are allowed")
    for i, text in enumerate(strings):
        name = prefix + ("stop" if isinstance(stop, str) else f"stop[{i}]")
        if not text:
            raise invalid(name, "must not be empty")
        if len(text) > MAX_STOP_LENGTH:
            raise invalid(name, f"is longer than {MAX_STOP_LENGTH} characters")
    if len(strings) > 1 and sum(map(len, strings)) > MAX_STOP_CHARACTERS:
        raise invalid(prefix + "stop", f"has more than {MAX_STOP_CHARACTERS} characters in all")
    return strings


def read_n(n: int | None, prompts: int, max_prompts: int, prefix: str = "") -> int:
    """Check the number of choices."""
    if n is None:
        return 1
    if not 1 <= n <= max_prompts:
        raise invalid(prefix + "n", f"must be an integer from 1 to {max_prompts}")
    if n * prompts > max_prompts:
        raise invalid(prefix + "n", f"times the number of prompts is {n * prompts}; at most {max_prompts} are allowed")
    return n


def read_response_format(value: ResponseFormat | None, info: EngineInfo) -> Grammar | None:
    """Translate ``response_format``.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    if value is None or value.type == "text":
        return None
    if value.type == "json_object":
        grammar = Grammar("json_object")
    elif value.type == "json_schema":
        if value.json_schema is None or value.json_schema.schema_ is None:
            raise invalid("response_format.json_schema", "must have a schema")
        check_nested("response_format.json_schema.schema", value.json_schema.schema_, MAX_GRAMMAR_CHARACTERS)
        grammar = Grammar("json_schema", msgspec.json.encode(value.json_schema.schema_).decode())
    else:
        raise invalid("response_format.type", "must be one of text, json_object, json_schema")
    check_grammar(grammar, info, "response_format")
    return grammar


def check_grammar(grammar: Grammar, info: EngineInfo, name: str) -> None:
    """Refuse a grammar that the engine does not enforce."""
    if grammar.kind not in info.grammars or "grammar" not in info.sampling:
        raise invalid(name, f"{grammar.kind} is not supported by the engine {info.name!r}")


def likeliest_is_chosen(params: SamplingParams) -> bool:
    """Whether every chosen id is the likeliest, so that top-1 log probabilities need no support by the engine."""
    return (
        params.temperature == 0.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
        and not params.logit_bias
        and params.grammar is None
        and params.min_new_tokens == 0
        and not params.ignore_eos
    )


def with_logprobs(params: SamplingParams, k: int, info: EngineInfo, name: str, switch: str) -> SamplingParams:
    """Ask for log probabilities.

    Parameters
    ----------
    params : SamplingParams
        Without log probabilities.
    k : int
        Likeliest ids per position; 0: the chosen id's alone.
    info : EngineInfo
        What the engine can do.
    name : str
        Field that holds `k`.
    switch : str
        Field that turns log probabilities on; may be the same.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    if "logprobs" not in info.sampling:
        raise invalid(switch, f"is not supported by the engine {info.name!r}")
    if k < 0:
        raise invalid(name, "must not be negative")
    if k > info.top_logprobs:
        if k == 1 and likeliest_is_chosen(params):
            return msgspec.structs.replace(params, logprobs=0)
        raise invalid(
            name,
            f"the engine {info.name!r} gives at most {info.top_logprobs} likeliest ids per position"
            " (and 1 with temperature 0 and no penalties)",
        )
    return msgspec.structs.replace(params, logprobs=k)


def sampling_params(
    fields: SamplingFields,
    check: FieldChecker,
    *,
    max_tokens: tuple[str, int | None],
    min_tokens: tuple[str, int | None],
    seed: tuple[str, int | None],
    grammar: Grammar | None,
    context_length: int,
) -> SamplingParams:
    """Check and translate sampling fields; log probabilities are added by `with_logprobs`.

    Parameters
    ----------
    fields : SamplingFields
        The request's.
    check : FieldChecker
        Checks them.
    max_tokens, min_tokens, seed : tuple of (str, int or None)
        The limits and the seed, with their names in this API. Without `max_tokens` the context's length stands in.
    grammar : Grammar or None
        Checked already.
    context_length : int
        Most prompt plus output ids.

    Returns
    -------
    SamplingParams
        For the engine.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    name, limit = max_tokens
    most = context_length if limit is None else check.count(name, limit, 1)
    name, least = min_tokens
    if least:
        check.count(name, least, 0)
        check.require("min_new_tokens", name)
        if least > most:
            raise invalid(check.prefix + name, f"must not be greater than the limit of {most} output tokens")
    top_k = fields.top_k or 0
    if top_k in (0, -1):
        top_k = 0
    else:
        check.count("top_k", top_k, 1)
        check.require("top_k", "top_k")
    name, seed_given = seed
    if seed_given is not None:
        check.count(name, seed_given, -(2**63), 2**63 - 1)
        check.require("seed", name)
        seed_given &= _SEED_MASK
    if fields.ignore_eos:
        check.require("ignore_eos", "ignore_eos")
    number = check.number
    return SamplingParams(
        max_new_tokens=most,
        min_new_tokens=least or 0,
        temperature=number("temperature", fields.temperature, 1.0, low=0.0, high=2.0),
        top_p=number("top_p", fields.top_p, 1.0, low=0.0, high=1.0, above=True),
        top_k=top_k,
        min_p=number("min_p", fields.min_p, 0.0, low=0.0, high=1.0),
        seed=seed_given,
        presence_penalty=number("presence_penalty", fields.presence_penalty, 0.0, low=-2.0, high=2.0),
        frequency_penalty=number("frequency_penalty", fields.frequency_penalty, 0.0, low=-2.0, high=2.0),
        repetition_penalty=number("repetition_penalty", fields.repetition_penalty, 1.0, low=0.0, high=2.0, above=True),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids, check),
        ignore_eos=bool(fields.ignore_eos),
        logit_bias=_logit_bias(fields.logit_bias, check),
        grammar=grammar,
    )


def _stop_token_ids(ids: Sequence[int] | None, check: FieldChecker) -> list[int] | None:
    if not ids:
        return None
    if len(ids) > check.limits.max_stop_strings:
        most = check.limits.max_stop_strings
        raise invalid(check.prefix + "stop_token_ids", f"has {len(ids)} ids; at most {most} are allowed")
    for i, token_id in enumerate(ids):
        check.count(f"stop_token_ids[{i}]", token_id, 0, check.info.vocab_size - 1)
    check.require("stop_token_ids", "stop_token_ids")
    return list(ids)


def _logit_bias(bias: dict[str, float] | None, check: FieldChecker) -> dict[int, float] | None:
    if not bias:
        return None
    name = check.prefix + "logit_bias"
    most = check.limits.max_logit_bias
    if len(bias) > most:
        raise invalid(name, f"has {len(bias)} entries; at most {most} are allowed")
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < check.info.vocab_size):
            raise invalid(name, f"key {key[:20]!r} is not a token id of the vocabulary")
        if not -100.0 <= value <= 100.0:
            raise invalid(name, f"the bias of {key} must be a number in the range -100 to 100")
        result[int(key)] = value
    check.require("logit_bias", "logit_bias")
    return result
