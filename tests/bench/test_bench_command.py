"""``multitok bench`` against a real server; everything is counted, nothing is timed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from multitok.bench.workloads import STANDARD


def bench(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("multitok")), "bench", *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)


def figures(directory: Path, url: str, *options: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    done = bench(directory, "--url", url, "--json", "out.json", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((directory / "out.json").read_text())
    return [point["summary"] for point in report["points"]], report


def test_closed_loop(tmp_path: Path, served: Any) -> None:
    sweep, report = figures(tmp_path, served.url, "--concurrency", "1,4", "--requests", "12", "--output-tokens", "10")
    assert [(each["clients"], each["requests"], each["ok"], each["errors"]) for each in sweep] == [
        (1, 12, 12, {}),
        (4, 12, 12, {}),
    ]
    for each in sweep:
        assert each["output_tokens"] == 120
        assert each["tokens_counted_by"] == "usage"
        assert each["mean_prompt_tokens"] == 128
        # An id may be a part of a character, whose text comes with a later one.
        assert 100 <= each["events"] <= 120
        assert each["ttft"]["p50"] <= each["ttft"]["p99"] <= each["latency"]["max"]
    roles = {process["role"] for process in report["points"][0]["processes"]}
    assert {"launcher", "tokenizer_worker", "scheduler", "detokenizer"} <= roles


def test_clients_without_work_are_remarked_on(tmp_path: Path, served: Any) -> None:
    _, report = figures(tmp_path, served.url, "--concurrency", "1,4,8", "--requests", "4", "--output-tokens", "2")
    assert report["facts"]["clients"].startswith("not all of 8 had something to do")
    _, report = figures(tmp_path, served.url, "--concurrency", "4", "--requests", "4", "--output-tokens", "2")
    assert "clients" not in report["facts"]


def test_html_report_stands_alone(tmp_path: Path, served: Any) -> None:
    done = bench(tmp_path, "--url", served.url, "--concurrency", "1,2", "--requests", "4", "--html", "r.html")
    assert done.returncode == 0
    assert "TTFT p50" in done.stdout
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") >= 5
    for title in ("Requests", "Output", "Time to first token", "Inter-token time", "CPU per request"):
        assert f">{title}</text>" in page
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(chart)
    assert not re.search(r"(src|href)=|@import|url\(|<script", page)


def test_open_loop(tmp_path: Path, served: Any) -> None:
    sweep, report = figures(tmp_path, served.url, "--rate", "50,200", "--requests", "10", "--output-tokens", "3")
    assert report["open_loop"]
    assert [(each["rate"], each["ok"], each["output_tokens"]) for each in sweep] == [(50, 10, 30), (200, 10, 30)]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_without_stream(tmp_path: Path, served: Any, api: str) -> None:
    options = ("--api", api, "--no-stream", "--concurrency", "2", "--requests", "6", "--output-tokens", "5")
    (only,), _ = figures(tmp_path, served.url, *options)
    assert (only["ok"], only["output_tokens"], only["ttft"], only["events"]) == (6, 30, None, 0)
    assert only["mean_prompt_tokens"] == 128


def test_standard_workload_of_chats(tmp_path: Path, served: Any) -> None:
    (only,), _ = figures(tmp_path, served.url, "--workload", "D", "--requests", "2", "--warmup", "0")
    assert only["clients"] == 16
    assert (only["ok"], only["output_tokens"]) == (40, 40 * 64)
    # Each turn adds a prompt and an answer of 64 tokens each, and what the template puts around them.
    assert only["mean_prompt_tokens"] > 512 + 64 + 9.5 * 128


def test_dataset(tmp_path: Path, served: Any) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "one", "max_tokens": 4}\n{"prompt": "two", "max_tokens": 6}\n')
    (only,), _ = figures(tmp_path, served.url, "--dataset", "mine.jsonl", "--concurrency", "1", "--requests", "4")
    assert only["output_tokens"] == 20


def test_no_server(tmp_path: Path) -> None:
    done = bench(tmp_path, "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr == (
        "multitok bench: nothing listens on http://127.0.0.1:1; start the server, or give its address by --url\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_there(tmp_path: Path, served: Any) -> None:
    done = bench(tmp_path, "--url", served.url, "--model", "other")
    assert done.returncode == 1
    assert "has no model 'other'; it has SmolLM2-135M-Instruct" in done.stderr


def test_a_server_that_answers_errors(tmp_path: Path, scripted: Callable[..., Any]) -> None:
    body = b'{"error": {"message": "out of order"}}'
    answer = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    server = scripted([answer], close=True)
    done = bench(tmp_path, "--url", f"http://127.0.0.1:{server.port}")
    assert done.returncode == 1
    assert "answered HTTP 500" in done.stderr
    assert "out of order" in done.stderr
    assert "Traceback" not in done.stderr


def test_requests_that_fail_are_told_by_kind(tmp_path: Path, served: Any) -> None:
    done = bench(
        *(tmp_path, "--url", served.url, "--concurrency", "1", "--requests", "3", "--warmup", "0"),
        *("--output-tokens", "1000000", "--json", "out.json"),
    )
    assert done.returncode == 1
    (point,) = json.loads((tmp_path / "out.json").read_text())["points"]
    assert (point["summary"]["ok"], point["summary"]["errors"]) == (0, {"HTTP 400": 3})
    assert "HTTP 400: " in done.stdout


@pytest.mark.parametrize("options", [("--rate", "1", "--concurrency", "1"), ("--rate", "0"), ("--concurrency", "a")])
def test_wrong_options(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = bench(tmp_path, *options)
    assert done.returncode == 2
    assert "usage: multitok bench" in done.stderr


@pytest.mark.parametrize("option", ["--html", "--json"])
@pytest.mark.parametrize(
    ("path", "problem"),
    [("none/out", "No such file or directory"), (".", "Is a directory"), ("kept/x", "Not a directory")],
)
def test_a_report_that_can_not_be_written_is_told_before_the_run(
    tmp_path: Path, scripted: Callable[..., Any], option: str, path: str, problem: str
) -> None:
    (tmp_path / "kept").write_text("as it was")
    server = scripted([])
    done = bench(tmp_path, "--url", f"http://127.0.0.1:{server.port}", option, path)
    assert done.returncode == 2
    assert done.stderr.endswith(f"multitok bench: error: {option}: can't write {path}: {problem}\n")
    assert server.connections == 0
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "as it was"


def test_every_standard_workload_can_be_chosen(tmp_path: Path) -> None:
    assert f"{{{','.join(STANDARD)}}}" in bench(tmp_path, "--help").stdout
