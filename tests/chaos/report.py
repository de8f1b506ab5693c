"""What runs have shown, added up: printed, and written as JSON."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from chaos.run import Result
from chaos.verdict import MUST_BE_0, Counts, Times
from multitok import __version__

# A test fails past this many times what is promised, since machines that test are busy.
FACTOR = 5
# Seconds promised from detection, by role and time.
PROMISED = (
    ("tokenizer_worker", "replaced", 2.0),
    ("scheduler", "told", 2.0),
    # Of any part: a stream that goes on does not wait for longer than for a replacement.
    ("", "paused", 2.0),
)
_FAULTS_SHOWN = 10
TIMES = {
    "detected": "noticed",
    "replaced": "replaced",
    "answered": "first answer",
    "told": "last one told",
    "paused": "longest pause",
}


class Machine(msgspec.Struct, frozen=True):
    """Where and when it was measured."""

    date: str
    cpu: str
    cores: int
    kernel: str
    python: str
    multitok: str


class Report(msgspec.Struct, kw_only=True):
    """All runs of one call.

    Attributes
    ----------
    machine : Machine
        Where.
    counts : Counts
        Added up.
    leftovers, late : list of str
        What was left over, and what took more than `FACTOR` times what is promised.
    times : dict of str to Times
        Of all runs, by kind.
    runs : list of Result
        One by one.
    """

    machine: Machine
    counts: Counts
    leftovers: list[str]
    late: list[str]
    times: dict[str, Times]
    runs: list[Result]

    @property
    def failures(self) -> list[str]:
        """Everything that must not be."""
        found = [f"{getattr(self.counts, name)} {name}" for name in MUST_BE_0 if getattr(self.counts, name)]
        found += [
            f"{failed} failed with a scheduler in spite of --resume-generation"
            for failed in [_failed_in_spite(self.runs)]
            if failed
        ]
        found += [f"left over: {what}" for what in self.leftovers] + self.late
        return found + [failure for run in self.runs for failure in run.failures]


def make_report(runs: Sequence[Result]) -> Report:
    """Add runs up."""
    counts = Counts()
    for run in runs:
        for name in Counts.__struct_fields__:
            setattr(counts, name, getattr(counts, name) + getattr(run.verdict.counts, name))
    times: dict[str, Times] = {}
    for run in runs:
        for kind, each in run.times.items():
            merged = times.setdefault(kind, Times())
            for name in Times.__struct_fields__:
                getattr(merged, name).extend(getattr(each, name))
    late = [
        f"{kind}: {name} after {value:.2f} s, {promised:g} s are promised"
        for role, name, promised in PROMISED
        for kind, each in times.items()
        if role in kind
        for value in getattr(each, name)
        if value > FACTOR * promised
    ]
    leftovers = [f"{what} ({run.options.mode})" for run in runs for what in run.leftovers]
    return Report(machine=_machine(), counts=counts, leftovers=leftovers, late=late, times=times, runs=list(runs))


def in_words(report: Report) -> Iterable[str]:
    """Yield the lines that are printed."""
    for run in report.runs:
        end = "SIGTERM" if run.options.end == "term" else "the launcher's death"
        acts = len(run.events)
        yield f"{run.options.mode}, {run.options.seconds:g} s, seed {run.options.seed}, {acts} acts, ended by {end}"
    yield ""
    for name in Counts.__struct_fields__:
        yield f"{name.replace('_', ' '):>24} {getattr(report.counts, name):>8}{_must(name)}"
    yield f"{'left over':>24} {len(report.leftovers):>8}{_must('leftovers')}"
    yield ""
    yield from times_table(report.times)
    for run in report.runs:
        yield from (f"  {fault}" for fault in run.verdict.faults[:_FAULTS_SHOWN])
    yield ""
    yield from (f"FAILED: {failure}" for failure in report.failures)
    yield "nothing that must not be" if not report.failures else ""


def times_table(times: dict[str, Times]) -> Iterable[str]:
    """Yield a table of the times: median and largest, in seconds."""
    header = ["", "kills", "streams", "ended", *TIMES.values()]
    rows = [header]
    for kind, each in sorted(times.items()):
        cells = [kind, str(len(each.detected)), _whole(each.streams), _whole(each.ended)]
        rows.append([*cells, *(_figure(getattr(each, name)) for name in TIMES)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _figure(values: list[float]) -> str:
    return f"{median(values):.2f} / {max(values):.2f}" if values else "-"


def _whole(values: list[int]) -> str:
    return f"{median(values):.0f} / {max(values)}" if values else "-"


def _must(name: str) -> str:
    return "   must be 0" if name in (*MUST_BE_0, "leftovers") else ""


def _failed_in_spite(runs: Iterable[Result]) -> int:
    return sum(run.verdict.counts.failed_with_scheduler for run in runs if run.options.mode.endswith("+resume"))


def _machine() -> Machine:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return Machine(
        date=time.strftime("%Y-%m-%d"),
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        python=platform.python_version(),
        multitok=__version__,
    )
