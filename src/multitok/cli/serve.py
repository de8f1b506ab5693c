"""``multitok serve``."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import msgspec

from multitok.cli.options import add_server_options, server_args_of
from multitok.config import OptionError, ServerArgs
from multitok.engines.registry import NEEDS_NO_MODEL
from multitok.http.files import check_files
from multitok.launcher.launcher import Launcher
from multitok.observability.logging import configure_logger
from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.model_files import ModelFiles, resolve_model, resolve_tokenizer

_log = logging.getLogger(__name__)

HELP = "start the server"
DESCRIPTION = """\
Start the server: an OpenAI-compatible API in front of an engine.

Without options a small real model, SmolLM2-135M-Instruct, answers on http://127.0.0.1:30000.
With --tokenizer-worker-num N there are N HTTP workers, each of which tokenizes and answers on its own.
What stands after -- goes to an engine that has options of its own.
Ctrl-C or SIGTERM lets running requests finish; a second one ends at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    add_server_options(parser)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the server; returns the exit status, 2 for options and models that can't be used."""
    try:
        server_args = server_args_of(options)
    except msgspec.ValidationError as error:
        parser.error(_in_options(str(error)))
    configure_logger(server_args.log_level, "launcher")
    try:
        check_files(server_args)
        files = _resolve(server_args)
    except (ModelError, OptionError) as error:
        _log.error("%s", error)
        return 2
    return Launcher(server_args, files).run()


def _in_options(problem: str) -> str:
    """Say what msgspec says of a field (``Expected `int` <= 65535 - at `$.port```) of its option."""
    what, _, where = problem.replace("`", "").partition(" - at $.")
    return f"--{where.replace('_', '-')}: {what[:1].lower()}{what[1:]}" if where else problem


def _resolve(server_args: ServerArgs) -> ModelFiles:
    cache_dir = Path(server_args.cache_dir) if server_args.cache_dir else None
    if server_args.engine in NEEDS_NO_MODEL and server_args.model is None and server_args.tokenizer is not None:
        return resolve_tokenizer(server_args.tokenizer)
    return resolve_model(server_args.model, server_args.tokenizer, cache_dir)
