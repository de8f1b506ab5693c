"""Measure servers side by side: the same prompts, the same replayed ids, the same time per step, in alternation.

    python benchmarks/compare.py --tokenizer DIR --rounds 5 \\
        --sglang-python PATH --vllm-python PATH --vllm-path DIR:DIR

In every round each system is started, warmed up, measured and stopped, in an order that is turned around each time. A
system that isn't installed is skipped. Ratios are taken within a round, since machines and hours differ.
"""

from __future__ import annotations

import argparse
from typing import Any

from harness.arguments import add_data_options, add_peer_options, add_result_options, environment_of
from harness.machine import describe_machine
from harness.results import compare_tables, write_result
from harness.server import NotReady
from harness.systems import SYSTEMS, Environment, System
from harness.workload_run import run_workloads, selected

from multitok.bench.terminal import table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="default: %(default)s")
    parser.add_argument("--runs", default="A,B,C", help="workloads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="alternations (default: %(default)s)")
    add_result_options(parser, "peers")
    add_data_options(parser)
    add_peer_options(parser)
    options = parser.parse_args()
    if unknown := set(options.systems.split(",")) - SYSTEMS.keys():
        raise SystemExit(f"there is no system {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    environment = environment_of(options)
    systems = present([SYSTEMS[name] for name in options.systems.split(",")], environment)
    result: dict[str, Any] = {
        "kind": "compare",
        "label": options.label,
        "machine": describe_machine(),
        "step_ms": options.step_ms,
        "scale": options.scale,
        "tokenizer": environment.data.tokenizer_hash,
        "versions": versions(environment),
        "systems": {system.name: {"command": system.command, "environment": system.environment} for system in systems},
        "runs": [],
    }
    file = options.out / f"compare-{options.label}.json"
    workloads = selected(options.runs, options.scale)
    for round_number in range(options.rounds):
        for system in systems if round_number % 2 == 0 else systems[::-1]:
            result["runs"] += one_round(environment, system, workloads, round_number)
        # After each round, so that a long comparison that is stopped leaves something.
        write_result(file, result)
    for title, rows in compare_tables(result):
        print(f"\n{title}\n{table(*rows)}")
    return 0


def present(systems: list[System], environment: Environment) -> list[System]:
    """Return the systems that can be run; says which can't."""
    found = []
    for system in systems:
        if reason := environment.missing(system):
            print(f"skipped: {system.name}: {reason}")
        else:
            found.append(system)
    return found


def versions(environment: Environment) -> dict[str, str]:
    """Return the peers' versions."""
    found = {name: environment.version_of(name, name) for name in ("sglang", "vllm")}
    return {name: version for name, version in found.items() if version}


def one_round(environment: Environment, system: System, workloads: list[Any], number: int) -> list[dict[str, Any]]:
    """Start a system, run all workloads once, stop it."""
    environment.cache.mkdir(parents=True, exist_ok=True)
    log = environment.data.work / f"{system.name}.log"
    try:
        with environment.start(system, log) as server:
            runs = run_workloads(
                server.target,
                environment.data,
                workloads,
                label=f"round {number + 1} {system.name}",
                pid=server.pid,
                repeats=[number],
                front_in_scheduler=system.front_in_scheduler,
            )
            return [run | {"system": system.name, "ready_s": server.ready_s} for run in runs]
    except NotReady as error:
        print(f"round {number + 1} {system.name}: {error}")
        return []


if __name__ == "__main__":
    raise SystemExit(main())
