"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from multitok.config import ServerArgs
from multitok.http.body_route import read_body
from multitok.http.decode import decode_body
from multitok.http.errors import invalid
from multitok.http.manager import Manager, Model
from multitok.http.openai.common import find_model
from multitok.http.respond import json_response
from multitok.http.token_ids import TokenIds, pack_ids, unpack_ids

# Their text takes a few tenths of a second, in a thread.
MOST_IDS = 1 << 20


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``/tokenize``."""

    prompt: str | list[str]
    add_special_tokens: bool | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``/detokenize``."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None
    model: str | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class TokenRoutes:
    """Serves the tokenizer.

    Parameters
    ----------
    manager : Manager
        Does the work.
    limits : ServerArgs
        What one request may hold.
    """

    def __init__(self, manager: Manager, limits: ServerArgs) -> None:
        self._manager = manager
        self._max_prompts = limits.max_prompts

    async def tokenize(self, request: Request) -> Response:
        """Serve ``/tokenize``: ids of a text, or of each text of a list."""
        body, model = await read_body(self._read_texts, request)
        single = isinstance(body.prompt, str)
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        packed = await model.tokenize(texts, body.add_special_tokens is not False)
        rows = [unpack_ids(ids) for ids in packed]
        counts = [len(row) for row in rows]
        tokens: list[int] | list[list[int]] = rows[0] if single else rows
        count: int | list[int] = counts[0] if single else counts
        return json_response({"tokens": tokens, "count": count, "max_model_len": model.context_length})

    async def detokenize(self, request: Request) -> Response:
        """Serve ``/detokenize``: text of ids, or of each list of ids."""
        rows, single, skip, model = await read_body(self._read_ids, request)
        texts = await model.detokenize(rows, skip)
        return json_response({"text": texts[0] if single else texts})

    def _read_texts(self, data: bytes) -> tuple[TokenizeRequest, Model]:
        body = decode_body(_tokenize_decoder, data)
        model = find_model(body.model, self._manager)
        if not isinstance(body.prompt, str):
            self._check_count("prompt", body.prompt)
        return body, model

    def _read_ids(self, data: bytes) -> tuple[list[bytes], bool, bool, Model]:
        """Return packed ids of each row, whether it is the only one, whether special tokens are left out, and whose."""
        body = decode_body(_detokenize_decoder, data)
        model = find_model(body.model, self._manager)
        tokens: TokenIds | list[int | list[int]] = body.tokens
        # Mixed, it is a list of rows that is wrong.
        single = isinstance(tokens, TokenIds) or all(isinstance(item, int) for item in tokens)
        rows: Any = [tokens] if single else tokens
        if not all(isinstance(row, list | TokenIds) for row in rows):
            raise invalid("tokens", "must not mix ids with lists of ids")
        if not single:
            self._check_count("tokens", rows)
        total = sum(map(len, rows))
        if total > MOST_IDS:
            raise invalid("tokens", f"has {total} ids; at most {MOST_IDS} are allowed")
        size = model.engine_info.vocab_size
        names = ["tokens"] if single else [f"tokens[{i}]" for i in range(len(rows))]
        packed = [pack_ids(row, size, name) if row else b"" for row, name in zip(rows, names, strict=True)]
        return packed, single, body.skip_special_tokens is not False, model

    def _check_count(self, param: str, items: Sized) -> None:
        if len(items) > self._max_prompts:
            raise invalid(param, f"has {len(items)} items; at most {self._max_prompts} are allowed")
