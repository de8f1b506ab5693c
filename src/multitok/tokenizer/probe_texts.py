"""Texts on which a fast tokenizer has to agree with the reference before it is used."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterable, Iterator

# Part of a verdict's name in the cache: a change of this module changes it.
PROBE_VERSION = 1

_SENTENCES = [
    *("The quick brown fox jumps over the lazy dog.", "I'm sure you've seen what they'll do; it's Bob's, isn't it?"),
    *("IT'S THEY'RE WE'VE I'D I'LL", "Der Übermut führt häufig zu Größenwahn, straßauf.", "œuvre Noël où ça"),
    *("今天天气很好，我们去公园散步吧。", "これは日本語の文章です。カタカナ、ひらがな、漢字。"),
    *("안녕하세요, 세계! 한국어 문장입니다.", "Привет, как дела? Это длинное предложение.", "Γειά σου Κόσμε"),
    *("مرحبا بالعالم، هذا نص", "שלום עולם", "नमस्ते दुनिया, यह हिंदी में एक वाक्य है।"),
    *("สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง", "ஹலோ உலகம்", "ਸਤ ਸ੍ਰੀ ਅਕਾਲ", "Xin chào thế giới, tiếng Việt có dấu"),
    *("İstanbul'da ılık bir gün", "Здравствуй, мир! ёЁ", "ሰላም ልዑል", "ᚠᛇᚻ᛫ᛒᛦᚦ"),
    *("𝕳𝖊𝖑𝖑𝖔 𝒲ℴ𝓇𝓁𝒹", "ﬁne ﬂow Ⅷ ½ ① ㎏ ﷺ", "､｡ＡＢＣ　ｄｅｆ１２３"),
    *("def f(x: int) -> dict:\n    return {k: v ** 2 for k, v in x.items() if v != 0}\n", "a->b==c!=d<=e>=f&&g||h"),
    *('{"a": [1, 2.5e-3, null, true], "b": {"c": "\\u00e9\\n"}}', "<div class='x'>\n\t<!-- c -->&nbsp;</div>"),
    *("SELECT * FROM t WHERE a = 'b' AND c <> 1; -- x", "#include <stdio.h>\r\nint main(void) { return 0; }\r\n"),
    *("https://user:pass@example.com:8080/a/b.html?c=d&e=%20f#g", "name.surname+tag@example.co.uk"),
    *("C:\\dir\\file.txt", "$E = mc^2$ \\frac{a}{b} \\alpha_{i,j}", "| a | b |\n|---|---|\n| 1 | 2 |"),
    *("---\n# Title\n\n* item\n  - sub\n\n```py\n1\n```", "camelCaseWords snake_case_words SCREAMING_CASE kebab-case"),
    *("3.14159 1,234,567.89 0x1F 1e-10 -42 +7 50%", "2026-11-30T14:30:00Z 12:34 (555) 123-4567 v1.2.3-rc.4"),
    "e\u0301 a\u0300\u0323 o\u0302\u0301 \u1ea5 \u212b \u2126 \u1f82 \u03b1\u0313\u0300\u0345 \u1100\u1161\u11a8",
    *("👨‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️ 😀😃 ☺︎ 1️⃣", "…—–‘’“”«»·•†‡§¶©®™°±×÷≠≤≥∞"),
]
_SPACES = [
    *(" ", "\t", "\n", "\r\n", "\r", "\u000b", "\u000c", "\u001c", "\u0085", "\u00a0", "\u2003", "\u2028", "\u3000"),
    *("\u200b", "\ufeff"),
]
_PIECES = [
    *("a", "Zz", "é", "中", "й", "1", "23", "!", "..", "'s", "'LL", "_", "\u0301", "😀", "\x00", "\x7f", "ﷺ"),
    *("<", "|>"),
]
_BEFORE = ("x", " ", "\n", "", ".", "  ", "1", "é")


def probe_texts(added_tokens: Iterable[str]) -> list[str]:
    """Return the texts: scripts, numbers, spaces, combining marks, code, long words, special tokens, all mixed.

    Parameters
    ----------
    added_tokens : iterable of str
        Those of the tokenizer; each occurs inside of text.
    """
    texts = ["", *_SENTENCES, *_whitespace(), *_digits(), *_long_words(), *_special_tokens(list(added_tokens))]
    return [*texts, *_code_points(), *_mixtures(random.Random(PROBE_VERSION))]


def _whitespace() -> Iterator[str]:
    for space in _SPACES:
        yield from (space, space * 2, f"a{space}b", f"{space}a{space}", f"a{space * 2}b{space * 3}.", f"1{space}2")
        yield from (f"a {space} b", f"a\n{space}\n b", f" {space}x", f"x{space} ")
    yield from (f"{' ' * n}x{' ' * n}\n{' ' * n}y" for n in (2, 3, 4, 7, 8, 15, 16, 17, 31, 64, 100, 200))
    yield from (char * n for char in "\n\t " for n in (2, 3, 5, 16, 33, 90, 257))


def _digits() -> Iterator[str]:
    digits = "31415926535897932384626433"
    yield from (digits[:n] for n in range(1, 27))
    yield from (f"a{digits[:n]}b {digits[:n]}.{digits[:n]}" for n in range(1, 9))
    yield from ("٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "１２３４５６７", "²³¹⁴ ₁₂ ⅓ Ⅳ ④", "1²3", "一二三 4五6")


def _long_words() -> Iterator[str]:
    letters = random.Random(0)
    for size in (30, 127, 128, 129, 513, 1025, 5000):
        yield "a" * size
        yield "".join(letters.choice("etaoinshrdlu") for _ in range(size))
    for alphabet in ("人大中国的是", "абвгде", "กขคงจ", "=-*#", "ab1", "😀👍", "가나다", "e\u0301\u0300"):
        yield from ("".join(letters.choice(alphabet) for _ in range(size)) for size in (17, 300))
    yield "0123456789abcdef" * 40


def _special_tokens(tokens: list[str]) -> Iterator[str]:
    # Vocabularies reserve thousands; one text holds eight of them, each in other surroundings.
    for start in range(0, len(tokens), 8):
        group = tokens[start : start + 8]
        yield "".join(f"{before}{token}" for before, token in zip(_BEFORE, group, strict=False))
        yield "".join(f"{token} {token[:-1]} y" for token in group)
    for token in tokens[:64]:
        yield from (token, f" {token} ", f"a{token}b", f"{token}{token}", f"{token}\n\n{token}", token.upper())
        yield from (f"{token} hello", f"hello {token}", token[1:] + token, f"  {token}\t{token}  x")


def _code_points() -> Iterator[str]:
    """All assigned characters, of Han, Hangul and the private ones every 41st; each between letters and alone."""
    dense = [*range(0x3400), *range(0xA000, 0xAC00), *range(0xF900, 0x20000)]
    assigned = [point for point in dense if unicodedata.category(chr(point)) != "Cn"]
    sparse = [*range(0x3400, 0xA000, 41), *range(0xAC00, 0xD800, 41), *range(0xE000, 0xF900, 41)]
    sparse += range(0x20000, 0x110000, 1009)
    for group in (assigned, sparse):
        for start in range(0, len(group), 64):
            yield "".join(f"a{chr(point)} {chr(point)}" for point in group[start : start + 64])


def _mixtures(choice: random.Random) -> Iterator[str]:
    parts = [*_PIECES, *_SPACES, *(word for sentence in _SENTENCES for word in sentence.split(" "))]
    for _ in range(600):
        yield "".join(choice.choice(parts) for _ in range(choice.randrange(1, 30)))
    for _ in range(8):
        yield " ".join(choice.choice(_SENTENCES) for _ in range(60))
