"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import msgspec

from multitok.http.body_route import BodyRoute, Start
from multitok.http.choice import UsageCounter
from multitok.http.decode import decode_body
from multitok.http.engine_fields import passed_back, read_engine_fields, with_passed_back
from multitok.http.errors import invalid
from multitok.http.exchange import HttpExchange
from multitok.http.generation import generate
from multitok.http.manager import Model
from multitok.http.openai.bounds import check_copies, check_logprobs
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
from multitok.http.openai.logprobs import CompletionLogprobs, completion_logprobs, completion_logprobs_parts
from multitok.http.openai.prompts import read_prompts
from multitok.http.openai.sampling import (
    FieldChecker,
    read_n,
    read_response_format,
    read_stop,
    sampling_params,
    with_logprobs,
)
from multitok.http.openai.types import CompletionRequest, refuse_unsupported, unsupported_fields
from multitok.http.parts import joined_parts
from multitok.http.sse import DONE, encode_json
from multitok.http.token_ids import unpack_ids
from multitok.tokenizer.requests import GenerateInput, GenerateOutput, Submission

DEFAULT_MAX_TOKENS = 16

_decoder = msgspec.json.Decoder(CompletionRequest)
_UNSUPPORTED = unsupported_fields(CompletionRequest)


class CompletionRoute(BodyRoute):
    """Serves completions."""

    def read(self, exchange: HttpExchange, in_thread: bool) -> Start:
        """Decode and check the body; see `BodyRoute`."""
        manager, limits = self._manager, self._limits
        body = decode_body(_decoder, exchange.body)
        request_id = set_request_id(
            exchange, "cmpl-", limits.max_request_id_length, rid=body.rid, request_id=body.request_id
        )
        model, adapter = find_generator(body.model, manager)
        refuse_unsupported(body, _UNSUPPORTED)
        info = model.engine_info
        prompts = read_prompts(body.prompt, "prompt", info, limits)
        n = read_n(body.n, len(prompts), limits.max_prompts)
        if body.best_of is not None and body.best_of != n:
            raise invalid("best_of", "is only supported when equal to n")
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = sampling_params(
            body,
            FieldChecker(info, limits),
            max_tokens=("max_tokens", max_tokens),
            min_tokens=("min_tokens", body.min_tokens),
            seed=("seed", body.seed),
            grammar=read_response_format(body.response_format, info),
            context_length=model.context_length,
        )
        if body.logprobs is not None:
            if body.echo:
                raise invalid("echo", "can't be combined with logprobs: log probabilities of a prompt are not computed")
            check_logprobs(
                "n" if n > 1 else "prompt",
                n * len(prompts),
                body.logprobs,
                max_tokens,
                stream=bool(body.stream),
                max_choices=limits.max_prompts,
            )
            params = with_logprobs(params, body.logprobs, info, "logprobs", "logprobs")
        stop = read_stop(body.stop, limits.max_stop_strings)
        check_copies("n" if n > 1 else "prompt", prompts, n, params, stop)
        request = GenerateInput(
            prompts=prompts,
            model=model.index,
            sampling_params=params,
            max_new_tokens=max_tokens,
            n=n,
            stop=stop,
            skip_special_tokens=body.skip_special_tokens is not False,
            stream=bool(body.stream),
            add_special_tokens=body.add_special_tokens is not False,
            request_id=request_id,
            id_is_given=exchange.id_is_given,
            priority=check_priority(body.priority),
            tenant=exchange.tenant,
            timeout=check_timeout(body.timeout),
            engine_fields=with_adapter(read_engine_fields(body, info), adapter),
        )
        writer = CompletionWriter(model, adapter or model.name, request_id, body, n, wants_usage(body))
        if body.echo and not all(isinstance(prompt, str) for prompt in prompts):
            return lambda: exchange.run(self._echo_ids(exchange, model, request, writer))
        if body.echo:
            writer.echo = prompts  # type: ignore[assignment]
        return partial(generate, exchange, manager, request, writer)

    async def _echo_ids(
        self, exchange: HttpExchange, model: Model, request: GenerateInput, writer: CompletionWriter
    ) -> None:
        """Find the text of prompts that were given as ids, then go on; rare enough for a task."""
        prompts = [ids for ids in request.prompts if isinstance(ids, bytes)]
        writer.echo = await model.detokenize(prompts, request.skip_special_tokens)
        generate(exchange, self._manager, request, writer)


class CompletionWriter:
    """Writes completions.

    Parameters
    ----------
    model : Model
        Knows the text of ids.
    name : str
        In the answer: the model's, or its adapter's.
    request_id : str
        `id` of the answer.
    body : CompletionRequest
        What was asked for.
    n : int
        Choices per prompt.
    usage : bool
        Whether a stream ends with a usage chunk.

    Attributes
    ----------
    echo : list of str or None
        Text of each prompt, in front of its choices' text.
    submission : Submission or None
        The call in progress.
    names : dict of str to str
        See `Writer`.
    """

    names: Mapping[str, str] = {}

    def __init__(self, model: Model, name: str, request_id: str, body: CompletionRequest, n: int, usage: bool) -> None:
        self._model = model
        self._n = n
        self._usage = usage
        self._ids = bool(body.return_token_ids)
        self._logprobs = body.logprobs
        self.echo: list[str] | None = None
        self._detailed = self._ids or body.logprobs is not None or bool(body.echo)
        self.submission: Submission | None = None
        self._passed_back = b""
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        kind = "text_completion"
        fields = {"id": request_id, "object": kind, "created": int(time.time()), "model": name}
        self._open = encode_json(fields)[:-1]
        self._head = b"data: " + self._open + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._prefixes: dict[int, bytes] = {}
        self._suffix = b',"logprobs":null,"finish_reason":null}' + self._tail

    def first(self) -> bytes:
        """Nothing comes before the first delta."""
        return b""

    def delta_frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Frame of a delta of text."""
        return None if self._detailed or self.echo else (self._prefix(index), self._suffix)

    def event(self, output: GenerateOutput) -> bytes:
        """Chunk of one delta."""
        index, text = output.index, output.text
        if output.finish is None and not self._detailed:
            if not text:
                return b""
            return self._prefix(index) + encode_json(text) + self._suffix
        choice = self._choice(output)
        choice["logprobs"] = None if self._logprobs is None else self._new_logprobs(output, self._logprobs)
        return with_passed_back(self._head, output) + encode_json(choice) + self._tail

    def _new_logprobs(self, output: GenerateOutput, k: int) -> CompletionLogprobs | None:
        index = output.index
        logprobs = completion_logprobs(output, k, self._model, self._offsets.get(index, 0))
        if logprobs is not None and logprobs.tokens:
            self._offsets[index] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        return logprobs

    def _prefix(self, index: int) -> bytes:
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self._prefixes[index] = b'%b{"index":%d,"text":' % (self._head, index)
        return prefix

    def last(self, usage: UsageCounter) -> bytes:
        """Usage chunk, where asked for, and the end."""
        if not self._usage:
            return DONE
        return b'data: %b,"choices":[],"usage":%b}\n\n%b' % (self._open, encode_json(usage.usage()), DONE)

    def answer(self, outputs: Iterable[GenerateOutput], usage: UsageCounter) -> Iterator[bytes]:
        """Body of a whole answer."""
        yield self._open + b',"choices":'
        yield from joined_parts(map(self._whole_choice, outputs))
        yield self._passed_back + b',"usage":%b}' % encode_json(usage.usage())

    def _whole_choice(self, output: GenerateOutput) -> Iterator[bytes]:
        self._passed_back = self._passed_back or passed_back(output)
        yield encode_json(self._choice(output))[:-1] + b',"logprobs":'
        if self._logprobs is None:
            yield b"null"
        else:
            yield from completion_logprobs_parts(output, self._logprobs, self._model)
        yield b"}"

    def _choice(self, output: GenerateOutput) -> dict[str, object]:
        index = output.index
        begins = index not in self._begun
        self._begun.add(index)
        text = output.text
        if begins and self.echo is not None:
            text = self.echo[index // self._n] + text
        choice: dict[str, object] = {"index": index, "text": text, "finish_reason": finish_reason(output.finish)}
        if output.finish is not None:
            choice["stop_reason"] = stop_reason(output.finish, self._model.engine_info.eos_token_ids)
        if self._ids:
            choice["token_ids"] = unpack_ids(output.output_ids)
            if begins and self.submission:
                choice["prompt_token_ids"] = unpack_ids(self.submission.prompt_ids[index // self._n])
        return choice
