"""Operations as SGLang's schedulers take them, and the LoRA adapters that they have."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import (
    FlushCacheReqInput,
    FlushCacheReqOutput,
    LoadLoRAAdapterReqInput,
    LoRAUpdateOutput,
    ProfileReq,
    ProfileReqOutput,
    ProfileReqType,
    UnloadLoRAAdapterReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)

from multitok.engines.base import EngineRefusal
from multitok.messages.operations import (
    EngineOperation,
    FlushCache,
    LoadAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)

# How a question is put: the message, and the type of its answers, of which there is one per data-parallel rank.
Ask = Callable[[Any, type[Any]], list[Any]]


class SGLangAdapters:
    """The LoRA adapters that SGLang has, by name.

    Parameters
    ----------
    loaded : list of LoRARef or None
        Those of ``--lora-paths``.
    most : int or None
        ``--max-loaded-loras``.
    """

    def __init__(self, loaded: list[LoRARef] | None, most: int | None) -> None:
        self._ids = {str(adapter.lora_name): str(adapter.lora_id) for adapter in loaded or ()}
        self._most = most

    def id_of(self, name: str) -> str:
        """Return what SGLang calls an adapter.

        Raises
        ------
        EngineRefusal
            None of this name is loaded.
        """
        if name not in self._ids:
            raise EngineRefusal(400, f"there is no LoRA adapter {name!r}; loaded are: {', '.join(self._ids) or 'none'}")
        return self._ids[name]

    def load(self, name: str, path: str, ask: Ask) -> None:
        """Load an adapter, in place of one of the same name."""
        if name in self._ids:
            self.unload(name, ask)
        if self._most is not None and len(self._ids) >= self._most:
            raise EngineRefusal(400, f"{self._most} LoRA adapters are loaded, which is --max-loaded-loras; unload one")
        adapter = LoRARef(lora_name=name, lora_path=path)
        load = LoadLoRAAdapterReqInput(lora_name=name, lora_path=path, lora_id=adapter.lora_id)
        answers = ask(load, LoRAUpdateOutput)
        if not all(answer.success for answer in answers):
            if any(answer.success for answer in answers):
                ask(UnloadLoRAAdapterReqInput(lora_name=name, lora_id=adapter.lora_id), LoRAUpdateOutput)
            _check(answers, "error_message")
        self._ids[name] = str(adapter.lora_id)

    def unload(self, name: str, ask: Ask) -> None:
        """Unload an adapter that no request uses."""
        unload = UnloadLoRAAdapterReqInput(lora_name=name, lora_id=self.id_of(name))
        _check(ask(unload, LoRAUpdateOutput), "error_message")
        del self._ids[name]


def operate(operation: EngineOperation, ask: Ask, adapters: SGLangAdapters, load_format: str) -> None:
    """Do an operation.

    Raises
    ------
    EngineRefusal
        SGLang won't; the message has its words.
    """
    match operation:
        case FlushCache():
            _check(ask(FlushCacheReqInput(), FlushCacheReqOutput), "message")
        case StartProfile(folder):
            start = ProfileReq(output_dir=folder, with_stack=True, record_shapes=True, profile_id=str(time.time()))
            _check(ask(start, ProfileReqOutput), "message")
        case StopProfile():
            _check(ask(ProfileReq(req_type=ProfileReqType.STOP_PROFILE), ProfileReqOutput), "message")
        case UpdateWeights(path):
            update = UpdateWeightFromDiskReqInput(model_path=path, load_format=load_format)
            _check(ask(update, UpdateWeightFromDiskReqOutput), "message")
        case LoadAdapter(name, path):
            adapters.load(name, path, ask)
        case UnloadAdapter(name):
            adapters.unload(name, ask)


def _check(answers: list[Any], words: str) -> None:
    failed = [str(getattr(answer, words) or "it gives no reason") for answer in answers if not answer.success]
    if failed:
        raise EngineRefusal(400, f"SGLang refuses: {'; '.join(dict.fromkeys(failed))}")
