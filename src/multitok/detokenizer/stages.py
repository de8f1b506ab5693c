"""The general way to decode: each stage of the reference's decoder as a small incremental transducer.

The reference passes the list of tokens from stage to stage; each makes a new list of it, and the last list is joined.
Here a stage takes the next tokens and returns those of its results that nothing can change any more. After ``Fuse`` or
``ByteLevel`` the reference's list holds one long token, of which the stages here see the parts as they come: such
stages have a name with ``Part``. `stage_plan` makes them from the decoder in tokenizer.json.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from multitok.detokenizer.decode_state import REPLACEMENT, DecodeState, check_ids
from multitok.detokenizer.table_states import byte_level_bytes, byte_of_token

TokenMap = Callable[[str], str]


class Stage(ABC):
    """One stage of a decoder. A shallow copy must be independent: attributes are rebound, never changed in place."""

    __slots__ = ()

    @abstractmethod
    def push(self, tokens: list[str]) -> list[str]:
        """Take the next tokens (or parts of the one token) and return what is now certain."""

    def finish(self) -> list[str]:
        """Return what is held when nothing follows."""
        return []


class MapStage(Stage):
    """Makes one token of one token, whatever stands around it."""

    __slots__ = ("_function",)

    def __init__(self, function: TokenMap) -> None:
        self._function = function

    def push(self, tokens: list[str]) -> list[str]:
        """Map each."""
        return list(map(self._function, tokens))


class FirstStage(Stage):
    """Makes one token of one token, differently for the first (WordPiece, Metaspace, no decoder)."""

    __slots__ = ("_first", "_other", "_started")

    def __init__(self, first: TokenMap, other: TokenMap) -> None:
        self._first = first
        self._other = other
        self._started = False

    def push(self, tokens: list[str]) -> list[str]:
        """Map the first one way and the others another way."""
        if self._started or not tokens:
            return list(map(self._other, tokens))
        self._started = True
        return [self._first(tokens[0]), *map(self._other, tokens[1:])]


class ByteFallbackStage(Stage):
    """Joins runs of byte tokens: a token of text if the run is UTF-8, otherwise U+FFFD for each byte."""

    __slots__ = ("_run",)

    def __init__(self) -> None:
        self._run: tuple[Any, ...] = ()

    def push(self, tokens: list[str]) -> list[str]:
        """Hold bytes until another token ends their run."""
        out: list[str] = []
        for token in tokens:
            byte = byte_of_token(token)
            if byte is None:
                out += self.finish()
                out.append(token)
            else:
                # Linked backwards, so that a byte costs the same however long the run is.
                self._run = (self._run, byte)
        return out

    def finish(self) -> list[str]:
        """End the run."""
        if not self._run:
            return []
        node, self._run = self._run, ()
        data = bytearray()
        while node:
            node, byte = node
            data.append(byte)
        data.reverse()
        try:
            return [data.decode()]
        except UnicodeDecodeError:
            return [REPLACEMENT] * len(data)


class ByteLevelStage(Stage):
    """Bytes of all tokens as one text; the parts of one token come out."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open = b""

    def push(self, tokens: list[str]) -> list[str]:
        """Decode up to the last whole character."""
        data = self._open + b"".join(map(byte_level_bytes, tokens))
        text, used = utf_8_decode(data, "replace", False)
        self._open = data[used:]
        return [text]

    def finish(self) -> list[str]:
        """Decode the cut character."""
        held, self._open = self._open, b""
        return [held.decode(errors="replace")]


class LastStage(Stage):
    """Makes one token of one token, differently for the last (BPEDecoder), so one token is held."""

    __slots__ = ("_held", "_last", "_other")

    def __init__(self, other: TokenMap, last: TokenMap) -> None:
        self._other = other
        self._last = last
        self._held: list[str] = []

    def push(self, tokens: list[str]) -> list[str]:
        """Give all but the last."""
        tokens = self._held + tokens
        self._held = tokens[-1:]
        return list(map(self._other, tokens[:-1]))

    def finish(self) -> list[str]:
        """Give the last."""
        held, self._held = self._held, []
        return list(map(self._last, held))


class CtcStage(Stage):
    """Drops repetitions of the token before, then maps, then drops empty tokens."""

    __slots__ = ("_function", "_previous")

    def __init__(self, function: TokenMap) -> None:
        self._function = function
        self._previous: str | None = None

    def push(self, tokens: list[str]) -> list[str]:
        """Give those that differ from the one before."""
        out: list[str] = []
        for token in tokens:
            if token != self._previous:
                self._previous = token
                if mapped := self._function(token):
                    out.append(mapped)
        return out


class ReplacePartStage(Stage):
    """Replaces a text in one token that comes in parts; an end that may be the beginning of it is held."""

    __slots__ = ("_by", "_held", "_what")

    def __init__(self, what: str, by: str) -> None:
        self._what = what
        self._by = by
        self._held = ""

    def push(self, tokens: list[str]) -> list[str]:
        """Replace what is whole."""
        *done, rest = (self._held + "".join(tokens)).split(self._what)
        keep = next((n for n in range(min(len(self._what) - 1, len(rest)), 0, -1) if rest.endswith(self._what[:n])), 0)
        self._held = rest[len(rest) - keep :]
        return [self._by.join([*done, rest[: len(rest) - keep]])]

    def finish(self) -> list[str]:
        """Give the end."""
        held, self._held = self._held, ""
        return [held]


class StripPartStage(Stage):
    """Takes a character from the start and the end of one token that comes in parts."""

    __slots__ = ("_character", "_held", "_start", "_stop")

    def __init__(self, character: str, start: int, stop: int) -> None:
        self._character = character
        self._start = start
        self._stop = stop
        self._held = 0

    def push(self, tokens: list[str]) -> list[str]:
        """Hold as many of the character at the end as may have to go."""
        text = "".join(tokens)
        while text and self._start:
            if not text.startswith(self._character):
                self._start = 0
                break
            text = text[1:]
            self._start -= 1
        text = self._character * self._held + text
        self._held = min(self._stop, len(text) - len(text.rstrip(self._character)))
        return [text[: len(text) - self._held]]

    def finish(self) -> list[str]:
        """Drop what is held, which is what had to go."""
        self._held = 0
        return []


class StagesState(DecodeState):
    """Decoding through any list of stages.

    Parameters
    ----------
    tokens : list of (str or None)
        Token of each id; None for one that shows nothing.
    stages : list of Stage
        Fresh stages of this state alone.
    """

    __slots__ = ("_stages", "_tokens")

    def __init__(self, tokens: list[str | None], stages: list[Stage]) -> None:
        self._tokens = tokens
        self._stages = stages

    def __copy__(self) -> StagesState:
        return StagesState(self._tokens, [copy.copy(stage) for stage in self._stages])

    def push(self, token_id: int) -> str:
        """Take one id; see `DecodeState.push`."""
        return self.push_many((token_id,))

    def push_many(self, ids: Sequence[int]) -> str:
        """Take several ids; see `DecodeState.push_many`."""
        check_ids(ids, len(self._tokens))
        tokens = [token for i in ids if (token := self._tokens[i]) is not None]
        for stage in self._stages:
            tokens = stage.push(tokens)
        return "".join(tokens)

    def flush(self) -> str:
        """Return what is still held; see `DecodeState.flush`."""
        tokens: list[str] = []
        for stage in self._stages:
            tokens = [*stage.push(tokens), *stage.finish()]
        return "".join(tokens)


class HeldState(DecodeState):
    """Decoders that can't be followed: everything is held, and the reference decodes it at the end.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        The reference.
    skip_special_tokens : bool
        Whether special tokens show nothing.
    size : int
        Number of ids.
    """

    __slots__ = ("_ids", "_size", "_skip", "_tokenizer")

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool, size: int) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._size = size
        self._ids: list[int] = []

    def push(self, token_id: int) -> str:
        """Take one id; see `DecodeState.push`."""
        return self.push_many((token_id,))

    def push_many(self, ids: Sequence[int]) -> str:
        """Take several ids; see `DecodeState.push_many`."""
        check_ids(ids, self._size)
        self._ids += ids
        return ""

    def flush(self) -> str:
        """Return what is still held; see `DecodeState.flush`."""
        ids, self._ids = self._ids, []
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
