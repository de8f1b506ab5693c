"""Reads what a Hugging Face or OpenVINO folder says of its tokenizer, chat template, special tokens and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from multitok.tokenizer.errors import ModelError

# Parts of a model_type: "bert" is in those of RoBERTa, DeBERTa, ModernBERT and the like too.
_ENCODERS = ("bert", "mpnet", "electra")


class FolderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What config.json, generation_config.json and the sentence-transformers files say.

    Attributes
    ----------
    found : bool
        Whether there was a config.json at all.
    is_encoder : bool
        A model that gives embeddings.
    context_length : int or None
        Most ids of one request.
    vocab_size : int or None
        Rows of the embedding table.
    eos_token_ids : list of int
        From generation_config.json, else from config.json.
    """

    found: bool = False
    is_encoder: bool = False
    context_length: int | None = None
    vocab_size: int | None = None
    eos_token_ids: list[int] = []


def read_config(path: Path) -> FolderConfig:
    """Read a model folder's configuration; absent files count as empty."""
    config = _json(path / "config.json")
    # Multimodal models keep the language model's numbers one level down.
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    generation = _json(path / "generation_config.json")
    return FolderConfig(
        found=bool(config),
        is_encoder=_is_encoder(path, config),
        context_length=_context_length(path, text),
        vocab_size=_int(text.get("vocab_size")),
        eos_token_ids=_ids(generation.get("eos_token_id")) or _ids(text.get("eos_token_id")),
    )


def _is_encoder(path: Path, config: dict[str, Any]) -> bool:
    if (path / "modules.json").exists() or (path / "1_Pooling").exists():
        return True
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    if any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in names):
        return False
    model_type = str(config.get("model_type", "")).replace("-", "").replace("_", "").lower()
    return any(kind in model_type for kind in _ENCODERS)


def _context_length(path: Path, config: dict[str, Any]) -> int | None:
    lengths = [_int(config.get(key)) for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")]
    length = next((value for value in lengths if value), None)
    # Here positions begin after the padding id, so two of them are never used.
    if length is not None and str(config.get("model_type", "")) in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        length -= 2
    trained = _int(_json(path / "sentence_bert_config.json").get("max_seq_length"))
    return min(length, trained) if length and trained else trained or length


class TokenizerFolder:
    """The tokenizer half of a folder.

    Attributes
    ----------
    tokenizer_file : Path
        Its tokenizer.json.
    chat_template : str or None
        From chat_template.jinja, else from tokenizer_config.json or chat_template.json; the one named ``default``
        where there are several.
    bos_token, eos_token : str or None
        From tokenizer_config.json, else from special_tokens_map.json.
    eos_token_ids : list of int
        From the generation_config.json beside it.
    """

    def __init__(self, path: Path) -> None:
        self.tokenizer_file = path / "tokenizer.json"
        if not self.tokenizer_file.is_file():
            raise ModelError(
                f"{path} has no tokenizer.json; give a folder that has one with --tokenizer DIR"
                " (a slow tokenizer is converted by saving it with the transformers library)"
            )
        config = _json(path / "tokenizer_config.json")
        special = {**_json(path / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
        self.chat_template = _chat_template(path, config)
        self.bos_token = _token_text(special.get("bos_token"))
        self.eos_token = _token_text(special.get("eos_token"))
        self.eos_token_ids = _ids(_json(path / "generation_config.json").get("eos_token_id"))
        self._add_bos = config.get("add_bos_token") is True
        try:
            self._tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        except Exception as error:  # the library raises bare Exception for everything
            raise ModelError(f"can't load the tokenizer {self.tokenizer_file}: {error}") from error

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token's text, None where there is no such token."""
        return self._tokenizer.token_to_id(token)

    def vocab_size(self) -> int:
        """Return one more than the highest id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def needs_bos(self) -> bool:
        """Whether the configuration asks for a BOS that tokenizer.json doesn't add."""
        if not self._add_bos or self.bos_token is None:
            return False
        return self._tokenizer.encode("a").tokens[:1] != [self.bos_token]


def read_tokenizer_folder(path: Path) -> TokenizerFolder:
    """Read the tokenizer of a folder.

    Raises
    ------
    ModelError
        When it is no folder, or has no tokenizer.json that loads.
    """
    if not path.is_dir():
        raise ModelError(f"{path} is no folder; --tokenizer takes a folder with a tokenizer.json")
    return TokenizerFolder(path)


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [index for index in values if isinstance(index, int) and not isinstance(index, bool)]


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"can't read {path}: {error}") from error
    return value if isinstance(value, dict) else {}
