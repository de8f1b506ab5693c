"""TokenizerManager: a request's life in one HTTP process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec
import zmq

from multitok.config import PortArgs, ServerArgs
from multitok.engines.base import EngineInfo
from multitok.ipc.sender_wrapper import FrameSender, SenderWrapper
from multitok.ipc.sockets import bind_pull
from multitok.messages.numbers import RequestNumbers, owner_address
from multitok.messages.to_scheduler import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from multitok.tokenizer.backends import TokenizerBackend
from multitok.tokenizer.call import EmbeddingCall, GenerateCall, SubRequest
from multitok.tokenizer.chat_template import ChatTemplate
from multitok.tokenizer.limits import check_texts
from multitok.tokenizer.model_files import ModelFiles
from multitok.tokenizer.recovery import ENGINE_DIED, Recovery, can_resume
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

_log = logging.getLogger(__name__)

# For what no context bounds: a second for one endless word, the worst case.
_MOST_CHARACTERS = 1 << 20
# Requests of one call that are sent in one turn of the event loop: a millisecond, ten with 2,000 ids in each.
_SENT_AT_ONCE = 256
_TOO_MANY = "too many requests are waiting; try again later"
# What a scheduler may take for an answer beyond the longest step.
_PATIENCE_S = 10.0
_NO_ROOM = "the server does not take requests at the moment; try again later"


class TextTools(Protocol):
    """What turns text into ids and back.

    Attributes
    ----------
    backend : TokenizerBackend
        What prompts are tokenized with.
    chat_template : ChatTemplate or None
        The model's.
    """

    backend: TokenizerBackend
    chat_template: ChatTemplate | None

    @property
    def decoder_is_loaded(self) -> bool:
        """Whether `token_text` answers at once."""
        ...

    def load_decoder(self) -> None:
        """Make it answer at once; may take seconds, in any thread."""
        ...

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return the text and the bytes of one id alone."""
        ...

    def decode_batch(self, prompts: Sequence[bytes], skip_special_tokens: bool = True) -> list[str]:
        """Return the texts of packed ids."""
        ...


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
    files : ModelFiles
        The model's name, chat template and so on.
    engine_info : EngineInfo
        What the engine is and can do.
    text_tools : TextTools
        Tokenizer, chat template and decoder.
    sender : FrameSender
        Takes what goes to the schedulers.
    detokenize_step : DetokenizeStep or None
        Decodes batches of ids, where the owner does that itself.
    is_ready : callable
        Whether all parts are up.
    queues_are_full : callable
        Whether no scheduler has room, by what they last said; they decide themselves.
    describe : callable
        Returns what /server_info says of the running processes.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        port_args: PortArgs,
        files: ModelFiles,
        engine_info: EngineInfo,
        *,
        text_tools: TextTools,
        sender: FrameSender,
        detokenize_step: DetokenizeStep | None,
        is_ready: Callable[[], bool],
        queues_are_full: Callable[[], bool],
        describe: Callable[[], dict[str, object]],
    ) -> None:
        self.server_args = server_args
        self.disaggregation_mode = server_args.disaggregation_mode
        self.engine_info = engine_info
        self.served_model_name = server_args.served_model_name or files.name
        self._model_path = files.model_path
        self.created = int(time.time())
        self.context_length = engine_info.context_length
        self.chat_template = text_tools.chat_template
        self.worker_id = port_args.index
        self.tokenizer_ipc_name = owner_address(port_args.index, port_args.life)
        self.is_ready = is_ready
        self.token_text = text_tools.token_text
        self._describe = describe
        self._text_tools = text_tools
        self._backend = text_tools.backend
        self._queues_are_full = queues_are_full
        detokenizers = max(1, len(port_args.detokenizer_ipc_names))
        self._maker = RequestMaker(
            server_args,
            engine_info,
            RequestNumbers(port_args.index, port_args.life),
            # Workers begin at different ones.
            itertools.cycle((self.worker_id + i) % detokenizers for i in range(detokenizers)),
        )
        ranks = len(port_args.scheduler_ipc_names)
        self._sender = SenderWrapper(sender, self.tokenizer_ipc_name, port_args.start_token, ranks)
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
                ranks=ranks,
                resume=(lambda params: can_resume(params, engine_info)) if server_args.resume_generation else None,
                patience=server_args.step_timeout + _PATIENCE_S,
            ),
        )
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        # /tokenize and /detokenize, however long they take, don't keep a prompt waiting.
        self._side_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="side")
        self._loop: asyncio.AbstractEventLoop | None = None

    # Life

    def start(self) -> None:
        """Begin to receive results; from inside the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.results.start(self._loop)

    def close(self) -> None:
        """Stop receiving; what has not been acknowledged or aborted is said first."""
        self.results.close()
        for threads in (self._threads, self._side_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    def server_info(self) -> dict[str, object]:
        """Return what /server_info says."""
        return {
            "model": self.served_model_name,
            "model_path": self._model_path,
            "engine": msgspec.to_builtins(self.engine_info),
            "server_args": msgspec.to_builtins(self.server_args.without_keys()),
            "chat_template": self.chat_template is not None,
            "worker": {
                "worker_id": self.worker_id,
                "address": self.tokenizer_ipc_name,
                "running_requests": len(self.results),
            },
            **self._describe(),
        }

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
        self._check_task("generate")
        self._check_room()
        call = GenerateCall(request, sink, self._end_early)
        # Log probabilities come with the text of each token.
        load_decoder = request.sampling_params.logprobs is not None and not self._text_tools.decoder_is_loaded
        self._tokenize(request.prompts, request.add_special_tokens, call, load_decoder, self._send_generate)
        return call

    def submit_embedding(self, request: EmbeddingInput, sink: EmbeddingSink) -> Submission:
        """Start an embedding; see `submit`."""
        self._check_task("embed")
        self._check_room()
        call = EmbeddingCall(request, sink, self._end_early)
        self._tokenize(request.prompts, True, call, False, self._send_embedding)
        return call

    def abort_by_id(self, request_id: str | None, abort_all: bool = False) -> None:
        """End requests by the user's id, or all, whoever owns them; their callers are told.

        Raises
        ------
        RequestError
            The schedulers can't be reached at the moment.
        """
        try:
            self._sender.send(AbortReq(rid=request_id, abort_all=abort_all))
        except zmq.Again as error:
            raise RequestError(503, _NO_ROOM) from error

    def check_text(self, text: str) -> None:
        """Refuse a text that can't fit into a prompt, without tokenizing it.

        Raises
        ------
        RequestError
            400.
        """
        check_texts([text], self._maker.longest_prompt, self._backend)

    async def tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[bytes]:
        """Return the packed int32 ids of texts.

        Raises
        ------
        RequestError
            400: they are too long.
        """
        size = sum(map(len, texts))
        if size <= self._backend.inline_characters:
            return [self._backend.encode(text, add_special_tokens) for text in texts]
        if size > _MOST_CHARACTERS:
            raise RequestError(400, f"{size} characters are more than the limit of {_MOST_CHARACTERS}", "prompt")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._side_thread, self._backend.encode_batch, texts, add_special_tokens)

    async def detokenize(self, prompts: list[bytes], skip_special_tokens: bool = True) -> list[str]:
        """Return the texts of packed int32 ids, which the caller has checked against the vocabulary."""
        # Always in the thread: the reference tokenizer may have to be loaded for it.
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._side_thread, self._text_tools.decode_batch, prompts, skip_special_tokens
        )

    # Inside

    def _check_task(self, task: str) -> None:
        if self.engine_info.task != task:
            what = "generates text" if self.engine_info.task == "generate" else "makes embeddings"
            raise RequestError(400, f"the model {self.served_model_name} only {what}", "model")

    def _check_room(self) -> None:
        """Refuse what would be refused anyway, before any work is done for it."""
        if not self.results.recovery.any_rank_is_up:
            raise RequestError(503, ENGINE_DIED)
        if self._queues_are_full():
            raise RequestError(503, _TOO_MANY)

    def _tokenize(
        self,
        prompts: list[str | bytes],
        add_special_tokens: bool,
        call: GenerateCall | EmbeddingCall,
        load_decoder: bool,
        then: Callable[[GenerateCall | EmbeddingCall, list[bytes]], None],
    ) -> None:
        """Get the ids of all prompts and go on with `then`: at once, or from the loop when it takes longer."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if isinstance(call, EmbeddingCall) and any(len(text) > _MOST_CHARACTERS for text in texts):
            raise RequestError(400, f"an input has more than {_MOST_CHARACTERS} characters", "input")
        longest = None if isinstance(call, EmbeddingCall) and call.request.truncate else self._maker.longest_prompt
        if not load_decoder and sum(map(len, texts)) <= self._backend.inline_characters:
            check_texts(texts, longest, self._backend)
            encoded = iter([self._backend.encode(text, add_special_tokens) for text in texts])
            then(call, [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts])
            return

        def finish(future: Future[list[bytes]]) -> None:
            if call.ended:
                return
            try:
                encoded = iter(future.result())
                then(call, [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts])
            except RequestError as error:
                call.fail(error)
            except Exception as error:
                _log.exception("tokenization failed")
                call.fail(RequestError(500, f"tokenization failed: {error}"))

        loop = self._loop or asyncio.get_running_loop()

        def encode() -> list[bytes]:
            if load_decoder:
                self._text_tools.load_decoder()
            check_texts(texts, longest, self._backend)
            return self._backend.encode_batch(texts, add_special_tokens)

        future = self._threads.submit(encode)
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(finish, done))

    def _send_generate(self, call: GenerateCall | EmbeddingCall, prompt_ids: list[bytes]) -> None:
        assert isinstance(call, GenerateCall)
        call.prompt_ids = prompt_ids
        self._send(call, self._maker.generate(call))

    def _send_embedding(self, call: GenerateCall | EmbeddingCall, prompt_ids: list[bytes]) -> None:
        assert isinstance(call, EmbeddingCall)
        call.prompt_ids = prompt_ids
        self._send(call, self._maker.embedding(call))

    def _send(
        self,
        call: GenerateCall | EmbeddingCall,
        message: BatchTokenizedGenerateReqInput | BatchTokenizedEmbeddingReqInput,
    ) -> None:
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
