"""CPU by stage, and the two totals: the front end alone, and with the scheduler."""

from __future__ import annotations

from typing import Any

import msgspec

from multitok.bench.measure import Point
from multitok.bench.processes import ENGINE_ROLES, Process
from multitok.bench.workloads import Workload

# A front end that merges tokens does less work than it seems to.
EVENTS_NEEDED = 0.95


def cpu_by_stage(processes: list[Process], front_in_scheduler: bool) -> dict[str, float]:
    """Return CPU seconds of each stage.

    Parameters
    ----------
    processes : list of Process
        What each used.
    front_in_scheduler : bool
        Whether the front end runs in threads of the scheduler's process (SGLang's Rust server): then only its first
        thread is the scheduler.
    """
    stages: dict[str, float] = {}
    for process in processes:
        parts = {process.role: process.cpu_s}
        if front_in_scheduler and process.role in ENGINE_ROLES:
            inner = process.main_thread_cpu_s
            parts = {process.role: inner, "server threads": process.cpu_s - inner}
        for name, cpu in parts.items():
            stages[name] = stages.get(name, 0.0) + cpu
    return {name: round(cpu, 3) for name, cpu in sorted(stages.items()) if cpu > 0}


def run_entry(workload: Workload, repeat: int, point: Point, front_in_scheduler: bool) -> dict[str, Any]:
    """Return one run as it stands in the results.

    Total 1 is HTTP workers, router and detokenizers, with whatever helper processes a server has; total 2 is all, the
    scheduler and the (simulated) engine included. Both are in milliseconds per request.
    """
    summary = point.summary
    stages = cpu_by_stage(point.processes, front_in_scheduler)
    requests = max(summary.ok, 1)
    per_request = {name: round(cpu / requests * 1e3, 3) for name, cpu in stages.items()}
    front = sum(cpu for name, cpu in stages.items() if name not in ENGINE_ROLES)
    return {
        "workload": workload.name,
        "repeat": repeat,
        "described": workload.describe(),
        "summary": msgspec.to_builtins(summary),
        "stages_ms_per_request": per_request,
        "total_1_ms": round(front / requests * 1e3, 3),
        "total_2_ms": round(sum(stages.values()) / requests * 1e3, 3),
        "total_1_us_per_token": round(front / max(summary.output_tokens, 1) * 1e6, 2),
        "counts": summary.events_per_token is None or summary.events_per_token >= EVENTS_NEEDED,
        "processes": msgspec.to_builtins(point.processes),
    }
