"""The fast tokenizer gives the reference's ids, for real vocabularies of several families, and can be forked."""

import array
import os
import subprocess
import sys
import unicodedata

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import FAMILIES, backends, minilm

from multitok.tokenizer.backends import LazyTokenizer, load_tokenizer
from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.fast_backend import FastBackend, load_fast_tokenizer
from multitok.tokenizer.probe_texts import probe_texts

every_family = pytest.mark.parametrize("family", FAMILIES)
PARTS = [
    *("a", "Hello", " world", "  ", "\n", "\r\n", "\t", "é", "e\u0301", "中文", "한", "й", "ß", "ﷺ", "12345", "3.14"),
    *("'s", "'LL", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>", "[INST]", "<｜User｜>", "<|"),
    *("▁", "Ġ", "<0x41>", "👨‍👩‍👧", "🇩🇪", "\x00", "\x1c", "\x7f", "\u200b", "\u00a0", "\u3000", "\ufeff"),
    *("_", "--", "==", "://", "\\n", "़", "ก็"),
]
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=8), max_size=12).map("".join)


def unpack(ids: bytes) -> list[int]:
    return list(array.array("i", ids))


@every_family
@settings(deadline=None)
@given(text=texts, special=st.booleans())
def test_generated_texts(family, text, special):
    reference, fast = backends(family)
    assert unpack(fast.encode(text, special)) == unpack(reference.encode(text, special))


@every_family
@pytest.mark.parametrize("special", [True, False])
def test_probe_texts(family, special):
    reference, fast = backends(family)
    tokenizer = load_tokenizer(FAMILIES[family]())
    probe = probe_texts(token.content for token in tokenizer.get_added_tokens_decoder().values())
    assert len(set(probe)) >= 500
    expected, got = reference.encode_batch(probe, special), fast.encode_batch(probe, special)
    assert [text for text, ids, others in zip(probe, expected, got, strict=True) if ids != others] == []


@pytest.mark.parametrize("family", ["smollm2", "mistral-v1", "qwen"])
def test_every_assigned_code_point(family):
    reference, fast = backends(family)
    points = [chr(point) for point in range(0x110000) if unicodedata.category(chr(point)) not in ("Cn", "Cs", "Co")]
    assert len(points) > 140_000
    lines = ["".join(f"a{char}b {char}" for char in points[start : start + 32]) for start in range(0, len(points), 32)]
    expected, got = reference.encode_batch(lines, False), fast.encode_batch(lines, False)
    assert [text for text, ids, others in zip(lines, expected, got, strict=True) if ids != others] == []


@every_family
@pytest.mark.parametrize("char", ["a", " ", "\n", "中", "é", "1", "=", "😀"])
def test_very_long_words(family, char):
    reference, fast = backends(family)
    for text in (char * 20_000, f"{char}x" * 5_000, f"word {char * 3_000} word"):
        assert fast.encode(text, True) == reference.encode(text, True)


@settings(deadline=None)
@given(st.lists(texts, max_size=5), st.booleans())
def test_a_batch_is_each_text_alone(batch, special):
    _, fast = backends("smollm2")
    assert fast.encode_batch(batch, special) == [fast.encode(text, special) for text in batch]


def test_bos_is_added_only_with_special_tokens():
    for family, bos in (("smollm2-bos", 1), ("mistral-v1", 1), ("tekken", 1)):
        _, fast = backends(family)
        assert unpack(fast.encode("", True)) == [bos]
        assert fast.encode("", False) == b""
        assert unpack(fast.encode("hi", True))[0] == bos
        assert unpack(fast.encode("hi", False))[0] != bos


def test_a_token_of_a_configuration_file_beside_is_as_unknown_as_to_the_reference(tmp_path):
    files = FAMILIES["smollm2"]()
    path = tmp_path / "tokenizer.json"
    with open(files.tokenizer_file, "rb") as file:
        path.write_bytes(file.read())
    added = {"60000": {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False, "normalized": False,
                       "single_word": False}}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_bytes(msgspec.json.encode({"added_tokens_decoder": added}))
    fast = FastBackend(load_fast_tokenizer(msgspec.structs.replace(files, tokenizer_file=str(path))), no_reference)
    assert fast.encode("a<extra>b", False) == backends("smollm2")[0].encode("a<extra>b", False)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_what_is_no_unicode_is_refused_as_the_reference_refuses_it(text):
    reference, fast = backends("smollm2")
    with pytest.raises(TypeError) as expected:
        reference.encode(text, False)
    for call in (lambda: fast.encode(text, False), lambda: fast.encode_batch(["a", text], False)):
        with pytest.raises(TypeError) as got:
            call()
        assert str(got.value) == str(expected.value)


def no_reference():
    raise AssertionError("the reference is not needed")


class Limited:
    """A library that refuses some texts, as with a limit of its regular expressions."""

    def no_truncation(self):
        pass

    no_padding = no_truncation

    def encode_batch_flat(self, texts, special=False):
        if texts == ["warm"]:
            return b"", b""
        raise ValueError("match limit exceeded")


def test_what_the_library_refuses_goes_to_the_reference_which_is_made_once():
    reference, _ = backends("smollm2")
    made = []
    fast = FastBackend(Limited(), lambda: made.append(1) or reference)
    assert made == []
    assert fast.encode("hello", False) == reference.encode("hello", False)
    assert fast.encode_batch(["hello", "x"], False) == reference.encode_batch(["hello", "x"], False)
    assert made == [1]


def test_a_file_that_the_library_does_not_know(tmp_path):
    with pytest.raises(ModelError, match=r"fastokens can't load .*BertNormalizer"):
        load_fast_tokenizer(minilm())
    files = FAMILIES["smollm2"]()
    for content in (b"", b"{}", b"\xff", b"[]"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        broken = msgspec.structs.replace(files, tokenizer_file=str(tmp_path / "tokenizer.json"))
        for bos in (False, True):
            with pytest.raises(ModelError, match="fastokens can't load"):
                load_fast_tokenizer(msgspec.structs.replace(broken, add_bos=bos, bos_token="<s>"))
    with pytest.raises(ModelError, match="'<none>' is not among the added tokens"):
        load_fast_tokenizer(msgspec.structs.replace(files, add_bos=True, bos_token="<none>"))


FORK = """
import os, signal, sys
import msgspec
from multitok.tokenizer.fast_backend import FastBackend, load_fast_tokenizer
from multitok.tokenizer.model_files import ModelFiles

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
backend = FastBackend(load_fast_tokenizer(msgspec.json.decode(sys.argv[1], type=ModelFiles)), None)
backend.encode("hello", True)
assert threads() == before, "a thread before the fork"
text = "".join(f"word{i} " for i in range(100_000))
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        backend.warm_up()
        ids = backend.encode(text, True)
        assert backend.encode_batch([text, "x"], True)[0] == ids and len(ids) > 400_000
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.parametrize("family", ["smollm2", "mistral-v1"])
def test_children_of_the_process_that_loaded_it_can_encode(family):
    names = ("FASTOKENS_BPE_THREADS", "RAYON_NUM_THREADS")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    command = [sys.executable, "-W", "error", "-c", FORK, msgspec.json.encode(FAMILIES[family]()).decode()]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[0, 0, 0]", "")


def test_the_lazy_tokenizer_is_loaded_when_it_is_needed(monkeypatch):
    loads = []
    monkeypatch.setattr(
        "multitok.tokenizer.backends.load_tokenizer", lambda files: loads.append(1) or load_tokenizer(files)
    )
    lazy = LazyTokenizer(FAMILIES["smollm2"]())
    assert loads == []
    assert lazy.decode_batch([backends("smollm2")[0].encode("hello", False), b""]) == ["hello", ""]
    assert lazy.get() is lazy.get()
    assert len(loads) == 1
