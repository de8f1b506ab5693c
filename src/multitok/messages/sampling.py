"""Sampling parameters: what an engine is told about one request."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf"]


class Grammar(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A constraint on the output text; `text` is a JSON schema, a regular expression or an EBNF grammar.

    ``json_object`` means any JSON object; its `text` is empty.
    """

    kind: GrammarKind
    text: str = ""


class SamplingParams(msgspec.Struct, array_like=True, gc=False, kw_only=True, frozen=True):
    """How the ids of one request are chosen; every default is neutral.

    Attributes
    ----------
    max_new_tokens : int
        Most output ids, >= 1.
    min_new_tokens : int
        No end-of-sequence or stop id before this many output ids.
    temperature : float
        0 is greedy.
    top_p, min_p : float
        Nucleus and minimum-probability limits; 1.0 and 0.0 are off.
    top_k : int
        0 is off.
    seed : int or None
        None lets the engine choose.
    presence_penalty, frequency_penalty, repetition_penalty : float
        0.0, 0.0 and 1.0 are off.
    stop_token_ids : list of int or None
        Ids that end the request, beside the model's end-of-sequence ids.
    ignore_eos : bool
        Go on after an end-of-sequence id.
    logprobs : int or None
        None: none. 0: of the chosen ids. k > 0: of the k likeliest ids too.
    logit_bias : dict of int to float or None
        Added to the logit of an id.
    grammar : Grammar or None
        Constraint on the output text.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    grammar: Grammar | None = None


class EngineFields(msgspec.Struct, array_like=True, gc=False, kw_only=True, frozen=True):
    """What an engine is told about one request beside its ids and how they are chosen.

    Attributes
    ----------
    adapter : str or None
        Name of a loaded LoRA adapter.
    bootstrap_host, bootstrap_port, bootstrap_room : str, int, int or None
        Where a prefill and a decode engine of SGLang meet over this request.
    kv_transfer_params : dict of str to Any or None
        What vLLM's KV connectors need; values of JSON.
    """

    adapter: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def in_use(self) -> list[str]:
        """Return the names of the fields that are set."""
        return [name for name in self.__struct_fields__ if getattr(self, name) is not None]
