"""A scheduler process for SGLang 0.5.23 that runs no model: it replays ids, one per running request and step.

It takes the place of `run_scheduler_process`. Everything around it is SGLang's own: its channels and messages, the
accumulator that builds `BatchTokenIDOutput` (so every field has its real shape), its time stats, and in Rust mode its
`RustServer`, whose threads live in this process.

Environment: STUB_STEP_MS, time of a step; STUB_TOKENS, a JSON list of ids.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
import traceback
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

log = logging.getLogger("stub")

# A request that isn't streamed still gets its ids in such portions (SGLANG_FORCE_STREAM_INTERVAL).
FORCE_INTERVAL = 50
MAX_TOTAL_TOKENS = 4_000_000
MAX_INPUT_TOKENS = MAX_TOTAL_TOKENS - 6
# Two neighbouring requests start this many ids apart in the replayed text.
STRIDE = 7919
PROMPT_TAIL = 5
POLL_MS = 1000
STARTUP = {"load_weight": 0.0, "kv_cache_allocation": 0.0, "scheduler_e2e": 0.0, "cuda_graph": {}}


def run_stub_scheduler(
    server_args: Any,
    port_args: Any,
    gpu_id: int,
    tp_rank: int,
    pp_rank: int,
    dp_rank: Any,
    pipe: Any,
    *_: Any,
    **__: Any,
) -> None:
    """Stand in for `run_scheduler_process`."""
    try:
        import setproctitle
        from sglang.srt.managers.scheduler import SpawnRanks, configure_scheduler_process, spawn_world_rank
        from sglang.srt.runtime_context import publish

        world_rank = spawn_world_rank(server_args, tp_rank=tp_rank, pp_rank=pp_rank)
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=gpu_id))
        configure_scheduler_process(server_args, gpu_id)
        setproctitle.setproctitle("sglang::stub_scheduler")
        from sglang.srt.environ import envs

        channel = RustChannel(server_args) if envs.SGLANG_RUST_SERVER.get() else ZmqChannel(port_args)
        scheduler = StubScheduler(channel)
        pipe.send(
            {
                "status": "ready",
                "max_total_num_tokens": MAX_TOTAL_TOKENS,
                "max_req_input_len": MAX_INPUT_TOKENS,
                "startup_time": STARTUP,
                "hicache_object_layout": None,
            }
        )
        gc.collect()
        gc.freeze()
        gc.disable()
        scheduler.run()
    except BaseException:
        traceback.print_exc()
        raise


class ZmqChannel:
    """The sockets that SGLang's Python front end uses."""

    rust = False

    def __init__(self, port_args: Any) -> None:
        import zmq
        from sglang.srt.managers.io_struct import sock_recv, wrap_as_pickle
        from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
        from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
        from sglang.srt.runtime_context import get_serving

        channels = SchedulerIpcChannels.create(
            port_args=port_args,
            is_rank_zero=True,
            skip_tokenizer_init=get_serving().skip_tokenizer_init,
            metrics_enabled=False,
            enable_scripted_runtime=False,
        )
        self._receiver = channels.recv_from_tokenizer
        self._sender = channels.send_to_detokenizer
        self._receive_one = lambda: sock_recv(self._receiver, zmq.NOBLOCK)
        self._again = zmq.ZMQError
        self._stats = lambda n: wrap_as_pickle([SchedulerReqTimeStats() for _ in range(n)])
        self._stats_made: dict[int, Any] = {}

    def receive(self, wait: bool) -> list[Any]:
        if wait:
            self._receiver.poll(POLL_MS)
        found: list[Any] = []
        while True:
            try:
                found.append(self._receive_one())
            except self._again:
                return found

    def send(self, output: Any) -> None:
        count = len(output.rids)
        # Fresh stats pickle the same whenever they are made, and making them is not what is measured.
        if count not in self._stats_made:
            self._stats_made[count] = self._stats(count)
        output.time_stats = self._stats_made[count]
        self._sender.send_output(output)

    def forward(self, message: Any) -> None:
        self._sender.send_output(message, message)


class RustChannel:
    """The ring that SGLang's Rust server uses, which runs in this process."""

    rust = True

    def __init__(self, server_args: Any) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import get_serving
        from sglang.srt.rust_server.server import RustServer
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        path = get_serving().tokenizer_path
        # What the server asks the scheduler for.
        scheduler = SimpleNamespace(
            server_args=server_args,
            model_config=ModelConfig.from_server_args(server_args),
            rust_server_tokenizer_path=lambda: path,
            kv_events_publisher=SimpleNamespace(local_kv_event_sources=lambda *_: []),
            page_size=1,
            load_snapshot_writer=None,
            processor=None,
            tokenizer=get_tokenizer(path),
            max_total_num_tokens=MAX_TOTAL_TOKENS,
            max_req_input_len=MAX_INPUT_TOKENS,
        )
        self._server = RustServer.launch(scheduler)
        try:
            self._server.set_startup_time(STARTUP)
        except Exception as error:
            log.warning("set_startup_time: %s", error)
            self._server.startup_time = STARTUP

    def receive(self, wait: bool) -> list[Any]:
        if wait:
            self._server.wait_request(POLL_MS)
        return list(self._server.drain(-1))

    def send(self, output: Any) -> None:
        self._server.push_generation(output, {})

    def forward(self, message: Any) -> None:
        """Nothing to do: there is no detokenizer process."""


class Request:
    """A running request."""

    __slots__ = ("first", "left", "limit", "made", "message", "offset", "prompt_tokens", "sent", "tail")

    def __init__(self, message: Any, offset: int) -> None:
        self.message = message
        ids = message.input_ids
        self.prompt_tokens = len(ids)
        self.tail = ids[-PROMPT_TAIL:]
        self.limit = message.sampling_params.max_new_tokens or 128
        self.offset = offset
        self.made = 0
        self.sent = 0
        self.first = True


class StubScheduler:
    """Replays ids."""

    def __init__(self, channel: Any) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        from sglang.srt.utils.weight_versions import WeightVersionSpan

        self._io = io_struct
        self._channel = channel
        self._span = WeightVersionSpan
        self._step_s = float(os.environ.get("STUB_STEP_MS", "5")) / 1e3
        self._ids: list[int] = json.loads(Path(os.environ["STUB_TOKENS"]).read_text())
        self._running: list[Request] = []
        self._count = 0
        self._ignored: set[str] = set()
        self._new_output = lambda: _GenerationStreamAccumulator(
            return_logprob=False,
            return_hidden_states=False,
            return_routed_experts=False,
            return_indexer_topk=False,
            spec_algorithm=SpeculativeAlgorithm.from_string(None),
            disaggregation_mode=DisaggregationMode.NULL,
            default_stream_interval=1,
            default_force_stream_interval=FORCE_INTERVAL,
            get_cached_tokens_details=None,
            is_request_level_customized_info_key=None,
            rust_server_mode=channel.rust,
            current_weight_version="default",
        )

    def run(self) -> None:
        next_step = time.perf_counter()
        while True:
            for message in self._channel.receive(wait=not self._running):
                self._handle(message)
            if not self._running:
                continue
            now = time.perf_counter()
            if self._step_s > 0:
                if now < next_step:
                    time.sleep(next_step - now)
                    now = time.perf_counter()
                # Time that was lost is not caught up.
                next_step = max(next_step + self._step_s, now)
            self._step()

    def _handle(self, message: Any) -> None:
        io = self._io
        if isinstance(message, io.TokenizedGenerateReqInput):
            self._running.append(Request(message, self._count * STRIDE % len(self._ids)))
            self._count += 1
        elif isinstance(message, io.BatchTokenizedGenerateReqInput):
            for each in message:
                self._handle(each)
        elif isinstance(message, io.AbortReq):
            keep = [] if message.abort_all else [r for r in self._running if r.message.rid != message.rid]
            self._running[:] = keep
        elif isinstance(message, io.FreezeGCReq):
            self._channel.forward(message)
        elif (name := type(message).__name__) not in self._ignored:
            self._ignored.add(name)
            log.warning("stub scheduler: ignoring %s", name)

    def _step(self) -> None:
        output = self._new_output()
        unfinished = []
        for request in self._running:
            request.made += 1
            finished = request.made >= request.limit
            if not finished:
                unfinished.append(request)
            if finished or request.message.stream or request.made % FORCE_INTERVAL == 0:
                self._add(output, request, finished)
        self._running = unfinished
        if output.rids:
            output.time_stats = None
            self._channel.send(output.to_payload(dp_rank=None, is_idle_batch=False))

    def _add(self, output: Any, request: Request, finished: bool) -> None:
        ids = self._ids
        start = request.offset + request.sent
        new = array("q", [ids[(start + i) % len(ids)] for i in range(request.made - request.sent)])
        request.sent = request.made
        message, sampling = request.message, request.message.sampling_params
        output.rids.append(message.rid)
        output.finished_reasons.append({"type": "length", "length": request.made} if finished else None)
        output.output_ids.append(new)
        output.prompt_tokens.append(request.prompt_tokens)
        for column in (output.reasoning_tokens, output.cached_tokens, output.image_tokens, output.audio_tokens):
            column.append(0)
        output.video_tokens.append(0)
        output.retraction_counts.append(0)
        span = self._span(version="default", start=0, end=request.made)
        output.weight_versions.append([span] if finished else None)
        if self._channel.rust:
            return
        output.http_worker_ipcs.append(message.http_worker_ipc)
        output.decoded_texts.append("")
        output.decode_ids_list.append(request.tail + new if request.first else new)
        request.first = False
        output.read_offsets.append(min(PROMPT_TAIL, request.prompt_tokens))
        output.skip_special_tokens.append(sampling.skip_special_tokens)
        output.spaces_between_special_tokens.append(sampling.spaces_between_special_tokens)
        output.no_stop_trim.append(sampling.no_stop_trim)
        output.completion_tokens.append(request.made)
        output.cached_tokens_details.append(None)
