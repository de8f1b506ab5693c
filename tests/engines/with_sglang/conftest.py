"""A model without weights, and SGLang with a scheduler that needs none; without SGLang, nothing is collected."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

HERE = Path(__file__).parent
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> list[str]:
    names = ["sglang", "torch", "transformers", "msgspec", "pyzmq", "numpy"]
    if importlib.util.find_spec("sglang") is None:
        return []
    return ["with " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)]


EOS = 7
VOCAB_SIZE = 1000
CONTEXT_LENGTH = 2048
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A Llama whose words are t0 to t999; its weights are an empty file, which nothing opens."""
    folder = tmp_path_factory.mktemp("model")
    words = {("</s>" if i == EOS else f"t{i}"): i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS,
        "bos_token_id": EOS,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture(scope="session")
def stub_environment(tmp_path_factory) -> dict[str, str]:
    """What makes SGLang find its scheduler in `stub_scheduler`, as a plugin; in this process too."""
    plugins = tmp_path_factory.mktemp("plugins")
    info = plugins / "multitok_stub-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: multitok-stub\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nmultitok_stub = stub_scheduler:register\n")
    added = [str(HERE), str(plugins)]
    sys.path += [path for path in added if path not in sys.path]
    before = os.environ.get("PYTHONPATH")
    variables = {
        "PYTHONPATH": os.pathsep.join([*added, before] if before else added),
        "STUB_LOG": str(plugins / "requests.jsonl"),
        "STUB_EVIL": str(plugins / "evil"),
        "HF_HUB_OFFLINE": "1",
    }
    os.environ.update(variables)
    return variables
