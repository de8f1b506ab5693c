"""Prompts of the user's own: a file with one JSON object per line."""

from __future__ import annotations

import json
from pathlib import Path

from multitok.bench.requests import Body, Settings
from multitok.bench.target import BenchError


def read_dataset(file: Path, settings: Settings, output_tokens: int) -> list[list[Body]]:
    """Return a session per line.

    Parameters
    ----------
    file : Path
        Each line holds ``prompt`` (text) or ``messages``, and may hold ``max_tokens``.
    settings : Settings
        Of all requests.
    output_tokens : int
        Where a line doesn't say.

    Raises
    ------
    BenchError
        When the file can't be read; the message names the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--dataset {file}: {error}") from error
    sessions: list[list[Body]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BenchError(f"--dataset {file}, line {number}: {error}") from error
        prompt = row.get("messages", row.get("prompt")) if isinstance(row, dict) else None
        if not isinstance(prompt, str | list) or not prompt:
            raise BenchError(f"--dataset {file}, line {number}: expected an object with 'prompt' or 'messages'")
        if isinstance(prompt, list) and settings.api != "chat":
            raise BenchError(f"--dataset {file}, line {number}: 'messages' need --api chat")
        limit = row.get("max_tokens", output_tokens)
        if not isinstance(limit, int) or limit < 1:
            raise BenchError(f"--dataset {file}, line {number}: 'max_tokens' must be a whole number above 0")
        sessions.append([settings.body(prompt, limit)])
    if not sessions:
        raise BenchError(f"--dataset {file} has no lines")
    return sessions
