"""Command-line options derived from `ServerArgs`: names, types, defaults and help stand there and nowhere else."""

from __future__ import annotations

import argparse
import types
import typing
from typing import Any, Literal

import msgspec

from multitok.config import ServerArgs

# The field that takes what stands after ``--``.
AFTER_OPTIONS = "engine_command_line"
_METAVARS = {
    "model": "[NAME=]PATH",
    "model_arg": "NAME:OPTION=VALUE",
    "engine_arg": "[NAME:]KEY=VALUE",
}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add an option per field of `ServerArgs`, but for what stands after ``--``."""
    hints: dict[str, Any] = typing.get_type_hints(ServerArgs, include_extras=True)
    for field in msgspec.structs.fields(ServerArgs):
        if field.name == AFTER_OPTIONS:
            continue
        base, description = _unwrap(hints[field.name])
        default = field.default if field.default is not msgspec.NODEFAULT else None
        help_text = description if default is None else f"{description} (default: {default})"
        options: dict[str, Any] = {"help": help_text.replace("%", "%%"), "default": argparse.SUPPRESS}
        if typing.get_origin(base) is list:
            options |= {"action": "append", "metavar": _METAVARS.get(field.name, "TEXT")}
        elif base is bool:
            options |= {"action": "store_true"}
        elif typing.get_origin(base) is Literal:
            options |= {"choices": typing.get_args(base)}
        else:
            options |= {"type": base, "metavar": {int: "N", float: "SECONDS", str: "TEXT"}[base]}
        parser.add_argument("--" + field.name.replace("_", "-"), **options)


def server_args_of(options: argparse.Namespace) -> ServerArgs:
    """Return the checked options.

    Raises
    ------
    msgspec.ValidationError
        A value is out of range; the message names the field.
    """
    given = {name: value for name, value in vars(options).items() if name in ServerArgs.__struct_fields__}
    return msgspec.convert(given, ServerArgs)


def _unwrap(hint: Any) -> tuple[Any, str]:
    """Return the plain type of an annotation, and its description."""
    description = ""
    while True:
        if hasattr(hint, "__metadata__"):
            description = next((m.description for m in hint.__metadata__ if m.description), description)
            hint = hint.__origin__
        elif isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        else:
            return hint, description
