"""The protocol's hash: two processes that agree on it declare all messages alike."""

from __future__ import annotations

import functools
import hashlib
import typing
from enum import Enum

import msgspec

from multitok.messages import (
    base,
    control,
    operations,
    sampling,
    to_child,
    to_detokenizer,
    to_launcher,
    to_scheduler,
    to_tokenizer,
)


@functools.cache
def protocol_hash() -> str:
    """Return 16 hex digits over every message: name, tag, fields, types; and over every enumeration."""
    digest = hashlib.sha256()
    requests = (base, sampling, to_scheduler, to_detokenizer, to_tokenizer)
    for module in (*requests, to_launcher, to_child, operations, control):
        for name, value in sorted(vars(module).items()):
            if not isinstance(value, type) or value.__module__ != module.__name__:
                continue
            if issubclass(value, Enum):
                digest.update(repr((name, [(member.name, member.value) for member in value])).encode())
            elif issubclass(value, msgspec.Struct):
                hints = typing.get_type_hints(value, include_extras=True)
                fields = [(field, str(hints[field])) for field in value.__struct_fields__]
                digest.update(repr((name, value.__struct_config__.tag, fields)).encode())
    return digest.hexdigest()[:16]
