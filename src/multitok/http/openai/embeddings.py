"""``POST /v1/embeddings``."""

from __future__ import annotations

from array import array
from binascii import b2a_base64
from collections.abc import Iterator

import msgspec

from multitok.http.body_route import BodyRoute, Start
from multitok.http.decode import decode_body
from multitok.http.errors import invalid, named_for
from multitok.http.exchange import HttpExchange
from multitok.http.openai.common import check_priority, check_timeout, find_model, set_request_id
from multitok.http.openai.prompts import read_prompts
from multitok.http.openai.types import EmbeddingRequest, refuse_unsupported, unsupported_fields
from multitok.http.parts import joined_parts, respond_in_parts
from multitok.http.sse import encode_json
from multitok.tokenizer.requests import EmbeddingInput, EmbeddingOutput, RequestError

_decoder = msgspec.json.Decoder(EmbeddingRequest)
_NAMES = {"prompt": "input"}
_UNSUPPORTED = unsupported_fields(EmbeddingRequest)


class EmbeddingRoute(BodyRoute):
    """Serves embeddings."""

    def read(self, exchange: HttpExchange, in_thread: bool) -> Start:
        """Decode and check the body; see `BodyRoute`."""
        manager, limits = self._manager, self._limits
        body = decode_body(_decoder, exchange.body)
        request_id = set_request_id(
            exchange, "embd-", limits.max_request_id_length, rid=body.rid, request_id=body.request_id
        )
        model = find_model(body.model, manager, "embed")
        refuse_unsupported(body, _UNSUPPORTED)
        info = model.engine_info
        if body.encoding_format not in (None, "float", "base64"):
            raise invalid("encoding_format", "must be float or base64")
        if body.dimensions is not None and body.dimensions != info.embedding_size:
            raise invalid("dimensions", f"the model makes embeddings of {info.embedding_size} numbers only")
        prompts = read_prompts(body.input, "input", info, limits, truncate=bool(body.truncate))
        request = EmbeddingInput(
            prompts=prompts,
            model=model.index,
            request_id=request_id,
            id_is_given=exchange.id_is_given,
            truncate=bool(body.truncate),
            priority=check_priority(body.priority),
            tenant=exchange.tenant,
            timeout=check_timeout(body.timeout),
        )
        sink = EmbeddingCollector(exchange, len(prompts), body.encoding_format == "base64", model.name, request_id)

        def start() -> None:
            try:
                exchange.on_disconnect = manager.submit_embedding(request, sink).abort
            except RequestError as error:
                raise named_for(error, _NAMES) from None

        return start


class EmbeddingCollector:
    """Collects the embeddings of one request and sends one answer.

    Parameters
    ----------
    exchange : HttpExchange
        Where the answer goes.
    count : int
        Number of inputs.
    base64 : bool
        Little-endian float32 in base64, as the official client asks for, in place of a list.
    model : str
        Name in the answer.
    request_id : str
        `id` of the answer.
    """

    def __init__(self, exchange: HttpExchange, count: int, base64: bool, model: str, request_id: str) -> None:
        self._exchange = exchange
        self._rows: list[bytes] = [b""] * count
        self._missing = count
        self._base64 = base64
        self._model = model
        self._request_id = request_id
        self._prompt_tokens = 0

    def on_output(self, output: EmbeddingOutput) -> None:
        """Take one embedding; the last one sends the answer."""
        self._rows[output.index] = output.embedding
        self._prompt_tokens += output.prompt_tokens
        self._missing -= 1
        if self._missing == 0:
            respond_in_parts(self._exchange, self._answer())

    def on_error(self, error: RequestError) -> None:
        """Answer with the error."""
        self._exchange.send_error(named_for(error, _NAMES))

    def _answer(self) -> Iterator[bytes]:
        usage = {"prompt_tokens": self._prompt_tokens, "total_tokens": self._prompt_tokens}
        answer = {"id": self._request_id, "object": "list", "model": self._model, "usage": usage}
        yield encode_json(answer)[:-1] + b',"data":'
        yield from joined_parts(
            (encode_json({"object": "embedding", "index": i, "embedding": self._encode(row)}),)
            for i, row in enumerate(self._rows)
        )
        yield b"}"

    def _encode(self, row: bytes) -> str | list[float]:
        if self._base64:
            return b2a_base64(row, newline=False).decode()
        return array("f", row).tolist()
