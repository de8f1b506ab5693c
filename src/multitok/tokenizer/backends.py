"""Text to packed token ids: the protocol of a tokenizer backend, and the reference that every other one must equal."""

from __future__ import annotations

import os
import struct
from typing import Protocol

from tokenizers import Tokenizer, processors

from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.model_files import ModelFiles

# Read by the library at every call. Without it, its first batch, even of one text, starts a thread per core, in each
# of N workers; the workers are what makes use of the cores here. Who sets the variable has the last word.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TokenizerBackend(Protocol):
    """Text to token ids, packed as int32 in native order."""

    name: str

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """Return the ids of one text."""
        ...

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        """Return the ids of several texts; the GIL is free meanwhile, so a thread pool can call this."""
        ...


class ReferenceBackend:
    """The `tokenizers` library.

    Parameters
    ----------
    tokenizer : Tokenizer
        Its truncation and padding are switched off: what doesn't fit is refused, not cut in silence.
    """

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._encode_batch = tokenizer.encode_batch_fast

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """Return the ids of one text; the GIL is free meanwhile.

        A batch of one: `Tokenizer.encode` holds the GIL and is slower, since it also tracks offsets.
        """
        return _pack(self._encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        """Return the ids of several texts; the GIL is free meanwhile."""
        encodings = self._encode_batch(texts, add_special_tokens=add_special_tokens)
        return [_pack(encoding.ids) for encoding in encodings]


def _pack(ids: list[int]) -> bytes:
    # Measured: half the time of array() and of numpy for long lists, equal for short ones.
    return struct.pack(f"{len(ids)}i", *ids)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load a model's tokenizer, without truncation and padding, that adds BOS where the model wants it.

    Parameters
    ----------
    files : ModelFiles
        Where it is.

    Raises
    ------
    ModelError
        When the file can't be loaded.
    """
    try:
        tokenizer = Tokenizer.from_file(files.tokenizer_file)
    except Exception as error:  # the library raises bare Exception for everything
        raise ModelError(f"can't load the tokenizer {files.tokenizer_file}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if files.add_bos and files.bos_token is not None:
        bos, bos_id = files.bos_token, tokenizer.token_to_id(files.bos_token)
        if bos_id is None:
            raise ModelError(f"{files.tokenizer_file} has no token {bos!r}, its tokenizer_config.json's bos_token")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
        )
    return tokenizer
