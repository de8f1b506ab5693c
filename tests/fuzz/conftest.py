"""The helpers of other tests are found from here."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path += [str(_TESTS / folder) for folder in ("messages", "http")]
