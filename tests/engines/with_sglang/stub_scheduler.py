"""A scheduler for SGLang 0.5.23 that runs no model: it takes the place of SGLang's class as one of its plugins.

All around it is SGLang's own: `run_scheduler_process` and the processes, the sockets, the messages, `Req` with its
rules for when a request is finished, and `SchedulerOutputStreamer` with its batches. Only what a model would do is
missing: a request gets its prompt's ids again and again, without end-of-sequence ids.

Environment: STUB_LOG, a file for a line of JSON per request; STUB_FAIL_TO_LOAD, what goes wrong while loading;
STUB_EVIL, a file that exists once anybody has unpickled what must not be.
"""

from __future__ import annotations

import json
import os
import signal
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import msgspec
import zmq
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import io_struct
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_device, get_parallel, get_serving
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

SLOTS = 24
STEP_S = 0.001
IDLE_MS = 1000
MAX_TOTAL_TOKENS = 100_000
EMBEDDING_SIZE = 16
# First prompt ids with which something goes wrong.
KILLED, RAISES, PICKLED_INFO, REFUSED, FORGED, DAMAGED, NO_NUMBER, NO_LOGPROBS = range(900, 908)


class Evil:
    """Unpickled, it leaves a trace."""

    def __reduce__(self):
        return (Path.touch, (Path(os.environ["STUB_EVIL"]),))


class StubScheduler:
    """What `run_scheduler_process` needs of a scheduler."""

    def __init__(self, server_args, port_args):
        if (reason := os.environ.get("STUB_FAIL_TO_LOAD")) is not None:
            raise ValueError(reason)
        self.gracefully_exit = False
        self.async_d2h_worker = None
        self.metrics_reporter = SimpleNamespace(_shutdown_fpm=lambda: None)
        self.model_config = ModelConfig.from_server_args(server_args)
        skip = get_serving().skip_tokenizer_init
        self.tokenizer = None if skip else get_tokenizer(get_serving().tokenizer_path)
        channels = SchedulerIpcChannels.create(
            port_args=port_args,
            is_rank_zero=get_parallel().tp_rank == 0,
            skip_tokenizer_init=skip,
            metrics_enabled=False,
            enable_scripted_runtime=False,
        )
        self.receiver = channels.recv_from_tokenizer
        self.to_tokenizer = channels.send_to_tokenizer
        self.to_detokenizer = channels.send_to_detokenizer
        self.streamer = SchedulerOutputStreamer(
            send_to_detokenizer=channels.send_to_detokenizer,
            tree_cache=None,
            server_args=server_args,
            is_generation=self.model_config.is_generation,
            spec_algorithm=SpeculativeAlgorithm.from_string(None),
            disaggregation_mode=DisaggregationMode.NULL,
            enable_hicache_storage=lambda: False,
        )
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.adapters: dict[str, str] = {}

    def get_init_info(self):
        length = min(self.model_config.context_len - 1, MAX_TOTAL_TOKENS - 1)
        startup = {"load_weight": 0.0, "kv_cache_allocation": 0.0, "scheduler_e2e": 0.0, "cuda_graph": {}}
        return {
            "status": "ready",
            "max_total_num_tokens": MAX_TOTAL_TOKENS,
            "max_req_input_len": length - 5,
            "startup_time": startup,
            "hicache_object_layout": None,
        }

    def run_event_loop(self):
        while not self.gracefully_exit:
            if not (self.running or self.waiting):
                self.receiver.poll(IDLE_MS)
            while True:
                try:
                    message = io_struct.sock_recv(self.receiver, zmq.NOBLOCK)
                except zmq.Again:
                    break
                self.handle(message)
            while self.waiting and len(self.running) < SLOTS:
                self.running.append(self.waiting.pop(0))
            if self.running:
                time.sleep(STEP_S)
                self.step()

    # Messages

    def handle(self, message):
        match message:
            case io_struct.TokenizedGenerateReqInput() | io_struct.TokenizedEmbeddingReqInput():
                self.take(message)
            case io_struct.AbortReq():
                self.abort(message)
            case io_struct.FlushCacheReqInput():
                words = "" if not self.running else "requests are running"
                self.answer(io_struct.FlushCacheReqOutput(success=not self.running, message=words))
            case io_struct.ProfileReq():
                self.log(profile=message.req_type.name, folder=message.output_dir)
                self.answer(io_struct.ProfileReqOutput(success=True, message="ok"))
            case io_struct.UpdateWeightFromDiskReqInput():
                there = Path(message.model_path).is_dir()
                words = "ok" if there else f"no weights in {message.model_path}"
                self.answer(io_struct.UpdateWeightFromDiskReqOutput(success=there, message=words))
            case io_struct.LoadLoRAAdapterReqInput():
                there = Path(message.lora_path).is_dir()
                if there:
                    self.adapters[message.lora_name] = message.lora_id
                words = None if there else f"no adapter in {message.lora_path}"
                self.answer(io_struct.LoRAUpdateOutput(success=there, error_message=words))
            case io_struct.UnloadLoRAAdapterReqInput():
                there = self.adapters.pop(message.lora_name, None) == message.lora_id
                self.answer(io_struct.LoRAUpdateOutput(success=there, error_message=None if there else "wrong id"))
            case io_struct.GetInternalStateReq():
                state = {"effective_max_running_requests_per_dp": SLOTS}
                self.answer(io_struct.GetInternalStateReqOutput(internal_state=state))
            case _:
                raise TypeError(f"the stub does not know {type(message).__name__}")

    def answer(self, message):
        self.to_tokenizer.send_output(message)

    def log(self, **line):
        if (file := os.environ.get("STUB_LOG")) is not None:
            with Path(file).open("a") as stream:
                stream.write(json.dumps(line) + "\n")

    def take(self, message):
        generates = isinstance(message, io_struct.TokenizedGenerateReqInput)
        self.log(rid=message.rid, **msgspec.to_builtins(self.described(message, generates)))
        logprobs = ("return_logprob", "top_logprobs_num") if generates else ()
        req = Req(
            message.rid,
            message.input_text,
            message.input_ids,
            message.sampling_params,
            stream=generates and message.stream,
            eos_token_ids=self.model_config.hf_eos_token_id,
            vocab_size=self.model_config.vocab_size,
            http_worker_ipc=message.http_worker_ipc,
            lora_id=message.lora_id,
            **{name: getattr(message, name) for name in logprobs},
        )
        req.tokenizer = self.tokenizer
        if generates and message.lora_id is not None and message.lora_id not in self.adapters.values():
            req.set_finish_with_abort(f"adapter {message.lora_id} is not loaded")
        self.waiting.append(req)

    def described(self, message, generates):
        names = ["lora_id", "input_text", "time_stats"]
        if generates:
            names += ["return_logprob", "logprob_start_len", "top_logprobs_num", "stream", "lora_name"]
            names += ["bootstrap_host", "bootstrap_port", "bootstrap_room"]
        sampling = {name: getattr(message.sampling_params, name) for name in message.sampling_params.__struct_fields__}
        place = {"dp_rank": get_parallel().dp_rank, "gpu_id": get_device().gpu_id}
        return {"sampling": sampling, **place, **{name: getattr(message, name) for name in names}}

    def abort(self, message):
        assert message.rid, "an empty id would end all requests"
        for req in [req for req in self.waiting if req.rid.startswith(message.rid)]:
            self.waiting.remove(req)
            self.answer(io_struct.AbortReq(rid=req.rid, finished_reason=message.finished_reason))
        for req in self.running:
            if req.rid.startswith(message.rid):
                # As in SGLang it still takes part in the next step.
                req.to_finish = FINISH_ABORT()

    # Steps

    def step(self):
        reqs, logprobs = self.running, any(req.return_logprob for req in self.running)
        for req in reqs:
            if not self.model_config.is_generation:
                self.embed(req)
                continue
            fault = req.origin_input_ids[0] if len(req.output_ids) == 1 else None
            if fault == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == RAISES:
                raise RuntimeError("the stub fails as it was told")
            elif fault == PICKLED_INFO:
                req.customized_info = {"evil": [Evil()] * 100}
            elif fault == REFUSED:
                req.to_finish = FINISH_ABORT("the stub refuses as it was told", 400, "BadRequestError")
            elif fault == FORGED:
                self.to_detokenizer.socket.send(io_struct.msgpack_encode(io_struct.wrap_as_pickle([Evil()])))
                self.to_detokenizer.socket.send(b"no msgpack at all")
            elif fault == DAMAGED:
                fields = msgspec.msgpack.encode(["BatchTokenIDOutput", [req.rid], None, "what is this?"])
                self.to_detokenizer.socket.send(fields)
            self.decode(req)
            if fault == NO_NUMBER:
                req.output_ids[-1] = -1
            req.update_finish_state()
            if fault == NO_LOGPROBS:
                req.logprob.output_token_logprobs_val.pop()
        self.streamer.stream_output(reqs, logprobs)
        self.running = [req for req in reqs if not req.finished()]

    def decode(self, req):
        ends = set(req.eos_token_ids or ())
        if req.tokenizer is not None:
            ends.add(req.tokenizer.eos_token_id)
        source = [token for token in req.origin_input_ids if token not in ends] or list(req.origin_input_ids[:1])
        position = len(req.output_ids)
        token = source[position % len(source)]
        if position < req.sampling_params.min_new_tokens:
            held = ends | set(req.sampling_params.stop_token_ids or ())
            while token in held:
                token = (token + 1) % self.model_config.vocab_size
        req.output_ids.extend(array("q", [token]))
        if req.return_logprob:
            value = -(1 + (7 * token + 13 * position) % 1000) / 1000
            logprob, top = req.logprob, req.logprob.top_logprobs_num
            logprob.output_token_logprobs_val.append(value)
            logprob.output_token_logprobs_idx.append(token)
            logprob.output_top_logprobs_val.append([value - i for i in range(top)])
            likely = [(token + i) % self.model_config.vocab_size for i in range(top)]
            logprob.output_top_logprobs_idx.append(likely)
            logprob.output_token_ids_logprobs_val.append(None)
            logprob.output_token_ids_logprobs_idx.append(None)
            if logprob.input_token_logprobs_val is None:
                logprob.input_token_logprobs_val = []
                logprob.input_token_logprobs_idx = []
                logprob.input_top_logprobs_val = []
                logprob.input_top_logprobs_idx = []
                logprob.input_token_ids_logprobs_val = []
                logprob.input_token_ids_logprobs_idx = []

    def embed(self, req):
        ids = req.origin_input_ids
        if ids[0] == REFUSED:
            req.finished_reason = FINISH_ABORT("the stub refuses as it was told", 400, "BadRequestError")
        else:
            req.finished_reason = FINISH_LENGTH(0)
        req.embedding = [float(ids[i % len(ids)]) for i in range(EMBEDDING_SIZE)]


def register():
    """Be SGLang's scheduler; see `sglang.srt.plugins`."""
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", StubScheduler, HookType.REPLACE)
