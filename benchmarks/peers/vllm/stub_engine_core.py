"""An engine core for vLLM 0.33 that runs no model: it replays ids, one per running request and step.

It takes the place of `EngineCoreProc.run_engine_core` and speaks vLLM's own protocol with vLLM's own structs, encoder
and decoder, statistics included; the front end, Python or Rust, can't tell the difference.

Environment: STUB_STEP_MS, time of a step; STUB_TOKENS, a JSON list of ids.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# Two neighbouring requests start this many ids apart in the replayed text.
STRIDE = 7919
POLL_MS = 1000
BLOCKS = 250_000
ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
# What the front end asks for at its start.
UTILITIES = {
    "get_supported_tasks": ("generate",),
    "is_sleeping": False,
    "get_kv_cache_group_metadata": [],
    "reset_prefix_cache": True,
    "list_loras": set(),
    "get_weight_version": "default",
    "is_scheduler_paused": False,
}


def run_engine_core(*_: Any, dp_rank: int = 0, local_dp_rank: int = 0, **options: Any) -> None:
    """Stand in for `EngineCoreProc.run_engine_core`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        core = StubEngineCore(dp_rank, options["vllm_config"], options["log_stats"])
        core.shake_hands(options["handshake_address"], options["local_client"])
        gc.collect()
        gc.freeze()
        gc.disable()
        core.run()
    except (SystemExit, KeyboardInterrupt):
        pass
    except BaseException:
        traceback.print_exc()
        raise


class Request:
    """A running request."""

    __slots__ = ("arrived", "client", "first", "limit", "made", "offset", "prompt_tokens", "request_id")

    def __init__(self, message: Any, offset: int) -> None:
        self.request_id = message.request_id
        self.client = message.client_index
        self.limit = message.sampling_params.max_tokens or 16
        self.prompt_tokens = len(message.prompt_token_ids)
        self.offset = offset
        self.made = 0
        self.first = True
        self.arrived = time.monotonic()


class StubEngineCore:
    """Replays ids."""

    def __init__(self, rank: int, config: Any, log_stats: bool) -> None:
        import setproctitle
        import zmq
        from vllm.v1 import engine
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        setproctitle.setproctitle("VLLM::stub_scheduler")
        self._engine = engine
        self._rank = rank
        self._config = config
        self._log_stats = log_stats
        self._step_s = float(os.environ.get("STUB_STEP_MS", "5")) / 1e3
        self._ids: list[int] = json.loads(Path(os.environ["STUB_TOKENS"]).read_text())
        self._zmq = zmq
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._encoder = MsgpackEncoder()
        self._decode_request = MsgpackDecoder(engine.EngineCoreRequest).decode
        self._decode = MsgpackDecoder().decode
        self._running: list[Request] = []
        self._count = 0

    def shake_hands(self, address: str, local: bool) -> None:
        """Do what vLLM's engine core does at its start."""
        import msgspec
        from vllm.v1.engine.utils import EngineHandshakeMetadata

        zmq, pack = self._zmq, msgspec.msgpack.encode
        identity = self._rank.to_bytes(2, "little")
        handshake = self._context.socket(zmq.DEALER)
        handshake.setsockopt(zmq.IDENTITY, identity)
        handshake.linger = 5000
        handshake.connect(address)
        handshake.send(pack({"status": "HELLO", "local": local, "headless": not local}))
        addresses = msgspec.msgpack.decode(handshake.recv(), type=EngineHandshakeMetadata).addresses
        ready = pack(self._ready())
        for each in addresses.inputs:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.rcvhwm = socket.sndhwm = 0
            socket.connect(each)
            socket.send(ready)
            self._inputs.append(socket)
            self._poller.register(socket, zmq.POLLIN)
        for each in addresses.outputs:
            socket = self._context.socket(zmq.PUSH)
            socket.sndhwm = 0
            socket.linger = 4000
            socket.connect(each)
            self._outputs.append(socket)
        handshake.send(pack({"status": "READY", "local": local, "headless": not local}))

    def _ready(self) -> Any:
        from vllm.version import __version__

        config = self._config
        block = config.cache_config.block_size or 16
        return self._engine.EngineCoreReadyResponse(
            max_model_len=config.model_config.max_model_len,
            num_gpu_blocks=BLOCKS,
            block_size=block,
            dp_stats_address=None,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            vllm_version=__version__,
            world_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank=self._rank,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            instance_id=config.instance_id,
            supports_lora=False,
            max_loras=0,
            kv_cache_size_tokens=BLOCKS * block,
            kv_cache_max_concurrency=100.0,
            effective_attention_block_size=block,
        )

    def run(self) -> None:
        next_step = time.perf_counter()
        while True:
            if not self._running:
                self._poller.poll(POLL_MS)
            for socket in self._inputs:
                with contextlib.suppress(self._zmq.Again):
                    while True:
                        self._receive(socket.recv_multipart(self._zmq.NOBLOCK, copy=False))
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

    def _receive(self, frames: list[Any]) -> None:
        kind = bytes(frames[0].buffer)
        if kind == ADD:
            self._running.append(Request(self._decode_request(frames[1:]), self._count * STRIDE))
            self._count += 1
        elif kind == ABORT:
            ended = set(self._decode(frames[1:]))
            self._running = [request for request in self._running if request.request_id not in ended]
        elif kind == UTILITY:
            from vllm.v1.serial_utils import UtilityResult

            client, call, method, _ = self._decode(frames[1:])
            result = UtilityResult(UTILITIES.get(method))
            output = self._engine.UtilityOutput(call, result=result)
            self._send(client, self._engine.EngineCoreOutputs(utility_output=output))

    def _send(self, client: int, outputs: Any) -> None:
        outputs.engine_index = self._rank
        self._outputs[client].send_multipart(self._encoder.encode(outputs), copy=False)

    def _step(self) -> None:
        by_client: dict[int, list[Any]] = {}
        unfinished = []
        for request in self._running:
            by_client.setdefault(request.client, []).append(self._output(request))
            if request.made < request.limit:
                unfinished.append(request)
        stats = self._stats()
        self._running = unfinished
        for client, outputs in by_client.items():
            self._send(client, self._engine.EngineCoreOutputs(outputs=outputs, scheduler_stats=stats))
            # The real scheduler sends them to one client only.
            stats = None

    def _output(self, request: Request) -> Any:
        engine = self._engine
        request.made += 1
        output = engine.EngineCoreOutput(
            request.request_id, [self._ids[(request.offset + request.made) % len(self._ids)]]
        )
        if request.made >= request.limit:
            output.finish_reason = engine.FinishReason.LENGTH
        if request.first:
            from vllm.v1.metrics.stats import PrefillStats

            request.first = False
            if self._log_stats:
                kinds = engine.EngineCoreEventType
                output.events = [
                    engine.EngineCoreEvent(kinds.QUEUED, request.arrived),
                    engine.EngineCoreEvent(kinds.SCHEDULED, time.monotonic()),
                ]
            tokens = request.prompt_tokens
            output.prefill_stats = PrefillStats(num_prompt_tokens=tokens, num_computed_tokens=tokens)
        return output

    def _stats(self) -> Any:
        if not self._log_stats:
            return None
        from vllm.v1.metrics.stats import SchedulerStats

        return SchedulerStats(num_running_reqs=len(self._running), step_counter=0, kv_cache_usage=0.01)
