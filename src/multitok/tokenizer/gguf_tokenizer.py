"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file.

A GGUF file carries vocabulary, merges or scores, token types, and only the *name* of the pre-tokenizer. That name
decides where words and digits are cut, so a wrong guess gives ids that the model was never trained on: a name that is
not in the table below is refused. The patterns are those of the original tokenizers, not of llama.cpp's rewriting of
them; where the two differ the original is right, since the model was trained with it.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.gguf_metadata import GgufMetadata

# Raised whenever the same file would give another tokenizer.json: it is part of the cache's key.
BUILDER_VERSION = 1

# Token types of the format.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_BYTE = 6

_WORD_MARK = "▁"


class _Kind(NamedTuple):
    """How one family of byte-level tokenizers cuts text before its merges apply."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    gpt2_pattern: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = _Kind(gpt2_pattern=True)
_SINGLE_DIGITS = _Kind(single_digits=True, gpt2_pattern=True)
_LLAMA3 = _Kind(
    patterns=(rf"{_CONTRACTION}|{_BEFORE_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    ignore_merges=True,
    add_bos=True,
)
_KINDS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Kind(
        patterns=(rf"{_CONTRACTION}|{_BEFORE_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
        nfc=True,
    ),
    "qwen35": _Kind(
        patterns=(
            rf"{_CONTRACTION}|{_BEFORE_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        nfc=True,
    ),
    "tekken": _Kind(
        patterns=(
            rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*"
            rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        ),
        ignore_merges=True,
        add_bos=True,
    ),
    "deepseek-v3": _Kind(
        patterns=(
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        ),
    ),
}


def build_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Parameters
    ----------
    metadata : GgufMetadata
        Header of the file.

    Returns
    -------
    Tokenizer
        ``encode(text)`` adds BOS and EOS as the file says; texts of control tokens are parsed as these tokens.

    Raises
    ------
    ModelError
        When the kind of tokenizer is not known for sure, or the metadata is inconsistent.
    """
    model = metadata.get("tokenizer.ggml.model", str, "")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{metadata.path} carries no tokenizer; {_ADVICE}")
    types = [int(kind) for kind in metadata.numbers("tokenizer.ggml.token_type")] or [_NORMAL] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(types) != len(tokens) or len(vocab) != len(tokens):
        raise ModelError(f"{metadata.path}: the vocabulary is inconsistent (lengths or doubled tokens); {_ADVICE}")
    # Padding of the embedding table: the original tokenizer doesn't know these ids and decodes them to nothing.
    while types and types[-1] == _UNUSED:
        del vocab[tokens[len(types) - 1]]
        types.pop()
    try:
        if model == "gpt2":
            tokenizer, add_bos = _byte_level(metadata, vocab)
        elif model == "llama":
            tokenizer, add_bos = _sentencepiece(metadata, vocab, types), True
        else:
            raise ModelError(f"{metadata.path} has a tokenizer of the unknown type {model!r}; {_ADVICE}")
        _add_special_tokens(tokenizer, metadata, tokens, types)
        _add_post_processor(tokenizer, metadata, tokens, add_bos)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception for merges outside of the vocabulary and the like
        raise ModelError(f"{metadata.path}: no tokenizer can be built from it: {error}; {_ADVICE}") from error
    return tokenizer


_ADVICE = "give the model's original tokenizer with --tokenizer DIR"


def _byte_level(metadata: GgufMetadata, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", str, "")
    kind = _KINDS.get(name)
    if kind is None:
        known = ", ".join(_KINDS)
        said = f"the unknown pre-tokenizer {name!r}" if name else "no pre-tokenizer name"
        raise ModelError(f"{metadata.path} has {said} (known: {known}); {_ADVICE}")
    merges = []
    for merge in metadata.strings("tokenizer.ggml.merges"):
        # A token may itself begin with a space, hence the 1.
        cut = merge.find(" ", 1)
        merges.append((merge[:cut], merge[cut + 1 :]))
    if not merges:
        raise ModelError(f"{metadata.path} carries no merges; {_ADVICE}")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if kind.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.gpt2_pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.add_bos


def _sentencepiece(metadata: GgufMetadata, vocab: dict[str, int], types: list[int]) -> Tokenizer:
    scores = metadata.numbers("tokenizer.ggml.scores")
    pieces = {token: scores[index] for token, index in vocab.items() if types[index] == _NORMAL and index < len(scores)}
    # Converted without the SentencePiece file: all scores are one placeholder, and the order of merges is lost.
    if len(set(pieces.values())) < 2:
        raise ModelError(f"{metadata.path}: the scores of its SentencePiece vocabulary are missing; {_ADVICE}")
    unknown = next((token for token, index in vocab.items() if types[index] == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(pieces, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    to_mark = normalizers.Replace(" ", _WORD_MARK)
    to_text: list[decoders.Decoder] = [decoders.Replace(_WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD_MARK), to_mark])
        to_text.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_mark
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _merges_by_score(pieces: dict[str, float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges that give what SentencePiece's "join the pair with the best score" gives."""
    ranked = []
    for piece, score in pieces.items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [(vocab[left], vocab[right]) for left, right in halves if left in pieces and right in pieces]
        ranked += [(-score, vocab[piece], *pair) for pair in pairs]
    ranked.sort()
    names = {index: token for token, index in vocab.items()}
    return [(names[left], names[right]) for _, _, left, right in ranked]


def _add_special_tokens(tokenizer: Tokenizer, metadata: GgufMetadata, tokens: list[str], types: list[int]) -> None:
    name = metadata.get("general.name", str, "").lower()
    # The format has no room for it, and these models' own tokenizer swallows the whitespace after a role.
    swallow = "phi-3" in name or "phi3" in name
    added = []
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token:
            rstrip = swallow and token not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(AddedToken(token, special=kind != _USER_DEFINED, normalized=False, rstrip=rstrip))
    tokenizer.add_tokens(added)


def _add_post_processor(tokenizer: Tokenizer, metadata: GgufMetadata, tokens: list[str], add_bos: bool) -> None:
    before: list[str] = []
    after: list[str] = []
    for place, key, default in ((before, "bos", add_bos), (after, "eos", False)):
        if metadata.get(f"tokenizer.ggml.add_{key}_token", bool, default):
            index = metadata.optional_int(f"tokenizer.ggml.{key}_token_id")
            if index is None and key == "bos" and "<s>" in tokens:
                index = tokens.index("<s>")
            if index is None or not 0 <= index < len(tokens):
                raise ModelError(f"{metadata.path} asks for a {key.upper()} token and names none; {_ADVICE}")
            place.append(tokens[index])
    if before or after:
        names = dict.fromkeys(before + after)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(token, tokens.index(token)) for token in names],
        )
