"""``POST /generate``, in SGLang's shape.

A stream's events carry increments of ``text`` and ``output_ids``, as SGLang's ``--incremental-streaming-output`` has
them: its default, the whole text so far in every event, costs the square of an answer's length.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Annotated, Any

import msgspec

from multitok.engines.base import EngineInfo
from multitok.http.body_route import BodyRoute, Start
from multitok.http.choice import UsageCounter
from multitok.http.decode import decode_body
from multitok.http.engine_fields import read_engine_fields
from multitok.http.errors import invalid
from multitok.http.exchange import HttpExchange
from multitok.http.generation import generate
from multitok.http.manager import Model
from multitok.http.openai.bounds import (
    MAX_GRAMMAR_CHARACTERS,
    check_copies,
    check_grammar_text,
    check_logprobs,
    check_nested,
)
from multitok.http.openai.common import (
    check_priority,
    check_timeout,
    find_generator,
    set_request_id,
    with_adapter,
)
from multitok.http.openai.logprobs import finite
from multitok.http.openai.prompts import read_prompts
from multitok.http.openai.sampling import (
    FieldChecker,
    check_grammar,
    read_n,
    read_stop,
    sampling_params,
    with_logprobs,
)
from multitok.http.openai.types import (
    Neutral,
    SamplingFields,
    Unsupported,
    UnsupportedFlag,
    UnsupportedList,
    refuse_unsupported,
    unsupported_fields,
)
from multitok.http.parts import joined_parts, list_parts
from multitok.http.sse import DONE, encode_json
from multitok.http.token_ids import TokenIds, unpack_ids
from multitok.messages.base import FinishReason
from multitok.messages.sampling import Grammar
from multitok.tokenizer.requests import GenerateInput, GenerateOutput, Submission

DEFAULT_MAX_NEW_TOKENS = 128
_PREFIX = "sampling_params."


class NativeSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params``; as SGLang does, it refuses names that it doesn't know, the OpenAI API's among them."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    sampling_seed: int | None = None

    stream_interval: Annotated[Any, Neutral(1)] = None
    watermark: Unsupported = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Body of ``/generate``."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    rid: str | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    model: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    resumed_tokens: int | None = None
    lora_path: str | None = None

    input_embeds: Unsupported = None
    image_data: UnsupportedList = None
    audio_data: UnsupportedList = None
    video_data: UnsupportedList = None
    logprob_start_len: int | None = None
    token_ids_logprob: UnsupportedList = None
    return_hidden_states: UnsupportedFlag = None
    session_params: Unsupported = None
    custom_logit_processor: Unsupported = None


_decoder = msgspec.json.Decoder(GenerateRequest)
_UNSUPPORTED = unsupported_fields(GenerateRequest)
_UNSUPPORTED_SAMPLING = unsupported_fields(NativeSampling)


def _grammar(sampling: NativeSampling, info: EngineInfo) -> Grammar | None:
    grammars: list[tuple[str, Grammar]] = []
    if sampling.json_schema is not None:
        grammars.append(("json_schema", Grammar("json_schema", _schema_text(sampling.json_schema))))
    if sampling.regex is not None:
        grammars.append(("regex", Grammar("regex", sampling.regex)))
    if sampling.ebnf is not None:
        grammars.append(("ebnf", Grammar("ebnf", sampling.ebnf)))
    if not grammars:
        return None
    if len(grammars) > 1:
        raise invalid(_PREFIX + grammars[1][0], f"can't be combined with {grammars[0][0]}")
    name, grammar = grammars[0]
    check_grammar_text(_PREFIX + name, grammar.text)
    check_grammar(grammar, info, _PREFIX + name)
    return grammar


def _schema_text(schema: str | dict[str, Any]) -> str:
    name = _PREFIX + "json_schema"
    if isinstance(schema, str):
        check_grammar_text(name, schema)
        try:
            value = msgspec.json.decode(schema)
        except (ValueError, RecursionError) as error:
            raise invalid(name, f"is not valid JSON: {error}") from None
    else:
        value = schema
    check_nested(name, value, MAX_GRAMMAR_CHARACTERS)
    return schema if isinstance(schema, str) else encode_json(schema).decode()


def _resumed_tokens(body: GenerateRequest) -> int:
    """Return how many of the prompt's ids are output that another server made."""
    count = body.resumed_tokens
    if not count:
        return 0
    ids: TokenIds | list[int | list[int]] | None = body.input_ids
    if not ids or not (isinstance(ids, TokenIds) or isinstance(ids[0], int)):
        raise invalid("resumed_tokens", "needs input_ids with one prompt")
    if not 0 < count < len(ids):
        raise invalid("resumed_tokens", f"must be an integer from 0 to {len(ids) - 1}: a part of input_ids")
    return count


class GenerateRoute(BodyRoute):
    """Serves native generation."""

    def read(self, exchange: HttpExchange, in_thread: bool) -> Start:
        """Decode and check the body; see `BodyRoute`."""
        manager, limits = self._manager, self._limits
        body = decode_body(_decoder, exchange.body)
        request_id = set_request_id(exchange, "gen-", limits.max_request_id_length, rid=body.rid)
        model, adapter = find_generator(self._adapter(body) or body.model, manager)
        sampling = body.sampling_params or NativeSampling()
        refuse_unsupported(body, _UNSUPPORTED)
        refuse_unsupported(sampling, _UNSUPPORTED_SAMPLING, _PREFIX)
        info = model.engine_info
        seed = ("seed", sampling.seed)
        if sampling.sampling_seed is not None:
            if sampling.seed is not None:
                raise invalid(_PREFIX + "sampling_seed", "can't be combined with seed")
            seed = ("sampling_seed", sampling.sampling_seed)
        if body.text is not None and body.input_ids is not None:
            raise invalid("input_ids", "can't be combined with text")
        if body.text is not None:
            single = isinstance(body.text, str)
            prompts = read_prompts(body.text, "text", info, limits)  # type: ignore[arg-type]
        elif body.input_ids is not None:
            ids: Any = body.input_ids
            single = isinstance(ids, TokenIds) or (bool(ids) and isinstance(ids[0], int))
            prompts = read_prompts(ids, "input_ids", info, limits)
        else:
            raise invalid("text", "or input_ids is required")
        n = read_n(sampling.n, len(prompts), limits.max_prompts, _PREFIX)
        limit = DEFAULT_MAX_NEW_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
        params = sampling_params(
            sampling,
            FieldChecker(info, limits, _PREFIX),
            max_tokens=("max_new_tokens", limit),
            min_tokens=("min_new_tokens", sampling.min_new_tokens),
            seed=seed,
            grammar=_grammar(sampling, info),
            context_length=model.context_length,
        )
        # What makes a request of many choices.
        several = _PREFIX + "n" if n > 1 else "text" if body.text is not None else "input_ids"
        top = body.top_logprobs_num or 0
        if body.return_logprob:
            if body.logprob_start_len not in (None, -1):
                raise invalid("logprob_start_len", "must be -1: log probabilities of a prompt are not computed")
            choices = n * len(prompts)
            check_logprobs(several, choices, top, limit, stream=bool(body.stream), max_choices=limits.max_prompts)
            name = "top_logprobs_num" if top else "return_logprob"
            params = with_logprobs(params, top, info, name, "return_logprob")
        elif top:
            raise invalid("top_logprobs_num", "needs return_logprob to be true")
        stop = read_stop(sampling.stop, limits.max_stop_strings, _PREFIX)
        check_copies(several, prompts, n, params, stop)
        request = GenerateInput(
            prompts=prompts,
            model=model.index,
            sampling_params=params,
            max_new_tokens=limit,
            n=n,
            stop=stop,
            skip_special_tokens=sampling.skip_special_tokens is not False,
            stream=bool(body.stream),
            request_id=request_id,
            id_is_given=exchange.id_is_given,
            priority=check_priority(body.priority),
            tenant=exchange.tenant,
            timeout=check_timeout(body.timeout),
            engine_fields=with_adapter(read_engine_fields(body, info), adapter),
            resumed_tokens=_resumed_tokens(body),
        )
        writer = NativeWriter(model, request_id, body, single and n == 1)
        return partial(generate, exchange, manager, request, writer)

    def _adapter(self, body: GenerateRequest) -> str | None:
        """Read ``lora_path``: as in SGLang, the name under which the adapter was loaded."""
        name = body.lora_path
        if name and name not in self._manager.control.state.adapters:
            raise invalid("lora_path", f"no adapter {name[:200]!r} is loaded")
        return name


class NativeWriter:
    """Writes answers of /generate.

    Parameters
    ----------
    model : Model
        Knows the text of ids.
    request_id : str
        The call's id; choices of a call with several have ``-i`` appended.
    body : GenerateRequest
        What was asked for.
    single : bool
        The answer is one object, not a list; events have no index.

    Attributes
    ----------
    submission : Submission or None
        The call in progress.
    names : dict of str to str
        See `Writer`.
    """

    def __init__(self, model: Model, request_id: str, body: GenerateRequest, single: bool) -> None:
        prompt = "text" if body.text is not None else "input_ids"
        self.names = {"prompt": prompt, "max_tokens": _PREFIX + "max_new_tokens"}
        self._model = model
        self._id = request_id
        self._single = single
        self._logprobs = bool(body.return_logprob)
        self._top = body.top_logprobs_num or 0
        self._with_text = bool(body.return_text_in_logprobs)
        self._begun = time.monotonic()
        self.submission: Submission | None = None

    def first(self) -> bytes:
        """Nothing comes before the first delta."""
        return b""

    def delta_frame(self, index: int) -> None:
        """Every event carries ids too."""
        return

    def event(self, output: GenerateOutput) -> bytes:
        """Event of one delta."""
        if not output.text and not output.output_ids and output.finish is None:
            return b""
        return b"data: %b\n\n" % encode_json(self._choice(output, output.logprobs if self._logprobs else None))

    def last(self, usage: UsageCounter) -> bytes:
        """End of a stream."""
        return DONE

    def answer(self, outputs: Iterable[GenerateOutput], usage: UsageCounter) -> Iterator[bytes]:
        """Body of a whole answer."""
        choices = map(self._whole_choice, outputs)
        return next(choices) if self._single else joined_parts(choices)

    def _whole_choice(self, output: GenerateOutput) -> Iterator[bytes]:
        choice = encode_json(self._choice(output, None))
        if not self._logprobs or output.logprobs is None:
            yield choice
            return
        # What is in meta_info comes last.
        yield choice[:-2]
        for name, items in self._meta_logprobs(output, output.logprobs).items():
            yield b',"%b":' % name.encode()
            yield from list_parts(items)
        yield b"}}"

    def _choice(self, output: GenerateOutput, logprobs: Sequence[float] | None) -> dict[str, object]:
        meta: dict[str, object] = {
            "id": self._id if self._single else f"{self._id}-{output.index}",
            "finish_reason": _finish(output.finish, output.completion_tokens),
            "completion_tokens": output.completion_tokens,
        }
        if output.finish is not None:
            meta["prompt_tokens"] = output.prompt_tokens
            meta["cached_tokens"] = output.cached_tokens
            meta["e2e_latency"] = time.monotonic() - self._begun
            if output.customized_info is not None:
                # What is there by these names already is multitok's own word.
                meta = output.customized_info | meta
        if logprobs is not None:
            meta |= {name: list(items) for name, items in self._meta_logprobs(output, logprobs).items()}
        choice: dict[str, object] = {"text": output.text, "output_ids": unpack_ids(output.output_ids)}
        if not self._single:
            choice["index"] = output.index
        choice["meta_info"] = meta
        return choice

    def _meta_logprobs(self, output: GenerateOutput, logprobs: Sequence[float]) -> dict[str, Iterator[object]]:
        pairs = list(zip(unpack_ids(output.output_ids), logprobs, strict=False))
        columns: dict[str, Iterator[object]] = {"output_token_logprobs": starmap(self._logprob, pairs)}
        if self._top:
            tops = output.top_logprobs if output.top_logprobs is not None else [[pair] for pair in pairs]
            columns["output_top_logprobs"] = ([self._logprob(*pair) for pair in top[: self._top]] for top in tops)
        return columns

    def _logprob(self, token_id: int, logprob: float) -> tuple[float, int, str | None]:
        text = self._model.token_text(token_id)[0] if self._with_text else None
        return finite(logprob), token_id, text


def _finish(finish: FinishReason | None, tokens: int) -> dict[str, object] | None:
    if finish is None:
        return None
    if finish.type == "length":
        return {"type": "length", "length": tokens}
    return {"type": finish.type, "matched": finish.matched}
