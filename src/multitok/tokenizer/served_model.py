"""ServedModel: one of the models that an HTTP process serves, with all that it needs to know of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from multitok.engines.base import EngineInfo
from multitok.tokenizer.backends import TokenizerBackend
from multitok.tokenizer.call import EmbeddingCall, GenerateCall
from multitok.tokenizer.chat_template import ChatTemplate
from multitok.tokenizer.limits import check_texts
from multitok.tokenizer.model_settings import ModelSettings
from multitok.tokenizer.requests import RequestError

_log = logging.getLogger(__name__)

# For what no context bounds: a second for one endless word, the worst case.
_MOST_CHARACTERS = 1 << 20


class TextTools(Protocol):
    """What turns text into ids and back.

    Attributes
    ----------
    backend : TokenizerBackend
        What prompts are tokenized with.
    chat_template : ChatTemplate or None
        The model's.
    """

    backend: TokenizerBackend
    chat_template: ChatTemplate | None

    @property
    def decoder_is_loaded(self) -> bool:
        """Whether `token_text` answers at once."""
        ...

    def load_decoder(self) -> None:
        """Make it answer at once; may take seconds, in any thread."""
        ...

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return the text and the bytes of one id alone."""
        ...

    def decode_batch(self, prompts: Sequence[bytes], skip_special_tokens: bool = True) -> list[str]:
        """Return the texts of packed ids."""
        ...


class ServedModel:
    """A model: its name, its engine, its tokenizer with the threads for long texts, and its ranks.

    Parameters
    ----------
    index : int
        Its place among the models.
    settings : ModelSettings
        Name, options and files.
    ranks : sequence of int
        The schedulers that serve it.
    engine_info : EngineInfo
        What its engine is and can do.
    text_tools : TextTools
        Tokenizer, chat template and decoder.
    is_up : callable
        Whether the server serves, and one of the ranks is up.
    is_full : callable
        Whether none of the ranks that are up has room, by what they last said; they decide themselves.

    Attributes
    ----------
    args : ServerArgs
        The options that hold for it.
    context_length, longest_prompt : int
        Most ids of prompt and output together, and of a prompt.
    """

    def __init__(
        self,
        index: int,
        settings: ModelSettings,
        ranks: Sequence[int],
        engine_info: EngineInfo,
        *,
        text_tools: TextTools,
        is_up: Callable[[], bool],
        is_full: Callable[[], bool],
    ) -> None:
        self.index = index
        self.name = settings.name
        self.args = settings.args
        self.model_path = settings.files.model_path
        self.ranks = ranks
        self.engine_info = engine_info
        self.context_length = engine_info.context_length
        self.longest_prompt = min(self.context_length, self.args.max_prompt_tokens or self.context_length)
        self.text_tools = text_tools
        self.chat_template = text_tools.chat_template
        self.token_text = text_tools.token_text
        self._is_up = is_up
        # Whether this process has heard so, too; a part that begins anew tells it a moment later.
        self.has_rank: Callable[[], bool] = lambda: True
        self.is_full = is_full
        self._backend = text_tools.backend
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        # /tokenize and /detokenize, however long they take, don't keep a prompt waiting.
        self._side_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="side")

    def is_up(self) -> bool:
        """Whether requests for it are taken."""
        return self._is_up() and self.has_rank()

    def close(self) -> None:
        """End the threads."""
        for threads in (self._threads, self._side_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    def check_task(self, task: str) -> None:
        """Refuse a kind of request that the model doesn't take.

        Raises
        ------
        RequestError
            400.
        """
        if self.engine_info.task != task:
            what = "generates text" if self.engine_info.task == "generate" else "makes embeddings"
            raise RequestError(400, f"the model {self.name} only {what}", "model")

    def check_text(self, text: str) -> None:
        """Refuse a text that can't fit into a prompt, without tokenizing it.

        Raises
        ------
        RequestError
            400.
        """
        check_texts([text], self.longest_prompt, self._backend)

    async def tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[bytes]:
        """Return the packed int32 ids of texts.

        Raises
        ------
        RequestError
            400: they are too long.
        """
        size = sum(map(len, texts))
        if size <= self._backend.inline_characters:
            return [self._backend.encode(text, add_special_tokens) for text in texts]
        if size > _MOST_CHARACTERS:
            raise RequestError(400, f"{size} characters are more than the limit of {_MOST_CHARACTERS}", "prompt")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._side_thread, self._backend.encode_batch, texts, add_special_tokens)

    async def detokenize(self, prompts: list[bytes], skip_special_tokens: bool = True) -> list[str]:
        """Return the texts of packed int32 ids, which the caller has checked against the vocabulary."""
        # Always in the thread: the reference tokenizer may have to be loaded for it.
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._side_thread, self.text_tools.decode_batch, prompts, skip_special_tokens)

    def encode_prompts(
        self,
        call: GenerateCall | EmbeddingCall,
        loop: asyncio.AbstractEventLoop,
        then: Callable[[GenerateCall | EmbeddingCall, list[bytes]], None],
    ) -> None:
        """Get the ids of all prompts of a call and go on with `then`: at once, or from the loop when it takes longer.

        Raises
        ------
        RequestError
            400: a text can't fit; nothing else will happen.
        """
        prompts = call.request.prompts
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if isinstance(call, EmbeddingCall):
            if any(len(text) > _MOST_CHARACTERS for text in texts):
                raise RequestError(400, f"an input has more than {_MOST_CHARACTERS} characters", "input")
            longest = None if call.request.truncate else self.longest_prompt
            add_special_tokens, load_decoder = True, False
        else:
            longest = self.longest_prompt
            add_special_tokens = call.request.add_special_tokens
            # Log probabilities come with the text of each token.
            with_text = call.request.sampling_params.logprobs is not None
            load_decoder = with_text and not self.text_tools.decoder_is_loaded
        if not load_decoder and sum(map(len, texts)) <= self._backend.inline_characters:
            check_texts(texts, longest, self._backend)
            encoded = iter([self._backend.encode(text, add_special_tokens) for text in texts])
            then(call, [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts])
            return

        def finish(future: Future[list[bytes]]) -> None:
            if call.ended:
                return
            try:
                encoded = iter(future.result())
                then(call, [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts])
            except RequestError as error:
                call.fail(error)
            except Exception as error:
                _log.exception("tokenization failed")
                call.fail(RequestError(500, f"tokenization failed: {error}"))

        def encode() -> list[bytes]:
            if load_decoder:
                self.text_tools.load_decoder()
            check_texts(texts, longest, self._backend)
            return self._backend.encode_batch(texts, add_special_tokens)

        future = self._threads.submit(encode)
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(finish, done))
