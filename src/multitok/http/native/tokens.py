"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from multitok.config import ServerArgs
from multitok.http.body_route import read_body
from multitok.http.errors import invalid
from multitok.http.manager import Manager
from multitok.http.openai.common import find_model
from multitok.http.openai.prompts import pack_ids, unpack_ids
from multitok.http.respond import json_response

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

    def _check_count(self, param: str, items: list[str] | list[list[int]]) -> None:
        if len(items) > self._max_prompts:
            raise invalid(param, f"has {len(items)} items; at most {self._max_prompts} are allowed")

    async def tokenize(self, request: Request) -> Response:
        """Serve ``/tokenize``: ids of a text, or of each text of a list."""
        body = await read_body(_tokenize_decoder, request)
        model = find_model(body.model, self._manager)
        specials = body.add_special_tokens is not False
        tokens: list[int] | list[list[int]]
        count: int | list[int]
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self._check_count("prompt", texts)
        rows = [unpack_ids(ids) for ids in await model.tokenize(texts, specials)]
        if isinstance(body.prompt, str):
            tokens, count = rows[0], len(rows[0])
        else:
            tokens, count = rows, [len(row) for row in rows]
        return json_response({"tokens": tokens, "count": count, "max_model_len": model.context_length})

    async def detokenize(self, request: Request) -> Response:
        """Serve ``/detokenize``: text of ids, or of each list of ids."""
        body = await read_body(_detokenize_decoder, request)
        model = find_model(body.model, self._manager)
        skip = body.skip_special_tokens is not False
        flat = [item for item in body.tokens if isinstance(item, int)]
        rows = [item for item in body.tokens if isinstance(item, list)]
        if flat and rows:
            raise invalid("tokens", "must not mix ids with lists of ids")
        self._check_count("tokens", rows)
        vocab_size = model.engine_info.vocab_size
        total = sum(map(len, rows)) + len(flat)
        if total > MOST_IDS:
            raise invalid("tokens", f"has {total} ids; at most {MOST_IDS} are allowed")
        for i, row in enumerate(rows or [flat]):
            if row:
                pack_ids(row, vocab_size, f"tokens[{i}]" if rows else "tokens")
        texts = await asyncio.gather(*(model.detokenize(row, skip) for row in rows or [flat]))
        return json_response({"text": texts if rows else texts[0]})
