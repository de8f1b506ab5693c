"""The data of a benchmark, made from what comes with Python: model folder, replayed ids, prompts."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from multitok.bench.prompts import PromptMaker, source_text
from multitok.tokenizer.chat_template import ChatTemplate
from multitok.tokenizer.model_files import ModelFiles, resolve_model, resolve_tokenizer

MODEL_NAME = "bench"
# Room for workload E's prompts; no weights are loaded, so this costs nothing.
CONTEXT_LENGTH = 262_144
_REPLAYED = 100_000
_FILES = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json")
# Peers want a model's config; nothing is made from it but limits.
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
}


class LocalCounter:
    """Counts with a tokenizer that is loaded here, so that all servers get the same prompts."""

    exact = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        """Return the number of tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))


class BenchData:
    """Files and prompts for one tokenizer.

    Parameters
    ----------
    tokenizer : Path or None
        Folder with a tokenizer.json; None for that of multitok's default model.
    work : Path
        Where files are kept between runs.
    """

    def __init__(self, tokenizer: Path | None, work: Path) -> None:
        files = resolve_tokenizer(str(tokenizer)) if tokenizer else resolve_model(None)
        if files.chat_template is None:
            raise SystemExit("the tokenizer has no chat template, and the workloads are chats")
        content = Path(files.tokenizer_file).read_bytes()
        self.tokenizer_hash = hashlib.sha256(content).hexdigest()[:12]
        self._tokenizer = Tokenizer.from_file(files.tokenizer_file)
        self.work = work
        self.model_dir = work / f"model-{self.tokenizer_hash}"
        self.replay_file = work / f"replay-{self.tokenizer_hash}.json"
        self._write_model_dir(files, tokenizer)
        self._write_replay()
        template = ChatTemplate(files.chat_template, files.bos_token, files.eos_token)
        counter = LocalCounter(self._tokenizer)
        rendered = template.render([{"role": "user", "content": "word"}])
        self.template_overhead = counter.count(rendered) - counter.count("word")
        self.maker = PromptMaker(counter)

    def _write_model_dir(self, files: ModelFiles, source: Path | None) -> None:
        folder = self.model_dir
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files.tokenizer_file, folder / "tokenizer.json")
        config: dict[str, Any] = _CONFIG | {"vocab_size": files.vocab_size, "eos_token_id": files.eos_token_ids}
        if source is not None:
            for name in _FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
            if (source / "config.json").is_file():
                config = json.loads((source / "config.json").read_text())
        else:
            described = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": files.chat_template,
                "bos_token": files.bos_token,
                "eos_token": files.eos_token,
            }
            (folder / "tokenizer_config.json").write_text(json.dumps(described))
        config["max_position_embeddings"] = CONTEXT_LENGTH
        (folder / "config.json").write_text(json.dumps(config))

    def _write_replay(self) -> None:
        if not self.replay_file.exists():
            ids = self._tokenizer.encode(source_text(), add_special_tokens=False).ids[:_REPLAYED]
            self.replay_file.write_text(json.dumps(ids))
