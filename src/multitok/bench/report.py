"""The report of a sweep: a summary table, and one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec

from multitok.bench.measure import Point
from multitok.bench.processes import cpu_by_role
from multitok.bench.summary import Percentiles
from multitok.bench.svg import Series, line_chart, stacked_bars
from multitok.bench.terminal import number, table

_STYLE = """
:root { color-scheme: light dark; --text: #1f2937; --soft: #6b7280; --rule: #e5e7eb; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #e5e7eb; --soft: #9ca3af; --rule: #374151; --back: #111827; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 2rem auto;
  max-width: 1180px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1.5rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--text); font: 11px system-ui, sans-serif; }
svg .title { font-size: 14px; font-weight: 600; } svg .label, svg .tick { fill: var(--soft); }
svg .grid { stroke: var(--rule); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
.errors { color: #dc2626; }
"""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep.

    Attributes
    ----------
    url, model : str
        What was measured.
    workload : str
        In words.
    open_loop : bool
        Whether the sweep is over rates; otherwise over clients.
    started : str
        Date and time.
    facts : dict of str to str
        What else a reader needs to know: where it ran, how tokens were counted.
    points : list of Point
        One per step of the sweep.
    """

    url: str
    model: str
    workload: str
    open_loop: bool
    started: str
    facts: dict[str, str]
    points: list[Point]

    @property
    def axis(self) -> str:
        """What the sweep is over."""
        return "requests/s asked for" if self.open_loop else "clients"

    @property
    def steps(self) -> list[str]:
        """Names of its steps."""
        return [f"{point.summary.level:g}" for point in self.points]


def summary_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the summary table; times are in milliseconds."""
    header = [
        *(report.axis, "ok", "errors", "req/s", "tokens/s"),
        *("TTFT p50", "p99", "inter-token p50", "p99", "latency p50", "p99", "events/token"),
    ]
    rows = []
    for step, point in zip(report.steps, report.points, strict=True):
        summary = point.summary
        row = [step, f"{summary.ok:,}", f"{sum(summary.errors.values()):,}", number(summary.requests_per_s)]
        row.append(number(summary.output_tokens_per_s, 0))
        for times in (summary.ttft, summary.inter_token, summary.latency):
            row += [number(times.p50 if times else None), number(times.p99 if times else None)]
        row.append(number(summary.events_per_token, 2))
        rows.append(row)
    return header, rows


def cpu_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the CPU table, milliseconds per request and kind of process; perhaps no rows."""
    cpu = [cpu_by_role(point.processes) for point in report.points]
    roles = sorted({role for each in cpu for role, seconds in each.items() if seconds})
    if not roles:
        return [], []
    rows = []
    for step, point, each in zip(report.steps, report.points, cpu, strict=True):
        requests = max(point.summary.ok, 1)
        rows.append([step, *(number(each.get(role, 0.0) / requests * 1e3, 2) for role in roles)])
        rows[-1].append(number(sum(each.values()) / requests * 1e3, 2))
    return [report.axis, *roles, "all"], rows


def text_summary(report: Report) -> str:
    """Return the summary for a terminal."""
    lines = [table(*summary_rows(report)), "", "TTFT (time to the first token), inter-token times and latencies in ms."]
    header, rows = cpu_rows(report)
    if rows:
        lines += ["", "CPU, ms per request:", table(header, rows), ""]
    lines += [f"{key}: {value}" for key, value in report.facts.items()]
    for step, point in zip(report.steps, report.points, strict=True):
        lines += [f"at {step}: {detail}" for detail in point.summary.error_details]
    return "\n".join(lines)


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def html_report(report: Report) -> str:
    """Return the report as one HTML page."""
    cpu = cpu_rows(report)
    facts = "".join(f"<li>{escape(key)}: {escape(value)}</li>" for key, value in report.facts.items())
    errors = "".join(
        f"<li>at {escape(step)}: {escape(detail)}</li>"
        for step, point in zip(report.steps, report.points, strict=True)
        for detail in point.summary.error_details
    )
    title = f"{report.model} at {report.url}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>multitok bench: {escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>multitok bench: {escape(title)}</h1>
<p>{escape(report.workload)}; {"open" if report.open_loop else "closed"} loop; {escape(report.started)}</p>
<ul>{facts}</ul>
<div class="charts">{"".join(f"<figure>{chart}</figure>" for chart in charts(report))}</div>
<h2>Figures</h2><p>Times in milliseconds.</p>
{_html_table(*summary_rows(report))}
{f"<h2>CPU, milliseconds per request</h2>{_html_table(*cpu)}" if cpu[1] else ""}
{f'<h2>Errors</h2><ul class="errors">{errors}</ul>' if errors else ""}
</body></html>
"""


def charts(report: Report) -> list[str]:
    """Return the report's charts, those that have something to show."""
    summaries = [point.summary for point in report.points]
    axis, steps = report.axis, report.steps
    found = [
        line_chart(
            "Requests", axis, "requests/s", steps, [Series("answered", [each.requests_per_s for each in summaries])]
        ),
        line_chart(
            "Output", axis, "tokens/s", steps, [Series("tokens", [each.output_tokens_per_s for each in summaries])]
        ),
    ]
    for title, times in (
        ("Time to first token", [each.ttft for each in summaries]),
        ("Inter-token time", [each.inter_token for each in summaries]),
        ("Latency", [each.latency for each in summaries]),
    ):
        if any(times):
            found.append(line_chart(title, axis, "ms", steps, _percentile_series(times)))
    cpu = [cpu_by_role(point.processes) for point in report.points]
    roles = sorted({role for each in cpu for role, seconds in each.items() if seconds})
    if roles:
        per_request = [
            Series(role, [each.get(role, 0.0) / max(one.ok, 1) * 1e3 for each, one in zip(cpu, summaries, strict=True)])
            for role in roles
        ]
        cores = [
            Series(role, [each.get(role, 0.0) / one.wall_s for each, one in zip(cpu, summaries, strict=True)])
            for role in roles
        ]
        found.append(stacked_bars("CPU per request", axis, "ms", steps, per_request))
        found.append(stacked_bars("CPU in use", axis, "cores", steps, cores))
    return found


def _percentile_series(times: Sequence[Percentiles | None]) -> list[Series]:
    return [Series(name, [getattr(each, name) if each else None for each in times]) for name in ("p50", "p90", "p99")]
