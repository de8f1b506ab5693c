"""Is a token late in a long answer as cheap as an early one?"""

from __future__ import annotations

import asyncio
from itertools import pairwise

import uvloop

from multitok.bench.connection import Sample, now
from multitok.bench.load import Load, run_load
from multitok.bench.measure import measure
from multitok.bench.processes import Process, snapshot, used_between
from multitok.bench.requests import Numbered
from scenarios.context import Context, Result, front_cpu

CLIENTS = 16
SHORT, LONG = 500, 32_000
_PARTS = 8
_LOOK_S = 0.5


def run(context: Context) -> Result:
    """Compare the CPU per token of 500-token and 32,000-token answers, and of the parts of a long one."""
    long_tokens = max(SHORT, int(LONG * context.scale))
    with context.serve() as server:
        settings, sessions = context.sessions(32, SHORT)
        load = Load(sessions=CLIENTS * 16, clients=CLIENTS, timeout=3600)
        point = measure(server.target, settings, list(sessions), load, warmup=CLIENTS, pid=server.pid)
        short = front_cpu(point.processes) / point.summary.output_tokens * 1e6

        settings, sessions = context.sessions(32, long_tokens, count=CLIENTS)
        load = Load(sessions=CLIENTS, clients=CLIENTS, timeout=3600, seed=1)
        looks: list[tuple[float, dict[int, Process]]] = []

        async def watched() -> list[Sample]:
            async def look() -> None:
                while True:
                    looks.append((now(), snapshot(server.pid)))
                    await asyncio.sleep(_LOOK_S)

            looking = asyncio.ensure_future(look())
            numbered = Numbered(list(sessions), server.target, settings.api, seed=1)
            result = await run_load(server.target, settings.api, numbered, load)
            looks.append((now(), snapshot(server.pid)))
            looking.cancel()
            return result.samples

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            samples = runner.run(watched())
    failed = [sample.error for sample in samples if sample.error]
    tokens = sum(sample.output_tokens or 0 for sample in samples)
    whole = front_cpu(used_between(looks[0][1], looks[-1][1])) / max(tokens, 1) * 1e6
    parts = _parts(looks, samples)
    return {
        "errors": failed,
        f"us/token at {SHORT} tokens": round(short, 2),
        f"us/token at {long_tokens} tokens": round(whole, 2),
        "ratio": round(whole / short, 3),
        "us/token by part of the long answer": parts,
        "last part to first": round(parts[-1] / parts[0], 3) if parts[0] else None,
    }


def _parts(looks: list[tuple[float, dict[int, Process]]], samples: list[Sample]) -> list[float]:
    """Return the CPU per token of equal parts of the time."""
    times = sorted(time for sample in samples for time in sample.times)
    chosen = [looks[i * (len(looks) - 1) // _PARTS] for i in range(_PARTS + 1)]
    parts = []
    for (start, before), (end, after) in pairwise(chosen):
        tokens = sum(1 for time in times if start <= time < end)
        parts.append(round(front_cpu(used_between(before, after)) / max(tokens, 1) * 1e6, 2))
    return parts
