"""What an encoder's folder says about itself: where its model is, how long an input may be, how it pools.

The layout is that of sentence-transformers: ``modules.json`` names the modules, ``1_Pooling/config.json`` the pooling,
``sentence_bert_config.json`` the longest input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

ModelFormat = Literal["openvino", "onnx", "safetensors"]
FORMATS: tuple[ModelFormat, ...] = ("openvino", "onnx", "safetensors")
POOLINGS = ("mean", "cls", "max", "mean_sqrt_len_tokens", "lasttoken")

_FILES: dict[ModelFormat, tuple[str, ...]] = {
    "openvino": ("openvino/openvino_model.xml", "openvino_model.xml"),
    "onnx": ("onnx/model.onnx", "model.onnx"),
    "safetensors": ("model.safetensors",),
}
# Names in older pooling configurations, one boolean each.
_POOLING_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# Their position ids start after the padding id.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet")


class EncoderLayout(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder's folder.

    Attributes
    ----------
    config : dict
        Its ``config.json``.
    model_file : Path
        The model.
    model_format : {'openvino', 'onnx', 'safetensors'}
        What `model_file` is.
    pooling : str
        One of `POOLINGS`.
    normalize : bool
        Whether vectors are brought to length 1.
    context_length : int
        Longest input in ids, special ids included.
    """

    config: dict[str, Any]
    model_file: Path
    model_format: ModelFormat
    pooling: str
    normalize: bool
    context_length: int


def read_encoder_layout(folder: Path, model_format: ModelFormat | None = None) -> EncoderLayout:
    """Read an encoder's folder.

    Parameters
    ----------
    folder : Path
        The model.
    model_format : {'openvino', 'onnx', 'safetensors'} or None
        Which of its files to take; None takes the first that there is, in this order.

    Raises
    ------
    ValueError
        Something is missing or not supported.
    """
    config = _read_object(folder / "config.json")
    if config is None:
        raise ValueError(f"{folder} has no config.json")
    found, file = _find_model(folder, FORMATS if model_format is None else (model_format,))
    pooling, normalize = _read_modules(folder)
    return EncoderLayout(
        config=config,
        model_file=file,
        model_format=found,
        pooling=pooling,
        normalize=normalize,
        context_length=_context_length(folder, config),
    )


def _find_model(folder: Path, formats: tuple[ModelFormat, ...]) -> tuple[ModelFormat, Path]:
    for model_format in formats:
        for name in _FILES[model_format]:
            if (folder / name).is_file():
                return model_format, folder / name
    wanted = ", ".join(name for model_format in formats for name in _FILES[model_format])
    raise ValueError(f"{folder} has no model: looked for {wanted}")


def _read_modules(folder: Path) -> tuple[str, bool]:
    """Return pooling and whether to normalize; without ``modules.json`` it is mean and no, as sentence-transformers."""
    modules = _read_json(folder / "modules.json")
    if modules is None:
        return "mean", False
    pooling, normalize = "", False
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _read_pooling(folder / module["path"] / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ValueError(f"{folder / 'modules.json'} has a module of type {kind}, which is not supported")
    if not pooling:
        raise ValueError(f"{folder / 'modules.json'} has no pooling, so there is no vector per text")
    return pooling, normalize


def _read_pooling(file: Path) -> str:
    config = _read_object(file)
    if config is None:
        raise ValueError(f"{file} is missing")
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else [name for flag, name in _POOLING_FLAGS.items() if config.get(flag)]
    if isinstance(mode, list):
        modes = mode
    if len(modes) != 1 or modes[0] not in POOLINGS:
        wanted = ", ".join(POOLINGS)
        raise ValueError(f"{file} asks for the pooling {' and '.join(modes) or 'none'}; supported is one of {wanted}")
    return str(modes[0])


def _context_length(folder: Path, config: dict[str, Any]) -> int:
    limits = []
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int):
        offset = config.get("pad_token_id", 1) + 1 if config.get("model_type") in _OFFSET_POSITIONS else 0
        limits.append(positions - offset)
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        # Tokenizers without a limit say so with a huge number.
        length = (_read_object(folder / name) or {}).get(key)
        if isinstance(length, int):
            limits.append(length)
            break
    if not limits:
        raise ValueError(f"{folder} says nowhere how long an input may be")
    return min(limits)


def _read_json(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error


def _read_object(file: Path) -> dict[str, Any] | None:
    value = _read_json(file)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{file} is no JSON object")
    return value
