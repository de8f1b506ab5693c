"""Ids to text, one request at a time and piece by piece, exactly as the reference decodes them at once.

The reference is `tokenizers.Tokenizer.decode`, whose cost grows with the text. `TextDecoder` reads its decoder once,
picks a strategy whose cost per token does not, and checks it against the reference before it serves anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import tokenizers

from multitok.detokenizer.decode_state import AfterPromptState, DecodeState, outside
from multitok.detokenizer.stage_plan import build_stages, first_and_other, token_map
from multitok.detokenizer.stages import HeldState, StagesState
from multitok.detokenizer.table_states import (
    ByteFallbackState,
    ByteLevelState,
    ByteLevelTable,
    PositionalState,
    build_fallback_table,
)
from multitok.detokenizer.verify import first_difference
from multitok.detokenizer.vocabulary import Vocabulary, read_stages

__all__ = ["DecodeState", "TextDecoder"]

_log = logging.getLogger(__name__)

# An entry of a table whose entries may be None.
Entry = TypeVar("Entry")


class Plan(NamedTuple):
    """One way to decode.

    Attributes
    ----------
    strategy : str
        Its name, for the log and /server_info.
    start : callable
        Makes a fresh state; takes ``skip_special_tokens``.
    token : callable or None
        Text and bytes of one id alone; None to ask the reference.
    """

    strategy: str
    start: Callable[[bool], DecodeState]
    token: Callable[[int], tuple[str, bytes]] | None = None


class TextDecoder:
    """Everything about one tokenizer that decoding needs; one per tokenizer and process.

    Strategies, best first; the first that agrees with the reference is taken:

    ``byte-level-table``
        ByteLevel. Bytes of each id; at most three bytes are held.
    ``byte-fallback``
        Replace, ByteFallback, Fuse and perhaps Strip at the start. A run of byte tokens is held until it ends.
    ``wordpiece-table``, ``metaspace-table``, ``spaced-table``, ``joined-table``
        Text of each id as the first and further on (``spaced`` is no decoder at all). Nothing is held.
    ``stages``
        Every other combination of known decoders, stage by stage.
    ``held``
        Decoders that can't be followed piece by piece. Exact, but the text comes at the end.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        The reference.
    size : int
        Number of ids.
    plan : Plan
        How to decode.

    Attributes
    ----------
    strategy : str
        Name of the strategy in use.
    size : int
        Ids from 0 to ``size - 1`` are accepted.
    """

    __slots__ = ("_start", "_token", "_tokenizer", "size", "strategy")

    def __init__(self, tokenizer: tokenizers.Tokenizer, size: int, plan: Plan) -> None:
        self._tokenizer = tokenizer
        self._start = plan.start
        self._token = plan.token
        self.size = size
        self.strategy = plan.strategy

    @classmethod
    def from_tokenizer(cls, tokenizer: tokenizers.Tokenizer, vocab_size: int = 0) -> TextDecoder:
        """Build the tables and check them against the reference.

        Parameters
        ----------
        tokenizer : tokenizers.Tokenizer
            The reference; it must not change afterwards.
        vocab_size : int
            The model's number of ids where that is larger than the tokenizer's (padded embeddings); the ids in
            between show nothing, as in the reference.

        Returns
        -------
        TextDecoder
        """
        vocabulary = Vocabulary.read(tokenizer, vocab_size)
        size = len(vocabulary)
        for plan in _plans(tokenizer, vocabulary):
            difference = first_difference(tokenizer, size, vocabulary.special_ids, plan.start)
            if difference is None:
                break
            _log.warning("decoding by %s differs from tokenizers and is not used: %s", plan.strategy, difference)
        else:
            plan = Plan("held", lambda skip: HeldState(tokenizer, skip, size))
            _log.warning("this tokenizer's decoder can't be followed token by token: text comes when a request ends")
        return cls(tokenizer, size, plan)

    def start(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> DecodeState:
        """Start the text of one request.

        Parameters
        ----------
        prompt_tail : sequence of int
            The last ids of a prompt that the output continues (raw completions); empty where the output is a text of
            its own (chat). See `decode_state` for what it changes.
        skip_special_tokens : bool
            Whether special tokens show nothing.

        Returns
        -------
        DecodeState

        Raises
        ------
        ValueError
            If an id of the tail is outside the vocabulary.
        """
        state = self._start(skip_special_tokens)
        if len(prompt_tail):
            state.push_many(prompt_tail)
            if shown := state.peek():
                return AfterPromptState(state, shown)
        return state

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return one token alone, as the entries of log probabilities show it.

        Parameters
        ----------
        token_id : int
            Any id of the vocabulary; special tokens are shown.

        Returns
        -------
        text : str
            As in the middle of a text, so with its leading space; U+FFFD for bytes that are no whole character.
        data : bytes
            Its bytes. Those of all tokens together are the text's, also where a character is split.

        Raises
        ------
        ValueError
            If the id is outside the vocabulary.
        """
        if not 0 <= token_id < self.size:
            raise outside(token_id, self.size)
        if self._token is not None:
            return self._token(token_id)
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text, text.encode()


def _plans(tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> Iterator[Plan]:
    stages = read_stages(tokenizer)
    listed: list[dict[str, Any] | None] = [None] if stages is None else list(stages)
    # What looks at one token alone is done once, in the vocabulary.
    while listed and (stage := listed[0]) is not None and (function := token_map(stage)) is not None:
        vocabulary = vocabulary.mapped(function)
        del listed[0]
    while len(listed) > 1 and (stage := listed[-1]) is not None and stage["type"] == "Fuse":
        del listed[-1]
    if (plan := _table_plan(vocabulary, listed)) is not None:
        yield plan
    if (makers := build_stages(listed)) is not None:
        shown, skipped = vocabulary.tokens, _without(vocabulary.tokens, vocabulary.special_ids)
        yield Plan("stages", lambda skip: StagesState(skipped if skip else shown, [make() for make in makers]))


def _table_plan(vocabulary: Vocabulary, stages: list[dict[str, Any] | None]) -> Plan | None:
    kinds = [None if stage is None else str(stage["type"]) for stage in stages]
    if kinds == ["ByteLevel"]:
        return _byte_level_plan(vocabulary)
    if kinds in (["ByteFallback"], ["ByteFallback", "Fuse", "Strip"]):
        strip = stages[-1] if len(stages) == 3 else None
        if strip is None:
            return _byte_fallback_plan(vocabulary, "", 0)
        if strip["stop"] == 0:
            return _byte_fallback_plan(vocabulary, strip["content"], strip["start"])
    if kinds in ([], ["Fuse"]):
        return _positional_plan("joined-table", vocabulary, vocabulary)
    if len(stages) == 1 and (pair := first_and_other(stages[0])) is not None:
        name = {None: "spaced-table", "Metaspace": "metaspace-table", "WordPiece": "wordpiece-table"}[kinds[0]]
        return _positional_plan(name, vocabulary.mapped(pair[0]), vocabulary.mapped(pair[1]))
    return None


def _byte_level_plan(vocabulary: Vocabulary) -> Plan:
    shown = ByteLevelTable.build(vocabulary)
    skipped = shown.without(vocabulary.special_ids)

    def token(token_id: int) -> tuple[str, bytes]:
        data = shown.datas[token_id]
        return data.decode(errors="replace"), data

    return Plan("byte-level-table", lambda skip: ByteLevelState(skipped if skip else shown), token)


def _byte_fallback_plan(vocabulary: Vocabulary, strip: str, strip_count: int) -> Plan:
    shown = build_fallback_table(vocabulary)
    skipped = _without(shown, vocabulary.special_ids)

    def token(token_id: int) -> tuple[str, bytes]:
        entry = shown[token_id]
        data = bytes((entry,)) if isinstance(entry, int) else (entry or "").encode()
        return data.decode(errors="replace"), data

    return Plan("byte-fallback", lambda skip: ByteFallbackState(skipped if skip else shown, strip, strip_count), token)


def _positional_plan(strategy: str, first: Vocabulary, other: Vocabulary) -> Plan:
    shown = first.tokens, other.tokens
    skipped = _without(first.tokens, first.special_ids), _without(other.tokens, other.special_ids)

    def token(token_id: int) -> tuple[str, bytes]:
        text = other.tokens[token_id] or ""
        return text, text.encode()

    return Plan(strategy, lambda skip: PositionalState(*(skipped if skip else shown)), token)


def _without(table: list[Entry], ids: frozenset[int]) -> list[Entry]:
    out = table.copy()
    for i in ids:
        out[i] = cast(Entry, None)
    return out
