"""A number of tokens that a text surely has, from its bytes alone: refuses endless prompts before they are tokenized.

Where every byte of a text ends up in exactly one token, a text with n bytes has at least n / (bytes of the longest
token) tokens. The same holds for any class of bytes: n letters and digits need n / (most of them in one token) tokens,
which is far tighter, since the longest tokens are runs of spaces and dashes.
"""

from __future__ import annotations

import string
from typing import Any

import msgspec

_WORD = (string.ascii_letters + string.digits).encode()
_ASCII = bytes(range(128))
# Bytes that no text holds.
_NO_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
# Steps that leave every byte in place. Replace is looked at closer, Sequence into.
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits"})
_PIECE = 1 << 17
# Composing turns at most four code points into one (U+1F82 is such a one; Unicode lets no more be added).
_MOST_COMPOSED = 4


class TokenBound(msgspec.Struct, frozen=True):
    """What one token can hold at most.

    Attributes
    ----------
    longest : int
        Bytes.
    most_word : int
        ASCII letters and digits.
    most_high : int
        Bytes of characters beyond ASCII.
    composes : bool
        The tokenizer composes characters first (NFC), so that there may be fewer than in the text.
    dropped : bytes
        Those that the vocabulary lacks: they may leave no token behind.
    """

    longest: int
    most_word: int
    most_high: int
    composes: bool
    dropped: bytes

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least."""
        size = word = high = 0
        # In pieces: a single call on megabytes would hold the interpreter's lock all the time.
        for start in range(0, len(text), _PIECE):
            data = text[start : start + _PIECE].encode("utf-8", "surrogatepass").translate(None, self.dropped)
            size += len(data)
            word += len(data) - len(data.translate(None, _WORD))
            high += len(data.translate(None, _ASCII))
        if self.composes:
            # A letter can vanish into the character beyond ASCII that follows it.
            return max(_ceil(len(text), _MOST_COMPOSED * self.longest), _ceil(max(0, word - high), self.most_word))
        return max(_ceil(size, self.longest), _ceil(word, self.most_word), _ceil(high, self.most_high))


def _ceil(count: int, per_token: int) -> int:
    return -(-count // max(1, per_token))


class _TokenizerJson(msgspec.Struct):
    model: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


def token_bound(tokenizer_json: bytes) -> TokenBound | None:
    """Find what a token can hold, of a byte-pair vocabulary that covers every byte of a text.

    Parameters
    ----------
    tokenizer_json : bytes
        The file's content.

    Returns
    -------
    TokenBound or None
        None where tokens and bytes are not related like that: WordPiece and Unigram fold any number of unknown
        characters into one token, some steps drop characters, some added tokens swallow the spaces around them.
    """
    parsed = msgspec.json.decode(tokenizer_json, type=_TokenizerJson)
    model, vocabulary = parsed.model, parsed.model.get("vocab")
    normalizers, steps = _flatten(parsed.normalizer, "normalizers"), _flatten(parsed.pre_tokenizer, "pretokenizers")
    composing = [step["type"] for step in normalizers if step["type"] in ("NFC", "NFKC")]
    rest = [step for step in normalizers if step["type"] not in ("NFC", "NFKC")]
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if (
        not isinstance(vocabulary, dict)
        # Older files don't name the type.
        or model.get("type", "BPE") != "BPE"
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
        or (dropped := _dropped(vocabulary, byte_level, bool(model.get("byte_fallback")))) is None
        or (composing and dropped)
        or not all(map(_keeps_bytes, rest))
        or not all(step["type"] in _PRE_TOKENIZERS or _splits_only(step) for step in steps)
        or any(token.get("lstrip") or token.get("rstrip") for token in parsed.added_tokens)
    ):
        return None
    added = {str(token["content"]).encode() for token in parsed.added_tokens}
    tokens = [_letters_to_bytes(token) if byte_level else token.encode() for token in vocabulary] + list(added)
    return TokenBound(
        longest=max(map(len, tokens)),
        most_word=max(len(token) - len(token.translate(None, _WORD)) for token in tokens),
        most_high=max(len(token.translate(None, _ASCII)) for token in tokens),
        composes=bool(composing),
        dropped=dropped,
    )


def _flatten(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step[key] for inner in _flatten(part, key)]
    return [step]


def _dropped(vocabulary: dict[str, int], byte_level: bool, byte_fallback: bool) -> bytes | None:
    """Return the bytes that have no token; None where that isn't the question."""
    if byte_level:
        absent = {byte for letter, byte in _LETTERS.items() if chr(letter) not in vocabulary}
        return None if absent.intersection(_WORD) else bytes(sorted(absent - _NO_UTF8))
    covered = byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256) if byte not in _NO_UTF8)
    return b"" if covered else None


def _keeps_bytes(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Prepend":
        return True
    # Spaces belong to no class of bytes but the sum, which doesn't shrink.
    return bool(
        normalizer["type"] == "Replace"
        and normalizer["pattern"] == {"String": " "}
        and isinstance(normalizer["content"], str)
        and normalizer["content"]
    )


def _splits_only(step: dict[str, Any]) -> bool:
    return step["type"] == "Split" and step.get("behavior") != "Removed"


def _byte_letters() -> dict[int, int]:
    """Code points of the letters that byte-level vocabularies write bytes with, and the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: byte for byte in plain} | {256 + i: byte for i, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _letters_to_bytes(token: str) -> bytes:
    # A token with other characters is never matched; what it counts as can only make the bound looser.
    translated = token.translate(_LETTERS)
    try:
        return translated.encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
