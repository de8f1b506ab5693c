"""The ``multitok`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from multitok import __version__
from multitok.cli import bench, serve
from multitok.cli.options import AFTER_OPTIONS

_COMMANDS = {"serve": serve, "bench": bench}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="multitok", description="The CPU side of LLM serving, scaled over processes.")
    parser.add_argument("--version", action="version", version=f"multitok {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=command, subparser=subparser)
    own, after = _split(sys.argv[1:] if arguments is None else list(arguments))
    # What a command doesn't know is its own error, with its own usage.
    options, unknown = parser.parse_known_args(own)
    if after and options.command is not serve:
        unknown += after
    setattr(options, AFTER_OPTIONS, after)
    if unknown:
        options.subparser.error(f"unrecognized arguments: {' '.join(unknown)}")
    status: int = options.command.run(options, options.subparser)
    return status


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return what stands before and after the first ``--``."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
