"""The Engine protocol and one module per engine."""

from __future__ import annotations

import sys

# ``import openvino`` sends an event and starts a thread through the package ``openvino_telemetry``, unless a file in
# the user's home says no. A module that is None here can't be imported, and OpenVINO then takes its own stub, which
# does nothing. In this place it comes before every import of OpenVINO, in whatever order the engines import things.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
