"""Writes a GGUF file of the Llama family as a Hugging Face folder: the same weights, in float32, for other engines."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from multitok.tokenizer.gguf_metadata import GgufMetadata
from multitok.tokenizer.model_files import resolve_model

_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def write_safetensors_folder(gguf_file: Path, folder: Path) -> Path:
    """Write the folder unless it is there; returns it."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    metadata = GgufMetadata(gguf_file)

    def number(key: str) -> int:
        value = metadata.optional_int(f"llama.{key}")
        assert value is not None, key
        return value

    heads, kv_heads, size = (
        number("attention.head_count"),
        number("attention.head_count_kv"),
        number("embedding_length"),
    )
    reader = gguf.GGUFReader(gguf_file)
    tensors = {}
    for tensor in reader.tensors:
        weight = np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name.endswith("attn_q.weight"):
            weight = _halves(weight, heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = _halves(weight, kv_heads)
        tensors[_name(tensor.name)] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    files = resolve_model(str(gguf_file))
    shutil.copyfile(files.tokenizer_file, folder / "tokenizer.json")
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": files.bos_token,
            "eos_token": files.eos_token,
            "chat_template": files.chat_template,
            "model_max_length": files.context_length,
        },
    )
    _write(folder / "generation_config.json", {"eos_token_id": files.eos_token_ids})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": size,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": files.context_length,
        "rms_norm_eps": _float(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _float(reader, "llama.rope.freq_base"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "vocab_size": files.vocab_size,
        "eos_token_id": files.eos_token_ids,
        "dtype": "float32",
    }
    # Last, as its presence says that all is there.
    _write(folder / "config.json", config)
    return folder


def _name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF has the two halves of each head's rotation side by side, these folders one after the other."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, rows // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _float(reader: gguf.GGUFReader, key: str) -> float:
    return round(float(reader.fields[key].contents()), 12)


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))
