"""``multitok serve``."""

from __future__ import annotations

import argparse
import logging

import msgspec

from multitok.cli.models import in_options, models_of
from multitok.cli.options import add_server_options, server_args_of
from multitok.config import OptionError
from multitok.http.files import check_files
from multitok.launcher.launcher import Launcher
from multitok.observability.logging import configure_logger
from multitok.tokenizer.errors import ModelError

_log = logging.getLogger(__name__)

HELP = "start the server"
DESCRIPTION = """\
Start the server: an OpenAI-compatible API in front of an engine.

Without options a small real model, SmolLM2-135M-Instruct, answers on http://127.0.0.1:30000.
With --tokenizer-worker-num N there are N HTTP workers, each of which tokenizes and answers on its own.
Several models, each with its own engine: --model chat=PATH --model embed=PATH.
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
        parser.error(in_options(str(error)))
    configure_logger(server_args.log_level, "launcher")
    try:
        check_files(server_args)
        models = models_of(server_args)
    except (ModelError, OptionError) as error:
        _log.error("%s", error)
        return 2
    return Launcher(server_args, models).run()
