"""Logging: one line per event on standard error, which names the part."""

from __future__ import annotations

import logging
import sys


def configure_logger(level: str, part: str) -> None:
    """Send this process's log to standard error.

    Parameters
    ----------
    level : str
        Least severe level shown: debug, info, warning or error.
    part : str
        Name of this part, such as ``tokenizer_worker:2``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)-7s {part:<18} %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    logging.getLogger().handlers[:] = [handler]
    set_log_level(level)


def set_log_level(level: str) -> None:
    """Show messages of this level and above: debug, info, warning or error."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    # Request lines are multitok's own business, and uvicorn's notes on its life are the launcher's.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
