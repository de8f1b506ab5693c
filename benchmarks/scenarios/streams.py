"""Can one HTTP worker hold 2,000 streams at once?"""

from __future__ import annotations

import threading
import time

import msgspec
from harness.server import ServerProcess

from multitok.bench.load import Load
from multitok.bench.measure import measure
from multitok.bench.target import BenchError
from scenarios.context import Context, Result, open_more_files

_STREAMS = 2000
_OUTPUT = 200
_STEP_MS = 50.0
_LOOK_S = 0.5


def run(context: Context) -> Result:
    """Open 2,000 streams on one worker, and count what runs at once and what arrives."""
    open_more_files()
    streams = max(1, int(_STREAMS * context.scale))
    settings, sessions = context.sessions(32, _OUTPUT)
    running: list[int] = []
    ended = threading.Event()
    with context.with_step(_STEP_MS).serve() as server:
        watcher = threading.Thread(target=_watch, args=(server, running, ended))
        watcher.start()
        load = Load(sessions=streams, clients=streams)
        point = measure(server.target, settings, list(sessions), load, pid=server.pid)
        ended.set()
        watcher.join()
    summary = point.summary
    return {
        "streams": streams,
        "most at once in the engine": max(running, default=0),
        "answered": summary.ok,
        "errors": summary.errors,
        "output tokens": summary.output_tokens,
        "tokens asked for": streams * _OUTPUT,
        "events/token": summary.events_per_token,
        "TTFT": msgspec.to_builtins(summary.ttft),
        "inter-token": msgspec.to_builtins(summary.inter_token),
        "step_ms": _STEP_MS,
    }


def _watch(server: ServerProcess, running: list[int], ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            processes = server.target.call("/server_info")["processes"]
        except (BenchError, KeyError):
            return
        running.append(sum(figures["load"] for name, figures in processes.items() if name.startswith("scheduler")))
        time.sleep(_LOOK_S)
