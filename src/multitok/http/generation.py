"""The sinks between `TokenizerManager` and an exchange: one streams, one collects.

Both are told what an answer looks like by a writer of the API family. A step's news of one exchange is one write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from multitok.http.choice import ChoiceBuffer, UsageCounter
from multitok.http.errors import named_for
from multitok.http.exchange import HttpExchange
from multitok.http.manager import Manager
from multitok.http.parts import respond_in_parts
from multitok.http.sse import encode_json
from multitok.tokenizer.requests import GenerateInput, GenerateOutput, RequestError, Submission

# What a client that does not read may have waiting, beside the connection's own buffer.
PENDING_LIMIT = 256 * 1024


class Writer(Protocol):
    """Writes the answer to one request, streamed or whole.

    Attributes
    ----------
    submission : Submission or None
        The call in progress, which knows the prompts' ids; set before anything is written.
    """

    submission: Submission | None

    @property
    def names(self) -> Mapping[str, str]:
        """The API's own names of ``prompt`` and ``max_tokens``, where they are others."""
        ...

    def first(self) -> bytes:
        """Events before all others; may be empty."""
        ...

    def event(self, output: GenerateOutput) -> bytes:
        """Event of one output; empty when it has no news for the client."""
        ...

    def delta_frame(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and after the JSON of a choice's new text, when that is all that an event carries."""
        ...

    def last(self, usage: UsageCounter) -> bytes:
        """Events after all others."""
        ...

    def answer(self, outputs: Iterable[GenerateOutput], usage: UsageCounter) -> Iterator[bytes]:
        """Body of a whole answer in parts, from the merged output of each choice."""
        ...


class StreamSink:
    """Writes each step's deltas to the connection, or merges them while it is full.

    Parameters
    ----------
    exchange : HttpExchange
        Where the answer goes.
    writer : Writer
        What it looks like.
    prompts : int
        Number of prompts.
    n : int
        Choices per prompt.
    """

    __slots__ = ("_error", "_events", "_exchange", "_frame", "_held", "_open", "_pending", "_usage", "_writer")

    def __init__(self, exchange: HttpExchange, writer: Writer, prompts: int, n: int) -> None:
        self._exchange = exchange
        self._writer = writer
        self._open = prompts * n
        self._usage = UsageCounter(n)
        self._events: list[bytes] = []
        self._pending: dict[int, ChoiceBuffer] = {}
        self._held = 0
        self._error: RequestError | None = None
        self._frame = writer.delta_frame(0) if prompts * n == 1 else None

    def write_delta(self, text: str) -> bool:
        """Write an event of text alone to a stream that has begun and can take it."""
        exchange = self._exchange
        if self._frame is None or exchange.flow.write_paused or not exchange.response_started:
            return False
        exchange.write_delta(self._frame[0], encode_json(text), self._frame[1])
        return True

    def on_output(self, output: GenerateOutput) -> None:
        """Make the event of one output, or merge it with what waits already."""
        if output.finish is not None:
            self._open -= 1
            self._usage.add(output)
        if self._exchange.flow.write_paused:
            buffer = self._pending.get(output.index)
            if buffer is None:
                buffer = self._pending[output.index] = ChoiceBuffer(output.index)
            self._held += buffer.add(output)
        elif event := self._writer.event(output):
            self._events.append(event)

    def on_step_end(self) -> None:
        """Write what the step made."""
        exchange = self._exchange
        if exchange.flow.write_paused:
            if self._held > PENDING_LIMIT:
                exchange.drop()
            return
        events = self._events
        if self._open == 0 or self._error is not None:
            self._finish()
        elif events:
            if not exchange.response_started:
                events.insert(0, self._writer.first())
            exchange.write_events(events[0] if len(events) == 1 else b"".join(events))
            events.clear()

    def on_error(self, error: RequestError) -> None:
        """End with an error, after what came before it."""
        self._error = named_for(error, self._writer.names)
        if not self._exchange.flow.write_paused:
            self._finish()

    def on_writable(self) -> None:
        """Write what was merged while the connection was full."""
        for buffer in self._pending.values():
            if event := self._writer.event(buffer.merged()):
                self._events.append(event)
        self._pending.clear()
        self._held = 0
        self.on_step_end()

    def on_cut(self, error: RequestError) -> None:
        """End an unfinished stream when a drain's time is up; a client that does not read is not waited for."""
        if self._exchange.flow.write_paused:
            self._exchange.drop()
        else:
            self.on_error(error)

    def _finish(self) -> None:
        events, exchange = self._events, self._exchange
        if self._error is not None:
            exchange.end_with_error(self._error, b"".join(events))
        else:
            if not exchange.response_started:
                events.insert(0, self._writer.first())
            events.append(self._writer.last(self._usage))
            exchange.end_events(b"".join(events))
        events.clear()
        # It leads back here; a cycle would wait for the garbage collector.
        self._writer.submission = None


class CollectSink:
    """Merges all outputs and sends one answer.

    Parameters
    ----------
    exchange : HttpExchange
        Where the answer goes.
    writer : Writer
        What it looks like.
    prompts : int
        Number of prompts.
    n : int
        Choices per prompt.
    """

    __slots__ = ("_choices", "_exchange", "_open", "_usage", "_writer")

    def __init__(self, exchange: HttpExchange, writer: Writer, prompts: int, n: int) -> None:
        self._exchange = exchange
        self._writer = writer
        self._open = prompts * n
        self._choices = [ChoiceBuffer(i) for i in range(prompts * n)]
        self._usage = UsageCounter(n)

    def write_delta(self, text: str) -> bool:
        """Take nothing this way: there is one answer, at the end."""
        return False

    def on_output(self, output: GenerateOutput) -> None:
        """Merge one output."""
        self._choices[output.index].add(output)
        if output.finish is not None:
            self._open -= 1
            self._usage.add(output)

    def on_step_end(self) -> None:
        """Answer when every choice has ended."""
        if self._open > 0 or self._exchange.disconnected:
            return
        respond_in_parts(self._exchange, self._answer())

    def _answer(self) -> Iterator[bytes]:
        yield from self._writer.answer((choice.merged() for choice in self._choices), self._usage)
        # It leads back here; a cycle would wait for the garbage collector.
        self._writer.submission = None

    def on_error(self, error: RequestError) -> None:
        """Answer with the error."""
        self._exchange.send_error(named_for(error, self._writer.names))

    def on_cut(self, error: RequestError) -> None:
        """Answer with the error when a drain's time is up."""
        self.on_error(error)


def generate(exchange: HttpExchange, manager: Manager, request: GenerateInput, writer: Writer) -> None:
    """Submit a request and connect its results, and the client's leaving, with the exchange.

    Parameters
    ----------
    exchange : HttpExchange
        The client's request and connection.
    manager : Manager
        Who works on it.
    request : GenerateInput
        What is asked for.
    writer : Writer
        What the answer looks like.

    Raises
    ------
    RequestError
        When the manager refuses at once.
    """
    kind = StreamSink if request.stream else CollectSink
    sink = kind(exchange, writer, len(request.prompts), request.n)
    try:
        submission = manager.submit(request, sink)
    except RequestError as error:
        raise named_for(error, writer.names) from None
    writer.submission = submission
    exchange.on_disconnect = submission.abort
    exchange.on_cut = sink.on_cut
    if isinstance(sink, StreamSink):
        exchange.on_writable = sink.on_writable
