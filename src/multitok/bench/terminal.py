"""What a benchmark shows while it runs: a progress bar on a terminal, plain lines elsewhere; and tables."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

_BAR = 30


class ProgressBar:
    """Shows how far a run has come.

    Parameters
    ----------
    label : str
        What runs.
    stream : TextIO
        Where to; a bar is drawn only on a terminal, and nothing until `close` elsewhere.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._drawn = self._stream.isatty()
        self._start = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        if not self._drawn:
            return
        filled = _BAR * done // max(total, 1)
        elapsed = time.monotonic() - self._start
        left = f", {elapsed / done * (total - done):.0f} s left" if 0 < done < total else ""
        line = f"{self._label}  [{'#' * filled}{'.' * (_BAR - filled)}] {done}/{total}, {elapsed:.0f} s{left}"
        self._stream.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()

    def close(self, note: str) -> None:
        """End with a line that stays."""
        self._stream.write(f"{chr(13) + chr(27) + '[K' if self._drawn else ''}{self._label}  {note}\n")
        self._stream.flush()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text; the first column is aligned left, numbers right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def number(value: float | None, digits: int = 1) -> str:
    """Return a number for a table; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"
