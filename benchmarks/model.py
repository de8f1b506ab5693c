"""A capacity model: how many HTTP workers and detokenizers an engine's rate needs.

    python benchmarks/model.py measure             measure costs per request, token and step; check them on other loads
    python benchmarks/model.py predict             for 100,000 output tokens/s at 2,000 streams
    python benchmarks/model.py predict --tokens-per-s 20000 --streams 400 --input-tokens 4000

`predict` needs the file that `measure` wrote.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harness.arguments import OWN_RESULTS, PUBLISHED_RESULTS, add_data_options, add_result_options, environment_of
from harness.capacity import EXPLAINED_BY, amounts_of, fit, plan, predict
from harness.machine import describe_machine
from harness.results import write_result
from harness.systems import SYSTEMS, Environment
from harness.workload_run import run_workloads

from multitok.bench.terminal import table
from multitok.bench.workloads import STANDARD, Workload


def _load(name: str, clients: int, input_tokens: int, output_tokens: int, sessions: int) -> Workload:
    return Workload(
        name=name,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        stream=True,
        clients=clients,
        sessions=sessions,
        warmup=clients,
    )


# Loads that differ in what they have much of.
FITTED = (
    _load("tokens", 64, 32, 256, 256),
    _load("few streams", 8, 32, 256, 64),
    _load("many streams", 192, 32, 128, 576),
    _load("requests", 64, 32, 8, 2048),
    _load("prompts", 16, 4000, 16, 256),
)
CHECKED = (STANDARD["A"], STANDARD["C"], _load("mixed", 128, 500, 128, 512))
SYSTEM_OF = {1: "multitok", 2: "multitok-2w", 4: "multitok-4w"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    measuring = commands.add_parser("measure", help="measure the costs")
    measuring.add_argument("--workers", default="1,2", help="numbers of HTTP workers (default: %(default)s)")
    add_result_options(measuring, "multitok")
    add_data_options(measuring)
    measuring.set_defaults(run=measure)
    predicting = commands.add_parser("predict", help="how many processes a rate needs")
    predicting.add_argument("--tokens-per-s", type=float, default=100_000, help="default: %(default)s")
    predicting.add_argument("--streams", type=int, default=2000, help="default: %(default)s")
    predicting.add_argument("--input-tokens", type=int, default=1000, help="default: %(default)s")
    predicting.add_argument("--output-tokens", type=int, default=500, help="default: %(default)s")
    predicting.add_argument(
        "--busy", type=float, default=0.7, help="share of a core per process (default: %(default)s)"
    )
    predicting.add_argument("--label", default="multitok", help="name of the result (default: %(default)s)")
    predicting.add_argument(
        "--results",
        type=Path,
        default=OWN_RESULTS,
        metavar="DIR",
        help="folder of it; without one of yours: the published",
    )
    predicting.set_defaults(run=show_plan)
    options = parser.parse_args()
    options.run(options)
    return 0


def measure(options: argparse.Namespace) -> None:
    environment = environment_of(options)
    machine = describe_machine()
    fitted: list[tuple[int, dict[str, Any]]] = []
    checked: list[tuple[int, dict[str, Any]]] = []
    for workers in map(int, options.workers.split(",")):
        fitted += [(workers, run) for run in _runs(environment, workers, FITTED, options.scale)]
        checked += [(workers, run) for run in _runs(environment, workers, CHECKED, options.scale)]
    amounts = [amounts_of(run, workers) for workers, run in fitted]
    costs = {}
    for stage, names in EXPLAINED_BY.items():
        seconds = [_cpu(run, stage) for _, run in fitted]
        # Only runs with a router tell what one costs.
        there = [i for i, cpu in enumerate(seconds) if cpu > 0]
        if there:
            costs[stage] = fit([amounts[i] for i in there], [seconds[i] for i in there], names)
    rows = [
        {
            "workers": workers,
            "load": run["described"],
            "stage": stage,
            "measured_s": measured,
            "model_s": round(said, 3),
        }
        for workers, run in checked
        for stage, said in predict(costs, amounts_of(run, workers)).items()
        if (measured := _cpu(run, stage)) > 0
    ]
    result = {
        "kind": "model",
        "label": options.label,
        "machine": machine,
        "step_ms": options.step_ms,
        "tokenizer": environment.data.tokenizer_hash,
        "costs_s": costs,
        "checks": rows,
        "fitted_on": [{"workers": workers, **_without_processes(run)} for workers, run in fitted],
    }
    show_costs(result)
    write_result(options.out / f"model-{options.label}.json", result)


def _runs(environment: Environment, workers: int, loads: tuple[Workload, ...], scale: float) -> list[dict[str, Any]]:
    system = SYSTEMS[SYSTEM_OF[workers]]
    environment.cache.mkdir(parents=True, exist_ok=True)
    with environment.start(system, environment.data.work / "model.log") as server:
        return list(
            run_workloads(
                server.target,
                environment.data,
                [load.scaled(scale) for load in loads],
                label=f"{workers} worker(s),",
                pid=server.pid,
                repeats=[0],
            )
        )


def _cpu(run: dict[str, Any], stage: str) -> float:
    return float(run["stages_ms_per_request"].get(stage, 0.0)) * run["summary"]["ok"] / 1e3


def _without_processes(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "processes"}


def show_costs(result: dict[str, Any]) -> None:
    """Print costs, and how well they explain loads that they were not made from."""
    names = list(dict.fromkeys(name for names in EXPLAINED_BY.values() for name in names))
    rows = [
        [stage, *(f"{costs[name] * 1e6:.2f}" if name in costs else "" for name in names)]
        for stage, costs in result["costs_s"].items()
    ]
    print("\nCPU, us for each of")
    print(table(["stage", *names], rows))
    print("\nloads that the costs were not made from, CPU seconds")
    checks = [
        [
            f"{row['workers']} worker(s): {row['load']}",
            row["stage"],
            f"{row['measured_s']:.2f}",
            f"{row['model_s']:.2f}",
            f"{row['model_s'] / row['measured_s'] - 1:+.0%}",
        ]
        for row in result["checks"]
    ]
    print(table(["load", "stage", "measured", "model", "off"], checks))


def show_plan(options: argparse.Namespace) -> None:
    name = f"model-{options.label}.json"
    file = next((folder / name for folder in (options.results, PUBLISHED_RESULTS) if (folder / name).is_file()), None)
    if file is None:
        raise SystemExit(f"{options.results / name} isn't there; run `model.py measure` first")
    print(f"costs: {file}")
    result = json.loads(file.read_text())
    found = plan(
        result["costs_s"],
        tokens_per_s=options.tokens_per_s,
        streams=options.streams,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        busy=options.busy,
    )
    asked = (
        f"{options.tokens_per_s:,.0f} output tokens/s at {options.streams:,} streams, "
        f"{options.input_tokens:,}-token prompts, {options.output_tokens:,} out"
    )
    if found is None:
        print(f"{asked}: out of reach for any number of workers with one scheduler's steps")
        return
    print(f"{asked}, each process at most {options.busy:.0%} of a core like that of {result['machine']['cpu']}:")
    print(f"  {found.workers} HTTP worker(s), each busy {found.worker_busy:.0%}")
    print(f"  {found.detokenizers} detokenizer(s), each busy {found.detokenizer_busy:.0%}")
    print(f"  router busy {found.router_busy:.0%}; scheduler busy {found.scheduler_busy:.0%} beside its engine")


if __name__ == "__main__":
    raise SystemExit(main())
