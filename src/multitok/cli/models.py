"""From ``--model``, ``--model-arg`` and ``--engine-arg`` to the list of models that everything after it works with."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from multitok.config import MODEL_OPTIONS, OptionError, ServerArgs
from multitok.engines.registry import NEEDS_NO_MODEL, TAKES_COMMAND_LINE, parse_engine_args
from multitok.tokenizer.model_files import ModelFiles, resolve_model, resolve_tokenizer
from multitok.tokenizer.model_settings import ModelSettings

_MOST_NAME = 256


def models_of(server_args: ServerArgs) -> list[ModelSettings]:
    """Find the models that the options name, each with the options that hold for it.

    Parameters
    ----------
    server_args : ServerArgs
        The user's options.

    Raises
    ------
    OptionError
        Options contradict each other, or name a model that isn't there.
    ModelError
        A model can't be found, or not be served.
    """
    if server_args.served_model_name is not None:
        _check_name("--served-model-name", server_args.served_model_name)
    given = [_name_and_path(model) for model in server_args.model] or [(None, None)]
    names = [name for name, _ in given if name is not None]
    _check_unique(names)
    if server_args.served_model_name is not None and (names or len(given) > 1):
        raise OptionError("--served-model-name is for a single model; name each with --model NAME=PATH")
    settings = _own_settings(server_args, names)
    models = []
    for name, path in given:
        args = settings.get(name, settings[None])
        files = _resolve(args, path)
        models.append(ModelSettings(name=name or server_args.served_model_name or files.name, args=args, files=files))
    _check_unique([model.name for model in models])
    return models


def in_options(problem: str) -> str:
    """Say what msgspec says of a field (``Expected `int` <= 65535 - at `$.port```) of its option."""
    what, _, where = problem.replace("`", "").partition(" - at $.")
    return f"--{where.replace('_', '-')}: {what[:1].lower()}{what[1:]}" if where else problem


def _name_and_path(model: str) -> tuple[str | None, str | None]:
    """Take ``NAME=PATH`` apart; a path with ``=`` in it that exists is a path. No path: the default model."""
    name, separator, path = model.partition("=")
    if not separator or os.path.exists(Path(model).expanduser()):
        return None, model
    if not name:
        raise OptionError(f"--model {model}: there is no name before the =")
    _check_name("--model", name)
    return name, path or None


def _check_name(option: str, name: str) -> None:
    """Refuse what no request could ask for by a line or an address."""
    if not name.strip() or len(name) > _MOST_NAME or not name.isprintable():
        raise OptionError(f"{option}: a model's name is 1 to {_MOST_NAME} printable characters, not {name[:50]!r}")


def _check_unique(names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise OptionError(f"{count} models have the name {name!r}; give each its own with --model NAME=PATH")


def _own_settings(server_args: ServerArgs, names: Sequence[str]) -> dict[str | None, ServerArgs]:
    """Return the options of each model that has a name, and for None those of all others."""
    options: dict[str | None, dict[str, str]] = {name: {} for name in (*names, None)}
    for argument in server_args.model_arg:
        whose, option, value = _own_option(argument, names)
        if option in options[whose]:
            raise OptionError(f"--model-arg {whose}:{option.replace('_', '-')} is given twice")
        options[whose][option] = value
    settings = {name: _with_own(server_args, name, own) for name, own in options.items()}
    engine_args = _engine_args(server_args.engine_arg, names)
    some_take_options = any(args.engine in TAKES_COMMAND_LINE for args in settings.values())
    for name, args in settings.items():
        # What was meant for another engine is none of this one's business.
        common = engine_args[None] if args.engine == server_args.engine else {}
        command_line = args.engine_command_line
        if "engine_command_line" not in options[name] and some_take_options and args.engine not in TAKES_COMMAND_LINE:
            command_line = []
        settings[name] = msgspec.structs.replace(
            args,
            engine_arg=[f"{key}={value}" for key, value in (common | engine_args[name]).items()],
            engine_command_line=command_line,
        )
    return settings


def _own_option(argument: str, names: Sequence[str]) -> tuple[str, str, str]:
    """Take ``NAME:OPTION=VALUE`` apart."""
    left, separator, value = argument.partition("=")
    name, colon, option = left.rpartition(":")
    if not (separator and colon and name and option):
        raise OptionError(f"--model-arg has the form NAME:OPTION=VALUE, not {argument!r}")
    _check_known(f"--model-arg {argument}", name, names)
    field = option.replace("-", "_")
    if field not in MODEL_OPTIONS:
        known = ", ".join(option.replace("_", "-") for option in MODEL_OPTIONS)
        raise OptionError(f"--model-arg {argument}: a model has no option {option!r} of its own; it has: {known}")
    return name, field, value


def _check_known(argument: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        known = f"there are: {', '.join(names)}" if names else "give it one with --model NAME=PATH"
        raise OptionError(f"{argument}: no model has the name {name!r}; {known}")


def _with_own(server_args: ServerArgs, name: str | None, own: dict[str, str]) -> ServerArgs:
    values: dict[str, object] = {**own}
    try:
        if "engine_command_line" in own:
            values["engine_command_line"] = shlex.split(own["engine_command_line"])
        made = msgspec.convert(values, ServerArgs, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise OptionError(f"--model-arg {name}: {in_options(str(error)).removeprefix('--')}") from None
    return msgspec.structs.replace(server_args, **{option: getattr(made, option) for option in own})


def _engine_args(arguments: Sequence[str], names: Sequence[str]) -> dict[str | None, dict[str, str]]:
    """Return the engine's options that each model has of its own, and for None those of all."""
    own: dict[str | None, list[str]] = {name: [] for name in (*names, None)}
    for argument in arguments:
        left, separator, value = argument.partition("=")
        whose, colon, key = left.rpartition(":")
        if colon:
            _check_known(f"--engine-arg {argument}", whose, names)
        own[whose if colon else None].append(f"{key}{separator}{value}")
    try:
        return {name: parse_engine_args(its) for name, its in own.items()}
    except ValueError as error:
        raise OptionError(f"--engine-arg: {error}") from None


def _resolve(args: ServerArgs, path: str | None) -> ModelFiles:
    cache_dir = Path(args.cache_dir) if args.cache_dir else None
    if args.engine in NEEDS_NO_MODEL and path is None and args.tokenizer is not None:
        return resolve_tokenizer(args.tokenizer)
    return resolve_model(path, args.tokenizer, cache_dir)
