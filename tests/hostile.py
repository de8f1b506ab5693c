"""Hostile values for every field of every request type: what the types declare is what is tried."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from multitok.http.admin.control import OPERATIONS
from multitok.http.native.generate import GenerateRequest
from multitok.http.native.tokens import DetokenizeRequest, TokenizeRequest
from multitok.http.openai.types import ChatRequest, CompletionRequest, EmbeddingRequest

# What a request needs to be answered, quickly.
REQUESTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 1}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
    "/generate": (GenerateRequest, {"text": "a", "sampling_params": {"max_new_tokens": 1}}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [97]}),
    **{path: (kind, {}) for path, (_, kind, _) in OPERATIONS.items()},
}
# What operations can't do without.
REQUESTS["/abort_request"][1]["rid"] = "nobody"
REQUESTS["/configure_logging"][1]["log_level"] = "info"
REQUESTS["/load_lora_adapter"][1].update(lora_name="poet", lora_path="/adapters/poet")
REQUESTS["/unload_lora_adapter"][1]["lora_name"] = "poet"
REQUESTS["/update_weights_from_disk"][1]["model_path"] = "/weights"
DEEP = 100_000
# Texts that are no JSON, or no Unicode, wherever they stand.
NO_JSON: dict[str, bytes] = {
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "-Infinity": b"-Infinity",
    "1e400": b"1e400",
    "-1e400": b"-1e400",
    "list of NaN": b"[NaN]",
    "list of 1e400": b"[1e400]",
    "lone surrogate": rb'"a\ud800b"',
    "list of a lone surrogate": rb'["\udfff"]',
    "object with a lone surrogate": rb'{"a":"\ud800"}',
    "invalid UTF-8": b'"\xff\xfe"',
    "overlong UTF-8": b'"\xc0\x80"',
    "nested lists": b"[" * DEEP + b"]" * DEEP,
    "nested objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "half of a list": b"[1,",
    "a bare word": b"none",
    "a leading zero": b"007",
    "hexadecimal": b"0x10",
    "a control character": b'"\x00"',
}
VALUES: dict[str, bytes] = {
    **{str(value): str(value).encode() for value in (0, -1, 1.5, -0.0, 10**6, 2**31, 2**63, 2**64, -(2**64))},
    "2**1000": str(2**1000).encode(),
    "-2**1000": str(-(2**1000)).encode(),
    "1e308": b"1e308",
    "5e-324": b"5e-324",
    "true": b"true",
    "false": b"false",
    "empty string": b'""',
    "NUL": rb'"a\u0000b"',
    "string": b'"x"',
    "number as a string": b'"1"',
    "1 MB": b'"' + b"x" * 1_000_000 + b'"',
    "non-ASCII": '"é🙂\u202e"'.encode(),
    "line breaks": rb'"a\r\nX-Evil: 1"',
    "empty list": b"[]",
    "empty object": b"{}",
    "list of null": b"[null]",
    "list of lists": b"[[]]",
    "list of objects": b"[{}]",
    "list of an empty string": b'[""]',
    "list of true": b"[true]",
    "list of -1": b"[-1]",
    "list of 2**64": b"[%d]" % 2**64,
    "list of 10**6": b"[1000000]",
    "list of 5000 numbers": b"[" + b"1," * 4999 + b"1]",
    "list of 5000 strings": b"[" + b'"x",' * 4999 + b'"x"]',
    "list of 140000 numbers": b"[" + b"1," * 139_999 + b"1]",
    "list of 140000 objects": b"[" + b"{}," * 139_999 + b"{}]",
    "mixed list": b'[1,"a",[1]]',
    "list of a deep list": b"[" * 500 + b"]" * 500,
    "object": b'{"a":1}',
    "object of 5000": b"{" + b",".join(b'"%d":1' % i for i in range(5000)) + b"}",
    "object of 2**64": b'{"1":%d}' % 2**64,
    "object with a long key": b'{"' + b"k" * 200_000 + b'":1}',
    "deep object": b'{"a":' * 500 + b"1" + b"}" * 500,
}
ALL_VALUES = NO_JSON | VALUES
_MARK = "@@@"


class Field(typing.NamedTuple):
    """A field of a request: its path, and its type."""

    path: str
    name: str
    type: Any

    def body(self, raw: bytes) -> bytes:
        """Return a request in which it has a value that is given as JSON."""
        _, base = REQUESTS[self.path]
        return body_with(base, self.name.split("."), raw)


def body_with(base: dict[str, Any], keys: list[str], raw: bytes) -> bytes:
    def put(value: Any, rest: list[str]) -> Any:
        return _MARK if not rest else {**(value or {}), rest[0]: put((value or {}).get(rest[0]), rest[1:])}

    body = put(base, keys)
    if keys[0] == "response_format" and len(keys) > 1:
        body["response_format"].setdefault("type", "json_schema")
    return msgspec.json.encode(body).replace(b'"@@@"', raw)


def fields(path: str) -> Iterator[Field]:
    """Every field of a route's request, those of objects in it too."""
    yield from _fields(path, REQUESTS[path][0], "")


def _fields(path: str, kind: type[msgspec.Struct], prefix: str) -> Iterator[Field]:
    for field in msgspec.structs.fields(kind):
        name = prefix + field.encode_name
        yield Field(path, name, field.type)
        for part in (field.type, *typing.get_args(field.type)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from _fields(path, part, name + ".")


def takes(field: Field, raw: bytes) -> bool:
    """Whether a field's type takes a value at all."""
    try:
        msgspec.json.decode(raw, type=field.type)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True
