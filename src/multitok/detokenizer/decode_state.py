"""The state of one request's decoding: the interface, and what is common to every strategy.

For one request with prompt tail ``t`` and output ids ``o`` every strategy keeps this law, where ``decode`` is
``tokenizers.Tokenizer.decode`` and ``lcp`` the longest common prefix of two texts::

    "".join(push(i) for i in o) + flush() == full[len(lcp(decode(t), full)):]    with full = decode(t + o)

With an empty tail that is ``decode(o)``. Wherever ``decode(t)`` is a prefix of ``full`` it says that prompt text plus
output is exactly ``full``. It is not a prefix only where the output changes what the tail alone looked like, as when
it completes a character of which the tail holds the first bytes: the tail alone shows U+FFFD, the output begins with
the whole character. Where it does not complete it, that U+FFFD is the prompt's and is not repeated.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence

# What the reference puts in place of bytes that are no UTF-8.
REPLACEMENT = "\ufffd"


class DecodeState(ABC):
    """Ids of one request to text, piece by piece; text that was returned never changes.

    Made by `TextDecoder.start`. Not to be used after `flush`.
    """

    __slots__ = ()

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Take one id and return the text that is now certain.

        Parameters
        ----------
        token_id : int
            The next output id.

        Returns
        -------
        str
            New text; empty while a character, a byte run or whatever the next id may still change is open.

        Raises
        ------
        ValueError
            If no vocabulary can have this id; the state is then as before.
        """

    @abstractmethod
    def push_many(self, ids: Sequence[int]) -> str:
        """Take several ids; the same as joining `push` over them, but faster.

        Parameters
        ----------
        ids : sequence of int
            The next output ids.

        Returns
        -------
        str
            New text.

        Raises
        ------
        ValueError
            If an id is outside the vocabulary; the state is then as before.
        """

    @abstractmethod
    def flush(self) -> str:
        """Return what is still held, as the reference shows it when nothing follows.

        Returns
        -------
        str
            The rest of the text; ``push`` and ``flush`` together are then the whole.
        """

    def peek(self) -> str:
        """Return what `flush` would return now, and go on unchanged.

        Returns
        -------
        str
            The text that is held back.
        """
        return copy.copy(self).flush()


class AfterPromptState(DecodeState):
    """Drops from the output what the prompt already showed of text that was still open at the prompt's end.

    Only needed where the tail ends in something open, so its extra call costs nothing elsewhere.

    Parameters
    ----------
    inner : DecodeState
        A state that has taken the prompt tail.
    shown : str
        What ``decode(tail)`` shows of the part that `inner` still holds.
    """

    __slots__ = ("_inner", "_shown")

    def __init__(self, inner: DecodeState, shown: str) -> None:
        self._inner = inner
        self._shown = shown

    def push(self, token_id: int) -> str:
        """Take one id; see `DecodeState.push`."""
        return self._without_shown(self._inner.push(token_id))

    def push_many(self, ids: Sequence[int]) -> str:
        """Take several ids; see `DecodeState.push_many`."""
        return self._without_shown(self._inner.push_many(ids))

    def flush(self) -> str:
        """Return what is still held; see `DecodeState.flush`."""
        return self._without_shown(self._inner.flush())

    def peek(self) -> str:
        """Return what `flush` would return now; see `DecodeState.peek`."""
        return copy.copy(self)._without_shown(self._inner.peek())

    def _without_shown(self, text: str) -> str:
        shown = self._shown
        if not shown or not text:
            return text
        same = 0
        for ours, theirs in zip(text, shown, strict=False):
            if ours != theirs:
                break
            same += 1
        # Everything matched and more was shown: go on comparing with the next piece. Otherwise the comparison is over.
        self._shown = shown[same:] if same == len(text) else ""
        return text[same:]


def check_ids(ids: Sequence[int], size: int) -> None:
    """Refuse ids that no entry of a table of this size stands for.

    Parameters
    ----------
    ids : sequence of int
        Ids as an engine gave them.
    size : int
        Number of entries.

    Raises
    ------
    ValueError
        Naming the first bad id.
    """
    if len(ids) and (min(ids) < 0 or max(ids) >= size):
        raise outside(next(i for i in ids if not 0 <= i < size), size)


def outside(token_id: int, size: int) -> ValueError:
    """Make the error for an id outside the vocabulary.

    Parameters
    ----------
    token_id : int
        The id.
    size : int
        Number of entries.

    Returns
    -------
    ValueError
        To be raised by the caller.
    """
    return ValueError(f"token id {token_id} is outside the vocabulary (0 to {size - 1})")
