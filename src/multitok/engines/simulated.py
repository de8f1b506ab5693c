"""The simulated engine: no model runs here; for tests, fault injection and benchmarks, and never the default.

What it answers is known beforehand: the ids of a recorded text, ids that a test chooses, or the prompt itself. All of a
request's output is laid out when it comes in, so that a step costs a list slice and one struct per running request.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from multitok.engines.base import EngineInfo, EngineLoad, EngineOutput, EngineRefusal, Task, no_such_operation
from multitok.engines.options import OptionReader
from multitok.messages.base import FinishReason
from multitok.messages.operations import (
    ALL_OPERATIONS,
    EngineOperation,
    LoadAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
    name_of,
)
from multitok.messages.sampling import EngineFields, SamplingParams

logger = logging.getLogger(__name__)

TOP_LOGPROBS = 20
# Two neighbouring requests start this many ids apart in a replayed text: a prime, so that all offsets come up.
REPLAY_STRIDE = 997

# All but `logit_bias` and `grammar`. Those that choose among likely ids are accepted and change nothing.
SAMPLING = [
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
]
# Nothing is met by all but the first; they go back as they came, so that a test sees that they were here.
FIELDS = ["adapter", "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params"]


def simulated_logprob(token_id: int, position: int) -> float:
    """Return the log probability of an id at an output position: ``-(1 + (7 id + 13 position) mod 1000) / 1000``."""
    return -(1 + (7 * token_id + 13 * position) % 1000) / 1000


def simulated_top_logprobs(token_id: int, position: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """Return the chosen id and the ids after it, each a quarter less likely (in log probability) than the last."""
    first = simulated_logprob(token_id, position)
    return [((token_id + rank) % vocab_size, first - 0.25 * rank) for rank in range(min(count, vocab_size))]


def simulated_embedding(input_ids: bytes, size: int) -> bytes:
    """Return a unit vector, packed float32, that depends only on the ids: normal numbers seeded by their CRC-32."""
    vector = np.random.default_rng(zlib.crc32(input_ids)).standard_normal(size).astype(np.float32)
    return bytes((vector / np.linalg.norm(vector)).astype(np.float32).tobytes())


class _Request:
    """One request: its whole output, laid out beforehand, and how far it has come."""

    __slots__ = ("fields", "finish", "kv_tokens", "number", "output", "position", "prefill_left", "prompt", "top")

    def __init__(
        self,
        number: int,
        prompt: bytes,
        output: list[int],
        finish: FinishReason,
        top: int | None = None,
        position: int = 0,
        fields: EngineFields | None = None,
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.output = output
        self.finish = finish
        self.top = top
        self.position = position
        self.fields = fields
        self.prefill_left = len(prompt) // 4
        self.kv_tokens = 0


class SimulatedEngine:
    """An engine that runs no model.

    Parameters
    ----------
    options : dict of str to str
        ``replay=FILE`` replays the ids of a JSON list, from an offset that depends on the number of requests so far;
        ``ids=1,2,3`` answers these, again and again; with neither, a request is answered with its own prompt ids,
        without end-of-sequence ids, again and again. A request with an adapter gets the same ids from the last to the
        first.
        ``step_ms`` time between steps; ``prefill_ms_per_token`` time per prompt id, added to the step that works on it;
        ``prefill_chunk`` most prompt ids of a request per step (all); ``tokens_per_step`` ids per running request and
        step, or a list that is gone through step by step; ``max_running`` requests with a slot (256); ``kv_tokens``
        room for prompt and output ids of running requests (no limit); ``eos_after=N`` makes the N-th output id the
        end-of-sequence id; ``embedding_size`` (384).
        Failures: ``fail_on_id=X`` a request fails at once when X is in its prompt; ``fail_after_tokens=N`` every
        request fails after N ids; ``crash_after_steps=N`` the N-th step raises; ``load_s`` time that loading takes.
    vocab_size : int
        Ids are in ``[0, vocab_size)``.
    eos_token_ids : sequence of int
        End-of-sequence ids of the model that is played.
    context_length : int
        Most prompt ids plus output ids of one request.
    task : {'generate', 'embed'}
        Which kind of model is played.

    Raises
    ------
    ValueError
        An option is unknown or wrong.
    """

    # The work is done inside `step`.
    wakeup: int | None = None

    def __init__(
        self,
        options: dict[str, str],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        context_length: int,
        task: Task,
    ) -> None:
        read = OptionReader("simulated", options)
        replay = read.text("replay")
        ids = read.integers("ids")
        self._step_s = (read.number("step_ms") or 0.0) / 1000
        self._prefill_s = (read.number("prefill_ms_per_token") or 0.0) / 1000
        self._prefill_chunk = read.integer("prefill_chunk", minimum=1) or context_length
        self._tokens_per_step = read.integers("tokens_per_step", minimum=1) or [1]
        self._max_running = read.integer("max_running", minimum=1) or 256
        self._kv_tokens = read.integer("kv_tokens", minimum=1)
        self._eos_after = read.integer("eos_after", minimum=1)
        embedding_size = read.integer("embedding_size", minimum=1) or 384
        self._fail_on_id = read.integer("fail_on_id")
        self._fail_after = read.integer("fail_after_tokens")
        self._crash_after = read.integer("crash_after_steps", minimum=1)
        load_s = read.number("load_s") or 0.0
        read.done()
        if replay is not None and ids is not None:
            raise ValueError("options 'replay' and 'ids' of engine 'simulated' exclude each other")
        if replay is not None:
            ids = _read_replay(replay)
        if ids is not None and max(ids) >= vocab_size:
            raise ValueError(
                f"engine 'simulated' was told to answer id {max(ids)}, but the vocabulary has {vocab_size}"
            )
        if self._eos_after is not None and not eos_token_ids:
            raise ValueError("option 'eos_after' of engine 'simulated' needs a model with an end-of-sequence id")
        self._source = ids
        self._stride = REPLAY_STRIDE if replay is not None else 0
        self._eos = frozenset(eos_token_ids)
        self._info = EngineInfo(
            name="simulated",
            version="1",
            task=task,
            simulated=True,
            vocab_size=vocab_size,
            context_length=context_length,
            eos_token_ids=list(eos_token_ids),
            sampling=SAMPLING if task == "generate" else [],
            top_logprobs=TOP_LOGPROBS if task == "generate" else 0,
            max_running_requests=self._max_running,
            embedding_size=embedding_size if task == "embed" else 0,
            # A replayed text begins anywhere; all else follows from the prompt and the position.
            resumable=SAMPLING if task == "generate" and replay is None else [],
            fields=FIELDS if task == "generate" else [],
            # As far as they can be without a model.
            operations=ALL_OPERATIONS if task == "generate" else [],
        )
        self._adapters: set[str] = set()
        self._profiling = False
        self._waiting: dict[int, _Request] = {}
        self._running: dict[int, _Request] = {}
        self._kv_reserved = 0
        self._requests = 0
        self._steps = 0
        self._last_end = 0.0
        logger.warning("simulated engine: no model runs, answers are %s", _describe(replay, ids, task))
        time.sleep(load_s)

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
        """Take a request and lay out its output; see `Engine.add_request`."""
        if number in self._running or number in self._waiting:
            raise ValueError(f"request {number} is in the engine already")
        if not input_ids:
            raise EngineRefusal(400, "the prompt has no tokens")
        prompt_tokens = len(input_ids) // 4
        if self._info.task == "embed":
            request = _Request(number, input_ids, [], FinishReason("stop"))
            request.kv_tokens = prompt_tokens
        else:
            adapter = None if fields is None else fields.adapter
            if adapter is not None and adapter not in self._adapters:
                raise EngineRefusal(404, f"the adapter {adapter!r} is not loaded")
            output, finish = self._plan(input_ids, params, resumed, backwards=adapter is not None)
            request = _Request(number, input_ids, output, finish, params.logprobs, resumed, fields)
            request.kv_tokens = prompt_tokens + params.max_new_tokens
        if self._kv_tokens is not None and request.kv_tokens > self._kv_tokens:
            raise EngineRefusal(
                400, f"the request needs room for {request.kv_tokens} tokens, but the KV cache has {self._kv_tokens}"
            )
        self._requests += 1
        if not self._running and not self._waiting:
            self._last_end = time.monotonic()
        self._waiting[number] = request

    def abort(self, number: int) -> None:
        """Forget a request; an unknown number is ignored."""
        if self._waiting.pop(number, None) is None:
            self._end(number)

    def step(self) -> list[EngineOutput]:
        """Give every running request its next ids, after the time that this would take."""
        tokens = self._tokens_per_step[self._steps % len(self._tokens_per_step)]
        self._steps += 1
        if self._crash_after is not None and self._steps >= self._crash_after:
            raise RuntimeError(f"simulated crash at step {self._steps} (option 'crash_after_steps')")
        self._admit()
        if not self._running:
            return []
        outputs: list[EngineOutput] = []
        ended: list[int] = []
        prefilled = 0
        for number, request in self._running.items():
            if request.prefill_left:
                done = min(request.prefill_left, self._prefill_chunk)
                prefilled += done
                request.prefill_left -= done
                if request.prefill_left:
                    continue
            start = request.position
            request.position = end = start + tokens
            output = EngineOutput(number, request.output[start:end])
            if end >= len(request.output):
                ended.append(number)
                output.finish = request.finish
                if request.fields is not None:
                    output.customized_info = {name: getattr(request.fields, name) for name in request.fields.in_use()}
                if self._info.embedding_size and request.finish.type != "error":
                    output.embedding = simulated_embedding(request.prompt, self._info.embedding_size)
            if request.top is not None:
                self._add_logprobs(output, start, request.top)
            outputs.append(output)
        for number in ended:
            self._end(number)
        self._wait(self._step_s + prefilled * self._prefill_s)
        return outputs

    def has_unfinished(self) -> bool:
        """Whether any request is left."""
        return bool(self._running or self._waiting)

    def load(self) -> EngineLoad:
        """Return load figures; without a limit of KV tokens they are measured against all slots at full length."""
        room = self._kv_tokens or self._max_running * self._info.context_length
        return EngineLoad(len(self._running), len(self._waiting), min(1.0, self._kv_reserved / room))

    def operate(self, operation: EngineOperation) -> None:
        """Keep the names of adapters, and do as if in all else: no file is read."""
        if name_of(operation) not in self._info.operations:
            raise no_such_operation(self._info, operation)
        match operation:
            case LoadAdapter() | UpdateWeights():
                if not Path(operation.path).exists():
                    raise EngineRefusal(400, f"there is nothing at {operation.path}")
                if isinstance(operation, LoadAdapter):
                    self._adapters.add(operation.name)
            case UnloadAdapter():
                self._adapters.discard(operation.name)
            case StartProfile() | StopProfile():
                if self._profiling == isinstance(operation, StartProfile):
                    raise EngineRefusal(400, f"a profile is {'' if self._profiling else 'not '}being recorded")
                self._profiling = not self._profiling
        logger.warning("simulated engine: did as if: %s", operation)

    def shutdown(self) -> None:
        """Forget all requests."""
        self._waiting.clear()
        self._running.clear()
        self._kv_reserved = 0

    def _admit(self) -> None:
        """Move waiting requests into free slots, in order; the first that doesn't fit holds the others back."""
        while self._waiting and len(self._running) < self._max_running:
            number, request = next(iter(self._waiting.items()))
            if self._kv_tokens is not None and self._kv_reserved + request.kv_tokens > self._kv_tokens:
                return
            del self._waiting[number]
            self._running[number] = request
            self._kv_reserved += request.kv_tokens

    def _end(self, number: int) -> None:
        request = self._running.pop(number, None)
        if request is not None:
            self._kv_reserved -= request.kv_tokens

    def _wait(self, duration: float) -> None:
        """Sleep until the step's end; time that was lost is not caught up."""
        now = time.monotonic()
        self._last_end = max(now, self._last_end + duration)
        if self._last_end > now:
            time.sleep(self._last_end - now)

    def _add_logprobs(self, output: EngineOutput, start: int, top: int) -> None:
        output.logprobs = [simulated_logprob(token, start + i) for i, token in enumerate(output.output_ids)]
        if top:
            output.top_logprobs = [
                simulated_top_logprobs(token, start + i, top, self._info.vocab_size)
                for i, token in enumerate(output.output_ids)
            ]

    def _plan(
        self, input_ids: bytes, params: SamplingParams, resumed: int, backwards: bool
    ) -> tuple[list[int], FinishReason]:
        """Return all ids that the request gets, those of an earlier run included, and why it will end."""
        ids: list[int] = np.frombuffer(input_ids, dtype=np.int32).tolist()
        prompt, before = ids[: len(ids) - resumed], ids[len(ids) - resumed :]
        if self._fail_on_id is not None and self._fail_on_id in prompt:
            return [], FinishReason("error", status=500, message=f"simulated failure: id {self._fail_on_id} in prompt")
        limit = resumed + params.max_new_tokens
        if self._source is None:
            source = [token for token in prompt if token not in self._eos] or prompt[:1]
            output = _cycle(source[::-1] if backwards else source, 0, limit)
        else:
            source = self._source[::-1] if backwards else self._source
            output = _cycle(source, self._requests * self._stride, limit)
        output[:resumed] = before
        stops = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops |= self._eos
        least = resumed + params.min_new_tokens
        early = output[resumed:least]
        if not stops.isdisjoint(early):
            output[resumed:least] = [_other_than(stops, token, self._info.vocab_size) for token in early]
        if self._eos_after is not None and self._eos.isdisjoint(before[self._eos_after - 1 :]):
            # A model that may not end before `min_new_tokens` ends with the next id.
            last = max(self._eos_after, least + 1)
            if last <= limit:
                output[last - 1] = min(self._eos)
        finish = FinishReason("length")
        if stops and not stops.isdisjoint(output[resumed:]):
            last = next(i for i, token in enumerate(output) if i >= resumed and token in stops)
            finish = FinishReason("stop", matched=output[last])
            del output[last + 1 :]
        if self._fail_after is not None and self._fail_after < len(output):
            message = f"simulated failure after {self._fail_after} tokens"
            return output[: self._fail_after], FinishReason("error", status=500, message=message)
        return output, finish


def _cycle(source: list[int], offset: int, count: int) -> list[int]:
    """Return `count` ids of `source` from `offset` on, starting over at its end."""
    offset %= len(source)
    output = source[offset : offset + count]
    while len(output) < count:
        output += source[: count - len(output)]
    return output


def _other_than(stops: set[int], token: int, vocab_size: int) -> int:
    """Return `token`, or the next id that is no stop id."""
    for candidate in range(token, token + len(stops) + 1):
        if candidate % vocab_size not in stops:
            return candidate % vocab_size
    return token


def _read_replay(file: str) -> list[int]:
    try:
        ids = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"option 'replay' of engine 'simulated': {file} can't be read: {error}") from error
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"option 'replay' of engine 'simulated': {file} is no JSON list of token ids")
    return ids


def _describe(replay: str | None, ids: list[int] | None, task: Task) -> str:
    if task == "embed":
        return "vectors made from the ids"
    if replay is not None:
        return f"replayed from {replay}"
    return "the prompt's ids" if ids is None else f"{len(ids)} chosen ids"
