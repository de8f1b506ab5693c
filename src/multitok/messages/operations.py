"""Operations on an engine: what an operator can ask for at run time; tags are the names in `EngineInfo.operations`.

Each is for the ranks of one model, `model`, by its index; an engine has no use for that.
"""

from __future__ import annotations

from typing import get_args

import msgspec


class FlushCache(msgspec.Struct, tag="flush_cache", frozen=True):
    """Forget all cached prefixes."""

    model: int = 0


class LoadAdapter(msgspec.Struct, tag="load_lora_adapter", frozen=True):
    """Make a LoRA adapter available.

    Attributes
    ----------
    name : str
        What requests call it; one that is loaded already is replaced.
    path : str
        Its folder or file.
    """

    name: str
    path: str
    model: int = 0


class UnloadAdapter(msgspec.Struct, tag="unload_lora_adapter", frozen=True):
    """Forget a LoRA adapter."""

    name: str
    model: int = 0


class UpdateWeights(msgspec.Struct, tag="update_weights_from_disk", frozen=True):
    """Load other weights of the same model.

    Attributes
    ----------
    path : str
        As for ``--model``.
    version : str or None
        What they are called.
    """

    path: str
    version: str | None = None
    model: int = 0


class StartProfile(msgspec.Struct, tag="start_profile", frozen=True):
    """Begin to record a profile.

    Attributes
    ----------
    folder : str or None
        Where it is written; None leaves it to the engine.
    """

    folder: str | None = None
    model: int = 0


class StopProfile(msgspec.Struct, tag="stop_profile", frozen=True):
    """End the profile and write it."""

    model: int = 0


EngineOperation = FlushCache | LoadAdapter | UnloadAdapter | UpdateWeights | StartProfile | StopProfile


def name_of(operation: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Return the tag of an operation, of this or another kind, or of a type of operations."""
    return str(operation.__struct_config__.tag)


ALL_OPERATIONS = [name_of(kind) for kind in get_args(EngineOperation)]
