"""Prompts and inputs: a string, a list of strings, ids, or a list of ids."""

from __future__ import annotations

from collections.abc import Sized

from multitok.config import ServerArgs
from multitok.engines.base import EngineInfo
from multitok.http.errors import invalid
from multitok.http.token_ids import TokenIds, pack_ids


def read_prompts(
    value: str | list[str | int | list[int]] | TokenIds,
    param: str,
    info: EngineInfo,
    limits: ServerArgs,
    *,
    truncate: bool = False,
) -> list[str | bytes]:
    """Bring the four forms of a prompt into one.

    Parameters
    ----------
    value : str or list or TokenIds
        As the client gave it; long lists of ids, and those in a list, may be `TokenIds`.
    param : str
        Field for errors.
    info : EngineInfo
        Knows vocabulary and context.
    limits : ServerArgs
        Most prompts, and most ids of one prompt.
    truncate : bool
        What the context has no room for will be cut.

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
    most = limits.max_prompt_tokens
    if not truncate:
        most = min(info.context_length, most or info.context_length)
    if isinstance(value, TokenIds) or isinstance(value[0], int):
        if not (isinstance(value, TokenIds) or all(isinstance(item, int) for item in value)):
            raise invalid(param, "must not mix ids with other values")
        _check_length(value, param, most)
        return [pack_ids(value, info.vocab_size, param)]  # type: ignore[arg-type]
    if len(value) > limits.max_prompts:
        raise invalid(param, f"has {len(value)} prompts; at most {limits.max_prompts} are allowed")
    prompts: list[str | bytes] = []
    kind = str if isinstance(value[0], str) else list | TokenIds
    for i, item in enumerate(value):
        if not isinstance(item, kind):
            raise invalid(f"{param}[{i}]", "must be of the same kind as the prompts before it")
        if not item:
            raise invalid(f"{param}[{i}]", "must not be empty")
        if isinstance(item, str):
            prompts.append(item)
        else:
            _check_length(item, f"{param}[{i}]", most)
            prompts.append(pack_ids(item, info.vocab_size, f"{param}[{i}]"))
    return prompts


def _check_length(ids: Sized, param: str, most: int | None) -> None:
    if most is not None and len(ids) > most:
        raise invalid(param, f"has {len(ids)} ids; at most {most} are allowed")
