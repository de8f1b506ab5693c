"""Measure one server: CPU per request and per stage, memory, ready time, latencies.

    python benchmarks/run.py                                      multitok, one HTTP worker, all workloads
    python benchmarks/run.py --runs A,C --repeat 5 -- --tokenizer-worker-num 2
    python benchmarks/run.py --system sglang --sglang-python PATH
    python benchmarks/run.py --url http://127.0.0.1:8000 --runs A  a server that runs already
    python benchmarks/run.py --health /health --command 'my-server --port {port} --model {model}'

Total 1 is the CPU of HTTP workers, router and detokenizers; total 2 adds the scheduler with its simulated engine.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import time
from typing import Any

import msgspec
from harness.arguments import add_data_options, add_peer_options, add_result_options, environment_of
from harness.machine import describe_machine
from harness.results import by_workload, run_table, stage_rows, write_result
from harness.systems import SYSTEMS, System
from harness.workload_run import run_workloads, selected

from multitok.bench.processes import find_listener
from multitok.bench.target import BenchError, Target, find_model
from multitok.bench.terminal import table
from multitok.bench.workloads import STANDARD, fit_context


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--system", choices=sorted(SYSTEMS), default="multitok", help="default: %(default)s")
    what.add_argument("--command", help="command line of another server; {port}, {model}, {replay} are filled in")
    what.add_argument("--url", help="a server that runs already")
    parser.add_argument("--health", default="/health", help="route of --command that answers 200 when it is ready")
    parser.add_argument("--runs", default=",".join(STANDARD), help="workloads (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="how often each is run (default: %(default)s)")
    parser.add_argument("--starts", type=int, default=3, help="starts with warm caches, for the ready time")
    add_result_options(parser, None)
    add_data_options(parser)
    add_peer_options(parser)
    parser.add_argument("options", nargs="*", help="after --: more options of the server")
    options = parser.parse_args()
    try:
        result = measure_url(options) if options.url else measure_system(options)
    except BenchError as error:
        raise SystemExit(str(error)) from None
    show(result)
    write_result(options.out / f"run-{result['label']}.json", result)
    return 1 if any(run["summary"]["errors"] for run in result["runs"]) else 0


def measure_url(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a server that runs already, with prompts for the given tokenizer."""
    target = Target.parse(options.url)
    model = find_model(target)
    pid = find_listener(target.port) if target.local else None
    data = environment_of(options).data
    workloads = [fit_context(workload, model.context_length) for workload in selected(options.runs, options.scale)]
    entries = run_workloads(
        target, data, workloads, label=model.name, pid=pid, repeats=range(options.repeat), model=model.name
    )
    label = options.label or "url"
    return {"kind": "run", "label": label, "machine": describe_machine(), "runs": list(entries)}


def measure_system(options: argparse.Namespace) -> dict[str, Any]:
    """Start a server, and measure it."""
    if options.command:
        system = System(name="other", family="other", command=shlex.split(options.command), health=options.health)
    else:
        system = SYSTEMS[options.system]
    system = msgspec.structs.replace(system, command=[*system.command, *options.options])
    environment = environment_of(options)
    if system.family != "other" and (reason := environment.missing(system)):
        raise SystemExit(f"{system.name} can't be measured: {reason}")
    label = options.label or "-".join([system.name, *(part.strip("-") for part in options.options)])
    log = environment.data.work / f"{label}.log"
    machine = describe_machine()
    # Everything that a start may leave for the next one; files stay in the kernel's page cache either way.
    shutil.rmtree(environment.cache, ignore_errors=True)
    environment.cache.mkdir(parents=True)
    ready: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(options.starts):
        with environment.start(system, log) as server:
            ready["warm" if ready["cold"] else "cold"].append(server.ready_s)
    with environment.start(system, log) as server:
        ready["warm" if ready["cold"] else "cold"].append(server.ready_s)
        time.sleep(1)
        result: dict[str, Any] = {
            "kind": "run",
            "label": label,
            "machine": machine,
            "command": system.command,
            "environment": system.environment,
            "step_ms": options.step_ms,
            "scale": options.scale,
            "tokenizer": environment.data.tokenizer_hash,
            "ready_s": ready,
            "start_cpu_s": server.start_cpu_s,
            "memory_idle": memory(server.memory()),
            "idle_cores": server.idle_cpu(),
        }
        result["runs"] = list(
            run_workloads(
                server.target,
                environment.data,
                selected(options.runs, options.scale),
                label=label,
                pid=server.pid,
                repeats=range(options.repeat),
                front_in_scheduler=system.front_in_scheduler,
                model=find_model(server.target).name,
            )
        )
        result["memory_end"] = memory(server.memory())
    return result


def memory(processes: list[Any]) -> list[dict[str, Any]]:
    """Return the memory of each process."""
    return [{"role": each.role, "rss_mb": each.rss_mb, "pss_mb": each.pss_mb} for each in processes]


def show(result: dict[str, Any]) -> None:
    """Print a result."""
    machine = result["machine"]
    print(f"\n{result['label']} on {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}")
    groups = by_workload(result["runs"])
    print(table(*run_table(result["runs"])))
    for name, runs in groups.items():
        print(f"\n{name}: {runs[0]['described']}; CPU ms per request by stage")
        print(table(["stage", "median (range)"], stage_rows(runs)))
    if "ready_s" in result:
        warm = ", ".join(f"{seconds:g}" for seconds in result["ready_s"]["warm"])
        print(f"\nready after {result['ready_s']['cold'][0]:g} s with an empty cache, then {warm or '-'} s")
        rows = [
            [
                end["role"],
                f"{start['rss_mb']:.0f}",
                f"{start['pss_mb']:.0f}",
                f"{end['rss_mb']:.0f}",
                f"{end['pss_mb']:.0f}",
            ]
            for start, end in zip(result["memory_idle"], result["memory_end"], strict=False)
        ]
        print(table(["memory, MB", "RSS at start", "PSS", "RSS after load", "PSS"], rows))
        print("idle, share of a core: " + ", ".join(f"{k} {v:.2%}" for k, v in result["idle_cores"].items()))


if __name__ == "__main__":
    raise SystemExit(main())
