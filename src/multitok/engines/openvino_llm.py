"""Text generation on OpenVINO GenAI: continuous batching, paged attention, prefix caching, from GGUF or OpenVINO IR.

`step` holds the GIL for its whole time, so nothing else in this process runs meanwhile; ``max_num_batched_tokens``
keeps it short, also when a long prompt comes in.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import openvino_genai as genai

from multitok.engines.base import EngineInfo, EngineLoad, EngineOutput, EngineRefusal, no_such_operation
from multitok.engines.grammar_gate import GrammarGate
from multitok.engines.openvino_blocks import Key, PartialBlocks
from multitok.engines.openvino_errors import error_text
from multitok.engines.openvino_sampling import RESUMABLE, SAMPLING, generation_config
from multitok.engines.options import OptionReader
from multitok.messages.base import FinishReason
from multitok.messages.operations import EngineOperation
from multitok.messages.sampling import EngineFields, Grammar, SamplingParams

logger = logging.getLogger(__name__)

PRECISIONS = ("f32", "f16", "bf16", "u8", "i8", "u4")
DEFAULT_KV_CACHE_GB = 2
DEFAULT_BATCHED_TOKENS = 128
# How long an idle engine's step waits for the verdict on a grammar.
GRAMMAR_WAIT_S = 0.005

GRAMMARS = ["json_object", "json_schema", "regex", "ebnf"]


class _Live:
    """A request in the pipeline."""

    __slots__ = ("handle", "ids", "logprobs", "number", "started")

    def __init__(self, number: int, handle: Any, input_ids: bytes, logprobs: bool) -> None:
        self.number = number
        self.handle = handle
        # Prompt and output, packed.
        self.ids = bytearray(input_ids)
        self.logprobs = logprobs
        self.started = False


class _Held(NamedTuple):
    """A request that waits for the next step, since another one has begun that goes on from the same block."""

    input_ids: bytes
    params: SamplingParams


class _Unchecked(NamedTuple):
    """A request that waits for the verdict on its grammar."""

    input_ids: bytes
    params: SamplingParams
    grammar: Grammar


class OpenVINOEngine:
    """A language model on OpenVINO GenAI's continuous batching pipeline.

    Parameters
    ----------
    model_path : Path or str
        A GGUF file, or a folder with ``openvino_model.xml``.
    options : dict of str to str
        ``device`` (CPU); ``num_threads`` (all cores); ``kv_cache_gb`` whole gigabytes (2) or ``kv_cache_tokens``;
        ``max_num_batched_tokens`` most ids that a step works on (128, or `max_running_requests` if that is more);
        ``prefix_caching`` (true); ``kv_cache_precision`` and ``inference_precision`` (f32 on CPU);
        ``dynamic_quantization`` group size in which activations are rounded to 8 bits (0, off): about twice the
        throughput, but a request's ids then depend on what runs beside it.
    eos_token_ids : sequence of int
        Ids that end a generation.
    context_length : int
        Most prompt ids plus output ids of one request; lowered to what the KV cache holds.
    vocab_size : int
        Ids are in ``[0, vocab_size)``.
    max_running_requests : int or None
        Most requests at once; None is ``max_num_batched_tokens``, as every running request needs one id per step.

    Raises
    ------
    ValueError
        An option is unknown or wrong, or OpenVINO can't load the model.
    """

    # The work is done inside `step`.
    wakeup: int | None = None

    def __init__(
        self,
        model_path: Path | str,
        options: dict[str, str],
        *,
        eos_token_ids: Sequence[int],
        context_length: int,
        vocab_size: int,
        max_running_requests: int | None = None,
    ) -> None:
        read = OptionReader("openvino", options)
        device = read.text("device") or "CPU"
        on_cpu = device.upper() == "CPU"
        exact = "f32" if on_cpu else None
        properties: dict[str, Any] = {
            "KV_CACHE_PRECISION": read.choice("kv_cache_precision", PRECISIONS) or exact,
            "INFERENCE_PRECISION_HINT": read.choice("inference_precision", PRECISIONS[:3]) or exact,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": read.integer("dynamic_quantization"),
            "INFERENCE_NUM_THREADS": read.integer("num_threads", minimum=1),
        }
        if on_cpu and properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] is None:
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        config = genai.SchedulerConfig()
        kv_cache_gb = read.integer("kv_cache_gb", minimum=1)
        kv_cache_tokens = read.integer("kv_cache_tokens", minimum=1)
        batched = read.integer("max_num_batched_tokens", minimum=1)
        prefix_caching = read.flag("prefix_caching")
        read.done()
        if kv_cache_gb is not None and kv_cache_tokens is not None:
            raise ValueError("options 'kv_cache_gb' and 'kv_cache_tokens' of engine 'openvino' exclude each other")
        # The paged attention of the CPU plugin works on blocks of 32 tokens, that of the GPU plugin on 16.
        self._block_size = 32 if on_cpu else 16
        if kv_cache_tokens is not None:
            config.num_kv_blocks = -(-kv_cache_tokens // self._block_size)
        else:
            config.cache_size = kv_cache_gb or DEFAULT_KV_CACHE_GB
        config.max_num_batched_tokens = batched or max(DEFAULT_BATCHED_TOKENS, max_running_requests or 0)
        config.max_num_seqs = max_running_requests or config.max_num_batched_tokens
        config.enable_prefix_caching = prefix_caching is not False

        started = time.monotonic()
        given = {name: str(value) for name, value in properties.items() if value is not None}
        try:
            self._pipeline = genai.ContinuousBatchingPipeline(str(model_path), config, device, given)
        except RuntimeError as error:
            raise ValueError(f"OpenVINO can't load {model_path}: {error_text(error)}") from error
        self._live: dict[int, _Live] = {}
        # The pipeline's own request ids: two requests with one id would leave it broken.
        self._pipeline_ids = 0
        self._eos = list(eos_token_ids)
        self._kv_tokens = self._warm_up() * self._block_size
        self._info = EngineInfo(
            name="openvino",
            version=str(genai.__version__),
            task="generate",
            vocab_size=vocab_size,
            context_length=min(context_length, self._kv_tokens),
            eos_token_ids=self._eos,
            sampling=SAMPLING,
            grammars=GRAMMARS,
            max_running_requests=config.max_num_seqs,
            resumable=RESUMABLE if _is_exact(properties) and not config.enable_prefix_caching else [],
        )
        self._unchecked: dict[int, _Unchecked] = {}
        self._held: dict[int, _Held] = {}
        self._partial_blocks = PartialBlocks(self._block_size) if config.enable_prefix_caching else None
        # Those that a request goes on from which has begun since the last step.
        self._taken: set[Key] = set()
        self._grammars = GrammarGate("openvino_grammar_compiler", str(model_path), str(vocab_size))
        logger.info(
            "loaded %s on %s in %.1f s: KV cache for %d tokens, context %d",
            Path(model_path).name,
            device,
            time.monotonic() - started,
            self._kv_tokens,
            self._info.context_length,
        )

    @property
    def info(self) -> EngineInfo:
        """What this engine is and can do."""
        return self._info

    def add_request(
        self,
        number: int,
        input_ids: bytes,
        params: SamplingParams,
        resumed: int = 0,
        fields: EngineFields | None = None,
    ) -> None:
        """Take a request; `resumed` makes no difference here. See `Engine.add_request`."""
        if number in self._live or number in self._unchecked or number in self._held:
            raise ValueError(f"request {number} is in the engine already")
        self._check_prompt(np.frombuffer(input_ids, dtype=np.int32), params)
        if params.grammar is not None:
            problem = self._grammars.verdict(params.grammar)
            if problem is None:
                generation_config(params, self._eos)
                self._unchecked[number] = _Unchecked(input_ids, params, params.grammar)
                return
            if problem:
                raise EngineRefusal(400, _grammar_problem(params.grammar, problem))
        self._start(number, input_ids, params)

    def abort(self, number: int) -> None:
        """Cancel a request; the next step frees its blocks. An unknown number is ignored."""
        self._unchecked.pop(number, None)
        self._held.pop(number, None)
        live = self._live.get(number)
        if live is not None:
            live.handle.cancel()
            self._end(live)

    def step(self) -> list[EngineOutput]:
        """Run one iteration of the pipeline and collect what it made."""
        outputs = self._start_checked() if self._unchecked else []
        if self._held:
            outputs += self._start_held()
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._taken.clear()
        for live in self._live.values():
            if live.handle.can_read():
                outputs.append(self._collect(live))
        for output in outputs:
            if output.finish is not None and (ended := self._live.get(output.number)) is not None:
                self._end(ended)
        return outputs

    def has_unfinished(self) -> bool:
        """Whether a request runs, waits or has yet to be freed."""
        return bool(self._unchecked) or bool(self._held) or bool(self._pipeline.has_non_finished_requests())

    def load(self) -> EngineLoad:
        """Return load figures; ``waiting`` are the requests that have no output yet."""
        waiting = len(self._unchecked) + len(self._held)
        if not self._live:
            return EngineLoad(0, waiting, 0.0)
        running = sum(live.started for live in self._live.values())
        used = self._pipeline.get_metrics().cache_usage / 100
        return EngineLoad(running, len(self._live) - running + waiting, min(1.0, used))

    def operate(self, operation: EngineOperation) -> None:
        """Do nothing of the kind: see ``info.operations``."""
        raise no_such_operation(self._info, operation)

    def shutdown(self) -> None:
        """Cancel what runs, let the pipeline free it, and release the model."""
        for number in [*self._live, *self._unchecked, *self._held]:
            self.abort(number)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._grammars.close()
        del self._pipeline

    def _start(self, number: int, input_ids: bytes, params: SamplingParams) -> None:
        """Give a request to the pipeline, now or before the step after the next."""
        if self._partial_blocks is not None:
            keys = self._partial_blocks.behind(input_ids)
            if not keys.isdisjoint(self._taken):
                self._held[number] = _Held(input_ids, params)
                return
            self._taken |= keys
        config = generation_config(params, self._eos)
        ids = np.frombuffer(input_ids, dtype=np.int32).astype(np.int64)
        self._pipeline_ids += 1
        try:
            handle = self._pipeline.add_request(self._pipeline_ids, ov.Tensor(ids.reshape(1, -1)), config)
        except RuntimeError as error:
            raise EngineRefusal(400, error_text(error)) from error
        self._live[number] = _Live(number, handle, input_ids, params.logprobs is not None)

    def _end(self, live: _Live) -> None:
        del self._live[live.number]
        if self._partial_blocks is not None:
            self._partial_blocks.ended(live.ids)

    def _start_held(self) -> list[EngineOutput]:
        """Start the requests that waited for a step; return the ends of those that the pipeline does not take."""
        held, self._held = self._held, {}
        ends: list[EngineOutput] = []
        for number, (input_ids, params) in held.items():
            try:
                self._start(number, input_ids, params)
            except EngineRefusal as refusal:
                ends.append(_end_of(number, refusal))
        return ends

    def _start_checked(self) -> list[EngineOutput]:
        """Start the requests whose grammar is good, and return the ends of those whose grammar is not."""
        # With nothing else to do, waiting here keeps the caller from spinning.
        given_up = self._grammars.poll(0.0 if self._pipeline.has_non_finished_requests() else GRAMMAR_WAIT_S)
        ends: list[EngineOutput] = []
        for number, (input_ids, params, grammar) in list(self._unchecked.items()):
            reason = given_up.get(grammar)
            # To ask for the verdict on one that was given up would ask the compiler again.
            problem = reason or self._grammars.verdict(grammar)
            if problem is None:
                continue
            del self._unchecked[number]
            try:
                if problem:
                    raise EngineRefusal(400 if reason is None else 503, _grammar_problem(grammar, problem))
                self._start(number, input_ids, params)
            except EngineRefusal as refusal:
                ends.append(_end_of(number, refusal))
        return ends

    def _warm_up(self) -> int:
        """Generate once, which compiles the kernels, and return the number of KV blocks."""
        config = genai.GenerationConfig()
        config.max_new_tokens = 2
        config.ignore_eos = True
        handle = self._pipeline.add_request(0, ov.Tensor(np.zeros((1, 2), dtype=np.int64)), config)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        # This request had one block; its part of the whole, in per cent, is the only way to learn the whole.
        usage = float(self._pipeline.get_metrics().cache_usage)
        if not handle.can_read() or usage <= 0:
            raise ValueError("the model did not generate a token at start")
        return round(100 / usage)

    def _check_prompt(self, ids: np.ndarray[Any, np.dtype[np.int32]], params: SamplingParams) -> None:
        """Refuse what the pipeline would take and answer with nonsense, or silence."""
        if not ids.size:
            raise EngineRefusal(400, "the prompt has no tokens")
        if ids.min() < 0 or ids.max() >= self._info.vocab_size:
            raise EngineRefusal(400, f"token ids must be from 0 to {self._info.vocab_size - 1}")
        total = ids.size + params.max_new_tokens
        if total > self._info.context_length:
            raise EngineRefusal(
                400,
                f"the prompt has {ids.size} tokens and up to {params.max_new_tokens} are to be generated, "
                f"but there is room for {self._info.context_length}",
            )

    def _collect(self, live: _Live) -> EngineOutput:
        """Read what the pipeline made for a request."""
        live.started = True
        output = EngineOutput(live.number, [])
        logprobs: list[float] = []
        while live.handle.can_read():
            parts = live.handle.read()
            if not parts:
                # Its status is IGNORED: the KV cache had no room for it, not even with everything else preempted.
                message = "the KV cache has no room left for this request"
                output.finish = FinishReason("error", status=503, message=message)
                break
            for part in parts.values():
                output.output_ids += part.generated_ids
                live.ids += array("i", part.generated_ids).tobytes()
                if live.logprobs:
                    logprobs += part.generated_log_probs
                if part.finish_reason != genai.GenerationFinishReason.NONE:
                    output.finish = self._finish(part.finish_reason, output.output_ids)
        if live.logprobs:
            output.logprobs = logprobs
        return output

    @staticmethod
    def _finish(reason: Any, output_ids: list[int]) -> FinishReason:
        if reason == genai.GenerationFinishReason.LENGTH:
            return FinishReason("length")
        return FinishReason("stop", matched=output_ids[-1] if output_ids else None)


def _end_of(number: int, refusal: EngineRefusal) -> EngineOutput:
    return EngineOutput(number, [], FinishReason("error", status=refusal.status, message=refusal.message))


def _is_exact(properties: dict[str, Any]) -> bool:
    """Whether nothing is rounded: ids worked on together, as a prompt, then give what they gave one by one."""
    precisions = (properties["KV_CACHE_PRECISION"], properties["INFERENCE_PRECISION_HINT"])
    return precisions == ("f32", "f32") and not properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"]


def _grammar_problem(grammar: Grammar, problem: str) -> str:
    return f"the {grammar.kind} can't be enforced: {problem}"
