"""Put a committed result into docs/reliability.md, between its marks.

    python -m chaos.page            write the tables
    python -m chaos.page --check    fail if the page is not what the result says

A mark is a line `<!-- chaos: LABEL -->`, of the result `results/LABEL.json`; what is written ends at `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from chaos.report import TIMES, Report
from chaos.verdict import MUST_BE_0, Counts

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_MARK = re.compile(r"(<!-- chaos: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_decode = msgspec.json.Decoder(Report).decode


def filled(page: str, results: Path = RESULTS) -> str:
    """Return the page with what the results say."""

    def fill(mark: re.Match[str]) -> str:
        file = results / f"{mark[2]}.json"
        text = in_markdown(_decode(file.read_bytes())) if file.is_file() else "Not measured yet."
        return f"{mark[1]}{text}\n{mark[3]}"

    return _MARK.sub(fill, page)


def in_markdown(report: Report) -> str:
    """Return a report as it stands on the page."""
    machine = report.machine
    seconds = sum(run.options.seconds for run in report.runs)
    modes = ", ".join(f"{run.options.mode} ({run.options.seed})" for run in report.runs)
    acts = sum(len(run.events) for run in report.runs)
    where = (
        f"{machine.date}, multitok {machine.multitok}, {machine.cpu}, {machine.cores} cores, Linux {machine.kernel}, "
        f"Python {machine.python}: {seconds / 60:g} minutes, {report.runs[0].options.clients} requests at a time, "
        f"{acts} kills and signals. Modes and their seeds: {modes}."
    )
    counts = [
        (name.replace("_", " "), f"{getattr(report.counts, name):,}{' (must be 0)' if name in MUST_BE_0 else ''}")
        for name in Counts.__struct_fields__
    ]
    counts.append(("left over", f"{len(report.leftovers)} (must be 0)"))
    times = [
        [kind, str(len(each.detected)), *_cells(each.streams, 0), *_cells(each.ended, 0)]
        + [cell for name in TIMES for cell in _cells(getattr(each, name), 2)]
        for kind, each in sorted(report.times.items())
    ]
    header = ["", "how often", "streams open", "requests ended", *(f"{words}, s" for words in TIMES.values())]
    return "\n\n".join(
        [
            where,
            _table(["requests", ""], counts),
            "Median and largest. `noticed` counts from the signal, the other times from when it was noticed.",
            _table(header, times),
        ]
    )


def _cells(values: Sequence[float], digits: int) -> list[str]:
    return [f"{median(values):.{digits}f} / {max(values):.{digits}f}" if values else ""]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is not up to date")
    options = parser.parse_args()
    page = PAGE.read_text()
    new = filled(page)
    if options.check:
        sys.stdout.write("up to date\n" if new == page else "docs/reliability.md is not what the results say\n")
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
