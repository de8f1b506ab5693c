"""Text to packed token ids: the protocol of a tokenizer backend, and the reference that every other one must equal."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer, processors

from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.model_files import ModelFiles
from multitok.tokenizer.token_bound import TokenBound

# Read by the library at every call. Without it, its first batch, even of one text, starts a thread per core, in each
# of N workers; the workers are what makes use of the cores here. Who sets the variable has the last word.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TokenizerBackend(Protocol):
    """Text to token ids, packed as int32 in native order.

    Attributes
    ----------
    name : str
        Of the library.
    inline_characters : int
        Texts up to this size take at most a few milliseconds, so that the event loop can encode them itself.
    """

    name: str
    inline_characters: int

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """Return the ids of one text."""
        ...

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        """Return the ids of several texts; the GIL is free meanwhile, so a thread pool can call this."""
        ...

    def warm_up(self) -> None:
        """Do what the first long text would else wait for; in the process that serves, after any fork."""
        ...

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least, without encoding it; 0 where nothing is known."""
        ...


class ReferenceBackend:
    """The `tokenizers` library.

    Parameters
    ----------
    tokenizer : Tokenizer
        Its truncation and padding are switched off: what doesn't fit is refused, not cut in silence.
    bound : TokenBound or None
        How many tokens a text has at least; None where nothing is known.
    """

    name = "tokenizers"
    # Measured: about 1 us per character.
    inline_characters = 4096

    def __init__(self, tokenizer: Tokenizer, bound: TokenBound | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._encode_batch = tokenizer.encode_batch_fast
        self._bound = bound

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """Return the ids of one text; the GIL is free meanwhile.

        A batch of one: `Tokenizer.encode` holds the GIL and is slower, since it also tracks offsets.
        """
        return _pack(self._encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        """Return the ids of several texts; the GIL is free meanwhile."""
        encodings = self._encode_batch(texts, add_special_tokens=add_special_tokens)
        return [_pack(encoding.ids) for encoding in encodings]

    def warm_up(self) -> None:
        """Do nothing: this library is ready when it is loaded."""

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least; takes a millisecond per MB."""
        return 0 if self._bound is None else self._bound.least_tokens(text)


def _pack(ids: list[int]) -> bytes:
    # Measured: half the time of array() and of numpy for long lists, equal for short ones.
    return struct.pack(f"{len(ids)}i", *ids)


class LazyTokenizer:
    """The reference tokenizer, loaded when it is first needed; threads can share it.

    Beside a fast backend only /detokenize and log probabilities need it, and it takes half a second and 80 MB for a
    vocabulary of 150,000.

    Parameters
    ----------
    files : ModelFiles
        Where it is.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None

    def get(self) -> Tokenizer:
        """Return the tokenizer.

        Raises
        ------
        ModelError
            When the file can't be loaded.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._files)
            return self._tokenizer

    def decode_batch(self, prompts: Sequence[bytes], skip_special_tokens: bool = True) -> list[str]:
        """Return the texts of packed int32 ids; the GIL is free meanwhile, which it isn't in `Tokenizer.decode`."""
        rows = [memoryview(ids).cast("i").tolist() for ids in prompts]
        texts: list[str] = self.get().decode_batch(rows, skip_special_tokens=skip_special_tokens)
        return texts


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
