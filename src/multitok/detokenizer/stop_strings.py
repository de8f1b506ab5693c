"""Stop strings, found in text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the end of a text that is cut off at the first of some stop strings.

    The stop string that *ends* first in the text wins; of several that end at the same place the longest, which
    begins first. So the result depends on the text alone, not on how it is split: at the moment when a stop string is
    complete nothing that follows is needed. With the stops ``bc`` and ``abcd`` the text ``abcd`` is cut to ``a``.

    Only the longest end of the text that is the beginning of a stop string is held back. Cost per call is bounded by
    the length of the piece and of the stop strings.

    Parameters
    ----------
    stops : sequence of str
        The stop strings.

    Raises
    ------
    ValueError
        If one is empty.
    """

    __slots__ = ("_firsts", "_held", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        # Longest first: of those that end at the same place it wins.
        self._stops = tuple(sorted(set(stops), key=lambda stop: (-len(stop), stop)))
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, delta: str) -> tuple[str, str | None]:
        """Take the next piece of text.

        Parameters
        ----------
        delta : str
            The piece; may be empty.

        Returns
        -------
        text : str
            What may be delivered now. After a match it is empty.
        stop : str or None
            The stop string that was found, now or before.
        """
        if self._matched is not None:
            return "", self._matched
        # Nothing is open and no stop string begins here; also where there are none.
        if not self._held and self._firsts.isdisjoint(delta):
            return delta, None
        # What is held is all that a match which ends in this piece can have before it.
        text = self._held + delta
        if (cut := self._find(text)) >= 0:
            self._held = ""
            return text[:cut], self._matched
        return self._hold_open_end(text), None

    def skip(self, delta: str) -> str:
        """Take the next piece of a text in which no stop string counts yet.

        One that begins in it and ends later is found later, as it is in vLLM.

        Parameters
        ----------
        delta : str
            The piece; may be empty.

        Returns
        -------
        str
            What may be delivered now.
        """
        return self._hold_open_end(self._held + delta)

    def flush(self) -> str:
        """Return what is held, when no more text comes.

        Returns
        -------
        str
            Empty after a match.
        """
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int:
        first_end = len(text) + 1
        cut = -1
        for stop in self._stops:
            at = text.find(stop, 0, first_end - 1)
            if at >= 0:
                first_end, cut, self._matched = at + len(stop), at, stop
        return cut

    def _hold_open_end(self, text: str) -> str:
        keep = self._open_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _open_end(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            # The leftmost place from which the rest of the text begins this stop string is the longest such end.
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0 and len(text) - at > longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest
