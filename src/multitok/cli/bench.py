"""``multitok bench``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "measure any OpenAI-compatible server"
DESCRIPTION = """\
Put a load on an OpenAI-compatible server and show what came of it: requests and tokens per second, time to the first
token, time between tokens, errors; for a server on this machine also the CPU time of each of its processes.

Closed loop: --concurrency 1,8,64 keeps so many clients busy, each value in turn.
Open loop: --rate 5,10 begins so many requests per second at random times, whether or not earlier ones are answered.

  multitok bench                                               a sweep against http://127.0.0.1:30000
  multitok bench --rate 5,10,20 --requests 300                 Poisson arrivals
  multitok bench --input-tokens 8000 --output-tokens 16 --no-stream
  multitok bench --workload D --concurrency 16                 a standard workload: A to E, see docs/benchmarks.md
  multitok bench --url https://api.example.com/v1 --model NAME --html report.html
"""
EPILOG = "exit status: 0, or 1 when the server isn't there or no request succeeded, or 2 for wrong options"

_WORKLOADS = ["A", "B", "C", "D", "E"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.epilog = EPILOG
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:30000", help="where it listens (default: %(default)s)")
    server.add_argument("--model", metavar="NAME", help="default: the first that /v1/models lists")
    server.add_argument("--api", choices=["chat", "completions"], default="chat", help="default: %(default)s")
    server.add_argument("--api-key", metavar="KEY", help="default: the environment's OPENAI_API_KEY")
    server.add_argument(
        "--pid", type=_count, metavar="N", help="first process, for CPU per process; found by itself on this machine"
    )
    load = parser.add_argument_group("load")
    loop = load.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=_counts, metavar="N,N,...", help="closed loop: clients (default: 1,8,64)")
    loop.add_argument("--rate", type=_rates, metavar="R,R,...", help="open loop: requests per second")
    load.add_argument(
        "--requests",
        type=_count,
        metavar="N",
        help="sessions per step; default: 8 per client, 64 or more; open loop: 30 s worth of them",
    )
    load.add_argument(
        "--warmup", type=_count_or_zero, metavar="N", help="sent before that, not counted; default: a tenth"
    )
    load.add_argument("--timeout", type=_positive, default=300.0, metavar="SECONDS", help="default: %(default)g")
    load.add_argument(
        "--seed", type=_count_or_zero, default=0, metavar="N", help="another seed: other prompts, other arrivals"
    )
    prompts = parser.add_argument_group("prompts (every prompt of a run is unique)")
    prompts.add_argument(
        "--input-tokens",
        type=_count,
        default=128,
        metavar="N",
        help="at least what the chat template and a number of its own take (default: %(default)s)",
    )
    prompts.add_argument("--output-tokens", type=_count, default=64, metavar="N", help="default: %(default)s")
    prompts.add_argument("--workload", choices=_WORKLOADS, help="a standard workload in place of the lengths")
    prompts.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="your own prompts: JSON lines with 'prompt' or 'messages', and perhaps 'max_tokens'; sent as they are",
    )
    prompts.add_argument("--stream", action=argparse.BooleanOptionalAction, default=None, help="default: --stream")
    prompts.add_argument("--ignore-eos", action="store_true", help="ask for all tokens, where the server knows this")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--html", type=Path, metavar="FILE", default=Path("multitok-bench.html"), help="report (default: %(default)s)"
    )
    output.add_argument("--json", type=Path, metavar="FILE", help="all figures")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the sweep; returns the exit status."""
    if options.dataset and options.workload:
        parser.error("--dataset and --workload exclude each other")
    # Only now: the load generator's libraries are of no use to `multitok serve`, whose launcher stays small.
    import msgspec

    from multitok.bench.report import html_report, text_summary
    from multitok.bench.sweep import run_sweep
    from multitok.bench.target import BenchError

    for option, path in (("--html", options.html), ("--json", options.json)):
        if path is not None and (problem := _unwritable(path)):
            parser.error(f"{option}: can't write {path}: {problem}")
    try:
        report = run_sweep(options)
    except BenchError as error:
        print(f"multitok bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmultitok bench: interrupted", file=sys.stderr)
        return 130
    print(f"\n{text_summary(report)}\n")
    try:
        options.html.write_text(html_report(report), encoding="utf-8")
        print(f"report: {options.html}")
        if options.json:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
            print(f"figures: {options.json}")
    except OSError as error:
        print(f"multitok bench: {error}", file=sys.stderr)
        return 1
    return 0 if any(point.summary.ok for point in report.points) else 1


def _unwritable(path: Path) -> str | None:
    """Say why a file can't be written, before a run of minutes is made for it; what is there stays."""
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        return error.strerror
    return None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _count_or_zero(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _rates(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]
