"""Reading an engine's own options (``--engine-arg KEY=VALUE``): parsed, checked, and no unknown name let through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite


class OptionReader:
    """Reads options by name and remembers which names exist.

    Call one of the readers for every option that there is, then `done`, which refuses the rest.

    Parameters
    ----------
    engine : str
        Name of the engine, for messages.
    options : mapping of str to str
        What the user gave.
    """

    def __init__(self, engine: str, options: Mapping[str, str]) -> None:
        self._engine = engine
        self._options = options
        self._known: list[str] = []

    def text(self, name: str) -> str | None:
        """Return the option as it is; None when it was not given."""
        self._known.append(name)
        value = self._options.get(name)
        if value == "":
            raise self._error(name, "must not be empty")
        return value

    def integer(self, name: str, *, minimum: int = 0) -> int | None:
        """Return the option as an integer of at least `minimum`; None when it was not given."""
        value = self.text(name)
        if value is None:
            return None
        try:
            number = int(value)
        except ValueError:
            raise self._error(name, f"must be an integer, not {value!r}") from None
        if number < minimum:
            raise self._error(name, f"must be at least {minimum}, not {number}")
        return number

    def number(self, name: str, *, minimum: float = 0.0) -> float | None:
        """Return the option as a finite number of at least `minimum`; None when it was not given."""
        value = self.text(name)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            raise self._error(name, f"must be a number, not {value!r}") from None
        if not isfinite(number) or number < minimum:
            raise self._error(name, f"must be a number of at least {minimum:g}, not {value}")
        return number

    def integers(self, name: str, *, minimum: int = 0) -> list[int] | None:
        """Return the option as a list of integers separated by commas; None when it was not given."""
        value = self.text(name)
        if value is None:
            return None
        try:
            numbers = [int(part) for part in value.split(",")]
        except ValueError:
            raise self._error(name, f"must be integers separated by commas, not {value!r}") from None
        if min(numbers) < minimum:
            raise self._error(name, f"must be integers of at least {minimum}, not {min(numbers)}")
        return numbers

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """Return the option, one of `choices`; None when it was not given."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise self._error(name, f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def flag(self, name: str) -> bool | None:
        """Return the option as a boolean (``true`` or ``false``, ``1`` or ``0``); None when it was not given."""
        value = self.choice(name, ("true", "false", "1", "0"))
        return None if value is None else value in ("true", "1")

    def done(self) -> None:
        """Refuse every option that no reader asked for.

        Raises
        ------
        ValueError
            Names the unknown options and the known ones.
        """
        unknown = sorted(set(self._options) - set(self._known))
        if unknown:
            known = ", ".join(self._known)
            raise ValueError(f"engine {self._engine!r} has no option {', '.join(unknown)}; it has: {known}")

    def _error(self, name: str, problem: str) -> ValueError:
        return ValueError(f"option {name!r} of engine {self._engine!r} {problem}")
