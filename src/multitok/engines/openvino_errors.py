"""OpenVINO's errors as text for people."""

from __future__ import annotations

import re

# Its messages, and xgrammar's, begin with the failed check and a source file's path on their build machine.
_SOURCE_PLACE = re.compile(r"^.*\.(?:cpp|hpp|cc|h):\d+:\s*", re.DOTALL)
_FAILED_CHECK = re.compile(r"^Check failed: \(.*?\) is false: ")


def error_text(error: BaseException) -> str:
    """Return what an OpenVINO error says, without places in its source."""
    text = _SOURCE_PLACE.sub("", str(error)).strip()
    return _FAILED_CHECK.sub("", text) or type(error).__name__
