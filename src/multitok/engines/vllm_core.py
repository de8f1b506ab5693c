"""vLLM's engine core, driven through vLLM's own client; its front end, output processor and detokenizer don't run.

The client is made for asyncio, so it has an event loop in a thread of its own. That thread takes the batches of new
ids, one per step, into a queue, and a descriptor is readable while something is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import uvloop
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from multitok.engines.vllm_process import adopt_processes, reason_of_failure, set_environment

# Below the default of --step-timeout: what takes longer than that ends the scheduler.
OPERATION_LIMIT_S = 240.0
# How long a core that is about to die gets to say why.
_LAST_WORDS_S = 3.0
_LOOK_INTERVAL_S = 0.05
_SHUTDOWN_S = 5.0
# A unix socket's path has 107 characters, and vLLM's sockets have names of 36.
_LONGEST_DIRECTORY = 107 - 37


class CoreDied(RuntimeError):
    """The engine core has ended; nothing more will come of it."""


class VLLMCore:
    """A running engine core, or several with vLLM's own data parallelism, which its client then balances.

    Parameters
    ----------
    config : VllmConfig
        What to run; vLLM completes it with what it found out while loading.
    log_stats : bool
        Whether the core says how full its cache is.
    directory : str or None
        For sockets, and for the core's last words; None makes one.

    Raises
    ------
    ValueError
        It could not be loaded; the message is vLLM's.
    """

    def __init__(self, config: Any, *, log_stats: bool, directory: str | None) -> None:
        self._own_directory: str | None = None
        if directory is None or len(directory) > _LONGEST_DIRECTORY:
            self._own_directory = directory = tempfile.mkdtemp(prefix="multitok-vllm-", dir="/tmp")
        self._directory = directory
        set_environment(directory)
        adopt_processes(directory)
        self._loop = uvloop.new_event_loop()
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._received: deque[list[Any]] = deque()
        self._usage: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Never has a result, but the core's death as an exception.
        self._ended: Future[None] = Future()
        self._closing = False
        try:
            # In this thread, as the kernel ends the core when the thread that started it ends.
            self._client = self._loop.run_until_complete(self._connect(config, log_stats))
        except Exception as error:
            reason = reason_of_failure(directory) or str(error) or type(error).__name__
            self._release()
            raise ValueError(f"vLLM can't load {config.model_config.model}: {reason}") from error
        self._thread = threading.Thread(target=self._run, name="vllm-core-client", daemon=True)
        self._thread.start()

    @property
    def cache_usage(self) -> float:
        """Used part of the KV cache, 0 to 1, when the core last said it; over all cores."""
        usage = list(self._usage.values())
        return sum(usage) / len(usage) if usage else 0.0

    def add(self, request: Any) -> None:
        """Send an ``EngineCoreRequest``."""
        self._send(self._client.add_request_async(request))

    def abort(self, request_id: str) -> None:
        """End a request; what is under way for it may still come."""
        self._send(self._client.abort_requests_async([request_id]))

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the client and wait for what the core says.

        Raises
        ------
        CoreDied
            There is no core to do it.
        TimeoutError
            It takes too long.
        Exception
            What the core raised; vLLM's client passes no type on.
        """
        answer = asyncio.run_coroutine_threadsafe(getattr(self._client, method)(*args), self._loop)
        done, _ = wait((answer, self._ended), OPERATION_LIMIT_S, FIRST_COMPLETED)
        if answer in done:
            return answer.result()
        answer.cancel()
        if self._ended in done:
            self._ended.result()
        raise TimeoutError(f"vLLM did not answer within {OPERATION_LIMIT_S:g} seconds")

    def notify(self) -> None:
        """Make the descriptor readable; from any thread."""
        if not self._closing:
            os.eventfd_write(self.wakeup, 1)

    def take(self) -> list[list[Any]]:
        """Return the batches of ``EngineCoreOutput`` that have come, in order, without waiting.

        Raises
        ------
        CoreDied
            It has ended, and all that it said before was taken.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        ended = self._ended.done()
        batches = []
        while self._received:
            batches.append(self._received.popleft())
        if ended:
            if not batches:
                self._ended.result()
            self.notify()
        return batches

    def close(self) -> None:
        """End the core and its processes."""
        self._closing = True
        self._client.shutdown(timeout=_SHUTDOWN_S)
        asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._release()

    async def _connect(self, config: Any, log_stats: bool) -> Any:
        # What it makes for asyncio belongs to the loop that runs now.
        return EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats)

    def _run(self) -> None:
        self._start_task(self._receive())
        self._loop.run_forever()

    def _send(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._start_task, self._sending(coroutine))

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        # The loop itself keeps tasks alive only weakly.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sending(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:
            await self._fail(error)

    async def _receive(self) -> None:
        try:
            while True:
                outputs = await self._client.get_output_async()
                if outputs.scheduler_stats is not None:
                    self._usage[outputs.engine_index] = outputs.scheduler_stats.kv_cache_usage
                if outputs.outputs:
                    self._received.append(outputs.outputs)
                    self.notify()
        except Exception as error:
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        """Make the core's death known, with the best reason that there is."""
        reason = None
        for _ in range(round(_LAST_WORDS_S / _LOOK_INTERVAL_S)):
            if self._closing or self._ended.done():
                return
            # A process that failed says why, and ends after that; one that was killed only ends.
            reason = reason_of_failure(self._directory) or self._exits()
            if reason is not None:
                break
            await asyncio.sleep(_LOOK_INTERVAL_S)
        if not self._ended.done():
            self._ended.set_exception(CoreDied(f"vLLM's engine core died: {reason or error}"))
            self.notify()

    def _exits(self) -> str | None:
        """Return which of the processes that were started here have ended, and how."""
        processes = getattr(self._client.resources.engine_manager, "processes", [])
        ends = []
        for process in processes:
            code = process.exitcode
            if code is not None:
                ends.append(f"{process.name} {_end_of_process(code)}")
        return ", ".join(ends) or None

    def _release(self) -> None:
        self._loop.close()
        os.close(self.wakeup)
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory, ignore_errors=True)


def _end_of_process(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"
