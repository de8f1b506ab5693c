"""The vocabulary as the reference sees it when it decodes, read once per tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import models

# A vocabulary may have holes, but one that is nearly all holes is not worth a table.
_MAX_HOLES = 1 << 20


class Vocabulary:
    """Every id's token, and which of them are special.

    Parameters
    ----------
    tokens : list of (str or None)
        Token of each id; None where no token has this id, which the reference skips in silence.
    special_ids : frozenset of int
        Ids that the reference leaves out with ``skip_special_tokens``.
    """

    __slots__ = ("special_ids", "tokens")

    def __init__(self, tokens: list[str | None], special_ids: frozenset[int]) -> None:
        self.tokens = tokens
        self.special_ids = special_ids

    @classmethod
    def read(cls, tokenizer: tokenizers.Tokenizer, vocab_size: int = 0) -> Vocabulary:
        """Read the vocabulary of a tokenizer.

        Parameters
        ----------
        tokenizer : tokenizers.Tokenizer
            The reference.
        vocab_size : int
            Least number of ids; those past the last token are holes.

        Returns
        -------
        Vocabulary

        Raises
        ------
        ValueError
            If the ids are so sparse that a table of them would be mostly empty.
        """
        count = tokenizer.get_vocab_size(with_added_tokens=True)
        tokens: list[str | None] = list(map(tokenizer.id_to_token, range(count)))
        if None in tokens or len(set(tokens)) != count:
            # Holes: the last id is not known from the number of tokens. The whole dictionary is slow to get.
            last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
            if last - count > _MAX_HOLES:
                raise ValueError(f"the vocabulary has {count} tokens, but ids up to {last}")
            tokens = list(map(tokenizer.id_to_token, range(last + 1)))
        tokens.extend([None] * (vocab_size - len(tokens)))
        # The reference tells special tokens by content, not by id.
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        return cls(tokens, frozenset(i for i, token in enumerate(tokens) if token in special))

    def __len__(self) -> int:
        return len(self.tokens)

    def mapped(self, function: Callable[[str], str]) -> Vocabulary:
        """Return the vocabulary after a decoder stage that looks at one token alone.

        Parameters
        ----------
        function : callable
            Token to token.

        Returns
        -------
        Vocabulary
            The same ids with changed tokens.
        """
        return Vocabulary([None if token is None else function(token) for token in self.tokens], self.special_ids)


def read_stages(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]] | None:
    """Read the decoder as in tokenizer.json, nested sequences flattened.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        The reference.

    Returns
    -------
    list of dict or None
        The stages in order, one of type ``Custom`` for a decoder written in Python; None where there is no decoder,
        which is not the same as an empty sequence.
    """
    if tokenizer.decoder is None:
        return None
    # An empty tokenizer with this decoder: writing the whole vocabulary as JSON would take long.
    bare = tokenizers.Tokenizer(models.BPE())
    bare.decoder = tokenizer.decoder
    try:
        described = bare.to_str()
    except Exception:  # the library raises a bare Exception for a decoder written in Python
        return [{"type": "Custom"}]
    return _flatten(json.loads(described)["decoder"])


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [stage for inner in decoder["decoders"] for stage in _flatten(inner)]
    return [decoder]
