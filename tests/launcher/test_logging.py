from __future__ import annotations

import re
import subprocess
import sys

CODE = """
import logging
from multitok.observability.logging import configure_logger
configure_logger({level!r}, "tokenizer_worker:2")
logging.getLogger("multitok.x").debug("a detail")
logging.getLogger("multitok.x").info("a note")
logging.getLogger("multitok.x").error("a failure")
logging.getLogger("uvicorn.access").info("GET /")
"""


def logged(level: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", CODE.format(level=level)], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_every_line_names_its_part():
    lines = logged("info")
    assert len(lines) == 2
    for line, level, text in zip(lines, ("INFO", "ERROR"), ("a note", "a failure"), strict=True):
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {level} +tokenizer_worker:2 +{text}", line)


def test_the_level_decides_what_is_shown():
    assert [line.rsplit("  ", 1)[-1].split()[-1] for line in logged("debug")] == ["detail", "note", "failure"]
    assert len(logged("error")) == 1
