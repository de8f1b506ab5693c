"""What ``--model``, ``--model-arg`` and ``--engine-arg`` mean, each by itself and together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multitok.cli import models as cli_models
from multitok.cli.models import models_of
from multitok.config import OptionError, ServerArgs
from multitok.tokenizer.model_settings import ModelSettings
from parts import byte_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder that is a tokenizer, and no model."""
    made = tmp_path / "words"
    made.mkdir()
    byte_tokenizer().save(str(made / "tokenizer.json"))
    return str(made)


def _models(folder: str, *names: str, **options: Any) -> list[ModelSettings]:
    """Models that are no more than a tokenizer."""
    common: dict[str, Any] = {"engine": "simulated", "tokenizer": folder, "model": [f"{name}=" for name in names]}
    return models_of(ServerArgs(**(common | options)))


def test_one_model_without_a_name_has_that_of_its_files(folder: str) -> None:
    (model,) = _models(folder)
    assert model.name == "words"
    assert model.files.tokenizer_file == str(Path(folder, "tokenizer.json"))
    (model,) = _models(folder, served_model_name="mine")
    assert model.name == "mine"


def test_plain_options_are_those_of_all_models(folder: str) -> None:
    options = {"context_length": 64, "engine_arg": ["step_ms=5"], "data_parallel_size": 2}
    first, second = _models(folder, "a", "b", **options)
    assert (first.name, second.name) == ("a", "b")
    for model in (first, second):
        assert (model.args.context_length, model.args.data_parallel_size) == (64, 2)
        assert model.args.engine_arg == ["step_ms=5"]


def test_own_options_are_one_models_alone_and_have_the_types_of_the_options(folder: str) -> None:
    own = ["a:data-parallel-size=3", "a:resume_generation=true", "b:request-timeout=1.5", "b:max-queued-requests=0"]
    first, second = _models(folder, "a", "b", model_arg=own, engine_arg=["step_ms=5", "b:step_ms=9", "b:kv_tokens=8"])
    assert (first.args.data_parallel_size, second.args.data_parallel_size) == (3, 1)
    assert (first.args.resume_generation, second.args.resume_generation) == (True, False)
    assert (first.args.request_timeout, second.args.request_timeout) == (None, 1.5)
    assert (first.args.max_queued_requests, second.args.max_queued_requests) == (2048, 0)
    assert (first.args.engine_arg, second.args.engine_arg) == (["step_ms=5"], ["step_ms=9", "kv_tokens=8"])


def test_each_model_may_have_its_own_tokenizer_and_a_name_with_a_colon(folder: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    byte_tokenizer().save(str(other / "tokenizer.json"))
    first, second = _models(folder, "a", "b:7", model_arg=[f"b:7:tokenizer={other}"], engine_arg=["b:7:step_ms=1"])
    assert Path(first.files.tokenizer_file).parent == Path(folder)
    assert Path(second.files.tokenizer_file).parent == other
    assert (first.args.engine_arg, second.args.engine_arg) == ([], ["step_ms=1"])


def test_what_is_meant_for_one_engine_does_not_go_to_another(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_models, "TAKES_COMMAND_LINE", frozenset({"driven"}))
    monkeypatch.setattr(cli_models, "NEEDS_NO_MODEL", frozenset({"driven", "simulated"}))
    own = ["a:engine=driven", "c:engine=driven", "c:engine-command-line=--name 'two words'"]
    models = _models(
        folder, "a", "b", "c", model_arg=own, engine_arg=["step_ms=5", "a:x=1"], engine_command_line=["--tp", "2"]
    )
    assert [model.args.engine for model in models] == ["driven", "simulated", "driven"]
    assert [model.args.engine_arg for model in models] == [["x=1"], ["step_ms=5"], []]
    assert [model.args.engine_command_line for model in models] == [["--tp", "2"], [], ["--name", "two words"]]
    # Where no engine takes them, the engine itself says so.
    (model,) = _models(folder, "b", engine_command_line=["--tp", "2"])
    assert model.args.engine_command_line == ["--tp", "2"]


def test_a_path_with_an_equals_sign_that_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    asked: list[str | None] = []

    def resolve(path: str | None, *_: object) -> None:
        asked.append(path)
        raise OptionError("enough")

    monkeypatch.setattr(cli_models, "resolve_model", resolve)
    for model in (str(folder), f"chat={folder}", "chat="):
        with pytest.raises(OptionError, match="enough"):
            models_of(ServerArgs(model=[model]))
    assert asked == [str(folder), str(folder), None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ["a=", "a="]}, "2 models have the name 'a'"),
        ({"model": ["=x"]}, "no name before the ="),
        ({"model": ["a=", "b="], "served_model_name": "c"}, "--served-model-name is for a single model"),
        ({"model": ["a" * 10_000 + "="]}, "a model's name is 1 to 256 printable characters"),
        ({"model": ["a\nb="]}, "a model's name is 1 to 256 printable characters"),
        ({"model": [" ="]}, "a model's name is 1 to 256 printable characters"),
        ({"served_model_name": ""}, "--served-model-name: a model's name is 1 to 256 printable characters"),
        ({"model": ["a="], "served_model_name": "c"}, "--served-model-name is for a single model"),
        ({"model_arg": ["c:engine=simulated"]}, "no model has the name 'c'; there are: a, b"),
        ({"model": [], "model_arg": ["c:engine=simulated"]}, "give it one with --model NAME=PATH"),
        ({"engine_arg": ["c:step_ms=5"]}, "--engine-arg c:step_ms=5: no model has the name 'c'; there are: a, b"),
        ({"engine_arg": ["a:step_ms=5", "a:step_ms=6"]}, "'step_ms' is given twice"),
        ({"engine_arg": ["a:step_ms"]}, "KEY=VALUE"),
        ({"model_arg": ["a:engine=x", "a:engine=y"]}, "--model-arg a:engine is given twice"),
        ({"model_arg": ["a:context-length"]}, "NAME:OPTION=VALUE"),
        ({"model_arg": ["context-length=5"]}, "NAME:OPTION=VALUE"),
        ({"model_arg": ["a:port=5"]}, "no option 'port' of its own; it has: .*context-length"),
        ({"model_arg": ["a:context-length=0"]}, "--model-arg a: context-length: expected int >= 1"),
        ({"model_arg": ["a:context-length=many"]}, "--model-arg a: context-length: expected int"),
        ({"model_arg": ["a:engine-command-line='open"]}, "--model-arg a: No closing quotation"),
    ],
)
def test_what_can_not_be_meant_is_said(folder: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        _models(folder, "a", "b", **options)


def test_models_that_take_their_names_from_their_files_need_different_ones(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = _models(folder)
    monkeypatch.setattr(cli_models, "resolve_model", lambda *_: model.files)
    with pytest.raises(OptionError, match="2 models have the name 'words'; give each its own"):
        models_of(ServerArgs(model=["x/words", "y/words"]))
