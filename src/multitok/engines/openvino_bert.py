"""Builds the graph of a BERT encoder from its safetensors weights, so that no torch is needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op
from safetensors.numpy import load_file

Array = np.ndarray[Any, np.dtype[Any]]


class _Weights:
    """The tensors of a file by name, with the prefix that some files put before every name."""

    def __init__(self, tensors: dict[str, Array]) -> None:
        self._tensors = tensors
        self._prefix = "bert." if "bert.embeddings.word_embeddings.weight" in tensors else ""

    def __call__(self, name: str) -> Array:
        full = self._prefix + name
        if full not in self._tensors:
            raise ValueError(f"the weights have no tensor {full!r}: only the layout of BERT is known")
        return self._tensors[full].astype(np.float32)


def build_bert(weights_file: Path, config: Mapping[str, Any]) -> Any:
    """Return the model: ``input_ids``, ``attention_mask`` and ``token_type_ids`` in, ``last_hidden_state`` out.

    Parameters
    ----------
    weights_file : Path
        A safetensors file with the tensor names of Hugging Face's `BertModel`.
    config : mapping
        The model's ``config.json``.

    Raises
    ------
    ValueError
        The layout is another one.
    """
    if config.get("model_type") != "bert":
        raise ValueError(f"a model of type {config.get('model_type')!r} needs an onnx/ or openvino/ folder")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"position embeddings of type {config['position_embedding_type']!r} are not supported")
    try:
        weights = _Weights(load_file(weights_file))
    except Exception as error:  # the library's own error class is not a public name
        raise ValueError(f"{weights_file} can't be read: {error}") from error
    epsilon = float(config.get("layer_norm_eps", 1e-12))

    def parameter(name: str) -> Any:
        node = op.parameter([-1, -1], np.int64, name=name)
        node.output(0).get_tensor().set_names({name})
        return node

    def lookup(table: str, ids: Any) -> Any:
        return op.gather(op.constant(weights(table)), ids, op.constant(np.int64(0)))

    def dense(x: Any, name: str) -> Any:
        product = op.matmul(x, op.constant(weights(f"{name}.weight")), False, True)
        return op.add(product, op.constant(weights(f"{name}.bias")))

    def norm(x: Any, name: str) -> Any:
        normal = op.mvn(x, op.constant(np.array([-1], dtype=np.int64)), True, epsilon, "inside_sqrt")
        scaled = op.multiply(normal, op.constant(weights(f"{name}.weight")))
        return op.add(scaled, op.constant(weights(f"{name}.bias")))

    ids, mask, types = parameter("input_ids"), parameter("attention_mask"), parameter("token_type_ids")
    length = op.gather(op.shape_of(ids), op.constant(np.int64(1)), op.constant(np.int64(0)))
    positions = op.range(op.constant(np.int64(0)), length, op.constant(np.int64(1)), "i64")
    x = op.add(
        lookup("embeddings.word_embeddings.weight", ids), lookup("embeddings.token_type_embeddings.weight", types)
    )
    x = norm(op.add(x, lookup("embeddings.position_embeddings.weight", positions)), "embeddings.LayerNorm")
    seen = op.convert(op.unsqueeze(mask, op.constant(np.array([1, 2], dtype=np.int64))), "boolean")
    for index in range(int(config["num_hidden_layers"])):
        layer = f"encoder.layer.{index}"
        attended = _attention(x, seen, f"{layer}.attention.self", int(config["num_attention_heads"]), dense)
        x = norm(op.add(x, dense(attended, f"{layer}.attention.output.dense")), f"{layer}.attention.output.LayerNorm")
        inner = _activation(dense(x, f"{layer}.intermediate.dense"), str(config.get("hidden_act", "gelu")))
        x = norm(op.add(x, dense(inner, f"{layer}.output.dense")), f"{layer}.output.LayerNorm")
    result = op.result(x)
    result.output(0).get_tensor().set_names({"last_hidden_state"})
    return ov.Model([result], [ids, mask, types], "bert")


def _attention(x: Any, seen: Any, name: str, heads: int, dense: Any) -> Any:
    split = op.constant(np.array([0, 0, heads, -1], dtype=np.int64))
    swap = op.constant(np.array([0, 2, 1, 3], dtype=np.int64))
    query, key, value = (
        op.transpose(op.reshape(dense(x, f"{name}.{kind}"), split, True), swap) for kind in ("query", "key", "value")
    )
    mixed = op.transpose(op.scaled_dot_product_attention(query, key, value, seen, causal=False), swap)
    return op.reshape(mixed, op.constant(np.array([0, 0, -1], dtype=np.int64)), True)


def _activation(x: Any, kind: str) -> Any:
    if kind == "gelu":
        return op.gelu(x, "erf")
    if kind in ("gelu_new", "gelu_pytorch_tanh"):
        return op.gelu(x, "tanh")
    if kind == "relu":
        return op.relu(x)
    raise ValueError(f"the activation {kind!r} is not supported")
