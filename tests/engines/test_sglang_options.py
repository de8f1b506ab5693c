"""What engine sglang says before it imports SGLang."""

import importlib.metadata
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from multitok.engines.registry import create_engine
from multitok.engines.settings import EngineSettings
from multitok.engines.sglang_install import SUPPORTED, checked_version
from multitok.engines.sglang_options import sglang_command_line
from multitok.engines.sglang_process import failure_of


def settings(*command_line, task="generate", model_path="/model", **fields):
    files = SimpleNamespace(task=task, model_path=model_path, context_length=None)
    return EngineSettings(files=files, command_line=list(command_line), **fields)


def install(monkeypatch, version):
    def find(name):
        assert name == "sglang"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cpu"])
def test_a_supported_version_is_taken(monkeypatch, version):
    install(monkeypatch, version)
    assert checked_version() == version


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.23rc1", "0.5.230", "0.6.0", "0.0.0.dev0"])
def test_another_version_is_refused_with_the_range(monkeypatch, version):
    install(monkeypatch, version)
    with pytest.raises(ValueError) as refusal:
        create_engine("sglang", settings())
    assert SUPPORTED in str(refusal.value)
    assert version in str(refusal.value)


def test_without_sglang_the_range_and_the_extra_are_named(monkeypatch):
    install(monkeypatch, None)
    with pytest.raises(ValueError) as refusal:
        create_engine("sglang", settings())
    assert SUPPORTED in str(refusal.value)
    assert "pip install 'sglang>=0.5.23,<0.5.24'" in str(refusal.value)


def test_the_extra_has_the_same_range():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["sglang"] == [f"sglang{SUPPORTED}"]


def test_options_are_checked_without_importing_sglang(monkeypatch):
    install(monkeypatch, "0.5.23")
    with pytest.raises(ValueError, match="it is --model, before --"):
        create_engine("sglang", settings("--model-path", "/other"))
    assert "sglang" not in sys.modules


def test_what_multitok_knows_is_said_and_the_rest_passes_through():
    assert sglang_command_line(settings("--tp-size", "2")) == ["--model-path", "/model", "--tp-size", "2"]
    known = settings(
        "--mem-fraction-static=0.8",
        task="embed",
        disaggregation_mode="prefill",
        context_length=4096,
        max_running_requests=8,
    )
    assert sglang_command_line(known) == [
        *("--model-path", "/model", "--is-embedding", "--disaggregation-mode", "prefill"),
        *("--context-length", "4096", "--max-running-requests", "8", "--mem-fraction-static=0.8"),
    ]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--model", "--model, before --"),
        ("--disaggregation-mode=decode", "stands before --"),
        ("--tokenizer-worker-num", "means multitok's"),
        ("--detokenizer-worker-num=2", "means multitok's"),
        ("--node-rank", "on the first node"),
        ("--use-ray", "never tried"),
    ],
)
def test_an_option_that_is_multitoks_is_refused(option, reason):
    with pytest.raises(ValueError, match=reason):
        sglang_command_line(settings(option))


def test_an_option_on_both_sides_is_refused():
    with pytest.raises(ValueError, match="--context-length is given twice"):
        sglang_command_line(settings("--context-length=10", context_length=20))


def test_engine_arguments_and_a_lone_tokenizer_are_refused():
    with pytest.raises(ValueError, match="no --engine-arg"):
        sglang_command_line(settings(options={"a": "1"}))
    with pytest.raises(ValueError, match="needs a model"):
        sglang_command_line(settings(model_path=""))


def test_a_split_has_one_rank():
    with pytest.raises(ValueError, match="one rank only: give SGLang's --dp-size"):
        sglang_command_line(settings(disaggregation_mode="decode", rank=1))


def test_a_failure_is_told_by_its_last_line(tmp_path):
    file = tmp_path / "failure"
    assert failure_of(file) is None
    file.write_text("Scheduler hit an exception: Traceback\n  File x\nOutOfMemory: no room\n\n")
    assert failure_of(file) == "OutOfMemory: no room"
