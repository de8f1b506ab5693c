"""vLLM behind the Engine protocol: token ids into its engine core, one batch of new ids per step out of it."""

from __future__ import annotations

import logging
import time
from array import array
from pathlib import Path
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import FinishReason as VLLMFinishReason

from multitok.engines.base import EngineInfo, EngineLoad, EngineOutput, EngineRefusal, no_such_operation
from multitok.engines.grammar_gate import GrammarGate
from multitok.engines.grammar_limits import problem_of_size
from multitok.engines.settings import EngineSettings
from multitok.engines.vllm_core import CoreDied, VLLMCore
from multitok.engines.vllm_grammars import GrammarChecks, grammar_problem
from multitok.engines.vllm_options import engine_args, engine_config
from multitok.engines.vllm_sampling import GRAMMARS, NOT_SPECULATIVE, SAMPLING, vllm_sampling_params
from multitok.messages.base import FinishReason
from multitok.messages.operations import (
    EngineOperation,
    FlushCache,
    LoadAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)
from multitok.messages.sampling import EngineFields, SamplingParams

logger = logging.getLogger(__name__)

# Backends for which a grammar is tried first; the others have limits of their own.
_TRIED_BACKENDS = ("auto", "xgrammar")


class _Live:
    """A request that has not ended."""

    __slots__ = ("cached_tokens", "number", "request_id", "started", "top")

    def __init__(self, number: int, request_id: str, top: int | None) -> None:
        self.number = number
        self.request_id = request_id
        self.top = top
        self.started = False
        self.cached_tokens = 0


class VLLMEngine:
    """A language model on vLLM's engine core.

    Parameters
    ----------
    settings : EngineSettings
        The model, and vLLM's own options in `command_line`.
    version : str
        Of the installed vLLM.

    Raises
    ------
    ValueError
        An option is unknown or wrong, or vLLM can't load the model.
    """

    def __init__(self, settings: EngineSettings, version: str) -> None:
        started = time.monotonic()
        args = engine_args(settings)
        self._config = config = engine_config(args)
        if config.model_config.runner_type != "generate":
            raise ValueError("engine 'vllm' generates text; for embeddings take engine 'openvino'")
        model = config.model_config
        # For grammars only: vLLM's checks of them look at it.
        self._tokenizer = cached_tokenizer_from_config(model)
        self._core = VLLMCore(config, log_stats=not args.disable_log_stats, directory=settings.runtime_dir)
        self._info = _info(config, settings, version, grammars=self._tokenizer is not None)
        self._eos = self._info.eos_token_ids
        self._live: dict[int, _Live] = {}
        self._by_id: dict[str, _Live] = {}
        self._requests = 0
        self._adapters: dict[str, Any] = {}
        self._adapter_ids = 0
        gate = None
        if config.structured_outputs_config.backend in _TRIED_BACKENDS:
            gate = GrammarGate("vllm_grammar_compiler", settings.files.tokenizer_file, str(self._info.vocab_size))
        self._grammars = GrammarChecks(self._verify, gate, self._core.notify)
        logger.info(
            "vLLM %s runs %s, loaded in %.1f s: context %d",
            version,
            Path(model.model).name,
            time.monotonic() - started,
            self._info.context_length,
        )

    @property
    def info(self) -> EngineInfo:
        """What this engine is and can do."""
        return self._info

    @property
    def wakeup(self) -> int | None:
        """Descriptor that is readable while the core has said something."""
        return self._core.wakeup

    def add_request(
        self,
        number: int,
        input_ids: bytes,
        params: SamplingParams,
        resumed: int = 0,
        fields: EngineFields | None = None,
    ) -> None:
        """Take a request; see `Engine.add_request`."""
        if number in self._live:
            raise ValueError(f"request {number} is in the engine already")
        if not input_ids:
            raise EngineRefusal(400, "the prompt has no tokens")
        try:
            sampling = vllm_sampling_params(params, self._eos, fields)
            if params.grammar is None:
                self._verify(sampling)
            elif problem := problem_of_size(params.grammar):
                raise EngineRefusal(400, grammar_problem(params.grammar, problem))
        except (ValueError, VLLMClientError) as error:
            raise EngineRefusal(400, str(error.args[0] if error.args else error)) from error
        adapter = self._adapter(fields)
        # Its own name, as what still comes for an aborted request must not be taken for the number's next one.
        self._requests += 1
        live = _Live(number, str(self._requests), params.logprobs)
        ids = array("i")
        ids.frombytes(input_ids)
        request = EngineCoreRequest(
            request_id=live.request_id,
            prompt_token_ids=ids.tolist(),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=adapter,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._live[number] = self._by_id[live.request_id] = live
        if params.grammar is None:
            self._core.add(request)
        else:
            self._grammars.submit(request, params.grammar)

    def abort(self, number: int) -> None:
        """Cancel a request; an unknown number is ignored."""
        live = self._live.pop(number, None)
        if live is not None:
            del self._by_id[live.request_id]
            self._core.abort(live.request_id)

    def step(self) -> list[EngineOutput]:
        """Return what the core has made since the last time, without waiting.

        Raises
        ------
        CoreDied
            The core has ended.
        """
        outputs: dict[int, EngineOutput] = {}
        for batch in self._core.take():
            for new in batch:
                live = self._by_id.get(new.request_id)
                if live is not None:
                    self._add_output(outputs, live, new)
        for request, finish in self._grammars.take():
            live = self._by_id.get(request.request_id)
            if live is None:
                continue
            if finish is None:
                self._core.add(request)
            else:
                self._forget(live)
                outputs[live.number] = EngineOutput(live.number, [], finish)
        return list(outputs.values())

    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._live)

    def load(self) -> EngineLoad:
        """Return load figures; ``waiting`` are the requests that have no output yet."""
        running = sum(live.started for live in self._live.values())
        used = self._core.cache_usage if self._live else 0.0
        return EngineLoad(running, len(self._live) - running, min(1.0, used))

    def operate(self, operation: EngineOperation) -> None:
        """Do what an operator asked for; the core's other work waits for it."""
        if operation.__struct_config__.tag not in self._info.operations:
            raise no_such_operation(self._info, operation)
        match operation:
            case FlushCache():
                if not self._call("reset_prefix_cache_async"):
                    raise EngineRefusal(503, "vLLM can't forget cached prefixes while requests use them")
            case LoadAdapter():
                self._load_adapter(operation.name, operation.path)
            case UnloadAdapter():
                adapter = self._adapters.pop(operation.name, None)
                if adapter is None:
                    raise EngineRefusal(400, f"there is no adapter {operation.name!r}")
                self._call("remove_lora_async", adapter.lora_int_id)
            case UpdateWeights():
                if not any(Path(operation.path).glob("*.safetensors")):
                    raise EngineRefusal(400, f"{operation.path} is no folder with *.safetensors")
                path = {"weights_path": operation.path}
                self._call("collective_rpc_async", "reload_weights", None, (), path)
                # Running requests go on, from what the new weights make of their ids.
                self._call("reset_prefix_cache_async", True)
            case StartProfile():
                if operation.folder is not None:
                    raise EngineRefusal(400, "where vLLM writes profiles is set at its start, by --profiler-config")
                self._call("profile_async", True)
            case StopProfile():
                self._call("profile_async", False)

    def shutdown(self) -> None:
        """End vLLM's processes."""
        self._grammars.close()
        self._live.clear()
        self._by_id.clear()
        self._core.close()

    def _verify(self, sampling: Any) -> None:
        config = self._config
        grammars = config.structured_outputs_config if sampling.structured_outputs is not None else None
        sampling.verify(config.model_config, config.speculative_config, grammars, self._tokenizer)

    def _adapter(self, fields: EngineFields | None) -> Any:
        if fields is None or fields.adapter is None:
            return None
        adapter = self._adapters.get(fields.adapter)
        if adapter is None:
            raise EngineRefusal(400, f"there is no adapter {fields.adapter!r}")
        return adapter

    def _load_adapter(self, name: str, path: str) -> None:
        if not Path(path).is_dir():
            raise EngineRefusal(400, f"{path} is no folder with an adapter")
        self._adapter_ids += 1
        # vLLM's prefix cache tells adapters apart by name, and another one under the same name must find it empty.
        adapter = LoRARequest(f"{name}#{self._adapter_ids}", self._adapter_ids, path)
        if not self._call("add_lora_async", adapter):
            raise EngineRefusal(400, f"vLLM did not take the adapter in {path}")
        replaced = self._adapters.get(name)
        self._adapters[name] = adapter
        if replaced is not None:
            self._call("remove_lora_async", replaced.lora_int_id)

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return self._core.call(method, *args)
        except CoreDied:
            raise
        except TimeoutError as error:
            raise EngineRefusal(503, str(error)) from error
        except Exception as error:  # the core's own, whose type vLLM doesn't pass on
            raise EngineRefusal(400, str(error) or type(error).__name__) from error

    def _add_output(self, outputs: dict[int, EngineOutput], live: _Live, new: Any) -> None:
        """Add what one step made for a request to what this call returns for it."""
        live.started = True
        if new.prefill_stats is not None:
            live.cached_tokens = new.prefill_stats.num_cached_tokens
        ids = new.new_token_ids
        if not ids and new.finish_reason is None:
            return
        output = outputs.get(live.number)
        if output is None:
            output = outputs[live.number] = EngineOutput(live.number, [], cached_tokens=live.cached_tokens)
            if live.top is not None:
                output.logprobs = []
                output.top_logprobs = [] if live.top else None
        output.output_ids += ids
        if new.new_logprobs is not None and live.top is not None:
            _add_logprobs(output, new.new_logprobs, len(ids), live.top)
        if new.finish_reason is not None:
            self._forget(live)
            output.finish = _finish(new)
            if new.kv_transfer_params is not None:
                output.customized_info = {"kv_transfer_params": new.kv_transfer_params}

    def _forget(self, live: _Live) -> None:
        del self._live[live.number]
        del self._by_id[live.request_id]


def _info(config: Any, settings: EngineSettings, version: str, *, grammars: bool) -> EngineInfo:
    """Return what vLLM can do in this configuration."""
    model, parallel = config.model_config, config.parallel_config
    left_out = NOT_SPECULATIVE if config.speculative_config is not None else set()
    if not grammars:
        left_out = {*left_out, "grammar"}
    operations = ["flush_cache", "update_weights_from_disk"]
    fields = []
    if config.lora_config is not None:
        fields.append("adapter")
        operations += ["load_lora_adapter", "unload_lora_adapter"]
    if config.kv_transfer_config is not None:
        fields.append("kv_transfer_params")
    if config.profiler_config.profiler is not None:
        operations += ["start_profile", "stop_profile"]
    vocab_size = model.get_vocab_size()
    engines = parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size
    return EngineInfo(
        name="vllm",
        version=version,
        task="generate",
        vocab_size=vocab_size,
        context_length=model.max_model_len,
        eos_token_ids=settings.files.eos_token_ids,
        sampling=[name for name in SAMPLING if name not in left_out],
        grammars=GRAMMARS if grammars else [],
        top_logprobs=vocab_size if model.max_logprobs == -1 else model.max_logprobs,
        max_running_requests=config.scheduler_config.max_num_seqs * engines,
        fields=fields,
        operations=operations,
    )


def _add_logprobs(output: EngineOutput, new: Any, count: int, top: int) -> None:
    """Add the chosen ids' log probabilities, which come first in each row, and the likeliest ids after them."""
    logprobs: list[list[float]] = new.logprobs[:count].tolist()
    if output.logprobs is not None:
        output.logprobs += [row[0] for row in logprobs]
    if output.top_logprobs is not None:
        ids: list[list[int]] = new.logprob_token_ids[:count].tolist()
        pairs = zip(ids, logprobs, strict=True)
        output.top_logprobs += [list(zip(i[1 : top + 1], p[1 : top + 1], strict=True)) for i, p in pairs]


def _finish(new: Any) -> FinishReason:
    match new.finish_reason:
        case VLLMFinishReason.LENGTH:
            return FinishReason("length")
        case VLLMFinishReason.ABORT:
            return FinishReason("abort")
        case VLLMFinishReason.ERROR:
            # From 0.33 on with what went wrong.
            error = getattr(new, "error", None)
            if error is None:
                return FinishReason("error", status=500, message="vLLM could not finish the request")
            status = 400 if error.code == "validation_error" else 503 if error.retryable else 500
            return FinishReason("error", status=status, message=error.message)
    return FinishReason("stop", matched=new.new_token_ids[-1] if new.new_token_ids else None)
