"""A TokenizerManager in a real event loop, and the scheduler and detokenizer around it, with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from multitok.engines.base import EngineInfo
from multitok.messages.base import FinishReason
from multitok.messages.codec import FrameDecoder
from multitok.messages.control import ControlState
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_detokenizer import OutputExtras
from multitok.messages.to_scheduler import Header, ToScheduler
from multitok.messages.to_tokenizer import BatchStrOutput
from multitok.router.policies import RoundRobinPolicy
from multitok.router.rank_dispatcher import RankDispatcher
from multitok.tokenizer.backends import ReferenceBackend, TokenizerBackend
from multitok.tokenizer.manager import TokenizerManager
from multitok.tokenizer.requests import EmbeddingInput, GenerateInput, RequestError
from multitok.tokenizer.served_model import ServedModel
from parts import DEADLINE_S, VOCAB_SIZE, Inbox, Site, byte_tokenizer, pack, unpack

T = TypeVar("T")


async def until(condition: Callable[[], T]) -> T:
    """Let the loop run until `condition` gives something true, and return that; fail when it takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to pass in time"
        await asyncio.sleep(0.001)
    return value


class Sink:
    """Keeps what it hears, in order."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_output(self, output: Any) -> None:
        self.heard.append(output)

    def write_delta(self, text: str) -> bool:
        return False

    def on_step_end(self) -> None:
        self.heard.append("step end")

    def on_error(self, error: RequestError) -> None:
        self.heard.append(error)

    @property
    def outputs(self) -> list[Any]:
        return [event for event in self.heard if event != "step end" and not isinstance(event, RequestError)]

    @property
    def errors(self) -> list[tuple[int, str]]:
        return [(event.status, event.message) for event in self.heard if isinstance(event, RequestError)]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)


def engine_info(**changes: Any) -> EngineInfo:
    fields: dict[str, Any] = {
        "name": "simulated",
        "version": "1",
        "task": "generate",
        "vocab_size": VOCAB_SIZE,
        "context_length": 100,
        "eos_token_ids": [256],
        "sampling": ["seed"],
    }
    return EngineInfo(**(fields | changes))


def text_rows(*rows: tuple[int, str, int, FinishReason | None], **fields: Any) -> BatchStrOutput:
    """What a detokenizer says of a step; a row is number, text (each byte an id), index of the first id, end."""
    finished = [finish for *_, finish in rows]
    lengths = [len(text.encode()) for _, text, _, _ in rows]
    return BatchStrOutput(
        numbers=[number for number, *_ in rows],
        http_worker_ipcs=["w1.1"] * len(rows),
        output_ids=b"".join(pack(list(text.encode())) for _, text, _, _ in rows),
        first_indexes=[first for _, _, first, _ in rows],
        output_lengths=None if lengths.count(1) == len(lengths) else lengths,
        finished_reasons=None if finished.count(None) == len(finished) else finished,
        output_strs=[text for _, text, _, _ in rows],
        extras=fields.pop("extras", None),
        **fields,
    )


def logprob_extras(*rows: list[float] | None) -> OutputExtras:
    return OutputExtras(output_token_logprobs=list(rows))


class ByteTools:
    """Ids are bytes."""

    chat_template = None

    def __init__(self, backend: TokenizerBackend) -> None:
        self.backend = backend
        self.decoder_is_loaded = False
        self.decoder_thread: str | None = None

    def load_decoder(self) -> None:
        self.decoder_thread = threading.current_thread().name
        self.decoder_is_loaded = True

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return byte_tokenizer().decode([token_id]), bytes([token_id])

    def decode_batch(self, prompts: Sequence[bytes], skip_special_tokens: bool = True) -> list[str]:
        rows = [unpack(ids) for ids in prompts]
        texts: list[str] = byte_tokenizer().decode_batch(rows, skip_special_tokens=skip_special_tokens)
        return texts


class Owner:
    """A manager, and what the schedulers receive from it."""

    def __init__(self, site: Site, manager: TokenizerManager, schedulers: list[Inbox]) -> None:
        self.site = site
        self.manager = manager
        self.schedulers = schedulers
        self._headers: FrameDecoder[Header] = FrameDecoder(site.token, Header)
        self._payloads: FrameDecoder[Any] = FrameDecoder(site.token, ToScheduler)

    def submit(
        self, prompts: list[str | bytes] | str, sink: Sink | None = None, tokens: int | None = 5, **fields: Any
    ) -> tuple[Any, Sink]:
        """Submit prompts; returns the call and its sink."""
        sink = sink or Sink()
        params = fields.pop("sampling_params", SamplingParams(max_new_tokens=tokens or 1))
        prompts = [prompts] if isinstance(prompts, str) else prompts
        request = GenerateInput(prompts=prompts, sampling_params=params, max_new_tokens=tokens, **fields)
        return self.manager.submit(request, sink), sink

    def submit_embedding(self, prompts: list[str | bytes], **fields: Any) -> tuple[Any, Sink]:
        sink = Sink()
        return self.manager.submit_embedding(EmbeddingInput(prompts=prompts, **fields), sink), sink

    async def sent(self, rank: int = 0) -> list[Any]:
        """The children of the next message to a scheduler; their headers must be theirs."""
        socket = self.schedulers[rank].socket
        await until(lambda: socket.poll(0))
        frames = self.schedulers[rank].pairs()
        headers = [self._headers.decode(frame) for frame in frames[::2]]
        payloads = [self._payloads.decode(frame) for frame in frames[1::2]]
        for header, payload in zip(headers, payloads, strict=True):
            assert (header.number, header.owner) == (payload.number, "w1.1")
            assert payload.http_worker_ipc == "w1.1"
        return payloads

    async def sent_one(self, rank: int = 0) -> Any:
        (message,) = await self.sent(rank)
        return message

    def has_sent_nothing(self) -> bool:
        return all(scheduler.is_empty() for scheduler in self.schedulers)

    def deliver(self, *messages: Any) -> None:
        """Be the detokenizer: send messages to the owner."""
        for message in messages:
            self.site.send("w1.1", message)

    async def start_one(self, sink: Sink | None = None, **fields: Any) -> tuple[int, Any, Sink]:
        """Submit one request; returns its number, the call and its sink."""
        call, sink = self.submit("abc", sink, **fields)
        message = await self.sent_one()
        return message.number, call, sink


@contextlib.asynccontextmanager
async def owner_of(
    site: Site,
    *,
    manager_class: type[TokenizerManager] = TokenizerManager,
    info: EngineInfo | None = None,
    backend: TokenizerBackend | None = None,
    start: bool = True,
    real_schedulers: bool = False,
    **changes: Any,
) -> AsyncIterator[Owner]:
    """Put a manager together as an HTTP process does; the test is the schedulers, unless there are real ones."""
    ranks = len(site.port_args.scheduler_ipc_names)
    schedulers = [] if real_schedulers else [site.inbox(f"s{rank}", None) for rank in range(ranks)]
    parts: dict[str, Any] = {
        "detokenize_step": None,
        "describe": lambda: {"processes": {}},
        "control": SimpleNamespace(state=ControlState(), settled=False),
    }
    is_full = changes.pop("is_full", lambda: False)
    models = [
        ServedModel(
            index,
            site.settings[index],
            ports.ranks,
            info or engine_info(),
            text_tools=ByteTools(backend or ReferenceBackend(byte_tokenizer())),
            is_up=lambda: True,
            is_full=is_full,
        )
        for index, ports in enumerate(site.port_args.models)
    ]
    if "sender" not in changes:
        parts["sender"] = RankDispatcher(site.port_args, RoundRobinPolicy())
    manager = site.keep(
        manager_class(
            site.server_args,
            site.ports(index=1),
            models,
            **(parts | changes),
        )
    )
    owner = Owner(site, manager, schedulers)
    if start:
        manager.start()
    try:
        yield owner
    finally:
        manager.close()
