"""When a part that has died starts again, and when that makes no sense any more."""

from __future__ import annotations

# Deaths in a row after which a part is tried again no more.
CRASH_LIMIT = 5
# A life that was ready for so long was a good one, however it ended: deaths in a row are counted anew after it.
HEALTHY_S = 5.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 8.0


class RestartPolicy:
    """Counts deaths in a row, per part.

    A crash at the start or at each first request has to end in words that somebody reads, and not in a part that
    starts for ever; while somebody who kills a part every second, be it an operator or a test, has to find it there
    every time. What tells them apart is who ended the life: a part that was ready and then was killed from outside
    (SIGKILL, SIGSTOP, or told to go) had no fault of its own, so its death begins a new row. A part that ended by
    itself (an exit, SIGSEGV, SIGABRT, silence) within `HEALTHY_S` of being ready, and one that never got ready, goes
    on with the row. Deaths in a row and not per minute, because a model may take minutes to load before it crashes.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[tuple[str, int], int] = {}

    def delay_after_death(
        self, part: tuple[str, int], ready_for: float | None, killed_from_outside: bool
    ) -> float | None:
        """Return in how many seconds the next life of a part that has died begins.

        Parameters
        ----------
        part : tuple of (str, int)
            Its role and index.
        ready_for : float or None
            For how many seconds it was ready; None when it never was.
        killed_from_outside : bool
            It did not end by itself.

        Returns
        -------
        float or None
            0, then 0.5, 1, 2 and 4; None: never.
        """
        healthy = ready_for is not None and (killed_from_outside or ready_for >= HEALTHY_S)
        deaths = 1 if healthy else self._in_a_row.get(part, 0) + 1
        self._in_a_row[part] = deaths
        if deaths > CRASH_LIMIT:
            return None
        return 0.0 if deaths == 1 else min(_FIRST_DELAY_S * 2 ** (deaths - 2), _LONGEST_DELAY_S)

    def forgive(self, part: tuple[str, int]) -> None:
        """Count the deaths of a part anew."""
        self._in_a_row.pop(part, None)
