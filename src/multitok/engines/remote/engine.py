"""RemoteEngine: the `Engine` protocol in the scheduler's thread, HTTP in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import uvloop

from multitok.engines.base import EngineInfo, EngineLoad, EngineOutput, EngineRefusal, no_such_operation
from multitok.engines.remote.dispatcher import UNREACHABLE, Dispatcher, RemoteRequest
from multitok.engines.remote.fleet import Fleet
from multitok.engines.remote.options import read_options
from multitok.engines.remote.outbox import Outbox, Pending
from multitok.engines.settings import EngineSettings
from multitok.messages.operations import EngineOperation
from multitok.messages.sampling import EngineFields, SamplingParams

_log = logging.getLogger(__name__)
_JOIN_S = 10.0
# For the requests that end others.
_LAST_WORDS_S = 0.2


class RemoteEngine:
    """Engines that already run elsewhere, reached over HTTP.

    Topology: scheduler's thread --`call_soon_threadsafe`--> loop's thread --HTTP--> engines, and back through the
    `Outbox`: what came since the last step is one output per request. All state of requests and addresses belongs to
    the loop's thread.

    Parameters
    ----------
    settings : EngineSettings
        The tokenizer's side, and the options.

    Raises
    ------
    ValueError
        An option is wrong, no engine answers, or one that does not fit.
    """

    def __init__(self, settings: EngineSettings) -> None:
        if settings.files.task != "generate":
            raise ValueError("engine 'remote' generates; give it a tokenizer of a model that does")
        options = read_options(settings.options)
        self._outbox = Outbox()
        self._running: dict[int, Pending] = {}
        self._dead = False
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(_log_exception)
        self._dispatcher = Dispatcher(self._outbox)
        self._fleet = Fleet(options, settings, self._dispatcher.went_down)
        self._watchers: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._run, name="remote engine", daemon=True)
        self._thread.start()
        try:
            self._info = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self.shutdown()
            raise

    @property
    def info(self) -> EngineInfo:
        """What all of the engines can do."""
        return self._info

    @property
    def wakeup(self) -> int:
        """Readable while there is output."""
        return self._outbox.wakeup

    def add_request(
        self,
        number: int,
        input_ids: bytes,
        params: SamplingParams,
        resumed: int = 0,
        fields: EngineFields | None = None,
    ) -> None:
        """Take a request; see `Engine.add_request`."""
        if number in self._running:
            raise ValueError(f"request {number} is in the engine already")
        if not input_ids:
            raise EngineRefusal(400, "the prompt has no tokens")
        if params.logprobs is not None and params.logprobs > self._info.top_logprobs:
            raise EngineRefusal(400, f"the engine gives at most {self._info.top_logprobs} likeliest ids per position")
        if not self._fleet.any_is_up:
            raise EngineRefusal(503, UNREACHABLE)
        self._running[number] = pending = Pending(number)
        request = RemoteRequest(pending, input_ids, params, resumed, fields)
        self._loop.call_soon_threadsafe(self._dispatcher.add, request)

    def abort(self, number: int) -> None:
        """Forget a request, here and where it runs; an unknown number is ignored."""
        pending = self._running.pop(number, None)
        if pending is not None:
            self._loop.call_soon_threadsafe(self._dispatcher.abort, pending)

    def step(self) -> list[EngineOutput]:
        """Return what has come since the last step; this never waits."""
        if self._dead:
            raise RuntimeError("the thread that speaks to the engines has ended")
        outputs: list[EngineOutput] = []
        for pending, output in self._outbox.take():
            # An aborted request may have had its last words.
            if self._running.get(pending.number) is pending:
                outputs.append(output)
                if output.finish is not None:
                    del self._running[pending.number]
        return outputs

    def has_unfinished(self) -> bool:
        """Whether any request is left."""
        return bool(self._running)

    def load(self) -> EngineLoad:
        """Return load figures; how full the engines' caches are is not known."""
        return EngineLoad(len(self._running), 0, 0.0, self._fleet.any_is_up)

    def operate(self, operation: EngineOperation) -> None:
        """Do nothing of the kind: the engines have operators of their own."""
        raise no_such_operation(self._info, operation)

    def shutdown(self) -> None:
        """End all requests, there too, and the thread."""
        self._running.clear()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._outbox.close()

    # In the loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_end_tasks(self._loop))
            self._loop.close()
        finally:
            self._dead = True
            self._outbox.signal()

    async def _start(self) -> EngineInfo:
        info = await self._fleet.start()
        self._dispatcher.use(self._fleet.peers, info)
        self._watchers = [self._loop.create_task(peer.watch()) for peer in self._fleet.peers]
        return info

    def _stop(self) -> None:
        self._dispatcher.close()
        for peer in self._fleet.peers:
            peer.pool.close()
        self._loop.call_later(_LAST_WORDS_S, self._loop.stop)


async def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    _log.error("%s", context.get("message", "an error"), exc_info=context.get("exception"))
