"""TokenizerManager: a request's life in one HTTP process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import zmq

from multitok.config import PortArgs, ServerArgs
from multitok.engines.base import EngineInfo, may_go_on
from multitok.ipc.sender_wrapper import FrameSender, SenderWrapper
from multitok.ipc.sockets import bind_pull
from multitok.messages.numbers import RequestNumbers, owner_address
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_scheduler import (
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from multitok.tokenizer.call import EmbeddingCall, GenerateCall, SubRequest
from multitok.tokenizer.control_client import ControlClient, described
from multitok.tokenizer.recovery import ENGINE_DIED, Recovery
from multitok.tokenizer.request_maker import RequestMaker
from multitok.tokenizer.requests import (
    EmbeddingInput,
    EmbeddingSink,
    GenerateInput,
    GenerateSink,
    RequestError,
    Submission,
)
from multitok.tokenizer.results import DetokenizeStep, ResultReceiver
from multitok.tokenizer.served_model import ServedModel

_log = logging.getLogger(__name__)

# Requests of one call that are sent in one turn of the event loop: a millisecond, ten with 2,000 ids in each.
_SENT_AT_ONCE = 256
_TOO_MANY = "too many requests are waiting; try again later"
# What a scheduler may take for an answer beyond the longest step.
_PATIENCE_S = 10.0
_NO_ROOM = "the server does not take requests at the moment; try again later"


class TokenizerManager:
    """Validation, tokenization, sending, state, the stream of results, abort: for every request of one HTTP process.

    Topology: routes call `submit`; here --SenderWrapper--> schedulers (in single mode directly, see `TokenizerWorker`);
    detokenizers --> `ResultReceiver` --> the routes' sinks. All of it runs in the event loop's thread, except that long
    texts are tokenized in a thread.

    Parameters
    ----------
    server_args : ServerArgs
        The user's options.
    port_args : PortArgs
        Where the parts meet.
    models : sequence of ServedModel
        What is served.
    sender : FrameSender
        Takes what goes to the schedulers.
    detokenize_step : DetokenizeStep or None
        Decodes batches of ids, where the owner does that itself.
    describe : callable
        Returns what /server_info says of the running processes.
    control : ControlClient
        The way to the control plane.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        port_args: PortArgs,
        models: Sequence[ServedModel],
        *,
        sender: FrameSender,
        detokenize_step: DetokenizeStep | None,
        describe: Callable[[], dict[str, object]],
        control: ControlClient,
    ) -> None:
        self.server_args = server_args
        self.disaggregation_mode = server_args.disaggregation_mode
        self.models = models
        self.created = int(time.time())
        self.worker_id = port_args.index
        self.tokenizer_ipc_name = owner_address(port_args.index, port_args.life)
        self.control = control
        self._describe = describe
        detokenizers = max(1, len(port_args.detokenizer_ipc_names))
        numbers = RequestNumbers(port_args.index, port_args.life)
        self._maker = RequestMaker(
            numbers,
            # Workers begin at different ones.
            itertools.cycle((self.worker_id + i) % detokenizers for i in range(detokenizers)),
        )
        by_prefix = server_args.routing_policy == "prefix-affinity"
        ranks = [model.ranks for model in models]
        self._sender = SenderWrapper(sender, self.tokenizer_ipc_name, port_args.start_token, ranks, by_prefix)
        requests: dict[int, SubRequest] = {}
        self.results = ResultReceiver(
            bind_pull(port_args.endpoint(self.tokenizer_ipc_name)),
            self._sender,
            port_args.start_token,
            detokenize_step,
            requests,
            Recovery(
                requests,
                self._sender,
                numbers,
                ranks=ranks,
                resume=[
                    partial(self._may_resume, info=model.engine_info) if model.args.resume_generation else None
                    for model in models
                ],
                patience=max(model.args.step_timeout for model in models) + _PATIENCE_S,
            ),
        )
        control.has_begun = self.results.has_begun
        for model in models:
            model.has_rank = partial(self.results.recovery.any_rank_is_up, model.index)
        self._loop: asyncio.AbstractEventLoop | None = None

    # Life

    def start(self) -> None:
        """Begin to receive results; from inside the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.results.start(self._loop)

    def close(self) -> None:
        """Stop receiving; what has not been acknowledged or aborted is said first."""
        self.results.close()
        for model in self.models:
            model.close()

    def _may_resume(self, params: SamplingParams, info: EngineInfo) -> bool:
        # Once this worker has said that nothing is left that had begun, other weights may be loaded before it goes on.
        return not self.control.settled and may_go_on(params, info.resumable)

    def is_ready(self) -> bool:
        """Whether every model can be used."""
        return all(model.is_up() for model in self.models)

    def server_info(self) -> dict[str, object]:
        """Return what /server_info says."""
        models = [
            {
                "model": model.name,
                "model_path": model.model_path,
                "engine": msgspec.to_builtins(model.engine_info),
                "chat_template": model.chat_template is not None,
                "ready": model.is_up(),
                "ranks": list(model.ranks),
            }
            for model in self.models
        ]
        first = models[0]
        return {
            # Of the first model, as where there is no other.
            **{key: first[key] for key in ("model", "model_path", "engine", "chat_template")},
            "models": models,
            "ready": self.is_ready(),
            "server_args": msgspec.to_builtins(self.server_args.without_keys()),
            "worker": {
                "worker_id": self.worker_id,
                "address": self.tokenizer_ipc_name,
                "running_requests": len(self.results),
            },
            **self.admin_state(),
        }

    def admin_state(self) -> dict[str, object]:
        """Return what /admin/state says: what operators have set, and how the processes do."""
        return {"control": described(self.control.state, [model.name for model in self.models]), **self._describe()}

    # Requests

    def submit(self, request: GenerateInput, sink: GenerateSink) -> Submission:
        """Start a generation.

        Parameters
        ----------
        request : GenerateInput
            What to do.
        sink : GenerateSink
            Hears of it; never from inside this call.

        Returns
        -------
        Submission
            For aborting it.

        Raises
        ------
        RequestError
            It can't be done; the sink hears nothing.
        """
        model = self.models[request.model]
        model.check_task("generate")
        self._check_room(model)
        call = GenerateCall(request, sink, self._end_early)
        model.encode_prompts(call, self._loop or asyncio.get_running_loop(), self._send_call)
        return call

    def submit_embedding(self, request: EmbeddingInput, sink: EmbeddingSink) -> Submission:
        """Start an embedding; see `submit`."""
        model = self.models[request.model]
        model.check_task("embed")
        self._check_room(model)
        call = EmbeddingCall(request, sink, self._end_early)
        model.encode_prompts(call, self._loop or asyncio.get_running_loop(), self._send_call)
        return call

    # Inside

    def _check_room(self, model: ServedModel) -> None:
        """Refuse what would be refused anyway, before any work is done for it."""
        if not self.results.recovery.any_rank_is_up(model.index):
            raise RequestError(503, ENGINE_DIED)
        if model.is_full():
            raise RequestError(503, _TOO_MANY)

    def _send_call(self, call: GenerateCall | EmbeddingCall, prompt_ids: list[bytes]) -> None:
        call.prompt_ids = prompt_ids
        model = self.models[call.request.model]
        message: BatchTokenizedGenerateReqInput | BatchTokenizedEmbeddingReqInput
        if isinstance(call, GenerateCall):
            message = self._maker.generate(call, model)
        else:
            message = self._maker.embedding(call, model)
        children: Sequence[TokenizedGenerateReqInput | TokenizedEmbeddingReqInput] = message.batch
        requests = [SubRequest(child, call, i) for i, child in enumerate(children)]
        try:
            self._send_some(call, message, 0)
        except zmq.Again as error:
            # Of several, some may have reached a rank that reads.
            if len(requests) > 1:
                self.results.abort(requests[:_SENT_AT_ONCE])
            raise RequestError(503, _NO_ROOM) from error
        call.sent_at = time.monotonic()
        for request in requests:
            self.results.add(request)

    def _send_some(
        self,
        call: GenerateCall | EmbeddingCall,
        message: BatchTokenizedGenerateReqInput | BatchTokenizedEmbeddingReqInput,
        begin: int,
    ) -> None:
        """Send so many requests of a call as the event loop has time for, and the rest in its next turns."""
        end = begin + _SENT_AT_ONCE
        if begin == 0 and len(message.batch) <= end:
            self._sender.send(message, call.request.id_is_given)
            return
        part = type(message)(numbers=message.numbers[begin:end], batch=message.batch[begin:end])  # type: ignore[arg-type]
        self._sender.send(part, call.request.id_is_given)
        if end < len(message.batch):
            loop = self._loop or asyncio.get_running_loop()
            loop.call_soon(self._send_rest, call, message, end)

    def _send_rest(
        self,
        call: GenerateCall | EmbeddingCall,
        message: BatchTokenizedGenerateReqInput | BatchTokenizedEmbeddingReqInput,
        begin: int,
    ) -> None:
        if call.ended:
            return
        try:
            self._send_some(call, message, begin)
        except zmq.Again:
            call.fail(RequestError(503, _NO_ROOM))

    def _end_early(self, running: Iterable[SubRequest]) -> None:
        self.results.abort(running)
