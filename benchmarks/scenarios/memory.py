"""Does a finished request leave anything behind?"""

from __future__ import annotations

from collections import Counter

from multitok.bench.load import Load
from multitok.bench.measure import measure
from multitok.bench.processes import snapshot
from scenarios.context import Context, Result

_REQUESTS = 10_000
_PARTS = 10
_CLIENTS = 64


def run(context: Context) -> Result:
    """Watch RSS over 10,000 requests, each with a prompt of its own."""
    each = max(_CLIENTS, int(_REQUESTS * context.scale / _PARTS))
    settings, sessions = context.sessions(64, 16, count=256)
    rss: dict[str, list[float]] = {}
    errors: dict[str, int] = {}
    with context.with_step(1.0).serve() as server:
        for part in range(_PARTS):
            load = Load(sessions=each, clients=_CLIENTS, seed=part)
            point = measure(server.target, settings, list(sessions), load)
            errors |= point.summary.errors
            roles: Counter[str] = Counter()
            for process in snapshot(server.pid).values():
                roles[process.role] += 1
                rss.setdefault(f"{process.role} {roles[process.role]}", []).append(process.rss_mb)
    return {
        "errors": errors,
        "requests": each * _PARTS,
        "RSS, MB, after each tenth": rss,
        "growth over the last half, bytes/request": {
            name: round((values[-1] - values[_PARTS // 2 - 1]) * 2**20 / (each * _PARTS / 2))
            for name, values in rss.items()
        },
    }
