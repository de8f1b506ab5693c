"""Text to packed token ids with `fastokens`, ten to a hundred times faster than the reference.

It is used only where it has shown that its ids are those of the reference, see `verdict`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from multitok.tokenizer.backends import TokenizerBackend
from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.model_files import ModelFiles
from multitok.tokenizer.token_bound import TokenBound

# Read by the library once. Without them its first call starts threads, which a forked child would not have: it would
# wait for them forever. And the workers are what makes use of the cores. Who sets a variable has the last word.
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "1")

from fastokens._native import Tokenizer

logger = logging.getLogger(__name__)


class FastBackend:
    """The `fastokens` library.

    Parameters
    ----------
    tokenizer : Tokenizer
        Of `load_fast_tokenizer`.
    reference : callable
        Makes the reference backend, for what this one refuses; called at most once.
    bound : TokenBound or None
        See `TokenizerBackend`.
    """

    name = "fastokens"
    # Measured: up to 0.07 us per character of unseen mixed text, 0.2 of one endless word; so 3 ms, at worst 8. A prompt
    # of 8,000 English tokens (40,000 characters) takes 0.1 to 0.6 ms, less than its way to a thread and back.
    inline_characters = 49152

    def __init__(
        self, tokenizer: Tokenizer, reference: Callable[[], TokenizerBackend], bound: TokenBound | None = None
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._encode_flat: Callable[[list[str], bool], tuple[bytes, bytes]] = tokenizer.encode_batch_flat
        self._make_reference = reference
        self._reference: TokenizerBackend | None = None
        self._bound = bound
        # A thread's first call fills the thread's tables, tens of milliseconds and megabytes of some vocabularies. One
        # word, in the thread that will serve: longer texts can start threads of the library, and a fork may follow.
        self._encode_flat(["warm"])

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """Return the ids of one text; the GIL is free meanwhile where the text is long."""
        try:
            return self._encode_flat([text], add_special_tokens)[0]
        except (ValueError, TypeError) as error:
            return self._ask_reference(error).encode(text, add_special_tokens)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        """Return the ids of several texts; the GIL is free meanwhile."""
        try:
            ids, packed = self._encode_flat(texts, add_special_tokens)
        except (ValueError, TypeError) as error:
            return self._ask_reference(error).encode_batch(texts, add_special_tokens)
        ends = memoryview(packed).cast("Q")
        return [ids[4 * ends[i] : 4 * ends[i + 1]] for i in range(len(texts))]

    def warm_up(self) -> None:
        """Let the library build what it builds at the first long text, which takes Gemma's vocabulary 10 to 30 ms."""
        self._encode_flat(["".join(f"{i} warm words " for i in range(4000))], False)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least; takes a millisecond per MB."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def _ask_reference(self, error: Exception) -> TokenizerBackend:
        # A text that is no Unicode, which the reference refuses in its own words, or one that exceeds a limit of the
        # library's regular expressions.
        if self._reference is None:
            logger.info("fastokens refuses a text (%s); such texts go to the reference tokenizer", error)
            self._reference = self._make_reference()
        return self._reference


def load_fast_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load a model's tokenizer as `load_tokenizer` does.

    Parameters
    ----------
    files : ModelFiles
        Where it is.

    Raises
    ------
    ModelError
        When the library can't load it.
    """
    try:
        content = Path(files.tokenizer_file).read_bytes()
        if files.add_bos and files.bos_token is not None:
            content = _with_bos(content, files.bos_token)
        # Not from_file: that adds tokens of a tokenizer_config.json beside it, which the reference doesn't know.
        return Tokenizer.from_json_str(content.decode())
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"fastokens can't load {files.tokenizer_file}: {error}") from error


class _Added(msgspec.Struct):
    content: str
    id: int


def _with_bos(content: bytes, bos: str) -> bytes:
    parts = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(parts["added_tokens"], type=list[_Added])
    bos_id = next((token.id for token in added if token.content == bos), None)
    if bos_id is None:
        raise ValueError(f"{bos!r} is not among the added tokens")
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    return msgspec.json.encode({**parts, "post_processor": msgspec.Raw(msgspec.json.encode(processor))})
