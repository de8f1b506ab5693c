"""Runs standard workloads against a server that is up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.data import MODEL_NAME, BenchData
from harness.machine import BusyMeter
from harness.stages import run_entry
from multitok.bench.load import Load
from multitok.bench.measure import measure
from multitok.bench.requests import Body, Settings
from multitok.bench.target import Target
from multitok.bench.terminal import ProgressBar, number
from multitok.bench.workloads import STANDARD, Workload, make_sessions

# Another model name or stream setting makes other bodies of the same prompts.
_made: dict[tuple[Workload, str], list[list[Body]]] = {}


def sessions_of(data: BenchData, workload: Workload, settings: Settings) -> list[list[Body]]:
    """Return a workload's sessions; made once, since exact long prompts take seconds."""
    key = (workload, settings.model)
    if key not in _made:
        _made[key] = make_sessions(workload, data.maker, settings, data.template_overhead)
    return _made[key]


def selected(names: str, scale: float) -> list[Workload]:
    """Return the workloads of a list such as ``A,C``."""
    unknown = set(names.split(",")) - STANDARD.keys()
    if unknown:
        raise SystemExit(f"there is no workload {', '.join(sorted(unknown))}; there are {', '.join(STANDARD)}")
    return [STANDARD[name].scaled(scale) for name in names.split(",")]


def run_workloads(
    target: Target,
    data: BenchData,
    workloads: Sequence[Workload],
    *,
    label: str,
    pid: int | None,
    repeats: Sequence[int],
    front_in_scheduler: bool = False,
    model: str = MODEL_NAME,
) -> Iterator[dict[str, Any]]:
    """Run each workload once per number of `repeats`, and give each run's results."""
    for workload in workloads:
        settings = Settings(model=model, stream=workload.stream)
        sessions = sessions_of(data, workload, settings)
        for repeat in repeats:
            load = Load(sessions=workload.sessions, clients=workload.clients, seed=repeat)
            bar = ProgressBar(f"{label} {workload.name}")
            meter = BusyMeter()
            point = measure(target, settings, list(sessions), load, warmup=workload.warmup, pid=pid, progress=bar)
            entry = run_entry(workload, repeat, point, front_in_scheduler) | {"machine": meter.read()}
            bar.close(f"{number(entry['total_1_ms'], 2)} ms/request, {number(point.summary.requests_per_s)} requests/s")
            for detail in point.summary.error_details:
                print(f"    error: {detail}")
            yield entry
