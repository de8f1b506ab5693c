"""Checks a way to decode against the reference before it is used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import tokenizers

from multitok.detokenizer.decode_state import DecodeState

# Ids in one checked sequence, and how many sequences mix special, rare and byte-like ids in any order.
_SEQUENCE = 64
_MIXED = 200

PROBES = (
    "Hello, world!",
    " leading space, two  spaces,   three\tand a tab\n\n  new line  ",
    "don't I'm it's we've they're n't do not , . ? ! ' s",
    "naïve café Ångström e\u0301a\u0300o\u0308\u0323",
    "안녕하세요, 세계! 한국어 토큰",
    "你好，世界。繁體字與简体字，龘𠮷",
    "こんにちは世界、カタカナ",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "नमस्ते दुनिया क्षत्रिय",
    "مرحبا بالعالم שלום עולם",
    "👩‍👩‍👧‍👦 👍🏽 🇰🇷 🏳️‍🌈 ❤️ 🫠",
    "1234567890 3.14159 0x1F600 1,000,000",
    "def f(x):\n    return {k: [v] for k, v in x.items()}  # done\n",
    "<s>[INST] <|im_start|>user\n<|endoftext|></s> <0x0A> <unk> ▁ Ġ Ċ ##ing </w>",
    "\u200b\u200d\ufeff\ufffd\u00a0\u2028\x00\x7f\x85",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ℵ₀ ∑∫√ ½ ﬁ",
)


def first_difference(
    tokenizer: tokenizers.Tokenizer,
    size: int,
    special_ids: frozenset[int],
    start: Callable[[bool], DecodeState],
) -> str | None:
    """Decode some hundreds of id sequences both ways; every id is in at least one.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        The reference.
    size : int
        Number of ids.
    special_ids : frozenset of int
        Special ids, which the mixed sequences hold often.
    start : callable
        Makes a fresh state; takes ``skip_special_tokens``.

    Returns
    -------
    str or None
        What differs first, in words; None if nothing does.
    """
    for number, ids in enumerate(_sequences(tokenizer, size, special_ids)):
        skip = number % 2 == 0
        state = start(skip)
        # Both ways in are used, in one sequence too.
        half = len(ids) // 2 if number % 3 else 0
        text = state.push_many(ids[:half]) + "".join([state.push(i) for i in ids[half:]]) + state.flush()
        reference = _reference(tokenizer, ids, skip)
        if reference is not None and text != reference:
            return f"ids {ids} are {reference!r}, not {text!r}"
    return None


def _reference(tokenizer: tokenizers.Tokenizer, ids: list[int], skip: bool) -> str | None:
    try:
        return tokenizer.decode(ids, skip_special_tokens=skip)
    except BaseException as error:
        # The library's Strip crashes on some tokens: there it is no reference.
        if type(error).__name__ == "PanicException":
            return None
        raise


def _sequences(tokenizer: tokenizers.Tokenizer, size: int, special_ids: frozenset[int]) -> Iterator[list[int]]:
    chance = random.Random(20260830)
    order = list(range(size))
    chance.shuffle(order)
    for at in range(0, size, _SEQUENCE):
        yield order[at : at + _SEQUENCE]
    probes: list[list[int]] = []
    for text in PROBES:
        try:
            probes.append(tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception:  # a vocabulary without an unknown token refuses text; the other sequences remain
            continue
    yield from probes
    if not size:
        return
    pool = [i for ids in probes for i in ids] or order[:1]
    special = sorted(special_ids) or order[:1]
    # Where the single bytes of nearly every vocabulary are.
    low = range(min(size, 300))
    for _ in range(_MIXED):
        sources = chance.choices((pool, special, low, order), (4, 1, 3, 2), k=chance.randrange(1, 24))
        yield [chance.choice(source) for source in sources]
