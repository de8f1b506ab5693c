"""Options that several commands have."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.data import BenchData
from harness.systems import Environment

OWN_RESULTS = Path(__file__).parents[1] / "out"
# What docs/benchmarks.md shows.
PUBLISHED_RESULTS = Path(__file__).parents[1] / "results"
_WORK = Path.home() / ".cache" / "multitok-bench"


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about data and timing."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder with tokenizer.json; default: multitok's default model's"
    )
    group.add_argument("--step-ms", type=float, default=5.0, help="time of an engine step (default: %(default)s)")
    group.add_argument(
        "--work", type=Path, default=_WORK, metavar="DIR", help="for data and logs (default: %(default)s)"
    )


def add_result_options(parser: argparse.ArgumentParser, label: str | None) -> None:
    """Add the options about how much is measured, and where the result goes."""
    group = parser.add_argument_group("result")
    group.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="more or fewer requests; with few, what is paid once weighs more: for a try, not to compare (default: 1)",
    )
    group.add_argument(
        "--label", default=label, help="name of the result" + (" (default: %(default)s)" if label else "")
    )
    group.add_argument("--out", type=Path, default=OWN_RESULTS, metavar="DIR", help="default: %(default)s")


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about peers."""
    group = parser.add_argument_group("peers (benchmarks/peers/*/README.md tells how to install them)")
    group.add_argument("--sglang-python", metavar="PATH", help="Python of an environment with SGLang")
    group.add_argument("--vllm-python", metavar="PATH", help="Python of an environment with vLLM")
    group.add_argument("--vllm-path", default="", metavar="DIR:DIR", help="folders put in front of vLLM's packages")


def environment_of(options: argparse.Namespace) -> Environment:
    """Return what servers are started with."""
    options.work.mkdir(parents=True, exist_ok=True)
    given = {"sglang": getattr(options, "sglang_python", None), "vllm": getattr(options, "vllm_python", None)}
    return Environment(
        data=BenchData(options.tokenizer, options.work),
        pythons={"multitok": sys.executable} | {name: python for name, python in given.items() if python},
        step_ms=options.step_ms,
        cache=options.work / "cache",
        vllm_path=getattr(options, "vllm_path", ""),
    )
