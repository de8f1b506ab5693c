"""Which SGLang is installed, and whether it is one whose messages the adapter knows; imports none of it."""

from __future__ import annotations

import importlib.metadata
import re

# SGLang's processes talk in messages that are nobody else's business, and change with its releases.
SUPPORTED = ">=0.5.23,<0.5.24"
_RELEASE = re.compile(r"0\.5\.23(\.post\d+)?(\+.*)?")


def checked_version() -> str:
    """Return the version of the installed SGLang.

    Raises
    ------
    ValueError
        There is none, or one outside `SUPPORTED`.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"engine 'sglang' needs SGLang {SUPPORTED}, which is not installed: pip install 'sglang{SUPPORTED}'"
        ) from None
    if _RELEASE.fullmatch(version) is None:
        raise ValueError(f"engine 'sglang' works with SGLang {SUPPORTED}, not with the installed {version}")
    return version
