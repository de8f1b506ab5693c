"""Request bodies of the OpenAI API.

Types check shapes; `sampling` and the routes check values. Fields that no type here names are ignored, as other
OpenAI-compatible servers do. Fields that clients know but this server can't honour carry `Neutral`: null and the
neutral values are accepted, anything else is refused by name.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any

import msgspec

from multitok.http.errors import invalid


class Neutral:
    """Marks a field that is not supported.

    Parameters
    ----------
    *values : object
        Values that ask for nothing, beside null.
    """

    def __init__(self, *values: object) -> None:
        self.values = values


Unsupported = Annotated[Any, Neutral()]
UnsupportedList = Annotated[Any, Neutral([])]
UnsupportedFlag = Annotated[Any, Neutral(False)]


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: UnsupportedFlag = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling fields that all API families have, by the same names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None

    # Known from other servers.
    min_new_tokens: Unsupported = None
    bad_words: UnsupportedList = None
    allowed_token_ids: Unsupported = None
    length_penalty: Annotated[Any, Neutral(1)] = None
    use_beam_search: UnsupportedFlag = None
    beam_width: Annotated[Any, Neutral(1)] = None
    include_stop_str_in_output: UnsupportedFlag = None
    no_stop_trim: UnsupportedFlag = None
    stop_regex: UnsupportedList = None
    spaces_between_special_tokens: Annotated[Any, Neutral(True)] = None
    structural_tag: Unsupported = None
    custom_params: Unsupported = None


class JsonSchema(msgspec.Struct):
    """``response_format.json_schema``."""

    name: str | None = None
    schema_: dict[str, Any] | None = msgspec.field(default=None, name="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """``response_format``."""

    type: str
    json_schema: JsonSchema | None = None


class OpenAIFields(SamplingFields, kw_only=True):
    """Fields of chat completions and completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    rid: str | None = None
    priority: int | None = None
    timeout: float | None = None

    # For the engine: see `engine_fields`.
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    kv_transfer_params: dict[str, Any] | None = None

    # It keeps requests apart: not to be ignored.
    cache_salt: Unsupported = None
    verbosity: Unsupported = None
    service_tier: Annotated[Any, Neutral("auto", "default")] = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    structured_outputs: Unsupported = None
    regex: Unsupported = None
    ebnf: Unsupported = None
    json_schema: Unsupported = None
    prompt_logprobs: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    logits_processors: UnsupportedList = None
    lora_path: Unsupported = None


class ChatRequest(OpenAIFields, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    echo: UnsupportedFlag = None
    tools: UnsupportedList = None
    tool_choice: Annotated[Any, Neutral("none", "auto")] = None
    functions: UnsupportedList = None
    function_call: Annotated[Any, Neutral("none", "auto")] = None
    modalities: Annotated[Any, Neutral([], ["text"])] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    reasoning_effort: Annotated[Any, Neutral("none")] = None
    store: UnsupportedFlag = None
    chat_template: Unsupported = None
    documents: UnsupportedList = None


class CompletionRequest(OpenAIFields, kw_only=True):
    """Body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    suffix: Annotated[Any, Neutral("")] = None
    prompt_embeds: Unsupported = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Body of ``/v1/embeddings``."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    request_id: str | None = None
    rid: str | None = None
    priority: int | None = None
    timeout: float | None = None
    truncate: bool | None = None

    truncate_prompt_tokens: Unsupported = None


def unsupported_fields(kind: type[msgspec.Struct]) -> list[tuple[str, tuple[object, ...]]]:
    """List the fields of a request type that are refused, with their neutral values."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [
        (name, mark.values)
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Neutral)
    ]


def refuse_unsupported(request: msgspec.Struct, fields: list[tuple[str, tuple[object, ...]]], prefix: str = "") -> None:
    """Refuse a request that asks for what is not there.

    Parameters
    ----------
    request : msgspec.Struct
        The request.
    fields : list
        From `unsupported_fields`.
    prefix : str
        Path of the object, in front of a field's name.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    for name, neutral in fields:
        value = getattr(request, name)
        if value is not None and not any(_same(value, neutral_value) for neutral_value in neutral):
            raise invalid(prefix + name, "is not supported here")


def _same(value: object, other: object) -> bool:
    # 1 is True in Python.
    return value == other and isinstance(value, bool) == isinstance(other, bool)
