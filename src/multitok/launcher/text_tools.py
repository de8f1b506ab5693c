"""What turns text into ids and back, for every HTTP worker: loaded once, in the fork server."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from multitok.config import ServerArgs
from multitok.detokenizer.incremental import TextDecoder
from multitok.tokenizer.backends import LazyTokenizer, TokenizerBackend
from multitok.tokenizer.chat_template import ChatTemplate
from multitok.tokenizer.model_files import ModelFiles
from multitok.tokenizer.verdict import choose_backend


class TextTools:
    """Tokenizer, chat template and decoder of a model; workers share their memory.

    Parameters
    ----------
    files : ModelFiles
        The model.
    cache_dir : Path or None
        Where verdicts on fast tokenizers are kept; None for the user's cache.

    Attributes
    ----------
    backend : TokenizerBackend
        What prompts are tokenized with.
    chat_template : ChatTemplate or None
        The model's, if it has one.
    """

    def __init__(self, files: ModelFiles, cache_dir: Path | None) -> None:
        self._reference = LazyTokenizer(files)
        self._vocab_size = files.vocab_size
        self.backend: TokenizerBackend = choose_backend(files, self._reference, cache_dir)
        self.chat_template = (
            ChatTemplate(files.chat_template, files.bos_token, files.eos_token) if files.chat_template else None
        )

    @classmethod
    def load(cls, server_args: ServerArgs, files: ModelFiles) -> TextTools:
        """Load them for a start; the decoder's tables only where owners decode for themselves."""
        tools = cls(files, Path(server_args.cache_dir) if server_args.cache_dir else None)
        if not server_args.detokenizer_worker_num:
            tools.load_decoder()
        return tools

    @functools.cached_property
    def decoder(self) -> TextDecoder:
        """The decoder; its tables are built when they are first asked for."""
        return TextDecoder.from_tokenizer(self._reference.get(), self._vocab_size)

    @property
    def decoder_is_loaded(self) -> bool:
        """Whether `token_text` answers at once."""
        return "decoder" in self.__dict__

    def load_decoder(self) -> None:
        """Build the decoder's tables: up to seconds, in any thread."""
        _ = self.decoder

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return the text and the bytes of one id alone."""
        return self.decoder.token_text(token_id)

    def decode_batch(self, prompts: Sequence[bytes], skip_special_tokens: bool = True) -> list[str]:
        """Return the texts of packed ids, by the reference."""
        return self._reference.decode_batch(prompts, skip_special_tokens)
