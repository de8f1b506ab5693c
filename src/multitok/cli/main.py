"""The ``multitok`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from multitok import __version__
from multitok.cli import bench, serve

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
    # What a command doesn't know is its own error, with its own usage.
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.subparser.error(f"unrecognized arguments: {' '.join(unknown)}")
    status: int = options.command.run(options, options.subparser)
    return status


if __name__ == "__main__":
    sys.exit(main())
