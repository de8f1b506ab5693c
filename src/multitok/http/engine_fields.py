"""Fields of a request that pass through to the engine, and what the engine gives back in the same way."""

from __future__ import annotations

from typing import Any, Protocol

from multitok.engines.base import EngineInfo
from multitok.http.errors import invalid
from multitok.http.openai.bounds import check_nested
from multitok.http.sse import encode_json
from multitok.messages.sampling import EngineFields
from multitok.tokenizer.requests import GenerateOutput

INT64_MAX = 2**63 - 1
# In front of the list of choices.
_CHOICES = b',"choices":['
# What a KV connector needs is some addresses and ids.
_MOST_CHARACTERS = 1 << 16


class _Body(Protocol):
    @property
    def bootstrap_host(self) -> str | None: ...
    @property
    def bootstrap_port(self) -> int | None: ...
    @property
    def bootstrap_room(self) -> int | None: ...
    @property
    def kv_transfer_params(self) -> dict[str, Any] | None: ...


def read_engine_fields(body: _Body, info: EngineInfo) -> EngineFields | None:
    """Return the fields that are for the engine; None without any.

    Raises
    ------
    RequestError
        400: a value can't be passed on, or the engine doesn't take it.
    """
    fields = EngineFields(
        bootstrap_host=body.bootstrap_host,
        bootstrap_port=body.bootstrap_port,
        bootstrap_room=body.bootstrap_room,
        kv_transfer_params=body.kv_transfer_params,
    )
    names = fields.in_use()
    for name in names:
        if name not in info.fields:
            raise invalid(name, f"is not supported by engine {info.name!r}")
    if not names:
        return None
    if fields.bootstrap_host is not None and len(fields.bootstrap_host) > _MOST_CHARACTERS:
        raise invalid("bootstrap_host", f"has more than {_MOST_CHARACTERS} characters")
    if fields.bootstrap_port is not None and not 0 <= fields.bootstrap_port <= 65535:
        raise invalid("bootstrap_port", "must be from 0 to 65535")
    if fields.bootstrap_room is not None and not 0 <= fields.bootstrap_room <= INT64_MAX:
        raise invalid("bootstrap_room", f"must be from 0 to {INT64_MAX}")
    if fields.kv_transfer_params is not None:
        check_nested("kv_transfer_params", fields.kv_transfer_params, _MOST_CHARACTERS)
    return fields


def passed_back(output: GenerateOutput) -> bytes:
    """Return what an answer of the OpenAI API carries of the engine's own, as members of JSON, each with its comma."""
    params = (output.customized_info or {}).get("kv_transfer_params")
    return b"" if params is None else b',"kv_transfer_params":' + encode_json(params)


def with_passed_back(head: bytes, output: GenerateOutput) -> bytes:
    """Return the head of a chunk, which ends where its choices begin, with what the engine passes back."""
    return head if output.customized_info is None else head[: -len(_CHOICES)] + passed_back(output) + _CHOICES
