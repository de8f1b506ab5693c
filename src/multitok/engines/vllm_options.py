"""vLLM's own options, as they stand after ``--``, made into vLLM's configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from multitok.engines.settings import EngineSettings

# What multitok says with options of its own.
_OURS = {"model": "--model", "tokenizer": "--tokenizer"}


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, which raises where it would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"options after --: {message}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise ValueError(f"options after --: {message or 'only shown, nothing was started'}")


def engine_args(settings: EngineSettings) -> Any:
    """Return vLLM's ``EngineArgs``.

    Parameters
    ----------
    settings : EngineSettings
        The model, the options after ``--``, and the limits of multitok's own options.

    Raises
    ------
    ValueError
        An option is unknown or wrong, or says again what an option of multitok says.
    """
    if settings.options:
        raise ValueError("engine 'vllm' takes vLLM's own options after --, and no --engine-arg")
    parser = _Parser(prog="vllm", add_help=False)
    parser.add_argument("--help", action="help", help=argparse.SUPPRESS)
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=None, tokenizer=None)
    given = parser.parse_args(settings.command_line)
    for name, option in _OURS.items():
        if getattr(given, name) is not None:
            raise ValueError(f"options after --: give {option} before the --")
    given.model = settings.files.model_path
    tokenizer = Path(settings.files.tokenizer_file).parent
    # The core needs it for grammars only.
    given.tokenizer = None if (Path(given.model) / "tokenizer.json").exists() else str(tokenizer)
    args = EngineArgs.from_cli_args(given)
    args.max_model_len = _one_of("--max-model-len", args.max_model_len, "--context-length", settings.context_length)
    args.max_num_seqs = _one_of(
        "--max-num-seqs", args.max_num_seqs, "--max-running-requests", settings.max_running_requests
    )
    if settings.ranks > 1 and args.device_ids is None and not current_platform.is_cpu():
        # Each rank is an engine of its own, and would begin with the first device.
        size = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size
        args.device_ids = list(range(settings.rank * size, (settings.rank + 1) * size))
    return args


def engine_config(args: Any) -> Any:
    """Return vLLM's ``VllmConfig``, with the defaults of ``vllm serve``.

    Raises
    ------
    ValueError
        vLLM can't use the model or the options; the message is vLLM's own.
    """
    try:
        return args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # its own, those of pydantic, transformers, huggingface_hub, ...
        raise ValueError(f"vLLM can't use {args.model}: {error or type(error).__name__}") from error


def _one_of(option: str, value: int | None, ours: str, our_value: int | None) -> int | None:
    if value is not None and our_value is not None and value != our_value:
        raise ValueError(f"{ours} {our_value} and, after --, {option} {value} contradict each other")
    return our_value if value is None else value
