"""Results as JSON files and as tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multitok.bench.terminal import number


def write_result(file: Path, result: dict[str, Any]) -> None:
    """Write a result; braces stand for paths in it, so it can be committed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten: {file}")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return median and range of values for a table."""
    if not values:
        return "-"
    middle = number(statistics.median(values), digits)
    if len(values) == 1:
        return middle
    return f"{middle} ({number(min(values), digits)} to {number(max(values), digits)})"


def figures(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the figures of all runs of one workload on one server: median and range of each."""
    summaries = [run["summary"] for run in runs]

    def of(name: str, digits: int) -> str:
        return spread([summary[name] for summary in summaries if summary[name] is not None], digits)

    def times(name: str, part: str) -> str:
        return spread([summary[name][part] for summary in summaries if summary[name]], 1)

    prompt_tokens = sum(summary["prompt_tokens"] for summary in summaries)
    cached = sum(summary["cached_tokens"] for summary in summaries) / max(prompt_tokens, 1)
    merged = "" if all(run["counts"] for run in runs) else " (merged)"
    return {
        "total 1, ms/request": spread([run["total_1_ms"] for run in runs]),
        "total 2, ms/request": spread([run["total_2_ms"] for run in runs]),
        "total 1, us/token": spread([run["total_1_us_per_token"] for run in runs], 1),
        "requests/s": of("requests_per_s", 0),
        "output tokens/s": of("output_tokens_per_s", 0),
        "TTFT p50, ms": times("ttft", "p50"),
        "TTFT p99, ms": times("ttft", "p99"),
        "inter-token p50, ms": times("inter_token", "p50"),
        "inter-token p99, ms": times("inter_token", "p99"),
        "latency p50, ms": times("latency", "p50"),
        "latency p99, ms": times("latency", "p99"),
        "events/request": of("events_per_request", 1),
        "events/token": of("events_per_token", 2) + merged,
        "reads/request": of("reads_per_request", 1),
        "prompt tokens": of("mean_prompt_tokens", 0),
        "prompt from cache": f"{cached:.0%}",
        "machine busy": spread([100 * run["machine"]["busy"] for run in runs], 0) + " %",
        "errors": str(sum(sum(summary["errors"].values()) for summary in summaries)),
    }


def run_table(runs: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: a column per workload."""
    columns = {name: figures(group) for name, group in by_workload(runs).items()}
    first = next(iter(columns.values()), {})
    return ["", *columns], [[name, *(column[name] for column in columns.values())] for name in first]


_COMPARED = (
    *("total 1, ms/request", "total 2, ms/request", "total 1, us/token", "requests/s", "TTFT p50, ms", "TTFT p99, ms"),
    *("inter-token p50, ms", "inter-token p99, ms", "events/token", "errors"),
)
_OWN = "multitok"

Table = tuple[list[str], list[list[str]]]


def compare_tables(result: dict[str, Any]) -> list[tuple[str, Table]]:
    """Return the tables of a comparison, each with a title."""
    tables: list[tuple[str, Table]] = []
    for workload, runs in by_workload(result["runs"]).items():
        by_system: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            by_system.setdefault(run["system"], []).append(run)
        rows = [[name, *(figures(group)[each] for each in _COMPARED)] for name, group in by_system.items()]
        tables.append((f"{workload}: {runs[0]['described']}", (["system", *_COMPARED], rows)))
        own = [name for name in by_system if name.startswith(_OWN)]
        peers = [name for name in by_system if not name.startswith(_OWN)]
        if own and peers:
            ratios = [[name, *(_ratio(by_system[name], by_system[peer]) for peer in peers)] for name in own]
            title = f"{workload}: total 1 as a share of the peer's, within a round: median (lowest to highest)"
            tables.append((title, (["", *peers], ratios)))
    ready: dict[str, dict[int, float]] = {}
    for run in result["runs"]:
        ready.setdefault(run["system"], {})[run["repeat"]] = run["ready_s"]
    rows = [[name, spread(list(each.values()), 1)] for name, each in ready.items()]
    return [*tables, ("Ready after, s", (["system", "median (range)"], rows))]


def _ratio(own: list[dict[str, Any]], peer: list[dict[str, Any]]) -> str:
    """Return the ratios of runs in the same round."""
    theirs = {run["repeat"]: run["total_1_ms"] for run in peer}
    return spread([run["total_1_ms"] / theirs[run["repeat"]] for run in own if theirs.get(run["repeat"])])


def stage_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return a table row per stage: CPU milliseconds per request."""
    names = sorted({name for run in runs for name in run["stages_ms_per_request"]})
    return [[name, spread([run["stages_ms_per_request"].get(name, 0.0) for run in runs])] for name in names]


def by_workload(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group runs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(run["workload"], []).append(run)
    return groups
