"""SGLang's schedulers as an engine: token ids to them, one batch of new ids per step from them.

Their processes, which do tensor, pipeline and data parallelism, are started here and end with this process. They work
by themselves; what they say is read when the scheduler's loop finds `SGLangEngine.wakeup` readable.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import zmq
from sglang.srt.managers import io_struct
from sglang.srt.runtime_context import get_exec, get_lora, get_parallel, get_serving

from multitok.engines.base import EngineInfo, EngineLoad, EngineOutput, EngineRefusal
from multitok.engines.settings import EngineSettings
from multitok.engines.sglang_launch import SGLangProcesses
from multitok.engines.sglang_link import Refused
from multitok.engines.sglang_operations import SGLangAdapters, operate
from multitok.engines.sglang_outputs import embedded, finish_of, generated, merge
from multitok.engines.sglang_requests import LiveRequest, embedding_request, generate_request, sampling_of
from multitok.messages.base import FinishReason
from multitok.messages.operations import EngineOperation, LoadAdapter, UnloadAdapter, UpdateWeights
from multitok.messages.sampling import EngineFields, SamplingParams

_log = logging.getLogger(__name__)

_SAMPLING = [
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "logit_bias",
]
_GRAMMARS = {
    "xgrammar": ["json_object", "json_schema", "regex", "ebnf"],
    "llguidance": ["json_object", "json_schema", "regex", "ebnf"],
    "outlines": ["json_object", "json_schema", "regex"],
}
# SGLang has no limit of its own.
_TOP_LOGPROBS = 128
# Of prompt and output together, what its schedulers leave free beside the longest prompt that they take.
_BESIDE_LONGEST_INPUT = 4
# One running and one waiting, so that SGLang can choose what comes next, and no slot waits for this process.
_REQUESTS_PER_SLOT = 2
_RUNNING_UNKNOWN = 128
_OPERATION_S = 240.0
_POLL_S = 1.0


class SGLangEngine:
    """SGLang's schedulers; see `Engine`.

    Parameters
    ----------
    settings : EngineSettings
        The model, and what the user wants.
    command_line : sequence of str
        For SGLang's parser: `sglang_command_line`.
    version : str
        Of SGLang.

    Raises
    ------
    ValueError
        SGLang refuses the options.
    RuntimeError
        A scheduler could not start.
    """

    def __init__(self, settings: EngineSettings, command_line: Sequence[str], version: str) -> None:
        started = time.monotonic()
        self._live: dict[int, LiveRequest] = {}
        self._by_rid: dict[str, LiveRequest] = {}
        self._next_rid = 0
        # What came while an operation waited for its answer, or was found out without SGLang.
        self._kept: dict[int, EngineOutput] = {}
        self._answers: list[Any] = []
        self._processes = SGLangProcesses(settings, command_line)
        try:
            self._link = self._processes.link
            self._answering = int(get_parallel().num_dp_ranks)
            self._adapters = SGLangAdapters(get_lora().lora_paths, get_lora().max_loaded_loras)
            self._info = self._describe(settings, version)
        except BaseException:
            self._processes.end()
            raise
        _log.info("SGLang %s is ready after %.1f s", version, time.monotonic() - started)

    @property
    def info(self) -> EngineInfo:
        """What this engine is and can do."""
        return self._info

    @property
    def wakeup(self) -> int:
        """Descriptor that is readable while a message of SGLang may be there, or one of its processes has died."""
        return self._link.wakeup.fileno()

    def add_request(
        self,
        number: int,
        input_ids: bytes,
        params: SamplingParams,
        resumed: int = 0,
        fields: EngineFields | None = None,
    ) -> None:
        """Send a request to SGLang; see `Engine.add_request`."""
        if number in self._live:
            raise ValueError(f"request {number} is in the engine already")
        if not input_ids:
            raise EngineRefusal(400, "the prompt has no tokens")
        # Of one width, so that none is the beginning of another: SGLang aborts all whose ids begin alike.
        rid = f"{self._next_rid:016x}"
        self._next_rid += 1
        request = LiveRequest(number, rid, len(input_ids) // 4)
        if self._info.task == "embed":
            message: Any = embedding_request(rid, input_ids)
        else:
            fields = fields or EngineFields()
            sampling = sampling_of(
                params,
                vocab_size=self._info.vocab_size,
                more_ends=self._more_ends,
                has_tokenizer=self._has_tokenizer,
            )
            request.logprobs = params.logprobs
            request.adapter = fields.adapter
            if params.ignore_eos:
                # SGLang then goes on after stop ids, too.
                request.stops = frozenset(params.stop_token_ids or ())
            lora_id = None if fields.adapter is None else self._adapters.id_of(fields.adapter)
            message = generate_request(rid, input_ids, params, sampling, fields, lora_id)
        try:
            self._link.send(message)
        except zmq.Again:
            raise EngineRefusal(503, "SGLang takes no more requests at the moment") from None
        self._live[number] = self._by_rid[rid] = request

    def abort(self, number: int) -> None:
        """Have SGLang free all that a request holds; what it has said about it already is dropped."""
        self._kept.pop(number, None)
        request = self._live.get(number)
        if request is not None:
            self._forget(request)
            self._send_if_alive(io_struct.AbortReq(rid=request.rid))

    def step(self) -> list[EngineOutput]:
        """Return what SGLang has said; never waits.

        Raises
        ------
        RuntimeError
            One of SGLang's processes has died, or failed.
        """
        self._receive()
        outputs = [*self._kept.values()]
        self._kept.clear()
        return outputs

    def has_unfinished(self) -> bool:
        """Whether SGLang has a request, or has said something that `step` has not returned."""
        return bool(self._live or self._kept)

    def load(self) -> EngineLoad:
        """Return load figures: a request runs once it has an id, and its ids are what it holds of the cache."""
        running = sum(request.made > 0 for request in self._live.values())
        tokens = sum(request.prompt_tokens + request.made for request in self._live.values())
        return EngineLoad(running, len(self._live) - running, min(1.0, tokens / self._kv_tokens))

    def operate(self, operation: EngineOperation) -> None:
        """Have all of SGLang's ranks do an operation, and wait for their answers.

        Raises
        ------
        EngineRefusal
            SGLang won't, or requests are in the way.
        RuntimeError
            SGLang has died, or doesn't answer.
        """
        if isinstance(operation, UpdateWeights) and self._live:
            # Its schedulers end with an error when they can't empty their cache for the new weights.
            raise EngineRefusal(503, f"{len(self._live)} requests are running; weights are updated when there are none")
        if isinstance(operation, LoadAdapter | UnloadAdapter):
            users = sum(request.adapter == operation.name for request in self._live.values())
            if users:
                raise EngineRefusal(503, f"{users} requests use LoRA adapter {operation.name!r}")
        operate(operation, self._ask, self._adapters, self._processes.load_format)

    def shutdown(self) -> None:
        """End SGLang's processes."""
        self._live.clear()
        self._by_rid.clear()
        self._kept.clear()
        self._processes.end()

    def _describe(self, settings: EngineSettings, version: str) -> EngineInfo:
        files, model, said = settings.files, self._processes.model_config, self._processes.infos[0]
        generates = files.task == "generate"
        self._has_tokenizer = not get_serving().skip_tokenizer_init
        self._kv_tokens = max(1, int(said["max_total_num_tokens"]) * self._answering)
        known_ends = set(model.hf_eos_token_id or ())
        self._more_ends = frozenset(files.eos_token_ids) - known_ends
        grammars = _GRAMMARS.get(str(get_exec().kernel.grammar_backend), []) if self._has_tokenizer else []
        sampling = [*_SAMPLING]
        if self._has_tokenizer:
            sampling.append("min_new_tokens")
        if get_exec().deterministic.enable_deterministic_inference:
            # Otherwise SGLang takes a seed, and ignores it.
            sampling.append("seed")
        if grammars:
            sampling.append("grammar")
        fields = ["bootstrap_host", "bootstrap_port", "bootstrap_room"]
        operations = ["flush_cache", "start_profile", "stop_profile", "update_weights_from_disk"]
        if get_lora().enable_lora:
            fields.append("adapter")
            if get_parallel().dp_size == 1:
                operations += ["load_lora_adapter", "unload_lora_adapter"]
        return EngineInfo(
            name="sglang",
            version=version,
            task=files.task,
            vocab_size=min(files.vocab_size, model.vocab_size),
            context_length=min(int(model.context_len), int(said["max_req_input_len"]) + _BESIDE_LONGEST_INPUT),
            eos_token_ids=sorted(known_ends | self._more_ends) if generates else [],
            sampling=sampling if generates else [],
            grammars=grammars if generates else [],
            top_logprobs=_TOP_LOGPROBS if generates else 0,
            max_running_requests=_REQUESTS_PER_SLOT * self._slots(),
            embedding_size=0 if generates else int(model.hidden_size),
            fields=fields if generates else [],
            operations=operations,
        )

    def _slots(self) -> int:
        """Return how many requests SGLang runs at once, in all its ranks."""
        answers = self._ask(io_struct.GetInternalStateReq(), io_struct.GetInternalStateReqOutput)
        each = (answer.internal_state.get("effective_max_running_requests_per_dp") for answer in answers)
        return sum(int(slots or _RUNNING_UNKNOWN) for slots in each)

    def _ask(self, question: Any, answer_type: type[Any]) -> list[Any]:
        """Send a control message and wait for the answer of every rank; ids that come meanwhile are kept."""
        deadline = time.monotonic() + _OPERATION_S
        self._answers.clear()
        self._link.send(question, wait=True)
        while True:
            self._receive()
            answers = [answer for answer in self._answers if isinstance(answer, answer_type)]
            if len(answers) >= self._answering:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"SGLang has not answered {type(question).__name__} in {_OPERATION_S:g} seconds")
            self._link.wakeup.poll(_POLL_S)
        if self._kept:
            self._link.ring()
        return answers

    def _receive(self) -> None:
        ready = [descriptor for descriptor, _ in self._link.wakeup.poll(0)]
        for message in self._link.receive():
            match message:
                case io_struct.BatchTokenIDOutput() | io_struct.BatchEmbeddingOutput():
                    self._take(message)
                case Refused(rids, reason):
                    _log.error("%s", reason)
                    self._fail(rids, reason)
                case io_struct.AbortReq():
                    self._end_aborted(message)
                case io_struct.ActiveRanksOutput():
                    # Of elastic expert parallelism: the controller is told by the tokenizer manager.
                    self._send_if_alive(message)
                case io_struct.HealthCheckOutput() | io_struct.FreezeGCReq() | io_struct.ConfigureLoggingReq():
                    pass
                case _:
                    self._answers.append(message)
        failure = self._processes.failure(ready)
        if failure is not None:
            raise RuntimeError(failure)

    def _take(self, batch: Any) -> None:
        read = generated if isinstance(batch, io_struct.BatchTokenIDOutput) else embedded
        for row, rid in enumerate(batch.rids or ()):
            request = self._by_rid.get(rid)
            if request is None:
                # Aborted, or ended here at a stop id, while SGLang was at its next step.
                continue
            try:
                output = read(batch, row, request)
            except (ValueError, IndexError, TypeError, AttributeError) as error:
                _log.exception("a row of SGLang's batch can't be read")
                self._fail([rid], f"SGLang's answer can't be read: {error}")
                continue
            if output is None:
                continue
            self._keep(output)
            if output.finish is not None:
                self._forget(request)
                if batch.finished_reasons[row] is None:
                    self._send_if_alive(io_struct.AbortReq(rid=rid))

    def _end_aborted(self, message: Any) -> None:
        """End a request that SGLang's scheduler gave up without having begun it."""
        request = self._by_rid.get(message.rid)
        if request is not None:
            reason = message.finished_reason or {"type": "abort", "message": message.abort_message}
            self._forget(request)
            self._keep(EngineOutput(request.number, [], finish_of(reason, [])))

    def _fail(self, rids: Iterable[str], reason: str) -> None:
        for rid in rids:
            request = self._by_rid.get(rid)
            if request is not None:
                self._forget(request)
                self._send_if_alive(io_struct.AbortReq(rid=rid))
                self._keep(EngineOutput(request.number, [], FinishReason("error", status=500, message=reason)))

    def _keep(self, output: EngineOutput) -> None:
        before = self._kept.get(output.number)
        if before is None:
            self._kept[output.number] = output
        else:
            merge(before, output)

    def _forget(self, request: LiveRequest) -> None:
        del self._live[request.number]
        del self._by_rid[request.rid]

    def _send_if_alive(self, message: Any) -> None:
        # Only a dead scheduler takes nothing, and `step` says so.
        with contextlib.suppress(zmq.Again):
            self._link.send(message)
