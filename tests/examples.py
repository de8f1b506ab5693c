"""How many examples a property test takes."""

from __future__ import annotations

from hypothesis import settings

_DEFAULT = 100


def examples(most: int) -> int:
    """Return so many, or the same share of them as the profile takes of hypothesis's own number."""
    return most * settings.default.max_examples // _DEFAULT
