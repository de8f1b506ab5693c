"""Compares the fast tokenizer library with the reference on the probe texts; run as a process by `verdict`."""

from __future__ import annotations

import array
import sys
from pathlib import Path

import msgspec

from multitok.tokenizer.backends import ReferenceBackend, TokenizerBackend, load_tokenizer
from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.fast_backend import FastBackend, load_fast_tokenizer
from multitok.tokenizer.model_files import ModelFiles
from multitok.tokenizer.probe_texts import probe_texts
from multitok.tokenizer.token_bound import token_bound
from multitok.tokenizer.verdict import Verdict

_BATCH = 64


def compare(files: ModelFiles) -> Verdict:
    """Return the verdict on a model's tokenizer.

    Parameters
    ----------
    files : ModelFiles
        The model.

    Raises
    ------
    ModelError
        When the reference can't load it.
    """
    bound = token_bound(Path(files.tokenizer_file).read_bytes())
    try:
        fast = load_fast_tokenizer(files)
    except ModelError as error:
        return Verdict(fast=False, reason=str(error), bound=bound)
    tokenizer = load_tokenizer(files)
    texts = probe_texts(token.content for token in tokenizer.get_added_tokens_decoder().values())
    reason = first_difference(ReferenceBackend(tokenizer), FastBackend(fast, _refuse), texts)
    return Verdict(fast=reason is None, reason=reason or "", bound=bound)


def first_difference(reference: TokenizerBackend, fast: TokenizerBackend, texts: list[str]) -> str | None:
    """Return the first text that the two encode differently, in words; None when there is none."""
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        for special in (True, False):
            expected = reference.encode_batch(batch, special)
            try:
                got = fast.encode_batch(batch, special)
            except _RefusedError as error:
                return f"it refuses a text that the reference takes: {error}"
            for text, ids, others in zip(batch, expected, got, strict=True):
                if ids != others:
                    return f"{text!r:.200} gives {_some(others)} in place of {_some(ids)} (special tokens: {special})"
    return None


class _RefusedError(Exception):
    """The fast library didn't encode a text."""


def _refuse() -> TokenizerBackend:
    error = sys.exc_info()[1]
    raise _RefusedError(str(error)) from error


def _some(ids: bytes) -> str:
    numbers = array.array("i", ids).tolist()
    return str(numbers[:20]) + ("..." if len(numbers) > 20 else "")


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(compare(msgspec.json.decode(sys.stdin.buffer.read(), type=ModelFiles))))
