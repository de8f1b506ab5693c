"""A sweep over numbers of clients or rates: what ``multitok bench`` does."""

from __future__ import annotations

import argparse
import os
import sys
import time

from multitok.bench.dataset import read_dataset
from multitok.bench.load import Load
from multitok.bench.measure import Point, measure, template_overhead
from multitok.bench.processes import find_listener
from multitok.bench.prompts import PromptMaker, find_counter
from multitok.bench.report import Report
from multitok.bench.requests import Session, Settings
from multitok.bench.summary import Summary
from multitok.bench.target import ServedModel, Target, find_model
from multitok.bench.terminal import ProgressBar
from multitok.bench.workloads import STANDARD, Workload, fit_context, make_sessions

_REQUESTS_PER_CLIENT = 8
_REQUESTS_LEAST = 64
_OPEN_LOOP_S = 30


def run_sweep(options: argparse.Namespace) -> Report:
    """Measure every step of a sweep.

    Parameters
    ----------
    options : argparse.Namespace
        As `multitok.cli.bench` reads them.

    Raises
    ------
    BenchError
        The server isn't there, or refuses what is asked; the message says why.
    """
    target = Target.parse(options.url, options.api_key or os.environ.get("OPENAI_API_KEY"))
    model = find_model(target, options.model)
    workload = _workload(options, model)
    stream = workload.stream if options.stream is None else options.stream
    settings = Settings(model=model.name, api=options.api, stream=stream, ignore_eos=options.ignore_eos)
    pid = options.pid or (find_listener(target.port) if target.local else None)
    facts = {
        "CPU": f"of process {pid} and its children" if pid else "not measured: no process of the server is seen here"
    }
    sessions, words = _sessions(options, target, settings, workload, model, facts)
    sys.stderr.write(f"{target.url}, model {model.name}: {words}\n")
    levels: list[float] = (
        options.rate or options.concurrency or ([workload.clients] if options.workload else [1, 8, 64])
    )
    started = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    steps = [(level, _count(options, level)) for level in levels]
    counts = ", ".join(f"{count:,}" for _, count in steps)
    sys.stderr.write(f"sessions per step: {counts} (--requests N: fewer or more)\n")
    if not options.rate and (idle := [f"{level:g}" for level, count in steps if count < level]):
        facts["clients"] = f"not all of {', '.join(idle)} had something to do: there were fewer sessions than clients"
    points = [
        _step(options, target, settings, sessions, level, count, index, pid)
        for index, (level, count) in enumerate(steps)
    ]
    if any(point.summary.tokens_counted_by == "events" for point in points):
        facts["tokens"] = "counted by events: the server gives no usage"
    busiest = max(point.summary.own_cpu_s / point.summary.wall_s for point in points)
    facts["load generator"] = f"up to {busiest:.0%} of a core" + (" (it may be the limit)" if busiest > 0.8 else "")
    return Report(
        url=target.url,
        model=model.name,
        workload=words,
        open_loop=options.rate is not None,
        started=started,
        facts=facts,
        points=points,
    )


def _workload(options: argparse.Namespace, model: ServedModel) -> Workload:
    if options.workload:
        return fit_context(STANDARD[options.workload], model.context_length)
    return Workload(
        name="custom",
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        stream=True,
        clients=1,
        sessions=1_000_000,
        warmup=0,
    )


def _sessions(
    options: argparse.Namespace,
    target: Target,
    settings: Settings,
    workload: Workload,
    model: ServedModel,
    facts: dict[str, str],
) -> tuple[list[Session], str]:
    """Return what is sent, and the same in words."""
    counter = find_counter(target, model.name)
    # This request also tells early whether the server answers at all.
    overhead = template_overhead(target, settings, counter)
    kind = "stream" if settings.stream else "no stream"
    if options.dataset:
        read = read_dataset(options.dataset, settings, options.output_tokens)
        return list(read), f"{len(read):,} prompts of {options.dataset}, {kind}"
    facts["prompt lengths"] = "exact, by the server's /tokenize" if counter.exact else "estimated: no /tokenize there"
    made = make_sessions(workload, PromptMaker(counter), settings, overhead)
    words = workload.describe().partition(", stream" if workload.stream else ", no stream")[0]
    return list(made), f"{words}, {kind}"


def _count(options: argparse.Namespace, level: float) -> int:
    """Return how many sessions a step of the sweep has."""
    if options.requests:
        return int(options.requests)
    if options.rate:
        return max(1, round(level * _OPEN_LOOP_S))
    return max(_REQUESTS_LEAST, _REQUESTS_PER_CLIENT * int(level))


def _step(
    options: argparse.Namespace,
    target: Target,
    settings: Settings,
    sessions: list[Session],
    level: float,
    count: int,
    index: int,
    pid: int | None,
) -> Point:
    seed = options.seed * 1000 + index
    if options.rate:
        load = Load(sessions=count, rate=level, timeout=options.timeout, seed=seed)
        label = f"{level:g} requests/s"
    else:
        clients = int(level)
        load = Load(sessions=count, clients=clients, timeout=options.timeout, seed=seed)
        label = f"{clients} client{'s' if clients > 1 else ''}"
    warmup = max(1, count // 10) if options.warmup is None else options.warmup
    bar = ProgressBar(label)
    point = measure(target, settings, sessions, load, warmup=warmup, pid=pid, progress=bar)
    bar.close(_line(point.summary))
    return point


def _line(summary: Summary) -> str:
    errors = f", {sum(summary.errors.values())} ERRORS" if summary.errors else ""
    return (
        f"{summary.ok} answers in {summary.wall_s:.1f} s, {summary.requests_per_s:,.1f} requests/s, "
        f"{summary.output_tokens_per_s:,.0f} tokens/s{errors}"
    )
