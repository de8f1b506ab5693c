"""A stand-in for TokenizerManager, for tests of framing and connections only, and a server in a thread.

Token id i is the character chr(i). A test either lets a request answer itself (`auto`), or takes each submission and
makes its outputs by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvloop

from multitok.config import ServerArgs
from multitok.engines.base import EngineInfo
from multitok.http.server import HttpServer
from multitok.messages.base import FinishReason
from multitok.messages.control import Adapter, ControlOperation, ControlState
from multitok.messages.operations import ALL_OPERATIONS
from multitok.messages.to_child import ControlReqOutput
from multitok.tokenizer.requests import (
    EmbeddingInput,
    EmbeddingOutput,
    EmbeddingSink,
    GenerateInput,
    GenerateOutput,
    GenerateSink,
    RequestError,
)

WAIT = 20.0
ALL_SAMPLING = [
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "stop_token_ids", "ignore_eos", "min_new_tokens", "logprobs", "logit_bias", "grammar",
]  # fmt: skip
INFO = EngineInfo(
    name="double",
    version="1",
    task="generate",
    vocab_size=70000,
    context_length=4096,
    eos_token_ids=[2],
    sampling=ALL_SAMPLING,
    grammars=["json_object", "json_schema", "regex", "ebnf"],
    top_logprobs=5,
    fields=["adapter"],
    operations=ALL_OPERATIONS,
)


def pack(text: str) -> bytes:
    return array("i", [ord(c) for c in text]).tobytes()


class DoubleSubmission:
    def __init__(self, request: GenerateInput | EmbeddingInput, sink: Any) -> None:
        self.request = request
        self.sink = sink
        self.prompt_ids: list[bytes] = []
        self.aborted = threading.Event()
        self.counts: dict[int, int] = {}
        self.prompt_ids.extend(p if isinstance(p, bytes) else pack(p) for p in request.prompts)

    def abort(self) -> None:
        self.aborted.set()

    def output(self, text: str, index: int = 0, finish: FinishReason | None = None, logprobs: bool = False) -> None:
        """Make one output; call `step_end` afterwards."""
        count = self.counts[index] = self.counts.get(index, 0) + len(text)
        prompt = self.prompt_ids[index // getattr(self.request, "n", 1)]
        params = self.request.sampling_params
        self.sink.on_output(
            GenerateOutput(
                index=index,
                text=text,
                output_ids=pack(text),
                finish=finish,
                completion_tokens=count,
                prompt_tokens=len(prompt) // 4 if finish else 0,
                cached_tokens=1 if finish else 0,
                logprobs=[-0.5] * len(text) if params.logprobs is not None else None,
                top_logprobs=[[(ord(c), -0.5), (ord("z"), -2.0)] for c in text] if params.logprobs else None,
            )
        )

    def step(self, text: str, finish: FinishReason | None = None, short_way: bool = True) -> None:
        choices = len(self.request.prompts) * self.request.n
        plain = short_way and choices == 1 and finish is None and self.request.sampling_params.logprobs is None
        if plain and text and self.sink.write_delta(text):
            self.counts[0] = self.counts.get(0, 0) + len(text)
            return
        for index in range(len(self.request.prompts) * self.request.n):
            self.output(text, index, finish)
        self.sink.on_step_end()

    def finish(self, text: str = "") -> None:
        self.step(text, FinishReason("stop", 2))

    def fail(self, status: int, message: str, param: str | None = None) -> None:
        self.sink.on_error(RequestError(status, message, param))


class DoubleTemplate:
    keeps_text = True

    def render(
        self,
        messages: list[dict[str, Any]],
        large: bool = False,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        if kwargs.get("fail"):
            raise ValueError("roles must alternate")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")


class DoubleControl:
    """Keeps what it is asked for; `refusal` is its answer to all, or to those of type `refused`."""

    def __init__(self) -> None:
        self.state = ControlState(epoch=7, adapters={"poet": Adapter("/adapters/poet")})
        self.asked: list[tuple[ControlOperation, float]] = []
        self.refusal: RequestError | None = None
        self.refused: type[Any] = object

    async def operate(self, operation: ControlOperation, timeout: float) -> ControlReqOutput:
        self.asked.append((operation, timeout))
        if self.refusal is not None and isinstance(operation, self.refused):
            raise self.refusal
        return ControlReqOutput(1, id=len(self.asked), epoch=7, done=["launcher", "scheduler:0"], count=3)


class DoubleManager:
    """A manager, and its only model."""

    index = 0
    name = "double-model"
    created = 1700000000
    context_length = 4096

    def __init__(self, info: EngineInfo = INFO, auto: str | None = None) -> None:
        self.engine_info = info
        self.chat_template: DoubleTemplate | None = DoubleTemplate()
        self.auto = auto
        self.refusal: RequestError | None = None
        self.ready = True
        self.submissions: queue.SimpleQueue[DoubleSubmission] = queue.SimpleQueue()
        self.control = DoubleControl()

    @property
    def models(self) -> list[DoubleManager]:
        return [self]

    def submit(self, request: GenerateInput, sink: GenerateSink) -> DoubleSubmission:
        if self.refusal is not None:
            raise self.refusal
        submission = DoubleSubmission(request, sink)
        if self.auto is not None:
            asyncio.get_running_loop().call_soon(self._answer, submission, self.auto)
        self.submissions.put(submission)
        return submission

    def _answer(self, submission: DoubleSubmission, text: str) -> None:
        if submission.aborted.is_set():
            return
        for char in text[:-1]:
            submission.step(char)
        submission.finish(text[-1])

    def submit_embedding(self, request: EmbeddingInput, sink: EmbeddingSink) -> DoubleSubmission:
        submission = DoubleSubmission(request, sink)
        self.submissions.put(submission)
        if self.auto is not None:
            for i in range(len(request.prompts)):
                row = array("f", [0.25 * (i + 1)] * self.engine_info.embedding_size).tobytes()
                tokens = len(submission.prompt_ids[i]) // 4
                asyncio.get_running_loop().call_soon(sink.on_output, EmbeddingOutput(i, row, tokens))
        return submission

    def check_text(self, text: str) -> None:
        if len(text) > 1_000_000:
            raise RequestError(400, "too long")

    async def tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[bytes]:
        return [pack(("\x01" if add_special_tokens else "") + text) for text in texts]

    async def detokenize(self, prompts: list[bytes], skip_special_tokens: bool = True) -> list[str]:
        # No tokenizer makes half of a pair.
        rows = [memoryview(ids).cast("i") for ids in prompts]
        return ["".join("\ufffd" if 0xD800 <= i < 0xE000 else chr(i) for i in row) for row in rows]

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return chr(token_id), chr(token_id).encode()

    def is_up(self) -> bool:
        return self.ready

    def server_info(self) -> dict[str, object]:
        return {"engine": self.engine_info.name}

    def admin_state(self) -> dict[str, object]:
        return {"control": {}, "processes": {}}

    def next_submission(self) -> DoubleSubmission:
        return self.submissions.get(timeout=WAIT)


class DoubleSlot:
    def __init__(self) -> None:
        self.published: list[int] = []
        self.others_lowest = 10**6

    def set_connections(self, n: int) -> None:
        self.published.append(n)

    def lowest_connections(self) -> int:
        return min(self.published[-1], self.others_lowest)

    def beat(self, allowance: float) -> None:
        pass


class RunningServer:
    """A server whose loop runs in a thread of its own."""

    def __init__(self, manager: DoubleManager, **args: Any) -> None:
        self.manager = manager
        self.slot = DoubleSlot()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self.listener.getsockname()[1]
        self.loop = uvloop.new_event_loop()
        self.problems: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.problems.append(context))
        self.server = HttpServer(msgspec.convert(args, ServerArgs), manager, self.listener, self.slot)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.await_(self.server.start())

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def await_(self, coro: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result(WAIT)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def run() -> Any:
            return function(*args)

        return self.await_(run())

    def stop(self) -> None:
        self.await_(self.server.drain(0.0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT)
        self.loop.close()
        assert not self.problems

    def connect(self) -> Connection:
        return Connection(socket.create_connection(("127.0.0.1", self.port), timeout=WAIT))


@contextlib.contextmanager
def running(manager: DoubleManager, **args: Any) -> Iterator[RunningServer]:
    server = RunningServer(manager, **args)
    try:
        yield server
    finally:
        server.stop()


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def events(self) -> list[bytes]:
        assert self.headers["content-type"].startswith("text/event-stream")
        events = self.body.split(b"\n\n")
        assert events.pop() == b""
        assert all(event.startswith(b"data: ") for event in events)
        return [event[6:] for event in events]


class Connection:
    """A client that sees every byte."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.file = sock.makefile("rb")

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def post(self, path: str, body: Any, headers: str = "", version: str = "1.1") -> None:
        self.send(request(path, body, headers, version))

    def read_head(self) -> tuple[int, dict[str, str]]:
        status = int(self.file.readline().split(b" ")[1])
        headers = {}
        while (line := self.file.readline()) != b"\r\n":
            assert line, "the connection ended in a head"
            name, _, value = line.decode().partition(":")
            assert name not in headers
            headers[name] = value.strip()
        return status, headers

    def read_chunk(self) -> bytes:
        size = int(self.file.readline(), 16)
        data = self.file.read(size)
        assert self.file.readline() == b"\r\n"
        return data

    def read(self, no_body: bool = False) -> Answer:
        status, headers = self.read_head()
        if no_body or status == 204:
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = b"".join(iter(self.read_chunk, b""))
        elif "content-length" in headers:
            body = self.file.read(int(headers["content-length"]))
        else:
            body = self.file.read()
        return Answer(status, headers, body)

    def at_end(self) -> bool:
        try:
            return self.file.read(1) == b""
        except ConnectionResetError:
            return True


def request(path: str, body: Any, headers: str = "", version: str = "1.1") -> bytes:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "double-model", "messages": [{"role": "user", "content": content}], **fields}
