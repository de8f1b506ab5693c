"""Run the tests: two at a time, and then those that run the real engine, which takes all cores, one by one.

What is given goes to pytest. With ``--all`` the tests that take long run, too, and generated examples are more.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_AT_A_TIME = ["-n", "2", "--dist", "worksteal"]
_PARTS = {"not real_engine": _AT_A_TIME, "real_engine": []}


def main(arguments: list[str]) -> int:
    """Run both parts, whatever becomes of the first; returns pytest's status of what has failed."""
    options, which = ["--hypothesis-profile", "quick"], "not slow and "
    if "--all" in arguments:
        arguments.remove("--all")
        options, which = [], ""
    statuses = [
        subprocess.call([sys.executable, "-m", "pytest", *options, *how, "-m", which + kind, *arguments])
        for kind, how in _PARTS.items()
    ]
    # Of some files only one of the parts has tests.
    nothing = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return max((status for status in statuses if status != nothing), default=nothing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
