"""The benchmarks' own harness: the capacity model, and each command once on a small load."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def capacity() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("harness.capacity")
    sys.path.remove(str(BENCHMARKS))


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def some_amounts(capacity: Any) -> list[Any]:
    rows = [(100, 3200, 25600, 2000, 2000), (2000, 64000, 16000, 300, 300), (50, 200000, 800, 100, 200)]
    rows += [(80, 8000, 40000, 5000, 10000), (500, 500, 500, 4000, 4000)]
    names = ("requests", "prompt_tokens", "tokens", "steps", "messages")
    return [capacity.Amounts(**dict(zip(names, row, strict=True))) for row in rows]


def test_costs_are_found_again(capacity: Any) -> None:
    costs = {"tokenizer_worker": {"requests": 2e-4, "prompt_tokens": 1e-6, "tokens": 1e-5, "messages": 1e-4}}
    amounts = some_amounts(capacity)
    cpu = [capacity.predict(costs, each)["tokenizer_worker"] for each in amounts]
    found = capacity.fit(amounts, cpu, capacity.EXPLAINED_BY["tokenizer_worker"])
    assert found == pytest.approx(costs["tokenizer_worker"])


def test_no_cost_is_negative(capacity: Any) -> None:
    amounts = some_amounts(capacity)
    found = capacity.fit(
        amounts, [each.requests * 1e-4 + each.tokens * -1e-9 for each in amounts], ["requests", "tokens"]
    )
    assert min(found.values()) == 0


COSTS = {
    "tokenizer_worker": {"requests": 2e-4, "prompt_tokens": 1e-6, "tokens": 1e-5, "messages": 1e-4},
    "detokenizer": {"requests": 0.0, "tokens": 1e-6, "steps": 1e-4, "messages": 1e-5},
    "router": {"requests": 1e-4, "prompt_tokens": 0.0},
    "scheduler": {"requests": 1e-4, "prompt_tokens": 0.0, "tokens": 1e-6, "steps": 1e-4},
}


@pytest.mark.parametrize("rate", [1_000, 100_000, 1_000_000])
def test_a_plan_keeps_up_and_one_process_less_does_not(capacity: Any, rate: float) -> None:
    load = {"tokens_per_s": rate, "streams": rate // 50, "input_tokens": 1000, "output_tokens": 500, "busy": 0.7}
    plan = capacity.plan(COSTS, **load)
    assert max(plan.worker_busy, plan.detokenizer_busy) <= 0.7
    # Tokens alone would keep one worker less busier than that.
    tokens = rate * 1e-5 + rate / 500 * (2e-4 + 1e-3)
    assert plan.workers == 1 or tokens / (plan.workers - 1) + 50 * 1e-4 > 0.7


def test_a_step_too_often_is_out_of_reach(capacity: Any) -> None:
    assert capacity.plan(COSTS, tokens_per_s=1e4, streams=1, input_tokens=1, output_tokens=100, busy=0.7) is None


def test_run(tmp_path: Path) -> None:
    files = ("--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"))
    done = run("run.py", *files, "--runs", "A", "--repeat", "1", "--scale", "0.01", "--starts", "1", "--step-ms", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "run-multitok.json").read_text())
    (only,) = result["runs"]
    # Two requests for each of 64 clients are the least.
    assert (only["summary"]["ok"], only["summary"]["output_tokens"]) == (128, 128 * 64)
    assert only["summary"]["mean_prompt_tokens"] == 128
    assert only["total_1_ms"] < only["total_2_ms"]
    assert {"tokenizer_worker", "detokenizer", "scheduler"} <= set(only["stages_ms_per_request"])
    # Results are committed: nothing in them may tell where they were made.
    assert str(tmp_path) not in json.dumps(result)
    assert str(BENCHMARKS) not in json.dumps(result)


def test_peers_that_are_missing_are_skipped(tmp_path: Path) -> None:
    files = ("--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"))
    done = run("compare.py", *files, "--systems", "sglang,vllm-rust", "--vllm-python", sys.executable, "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped: sglang: no --sglang-python given" in done.stdout
    assert "skipped: vllm-rust: vllm is not installed for --vllm-python" in done.stdout
