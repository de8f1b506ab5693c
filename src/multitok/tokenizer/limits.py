"""What fits: prompt and output into the context."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multitok.messages.sampling import SamplingParams
from multitok.tokenizer.backends import TokenizerBackend
from multitok.tokenizer.requests import GenerateInput, RequestError


def check_prompt(ids: bytes, most: int | None) -> None:
    """Check how many ids a prompt has.

    Raises
    ------
    RequestError
        400: there are none, or more than `most`.
    """
    if not ids:
        raise RequestError(400, "the prompt is empty", "prompt")
    if most is not None and len(ids) > 4 * most:
        raise RequestError(400, f"the prompt of {len(ids) // 4} tokens is longer than the limit of {most}", "prompt")


def check_texts(texts: Sequence[str], longest: int | None, backend: TokenizerBackend) -> None:
    """Refuse texts that can't fit before time is spent on tokenizing them; None: whatever doesn't fit will be cut.

    Raises
    ------
    RequestError
        400: one has more tokens than that, however they are counted.
    """
    if longest is None:
        return
    for text in texts:
        # Looking closer costs a millisecond per MB, and no common text has a token per letter.
        if len(text) > 4 * longest and backend.least_tokens(text) > longest:
            raise RequestError(
                400, f"the prompt of {len(text)} characters has more tokens than the limit of {longest}", "prompt"
            )


def fit_output(request: GenerateInput, prompt_tokens: int, context_length: int) -> SamplingParams:
    """Return the sampling parameters with a token limit that the context has room for.

    Raises
    ------
    RequestError
        400: the prompt leaves no room, or less than was asked for.
    """
    room = context_length - prompt_tokens
    if room < 1:
        raise RequestError(
            400, f"the prompt of {prompt_tokens} tokens leaves no room in the context of {context_length}", "prompt"
        )
    if request.max_new_tokens is None:
        return msgspec.structs.replace(request.sampling_params, max_new_tokens=room)
    if request.max_new_tokens > room:
        raise RequestError(
            400,
            f"the context of {context_length} tokens has room for {room} after the prompt of {prompt_tokens}, "
            f"and {request.max_new_tokens} were asked for",
            "max_tokens",
        )
    return request.sampling_params


def fit_prompt(ids: bytes, longest: int, truncate: bool) -> bytes:
    """Return packed ids that fit an encoder, cut where that is wanted.

    Raises
    ------
    RequestError
        400: there are too many.
    """
    length = len(ids) // 4
    if length <= longest:
        return ids
    if not truncate:
        raise RequestError(400, f"the input of {length} tokens exceeds the limit of {longest}", "input")
    # The closing special token ([SEP]) stays, as in sentence-transformers.
    return ids[: (longest - 1) * 4] + ids[-4:]
