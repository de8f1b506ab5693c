"""Closed loop: a number of clients, each sends when its last answer is complete. Open loop: arrivals at a rate."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
from collections.abc import Callable, Iterator

import msgspec

from multitok.bench.connection import LoadConnection, Sample, now
from multitok.bench.requests import Numbered
from multitok.bench.target import Target

Progress = Callable[[int, int], None]
_PROGRESS_S = 0.2


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How much is asked for; either `clients` or `rate`.

    Attributes
    ----------
    sessions : int
        How many sessions (most of one request) there are.
    clients : int or None
        Closed loop: so many at a time.
    rate : float or None
        Open loop: sessions that begin per second, as a Poisson process.
    timeout : float
        Seconds that an answer may take.
    seed : int
        Of the arrivals.
    """

    sessions: int
    clients: int | None = None
    rate: float | None = None
    timeout: float = 300.0
    seed: int = 0


class LoadResult(msgspec.Struct, frozen=True):
    """All samples of a run, the time it took, and the load generator's own CPU."""

    samples: list[Sample]
    wall_s: float
    own_cpu_s: float


class _Run:
    """One run: its connections and its samples."""

    def __init__(self, target: Target, api: str, numbered: Numbered, load: Load) -> None:
        self._target = target
        self._api = api
        self._numbered = numbered
        self._load = load
        self._tls = target.tls()
        self._idle: list[LoadConnection] = []
        self.samples: list[Sample] = []
        self.sessions_done = 0

    async def session(self) -> None:
        """Send one session's requests; after an error the rest of it is left out."""
        for payload, stream in self._numbered.take():
            if not await self._request(payload, stream):
                break
        self.sessions_done += 1

    async def _request(self, payload: bytes, stream: bool) -> bool:
        sample = Sample(now())
        connection = self._idle.pop() if self._idle else None
        while connection is not None and connection.closed:
            connection = self._idle.pop() if self._idle else None
        try:
            async with asyncio.timeout(self._load.timeout):
                if connection is None:
                    connection = await self._connect()
                await connection.send(payload, stream, sample)
        except TimeoutError:
            sample.error, sample.end = "timeout", now()
            if connection is not None:
                connection.abort()
        except OSError as error:
            sample.error, sample.detail, sample.end = "no connection", str(error), now()
        if connection is not None and not connection.closed:
            self._idle.append(connection)
        self.samples.append(sample)
        return sample.error is None

    async def _connect(self) -> LoadConnection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: LoadConnection(self._api), self._target.host, self._target.port, ssl=self._tls
        )
        return connection

    async def closed_loop(self, clients: int) -> None:
        """Keep `clients` sessions going until all have been."""
        left = iter(range(self._load.sessions))

        async def client() -> None:
            for _ in left:
                await self.session()

        await asyncio.gather(*(client() for _ in range(min(clients, self._load.sessions))))

    async def open_loop(self, rate: float) -> None:
        """Begin sessions when they are due, whatever has become of those before."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for due in _arrivals(rate, self._load):
                await asyncio.sleep(start + due - loop.time())
                tasks.create_task(self.session())

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()


def _arrivals(rate: float, load: Load) -> Iterator[float]:
    generator = random.Random(load.seed)
    due = 0.0
    for _ in range(load.sessions):
        yield due
        due += generator.expovariate(rate)


async def run_load(
    target: Target, api: str, numbered: Numbered, load: Load, progress: Progress | None = None
) -> LoadResult:
    """Put a load on a server.

    Parameters
    ----------
    target : Target
        The server.
    api : str
        Which API is used.
    numbered : Numbered
        Gives the requests.
    load : Load
        How much.
    progress : callable, optional
        Called with sessions done and all, a few times per second.
    """
    run = _Run(target, api, numbered, load)
    # What exists now stays: a full collection during the run would be seen as latency.
    gc.collect()
    gc.freeze()
    before, start = resource.getrusage(resource.RUSAGE_SELF), now()
    reporter = asyncio.ensure_future(_report(run, load.sessions, progress)) if progress else None
    try:
        if load.clients is not None:
            await run.closed_loop(load.clients)
        else:
            assert load.rate is not None
            await run.open_loop(load.rate)
    finally:
        wall, after = now() - start, resource.getrusage(resource.RUSAGE_SELF)
        if reporter is not None:
            reporter.cancel()
        run.close()
        gc.unfreeze()
    if progress:
        progress(run.sessions_done, load.sessions)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return LoadResult(run.samples, wall, cpu)


async def _report(run: _Run, total: int, progress: Progress) -> None:
    while True:
        progress(run.sessions_done, total)
        await asyncio.sleep(_PROGRESS_S)
