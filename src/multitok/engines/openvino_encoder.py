"""Embeddings on OpenVINO: an encoder from IR, ONNX or BERT safetensors, batched, pooled and normalized as it says."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from multitok.engines.base import EngineInfo, EngineLoad, EngineOutput, EngineRefusal, no_such_operation
from multitok.engines.encoder_layout import FORMATS, EncoderLayout, read_encoder_layout
from multitok.engines.openvino_errors import error_text
from multitok.engines.options import OptionReader
from multitok.messages.base import FinishReason
from multitok.messages.operations import EngineOperation
from multitok.messages.sampling import EngineFields, SamplingParams

logger = logging.getLogger(__name__)

DEFAULT_BATCH_TOKENS = 1024
DEFAULT_RUNNING = 256

Array = np.ndarray[Any, np.dtype[Any]]


class OpenVINOEncoder:
    """An encoder on OpenVINO; a step takes one batch of waiting requests, in order.

    Parameters
    ----------
    model_dir : Path or str
        A folder in the layout of sentence-transformers.
    options : dict of str to str
        ``device`` (CPU); ``num_threads`` (all cores); ``batch_tokens`` most ids in a step, padding included (1024; one
        longer input is a batch of its own); ``format`` openvino, onnx or safetensors (the first that there is);
        ``inference_precision`` (f32 on CPU).
    context_length : int or None
        Longest input; None takes the model's.
    max_running_requests : int or None
        Most requests that it holds at once; None is 256.

    Raises
    ------
    ValueError
        An option is unknown or wrong, or the model is not supported.
    """

    # The work is done inside `step`.
    wakeup: int | None = None

    def __init__(
        self,
        model_dir: Path | str,
        options: dict[str, str],
        *,
        context_length: int | None = None,
        max_running_requests: int | None = None,
    ) -> None:
        read = OptionReader("openvino", options)
        device = read.text("device") or "CPU"
        exact = "f32" if device.upper() == "CPU" else None
        properties = {
            "INFERENCE_PRECISION_HINT": read.choice("inference_precision", ("f32", "f16", "bf16")) or exact,
            "INFERENCE_NUM_THREADS": read.integer("num_threads", minimum=1),
        }
        self._batch_tokens = read.integer("batch_tokens", minimum=1) or DEFAULT_BATCH_TOKENS
        wanted = read.choice("format", FORMATS)
        read.done()
        started = time.monotonic()
        folder = Path(model_dir)
        layout = read_encoder_layout(folder, next((name for name in FORMATS if name == wanted), None))
        if context_length is not None and context_length > layout.context_length:
            raise ValueError(f"context length {context_length} is above the model's {layout.context_length}")
        try:
            model = _read_model(layout)
            given = {name: str(value) for name, value in properties.items() if value is not None}
            compiled = ov.Core().compile_model(model, device, given)
        except RuntimeError as error:
            raise ValueError(f"OpenVINO can't load {layout.model_file}: {error_text(error)}") from error
        self._layout = layout
        self._inputs = {port.get_any_name() for port in compiled.inputs}
        unknown = self._inputs - {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
        if unknown:
            raise ValueError(f"{layout.model_file} has inputs that an encoder hasn't: {', '.join(sorted(unknown))}")
        self._output = _hidden_state(compiled)
        self._request = compiled.create_infer_request()
        self._waiting: dict[int, Array] = {}
        hidden = self._output.get_partial_shape()[2]
        self._info = EngineInfo(
            name="openvino",
            version=str(ov.get_version()),
            task="embed",
            vocab_size=int(layout.config["vocab_size"]),
            context_length=context_length or layout.context_length,
            eos_token_ids=[],
            sampling=[],
            max_running_requests=max_running_requests or DEFAULT_RUNNING,
            embedding_size=hidden.get_length() if hidden.is_static else int(layout.config["hidden_size"]),
        )
        logger.info(
            "loaded %s (%s) on %s in %.1f s: %s pooling, vectors of %d, at most %d ids",
            folder,
            layout.model_format,
            device,
            time.monotonic() - started,
            layout.pooling,
            self._info.embedding_size,
            self._info.context_length,
        )

    @property
    def info(self) -> EngineInfo:
        """What this engine is and can do."""
        return self._info

    def add_request(
        self,
        number: int,
        input_ids: bytes,
        params: SamplingParams,
        resumed: int = 0,
        fields: EngineFields | None = None,
    ) -> None:
        """Queue a request; `params` and `resumed` are ignored. See `Engine.add_request`."""
        if number in self._waiting:
            raise ValueError(f"request {number} is in the engine already")
        ids = np.frombuffer(input_ids, dtype=np.int32)
        if not ids.size:
            raise EngineRefusal(400, "the input has no tokens")
        if ids.min() < 0 or ids.max() >= self._info.vocab_size:
            raise EngineRefusal(400, f"token ids must be from 0 to {self._info.vocab_size - 1}")
        if ids.size > self._info.context_length:
            raise EngineRefusal(400, f"the input has {ids.size} tokens, but at most {self._info.context_length} fit")
        self._waiting[number] = ids

    def abort(self, number: int) -> None:
        """Forget a request; an unknown number is ignored."""
        self._waiting.pop(number, None)

    def step(self) -> list[EngineOutput]:
        """Run one batch."""
        batch = self._next_batch()
        if not batch:
            return []
        vectors = self._embed([self._waiting.pop(number) for number in batch])
        return [
            EngineOutput(number, [], FinishReason("stop"), embedding=vector.tobytes())
            for number, vector in zip(batch, vectors, strict=True)
        ]

    def has_unfinished(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiting)

    def load(self) -> EngineLoad:
        """Return load figures; nothing runs between steps."""
        return EngineLoad(0, len(self._waiting), 0.0)

    def operate(self, operation: EngineOperation) -> None:
        """Do nothing of the kind: see ``info.operations``."""
        raise no_such_operation(self._info, operation)

    def shutdown(self) -> None:
        """Forget all requests and release the model."""
        self._waiting.clear()
        del self._request, self._output

    def _next_batch(self) -> list[int]:
        """Return the requests that come next: in order, as many as fit when all are padded to the longest."""
        batch: list[int] = []
        longest = 0
        for number, ids in self._waiting.items():
            longest = max(longest, ids.size)
            if batch and longest * (len(batch) + 1) > self._batch_tokens:
                break
            batch.append(number)
        return batch

    def _embed(self, inputs: list[Array]) -> Array:
        length = max(ids.size for ids in inputs)
        ids = np.full((len(inputs), length), self._layout.config.get("pad_token_id") or 0, dtype=np.int64)
        mask = np.zeros((len(inputs), length), dtype=np.int64)
        for row, one in enumerate(inputs):
            ids[row, : one.size] = one
            mask[row, : one.size] = 1
        feed: dict[str, Array] = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in self._inputs:
            feed["token_type_ids"] = np.zeros_like(ids)
        if "position_ids" in self._inputs:
            feed["position_ids"] = np.broadcast_to(np.arange(length), ids.shape).copy()
        hidden = self._request.infer({name: feed[name] for name in self._inputs})[self._output]
        vectors = pool(np.asarray(hidden, dtype=np.float32), mask, self._layout.pooling)
        if self._layout.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors.astype(np.float32)


def pool(hidden: Array, mask: Array, pooling: str) -> Array:
    """Return one vector per row.

    Parameters
    ----------
    hidden : array of shape (rows, length, size)
        The encoder's output per id.
    mask : array of shape (rows, length)
        1 for an id, 0 for padding, which is on the right.
    pooling : str
        One of `POOLINGS`.
    """
    weights = mask[:, :, None].astype(np.float32)
    count = weights.sum(axis=1)
    if pooling == "cls":
        vectors = hidden[:, 0]
    elif pooling == "lasttoken":
        vectors = hidden[np.arange(len(hidden)), mask.sum(axis=1) - 1]
    elif pooling == "max":
        vectors = np.where(weights > 0, hidden, -np.inf).max(axis=1)
    elif pooling == "mean_sqrt_len_tokens":
        vectors = (hidden * weights).sum(axis=1) / np.sqrt(count)
    else:
        vectors = (hidden * weights).sum(axis=1) / count
    return np.asarray(vectors)


def _read_model(layout: EncoderLayout) -> Any:
    if layout.model_format == "safetensors":
        from multitok.engines.openvino_bert import build_bert

        return build_bert(layout.model_file, layout.config)
    return ov.Core().read_model(layout.model_file)


def _hidden_state(compiled: Any) -> Any:
    """Return the output with one vector per id."""
    for port in compiled.outputs:
        if port.get_names() & {"last_hidden_state", "token_embeddings"}:
            return port
    for port in compiled.outputs:
        if port.get_partial_shape().rank.get_length() == 3:
            return port
    raise ValueError("the model has no output with one vector per token")
