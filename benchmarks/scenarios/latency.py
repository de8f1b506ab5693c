"""How much does the front end add to the time between tokens, at half of what saturates it?"""

from __future__ import annotations

import msgspec
from harness.machine import BusyMeter

from multitok.bench.load import Load
from multitok.bench.measure import measure
from multitok.bench.target import BenchError
from scenarios.context import Context, Result, front_cpu

_OUTPUT = 256
_CLIENTS = 64
_STEP_MS = 5.0
_SESSIONS = 512


def run(context: Context) -> Result:
    """Find the most tokens per second that pass with no time per step; then measure at half of that.

    The engine gives a token per stream and step, so a time between two tokens is the step's plus what was added. Both
    the load generator and the engine run on the same cores, so what is found is an upper bound.
    """
    settings, sessions = context.sessions(32, _OUTPUT)
    count = max(2 * _CLIENTS, int(_SESSIONS * context.scale))
    with context.with_step(0.0).serve() as server:
        load = Load(sessions=count, clients=_CLIENTS)
        point = measure(server.target, settings, list(sessions), load, warmup=_CLIENTS, pid=server.pid)
    most = point.summary.output_tokens_per_s
    streams = max(1, round(most / 2 * _STEP_MS / 1e3))
    with context.with_step(_STEP_MS).serve() as server:
        load = Load(sessions=max(2 * streams, count), clients=streams, seed=1)
        meter = BusyMeter()
        half = measure(server.target, settings, list(sessions), load, warmup=streams, pid=server.pid)
        machine = meter.read()
    summary = half.summary
    if summary.inter_token is None or summary.per_token is None:
        raise BenchError(f"nothing was streamed: {summary.error_details}")
    return {
        "errors": summary.errors,
        "tokens/s at saturation (no time per step)": most,
        "events/token there": point.summary.events_per_token,
        "streams at half": streams,
        "tokens/s at half": summary.output_tokens_per_s,
        "front end's cores there": round(front_cpu(half.processes) / summary.wall_s, 2),
        "load generator's cores": round(summary.own_cpu_s / summary.wall_s, 2),
        "machine": machine,
        "step_ms": _STEP_MS,
        "inter-token": msgspec.to_builtins(summary.inter_token),
        "added at p99, ms": round(summary.inter_token.p99 - _STEP_MS, 2),
    }
