"""Shapes of answers, for the documentation alone: answers are written piece by piece, and tests compare them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishWord = Literal["stop", "length", "abort"]


class PromptTokensDetails(msgspec.Struct):
    """Part of `Usage`."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Part of `Usage`."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts of one call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(msgspec.Struct):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token that has come."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a chat choice."""

    content: list[TokenLogprob]
    refusal: str | None


class AssistantMessage(msgspec.Struct):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: str | None


class ChatChoice(msgspec.Struct):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextLogprobs(msgspec.Struct):
    """Log probabilities of a completion choice."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    """One of the texts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishWord
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """Answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class EmbeddingRow(msgspec.Struct):
    """One embedding; text is base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Token counts of one call for embeddings."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """Answer of ``/v1/embeddings``."""

    id: str
    object: Literal["list"]
    model: str
    usage: EmbeddingUsage
    data: list[EmbeddingRow]


class Generation(msgspec.Struct):
    """Answer of ``/generate`` for one prompt and choice."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: int | UnsetType = UNSET


class Tokenized(msgspec.Struct):
    """Answer of ``/tokenize``."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class Detokenized(msgspec.Struct):
    """Answer of ``/detokenize``."""

    text: str | list[str]


class ModelCard(msgspec.Struct):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None


class ModelList(msgspec.Struct):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class Status(msgspec.Struct):
    """Answer of the health checks."""

    status: str


class ServerInfo(msgspec.Struct):
    """Answer of ``/server_info``: these and more."""

    engine: Any


class AdminState(msgspec.Struct):
    """Answer of ``/admin/state``: these and more."""

    control: Any
    processes: Any
