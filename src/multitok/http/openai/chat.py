"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from multitok.http.body_route import LARGE_BODY, BodyRoute, Start, TakesLong
from multitok.http.choice import UsageCounter
from multitok.http.decode import decode_body
from multitok.http.engine_fields import passed_back, read_engine_fields, with_passed_back
from multitok.http.errors import invalid
from multitok.http.exchange import HttpExchange
from multitok.http.generation import generate
from multitok.http.manager import Model
from multitok.http.openai.bounds import MAX_TEMPLATE_CHARACTERS, check_copies, check_logprobs, check_nested
from multitok.http.openai.common import (
    check_priority,
    check_timeout,
    find_generator,
    finish_reason,
    set_request_id,
    stop_reason,
    wants_usage,
    with_adapter,
)
from multitok.http.openai.logprobs import chat_logprobs, chat_logprobs_parts
from multitok.http.openai.messages import check_arguments, check_messages
from multitok.http.openai.sampling import (
    FieldChecker,
    read_n,
    read_response_format,
    read_stop,
    sampling_params,
    with_logprobs,
)
from multitok.http.openai.types import ChatRequest, refuse_unsupported, unsupported_fields
from multitok.http.parts import joined_parts
from multitok.http.sse import DONE, encode_json
from multitok.http.token_ids import unpack_ids
from multitok.tokenizer.requests import GenerateInput, GenerateOutput, RequestError, Submission
from multitok.tokenizer.template_limits import INLINE_SECONDS, MOST_SECONDS, TemplateTooSlow, time_limit

_decoder = msgspec.json.Decoder(ChatRequest)
_UNSUPPORTED = unsupported_fields(ChatRequest)
# A template takes a few milliseconds for so many.
_MANY_MESSAGES = 500
_TEMPLATE_ARGUMENTS = {"messages", "add_generation_prompt", "continue_final_message"}


class ChatRoute(BodyRoute):
    """Serves chat completions."""

    def read(self, exchange: HttpExchange, in_thread: bool) -> Start:
        """Decode and check the body; see `BodyRoute`."""
        manager, limits = self._manager, self._limits
        body = decode_body(_decoder, exchange.body)
        request_id = set_request_id(
            exchange, "chatcmpl-", limits.max_request_id_length, rid=body.rid, request_id=body.request_id
        )
        model, adapter = find_generator(body.model, manager)
        refuse_unsupported(body, _UNSUPPORTED)
        info = model.engine_info
        if body.max_completion_tokens is not None:
            limit = ("max_completion_tokens", body.max_completion_tokens)
        else:
            limit = ("max_tokens", body.max_tokens)  # type: ignore[assignment]
        params = sampling_params(
            body,
            FieldChecker(info, limits),
            max_tokens=limit,
            min_tokens=("min_tokens", body.min_tokens),
            seed=("seed", body.seed),
            grammar=read_response_format(body.response_format, info),
            context_length=model.context_length,
        )
        n = read_n(body.n, 1, limits.max_prompts)
        top = body.top_logprobs or 0
        if body.logprobs:
            check_logprobs("n", n, top, params.max_new_tokens, stream=bool(body.stream), max_choices=limits.max_prompts)
            params = with_logprobs(params, top, info, "top_logprobs" if top else "logprobs", "logprobs")
        elif top:
            raise invalid("top_logprobs", "needs logprobs to be true")
        prompts: list[str | bytes] = [render_chat(body, model, in_thread)]
        stop = read_stop(body.stop, limits.max_stop_strings)
        check_copies("n", prompts, n, params, stop)
        request = GenerateInput(
            prompts=prompts,
            model=model.index,
            sampling_params=params,
            max_new_tokens=limit[1],
            raw=False,
            n=n,
            stop=stop,
            skip_special_tokens=body.skip_special_tokens is not False,
            stream=bool(body.stream),
            add_special_tokens=False,
            request_id=request_id,
            id_is_given=exchange.id_is_given,
            priority=check_priority(body.priority),
            tenant=exchange.tenant,
            timeout=check_timeout(body.timeout),
            engine_fields=with_adapter(read_engine_fields(body, info), adapter),
        )
        writer = ChatWriter(model, adapter or model.name, request_id, body, n, wants_usage(body))
        return partial(generate, exchange, manager, request, writer)


def render_chat(body: ChatRequest, model: Model, in_thread: bool) -> str:
    """Render a conversation with the model's template.

    Parameters
    ----------
    body : ChatRequest
        Holds the conversation.
    model : Model
        Has the template.
    in_thread : bool
        Whether it may take long.

    Raises
    ------
    RequestError
        400 when the conversation, or what the template makes of it, is not acceptable.
    TakesLong
        It takes longer than it may.
    """
    if len(body.messages) > _MANY_MESSAGES and not in_thread:
        raise TakesLong
    check_messages(body.messages, model.context_length)
    if in_thread:
        check_arguments(body.messages)
    template = model.chat_template
    if template is None:
        raise RequestError(400, f"the model {model.name!r} has no chat template; use /v1/completions", "messages")
    going_on = bool(body.continue_final_message)
    opening = body.add_generation_prompt
    if going_on and opening:
        raise invalid("continue_final_message", "can't be combined with add_generation_prompt")
    arguments: dict[str, Any] = body.chat_template_kwargs or {}
    for name in arguments:
        if name in _TEMPLATE_ARGUMENTS:
            raise invalid(f"chat_template_kwargs.{name}", "is a field of the request itself")
    if arguments:
        check_nested("chat_template_kwargs", arguments, MAX_TEMPLATE_CHARACTERS)
    last = body.messages[-1].get("content")
    if isinstance(last, str) and len(last) > LARGE_BODY and template.keeps_text:
        # Rendering megabytes holds the interpreter's lock for longer than counting them.
        model.check_text(last.strip())
    try:
        with time_limit(MOST_SECONDS if in_thread else INLINE_SECONDS):
            return template.render(
                body.messages,
                in_thread,
                add_generation_prompt=not going_on if opening is None else opening,
                continue_final_message=going_on,
                **arguments,
            )
    except ValueError as exc:
        if isinstance(exc, TemplateTooSlow) and not in_thread:
            raise TakesLong from None
        raise RequestError(400, f"messages: {exc}", "messages") from None


class ChatWriter:
    """Writes chat completions.

    Parameters
    ----------
    model : Model
        Knows the text of ids.
    name : str
        In the answer: the model's, or its adapter's.
    request_id : str
        `id` of the answer.
    body : ChatRequest
        What was asked for.
    n : int
        Number of choices.
    usage : bool
        Whether a stream ends with a usage chunk.

    Attributes
    ----------
    submission : Submission or None
        The call in progress.
    names : dict of str to str
        See `Writer`.
    """

    def __init__(self, model: Model, name: str, request_id: str, body: ChatRequest, n: int, usage: bool) -> None:
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self.names = {"prompt": "messages", "max_tokens": limit}
        self._model = model
        self.submission: Submission | None = None
        self._n = n
        self._usage = usage
        self._ids = bool(body.return_token_ids)
        self._logprobs = bool(body.logprobs)
        self._top = body.top_logprobs or 0
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        fields = {"id": request_id, "object": kind, "created": int(time.time()), "model": name}
        self._open = encode_json(fields)[:-1]
        self._detailed = self._ids or self._logprobs
        self._passed_back = b""
        if body.stream:
            head = b"data: " + self._open + b',"choices":['
            self._head = head
            self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
            self._prefixes = [b'%b{"index":%d,"delta":{"content":' % (head, i) for i in range(n)]
            self._suffix = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def first(self) -> bytes:
        """Chunks that carry the role; the first one carries the prompt's ids too, where asked for."""
        chunks = [
            b'%b{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}%b'
            % (self._head, i, self._tail)
            for i in range(self._n)
        ]
        if self._ids and self.submission:
            ids = encode_json(unpack_ids(self.submission.prompt_ids[0]))
            chunks[0] = chunks[0].replace(b',"choices":[', b',"prompt_token_ids":%b,"choices":[' % ids, 1)
        return b"".join(chunks)

    def delta_frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Frame of a delta of text."""
        return None if self._detailed else (self._prefixes[index], self._suffix)

    def event(self, output: GenerateOutput) -> bytes:
        """Chunk of one delta."""
        text = output.text
        if output.finish is None and not self._detailed:
            return self._prefixes[output.index] + encode_json(text) + self._suffix if text else b""
        choice: dict[str, object] = {
            "index": output.index,
            "delta": {"content": text} if text else {},
            "logprobs": chat_logprobs(output, self._top, self._model) if self._logprobs else None,
            "finish_reason": finish_reason(output.finish),
        }
        if output.finish is not None:
            choice["stop_reason"] = stop_reason(output.finish, self._model.engine_info.eos_token_ids)
        if self._ids:
            choice["token_ids"] = unpack_ids(output.output_ids)
        return with_passed_back(self._head, output) + encode_json(choice) + self._tail

    def last(self, usage: UsageCounter) -> bytes:
        """Usage chunk, where asked for, and the end."""
        if not self._usage:
            return DONE
        return b'data: %b,"choices":[],"usage":%b}\n\n%b' % (self._open, encode_json(usage.usage()), DONE)

    def answer(self, outputs: Iterable[GenerateOutput], usage: UsageCounter) -> Iterator[bytes]:
        """Body of a whole answer."""
        yield self._open + b',"choices":'
        yield from joined_parts(map(self._choice, outputs))
        rest: dict[str, object] = {"usage": usage.usage()}
        if self._ids and self.submission:
            rest["prompt_token_ids"] = unpack_ids(self.submission.prompt_ids[0])
        yield self._passed_back + b"," + encode_json(rest)[1:]

    def _choice(self, output: GenerateOutput) -> Iterator[bytes]:
        self._passed_back = self._passed_back or passed_back(output)
        choice: dict[str, object] = {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "finish_reason": finish_reason(output.finish),
            "stop_reason": stop_reason(output.finish, self._model.engine_info.eos_token_ids),
        }
        if self._ids:
            choice["token_ids"] = unpack_ids(output.output_ids)
        yield encode_json(choice)[:-1] + b',"logprobs":'
        if self._logprobs:
            yield from chat_logprobs_parts(output, self._top, self._model)
        else:
            yield b"null"
        yield b"}"
