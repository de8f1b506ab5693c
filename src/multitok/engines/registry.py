"""Engines by name. An engine's library is imported only when that engine is made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multitok.engines.base import Engine

if TYPE_CHECKING:
    from multitok.tokenizer.model_files import ModelFiles

ENGINE_NAMES = ("openvino", "simulated")
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


def create_engine(
    name: str,
    *,
    files: ModelFiles,
    options: dict[str, str],
    max_running_requests: int | None = None,
    context_length: int | None = None,
    resume: bool = False,
) -> Engine:
    """Load an engine; this takes seconds for a real one.

    Parameters
    ----------
    name : str
        One of `ENGINE_NAMES`.
    files : ModelFiles
        The model.
    options : dict of str to str
        The engine's own options.
    max_running_requests : int or None
        Most requests that it works on at once; None leaves it to the engine.
    context_length : int or None
        A shorter context than the model's; None takes the model's.
    resume : bool
        Requests are to be resumed after this process's death: an engine that can do so only without something that
        makes it faster does without, unless `options` say otherwise.

    Raises
    ------
    ValueError
        The engine or an option is unknown or wrong.
    """
    if name not in ENGINE_NAMES:
        raise ValueError(f"there is no engine {name!r}; there are: {', '.join(ENGINE_NAMES)}")
    known = files.context_length
    if context_length is not None and known is not None and context_length > known:
        raise ValueError(f"context length {context_length} is above the model's {known}")
    if name == "openvino" and not files.model_path:
        raise ValueError("engine 'openvino' needs a model, not only a tokenizer")
    if name == "openvino" and files.task == "embed":
        from multitok.engines.openvino_encoder import OpenVINOEncoder

        return OpenVINOEncoder(
            files.model_path, options, context_length=context_length, max_running_requests=max_running_requests
        )
    length = context_length or known or (SIMULATED_CONTEXT_LENGTH if name == "simulated" else None)
    if length is None:
        raise ValueError("the model's files don't say how long a context may be; give --context-length")
    if name == "openvino":
        folder = Path(files.model_path)
        if folder.is_dir() and not (folder / "openvino_model.xml").exists():
            raise ValueError(
                f"{folder} has no openvino_model.xml, and OpenVINO doesn't run other weights: export the model "
                "with `optimum-cli export openvino --model FOLDER OUT`, or give a GGUF file"
            )
        from multitok.engines.openvino_llm import OpenVINOEngine

        return OpenVINOEngine(
            files.model_path,
            {"prefix_caching": "false", **options} if resume else options,
            eos_token_ids=files.eos_token_ids,
            context_length=length,
            vocab_size=files.vocab_size,
            max_running_requests=max_running_requests,
        )
    from multitok.engines.simulated import SimulatedEngine

    if max_running_requests is not None:
        options = {"max_running": str(max_running_requests), **options}
    return SimulatedEngine(
        options,
        vocab_size=files.vocab_size,
        eos_token_ids=files.eos_token_ids,
        context_length=length,
        task=files.task,
    )
