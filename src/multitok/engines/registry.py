"""Engines by name. An engine's library is imported only when that engine is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from multitok.engines.base import Engine
from multitok.engines.settings import EngineSettings

# For a simulated engine with no more than a tokenizer: longer than what any benchmark sends.
SIMULATED_CONTEXT_LENGTH = 131072


def parse_engine_args(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options that ``--engine-arg KEY=VALUE`` gave.

    Parameters
    ----------
    arguments : sequence of str
        One ``KEY=VALUE`` each.

    Raises
    ------
    ValueError
        One has no ``=``, no key or no value, or a key comes twice.
    """
    options: dict[str, str] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator or not key or not value:
            raise ValueError(f"an engine argument has the form KEY=VALUE, not {argument!r}")
        if key in options:
            raise ValueError(f"engine argument {key!r} is given twice")
        options[key] = value
    return options


def create_engine(name: str, settings: EngineSettings) -> Engine:
    """Load an engine; this takes seconds for a real one.

    Parameters
    ----------
    name : str
        One of `ENGINE_NAMES`.
    settings : EngineSettings
        The model, and what the user wants of the engine.

    Raises
    ------
    ValueError
        The engine or an option is unknown or wrong.
    """
    if name not in _MAKERS:
        raise ValueError(f"there is no engine {name!r}; there are: {', '.join(ENGINE_NAMES)}")
    if settings.command_line and name not in TAKES_COMMAND_LINE:
        raise ValueError(f"engine {name!r} takes no options after --, but --engine-arg KEY=VALUE")
    length, known = settings.context_length, settings.files.context_length
    if length is not None and known is not None and length > known:
        raise ValueError(f"context length {length} is above the model's {known}")
    return _MAKERS[name](settings)


def _make_openvino(settings: EngineSettings) -> Engine:
    files = settings.files
    if not files.model_path:
        raise ValueError("engine 'openvino' needs a model, not only a tokenizer")
    if files.task == "embed":
        from multitok.engines.openvino_encoder import OpenVINOEncoder

        return OpenVINOEncoder(
            files.model_path,
            settings.options,
            context_length=settings.context_length,
            max_running_requests=settings.max_running_requests,
        )
    length = settings.known_context_length()
    folder = Path(files.model_path)
    if folder.is_dir() and not (folder / "openvino_model.xml").exists():
        raise ValueError(
            f"{folder} has no openvino_model.xml, and OpenVINO doesn't run other weights: export the model "
            "with `optimum-cli export openvino --model FOLDER OUT`, or give a GGUF file"
        )
    from multitok.engines.openvino_llm import OpenVINOEngine

    return OpenVINOEngine(
        files.model_path,
        {"prefix_caching": "false", **settings.options} if settings.resume else settings.options,
        eos_token_ids=files.eos_token_ids,
        context_length=length,
        vocab_size=files.vocab_size,
        max_running_requests=settings.max_running_requests,
    )


def _make_simulated(settings: EngineSettings) -> Engine:
    from multitok.engines.simulated import SimulatedEngine

    files, options = settings.files, settings.options
    if settings.max_running_requests is not None:
        options = {"max_running": str(settings.max_running_requests), **options}
    return SimulatedEngine(
        options,
        vocab_size=files.vocab_size,
        eos_token_ids=files.eos_token_ids,
        context_length=settings.context_length or files.context_length or SIMULATED_CONTEXT_LENGTH,
        task=files.task,
    )


def _make_remote(settings: EngineSettings) -> Engine:
    from multitok.engines.remote.engine import RemoteEngine

    return RemoteEngine(settings)


def _make_vllm(settings: EngineSettings) -> Engine:
    from multitok.engines.vllm_version import installed_version

    if settings.files.task == "embed":
        raise ValueError("engine 'vllm' generates text; for embeddings take engine 'openvino'")
    version = installed_version()
    from multitok.engines.vllm_engine import VLLMEngine

    return VLLMEngine(settings, version)


def _make_sglang(settings: EngineSettings) -> Engine:
    from multitok.engines.sglang_install import checked_version
    from multitok.engines.sglang_options import sglang_command_line

    version = checked_version()
    command_line = sglang_command_line(settings)
    # Read when SGLang is imported, here and in its own processes: messages are msgpack, and its server is this one.
    os.environ["SGLANG_USE_PICKLE_IPC"] = "0"
    os.environ["SGLANG_RUST_SERVER"] = "0"
    from multitok.engines.sglang import SGLangEngine

    return SGLangEngine(settings, command_line, version)


_MAKERS: dict[str, Callable[[EngineSettings], Engine]] = {
    "openvino": _make_openvino,
    "remote": _make_remote,
    "sglang": _make_sglang,
    "simulated": _make_simulated,
    "vllm": _make_vllm,
}
ENGINE_NAMES = tuple(_MAKERS)
# Those that need no weights here, so that --tokenizer without --model is enough.
NEEDS_NO_MODEL = frozenset({"remote", "simulated"})
# Those with options of their own after ``--``.
TAKES_COMMAND_LINE = frozenset({"sglang", "vllm"})
