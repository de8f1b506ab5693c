"""Put the committed results into docs/benchmarks.md, between its marks.

    python benchmarks/report.py            write the tables
    python benchmarks/report.py --check    fail if the page is not what the results say

A mark is a line `<!-- results: KIND LABEL -->`, and its table ends at `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.arguments import PUBLISHED_RESULTS
from harness.capacity import EXPLAINED_BY, plan
from harness.results import by_workload, compare_tables, run_table, stage_rows

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
MARK = re.compile(r"(<!-- results: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Rates that the model is asked for: output tokens/s, streams, prompt tokens, output tokens.
ASKED = ((20_000, 400, 1000, 500), (100_000, 2000, 1000, 500), (100_000, 2000, 8000, 200), (200_000, 8000, 1000, 500))
BUSY = 0.7


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def where(result: dict[str, Any]) -> str:
    """Return on what a result was measured."""
    machine = result["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    commit = f" at {machine['commit']}" if machine.get("commit") else ""
    scale = f" `--scale {result['scale']:g}`." if "scale" in result else ""
    return (
        f"{machine['date'].split()[0]}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:g} GB, "
        f"Linux {machine['kernel']}, Python {machine['python']}; {packages}{commit}.{scale}"
    )


def run_text(result: dict[str, Any]) -> str:
    parts = [where(result), markdown(*run_table(result["runs"]))]
    groups = by_workload(result["runs"])
    stages = {name: dict(map(tuple, stage_rows(runs))) for name, runs in groups.items()}
    names = sorted({stage for rows in stages.values() for stage in rows})
    rows = [[stage, *(each.get(stage, "") for each in stages.values())] for stage in names]
    parts += ["CPU by stage, ms per request:", markdown(["", *groups], rows)]
    if "ready_s" in result:
        ready = result["ready_s"]
        warm = f", then after {', '.join(f'{seconds:g}' for seconds in ready['warm'])} s" if ready["warm"] else ""
        parts.append(f"Ready after {ready['cold'][0]:g} s with an empty cache{warm}. Memory, MB:")
        memory = [
            [end["role"], *(f"{each[key]:.0f}" for each in (start, end) for key in ("rss_mb", "pss_mb"))]
            for start, end in zip(result["memory_idle"], result["memory_end"], strict=False)
        ]
        parts.append(markdown(["process", "RSS at start", "PSS at start", "RSS after load", "PSS after load"], memory))
    return "\n\n".join(parts)


def compare_text(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [f"{where(result)} Peers: {versions}. Step time {result['step_ms']:g} ms."]
    for title, rows in compare_tables(result):
        parts += [f"**{title}**", markdown(*rows)]
    return "\n\n".join(parts)


def scenario_text(result: dict[str, Any]) -> str:
    """Return the figures of a scenario; a figure with parts gets a row for each."""
    rows: list[list[str]] = []
    for key, value in result["figures"].items():
        parts = value.items() if isinstance(value, dict) and value else [("", value)]
        rows += [[f"{key}: {part}" if part else key, plain(figure)] for part, figure in parts]
    day = result["machine"]["date"].split()[0]
    return markdown([f"{result['scenario']} ({day})", ""], rows)


def plain(value: Any) -> str:
    """Return a figure as it stands in a table."""
    if isinstance(value, list | tuple | dict):
        return ", ".join(plain(each) for each in value) or "none"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def model_text(result: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for each in EXPLAINED_BY.values() for name in each))
    costs = [
        [stage, *(f"{each[name] * 1e6:.2f}" if name in each else "" for name in names)]
        for stage, each in result["costs_s"].items()
    ]
    checks = [
        [
            *(f"{row['workers']} worker(s): {row['load']}", row["stage"]),
            *(f"{row['measured_s']:.2f}", f"{row['model_s']:.2f}", f"{row['model_s'] / row['measured_s'] - 1:+.0%}"),
        ]
        for row in result["checks"]
    ]
    plans = []
    for rate, streams, prompt, output in ASKED:
        found = plan(
            result["costs_s"],
            tokens_per_s=rate,
            streams=streams,
            input_tokens=prompt,
            output_tokens=output,
            busy=BUSY,
        )
        load = f"{rate:,} tokens/s, {streams:,} streams, {prompt:,} in, {output:,} out"
        if found is None:
            plans.append([load, *["out of reach"] * 4])
        else:
            plans.append([load, str(found.workers), str(found.detokenizers)])
            plans[-1] += [f"{found.router_busy:.0%}", f"{found.scheduler_busy:.0%}"]
    return "\n\n".join(
        [
            where(result),
            "Costs, us of CPU for each:",
            markdown(["stage", *names], costs),
            "Checked on loads that the costs were not made from, CPU seconds:",
            markdown(["load", "stage", "measured", "model", "off"], checks),
            f"What the model says, with each process at most {BUSY:.0%} busy:",
            markdown(["load", "HTTP workers", "detokenizers", "router busy", "scheduler busy"], plans),
        ]
    )


TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "run": run_text,
    "compare": compare_text,
    "scenario": scenario_text,
    "model": model_text,
}


def filled(mark: re.Match[str]) -> str:
    """Return a mark with its table."""
    begin, kind, label, end = mark.groups()
    file = PUBLISHED_RESULTS / f"{kind}-{label}.json"
    text = TEXTS[kind](json.loads(file.read_text())) if file.is_file() else "Not measured yet."
    return f"{begin}{text}\n{end}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is not up to date")
    parser.add_argument("files", nargs="*", type=Path, help="print the tables of these results, and change nothing")
    options = parser.parse_args()
    if options.files:
        for file in options.files:
            result = json.loads(file.read_text())
            print(f"# {file}\n\n{TEXTS[result['kind']](result)}\n")
        return 0
    page = PAGE.read_text()
    new = MARK.sub(filled, page)
    if options.check:
        print("up to date" if new == page else "docs/benchmarks.md is not what the results say")
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
