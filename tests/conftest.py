"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parts import Site


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
