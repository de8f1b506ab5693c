"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from parts import Site

# What `make test` takes; without it, there are as many examples as a test says.
settings.register_profile("quick", max_examples=40)


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Make a site; it is taken down, with all its processes and sockets, after the test."""
    sites: list[Site] = []

    def make(**options: Any) -> Site:
        sites.append(Site(tmp_path, **options))
        return sites[-1]

    yield make
    for site in sites:
        site.close()
