"""The one place that imports OpenVINO, so that its telemetry can never run.

``import openvino`` sends an event and starts a thread through the package ``openvino_telemetry`` unless the user's home
holds a file that says no. A module that is None in ``sys.modules`` can't be imported, and OpenVINO then takes its own
stub, which does nothing; so nothing of the telemetry package is ever loaded.
"""

from __future__ import annotations

import logging
import re
import sys

logger = logging.getLogger(__name__)

if sys.modules.get("openvino_telemetry") is not None:
    logger.error("openvino_telemetry was imported before multitok could block it")
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino as ov  # noqa: E402

__all__ = ["error_text", "ov"]

# OpenVINO's and xgrammar's messages begin with the failed check and a source file's path on their build machine.
_SOURCE_PLACE = re.compile(r"^.*\.(?:cpp|hpp|cc|h):\d+:\s*", re.DOTALL)
_FAILED_CHECK = re.compile(r"^Check failed: \(.*?\) is false: ")


def error_text(error: BaseException) -> str:
    """Return what an OpenVINO error says, without places in its source."""
    text = _SOURCE_PLACE.sub("", str(error)).strip()
    return _FAILED_CHECK.sub("", text) or type(error).__name__
