"""The process in which a grammar is compiled for the first time, so that nothing but this process can come to harm.

The pipeline compiles a grammar inside `step`: a bad one makes that step raise and leaves every running request stuck,
one that is nested deeply enough ends the process with a segmentation fault, and some short ones compile for minutes. So
each new grammar first runs for one token here, on a pipeline with the same tokenizer and a model of one tiny layer,
within a limit of CPU time that the kernel enforces.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13 as op

from multitok.engines.grammar_server import serve_grammars
from multitok.engines.openvino_errors import error_text
from multitok.messages.sampling import Grammar

_WIDTH = 16


def structured_output_config(grammar: Grammar) -> Any:
    """Return OpenVINO's form of a grammar."""
    if grammar.kind == "json_object":
        return genai.StructuredOutputConfig(json_schema='{"type": "object"}')
    field = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar"}[grammar.kind]
    return genai.StructuredOutputConfig(**{field: grammar.text})


class GrammarCompiler:
    """Says whether the pipeline can enforce a grammar.

    Parameters
    ----------
    model_path : str
        The model whose tokenizer grammars are meant for.
    vocab_size : int
        Number of ids.
    """

    def __init__(self, model_path: str, vocab_size: int) -> None:
        config = genai.SchedulerConfig()
        config.num_kv_blocks = 4
        config.max_num_batched_tokens = 32
        with tempfile.TemporaryDirectory(prefix="multitok-") as directory:
            ov.save_model(_tiny_model(vocab_size), Path(directory) / "openvino_model.xml", compress_to_fp16=False)
            tokenizer = genai.Tokenizer(model_path)
            self._pipeline = genai.ContinuousBatchingPipeline(directory, tokenizer, config, "CPU")

    def check(self, grammar: Grammar) -> str:
        """Return what is wrong with a grammar; nothing for a good one."""
        config = genai.GenerationConfig()
        config.max_new_tokens = 1
        problem = ""
        try:
            config.structured_output_config = structured_output_config(grammar)
            handle = self._pipeline.add_request(0, ov.Tensor(np.zeros((1, 1), dtype=np.int64)), config)
        except RuntimeError as error:
            return error_text(error)
        try:
            self._pipeline.step()
        except RuntimeError as error:
            problem = error_text(error)
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return problem


def _tiny_model(vocab_size: int) -> Any:
    """Build the smallest language model that the pipeline takes: one attention layer of width 16, all weights zero."""

    def integers(*values: int) -> Any:
        return op.constant(np.array(values, dtype=np.int64))

    def parameter(name: str, shape: list[int], dtype: Any = np.int64) -> Any:
        node = op.parameter(shape, dtype, name=name)
        node.output(0).get_tensor().set_names({name})
        return node

    ids = parameter("input_ids", [-1, -1])
    mask = parameter("attention_mask", [-1, -1])
    positions = parameter("position_ids", [-1, -1])
    beams = parameter("beam_idx", [-1], np.int32)
    zero = op.constant(np.int64(0))
    table = op.constant(np.zeros((vocab_size, _WIDTH), dtype=np.float32))
    hidden = op.gather(table, ids, zero)
    hidden = op.add(hidden, op.convert(op.unsqueeze(positions, op.constant(np.int64(-1))), "f32"))
    heads = op.transpose(op.reshape(hidden, integers(0, 0, 1, _WIDTH), True), integers(0, 2, 1, 3))
    batch = op.gather(op.shape_of(ids), integers(0), zero)
    empty = op.broadcast(op.constant(np.float32(0)), op.concat([batch, integers(1), integers(0), integers(_WIDTH)], 0))
    sinks = []

    def cached(kind: str) -> Any:
        info = ov.op.util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, 1, -1, _WIDTH])
        info.data_type = ov.Type.f32
        info.variable_id = f"past_key_values.0.{kind}present.0.{kind}"
        variable = ov.op.util.Variable(info)
        past = op.gather(ov.op.read_value(empty, variable), beams, zero)
        full = op.concat([past, heads], 2)
        sinks.append(ov.op.assign(full, variable))
        return full

    attended = op.scaled_dot_product_attention(
        heads,
        cached("key"),
        cached("value"),
        op.unsqueeze(op.convert(mask, "f32"), integers(1, 2)),
        op.constant(np.float32(1)),
        causal=False,
    )
    attended = op.reshape(op.transpose(attended, integers(0, 2, 1, 3)), integers(0, 0, _WIDTH), True)
    logits = op.result(op.matmul(attended, table, False, True))
    logits.output(0).get_tensor().set_names({"logits"})
    return ov.Model([logits], sinks, [ids, mask, positions, beams], "grammar_check")


if __name__ == "__main__":
    serve_grammars(lambda: GrammarCompiler(sys.argv[1], int(sys.argv[2])).check)
