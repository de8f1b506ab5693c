"""Prompts and inputs: a string, a list of strings, ids, or a list of ids."""

from __future__ import annotations

from array import array
from collections.abc import Sized

from multitok.config import ServerArgs
from multitok.http.errors import invalid


def pack_ids(ids: list[int], vocab_size: int, param: str) -> bytes:
    """Pack ids as int32 after a check against the vocabulary.

    Parameters
    ----------
    ids : list of int
        As the client gave them.
    vocab_size : int
        Size of the vocabulary.
    param : str
        Field for the error.

    Raises
    ------
    RequestError
        When an id is outside the vocabulary.
    """
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid(param, f"token id {bad} is outside the vocabulary of {vocab_size} ids")
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Unpack int32 ids."""
    return memoryview(packed).cast("i").tolist()


def read_prompts(
    value: str | list[str | int | list[int]], param: str, vocab_size: int, limits: ServerArgs
) -> list[str | bytes]:
    """Bring the four forms of a prompt into one.

    Parameters
    ----------
    value : str or list
        As the client gave it.
    param : str
        Field for errors.
    vocab_size : int
        Size of the vocabulary.
    limits : ServerArgs
        Most prompts, and most ids of one prompt.

    Returns
    -------
    list of (str or bytes)
        Text, or packed int32 ids.

    Raises
    ------
    RequestError
        400 when it is none of the four forms, or too much.
    """
    if isinstance(value, str):
        if not value:
            raise invalid(param, "must not be empty")
        return [value]
    if not value:
        raise invalid(param, "must not be an empty list")
    if isinstance(value[0], int):
        if not all(isinstance(item, int) for item in value):
            raise invalid(param, "must not mix ids with other values")
        _check_length(value, param, limits)
        return [pack_ids(value, vocab_size, param)]  # type: ignore[arg-type]
    if len(value) > limits.max_prompts:
        raise invalid(param, f"has {len(value)} prompts; at most {limits.max_prompts} are allowed")
    prompts: list[str | bytes] = []
    kind = type(value[0])
    for i, item in enumerate(value):
        if type(item) is not kind:
            raise invalid(f"{param}[{i}]", "must be of the same kind as the prompts before it")
        if not item:
            raise invalid(f"{param}[{i}]", "must not be empty")
        if isinstance(item, list):
            _check_length(item, f"{param}[{i}]", limits)
            prompts.append(pack_ids(item, vocab_size, f"{param}[{i}]"))
        elif isinstance(item, str):
            prompts.append(item)
    return prompts


def _check_length(ids: Sized, param: str, limits: ServerArgs) -> None:
    most = limits.max_prompt_tokens
    if most is not None and len(ids) > most:
        raise invalid(param, f"has {len(ids)} ids; at most {most} are allowed")
