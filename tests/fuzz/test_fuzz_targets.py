"""A short pass over the fuzz targets; ``make fuzz`` is the long one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_unexpected_happens(name: str) -> None:
    settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)(
        TARGETS[name]
    )()
