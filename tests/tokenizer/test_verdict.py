"""The fast tokenizer serves only models on which it agreed with the reference, and that is found out once."""

import logging
import os
import subprocess
import tempfile

import pytest
from tokenizer_families import FAMILIES, backends, minilm

from multitok.tokenizer import probe, verdict
from multitok.tokenizer.backends import LazyTokenizer, ReferenceBackend
from multitok.tokenizer.fast_backend import FastBackend
from multitok.tokenizer.verdict import Verdict, choose_backend, get_verdict


@pytest.fixture
def files():
    return FAMILIES["smollm2"]()


@pytest.fixture
def probes(monkeypatch):
    """Models that were really probed; the probe itself is replaced by what `result` holds."""

    class Probes(list):
        result = Verdict(fast=True, reason="", bound=None)

    made = Probes()

    def run(files):
        made.append(files.name)
        if isinstance(made.result, Exception):
            raise made.result
        return made.result

    monkeypatch.setattr(verdict, "_probe", run)
    return made


@pytest.mark.parametrize("family", ["smollm2", "smollm2-bos", "mistral-v1"])
def test_a_tokenizer_on_which_both_agree_is_served_by_the_fast_one(family, tmp_path):
    files = FAMILIES[family]()
    lazy = LazyTokenizer(files)
    backend = choose_backend(files, lazy, tmp_path)
    assert isinstance(backend, FastBackend)
    assert lazy._tokenizer is None
    assert backend.encode("Hello", True) == backends(family)[0].encode("Hello", True)
    assert backend.least_tokens("a" * 1000) >= 10


def test_word_piece_is_served_by_the_reference_and_the_log_says_so(tmp_path, caplog):
    files = minilm()
    with caplog.at_level(logging.INFO):
        backend = choose_backend(files, LazyTokenizer(files), tmp_path)
    assert isinstance(backend, ReferenceBackend)
    assert "the reference is used, not the faster fastokens: fastokens can't load" in caplog.text
    assert backend.inline_characters < FastBackend.inline_characters


def test_the_first_difference_is_named():
    reference, _ = backends("smollm2")

    class Differs:
        def encode_batch(self, texts, special):
            return [b"\7\0\0\0" if "Über" in text else reference.encode(text, special) for text in texts]

    texts = ["a", "b", "ein Übermut", "Über"]
    ids = probe._some(reference.encode("ein Übermut", True))
    expected = f"'ein Übermut' gives [7] in place of {ids} (special tokens: True)"
    assert probe.first_difference(reference, Differs(), texts) == expected
    assert probe.first_difference(reference, reference, texts) is None


def test_a_text_that_only_the_fast_one_refuses_is_a_difference():
    reference, _ = backends("smollm2")

    class Refuses:
        def encode_batch(self, texts, special):
            try:
                raise ValueError("match limit")
            except ValueError:
                return probe._refuse()

    assert "refuses a text that the reference takes: match limit" in probe.first_difference(reference, Refuses(), ["a"])


def test_the_second_start_finds_the_verdict(files, tmp_path, probes):
    probes.result = Verdict(fast=False, reason="a difference", bound=None)
    assert get_verdict(files, tmp_path) == get_verdict(files, tmp_path) == probes.result
    assert len(probes) == 1
    (entry,) = (tmp_path / "tokenizers").iterdir()
    assert entry.stat().st_mode & 0o777 == 0o644


def test_a_reference_by_verdict(files, tmp_path, probes, caplog):
    probes.result = Verdict(fast=False, reason="'x' gives [1]", bound=None)
    with caplog.at_level(logging.INFO):
        assert isinstance(choose_backend(files, LazyTokenizer(files), tmp_path), ReferenceBackend)
    assert "'x' gives [1]" in caplog.text


@pytest.mark.parametrize("damage", [b"", b"{}", None, b"\xff" * 100])
def test_a_damaged_verdict_is_found_out_again(files, tmp_path, probes, damage):
    get_verdict(files, tmp_path)
    (entry,) = (tmp_path / "tokenizers").iterdir()
    entry.write_bytes(entry.read_bytes().replace(b"true", b"null") if damage is None else damage)
    assert get_verdict(files, tmp_path) == probes.result
    assert len(probes) == 2
    assert get_verdict(files, tmp_path) == probes.result
    assert len(probes) == 2


def test_another_file_bos_or_version_is_another_verdict(files, tmp_path, probes, monkeypatch):
    get_verdict(files, tmp_path)
    get_verdict(FAMILIES["smollm2-bos"](), tmp_path)
    get_verdict(minilm(), tmp_path)
    monkeypatch.setattr(verdict, "PROBE_VERSION", -1)
    get_verdict(files, tmp_path)
    assert len(probes) == 4
    assert len(list((tmp_path / "tokenizers").iterdir())) == 4


def test_a_cache_that_cannot_be_written_gives_a_private_temporary_one(files, tmp_path, probes, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert get_verdict(files, tmp_path / "file") == probes.result
    assert get_verdict(files, tmp_path / "file") == probes.result
    assert len(probes) == 1
    assert len(list((tmp_path / f"cache-multitok-{os.geteuid()}").iterdir())) == 1


def test_no_place_at_all_costs_only_the_probe(files, tmp_path, probes, monkeypatch, caplog):
    def full(path, verdict):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verdict, "_write", full)
    assert get_verdict(files, tmp_path) == probes.result
    assert "can't be kept" in caplog.text


@pytest.mark.parametrize(
    "error", [OSError("no process"), subprocess.TimeoutExpired("x", 1), subprocess.SubprocessError("exit status -9")]
)
def test_a_probe_that_dies_gives_the_reference_and_is_tried_again_at_the_next_start(files, tmp_path, probes, error):
    good, probes.result = probes.result, error
    failed = get_verdict(files, tmp_path)
    assert not failed.fast and "comparison with the reference failed" in failed.reason
    probes.result = good
    assert get_verdict(files, tmp_path) == good


def test_a_probe_process_that_fails_tells_why(files, tmp_path):
    import msgspec

    broken = msgspec.structs.replace(files, add_bos=True, bos_token="<none>")
    outcome = get_verdict(broken, tmp_path)
    assert not outcome.fast and "'<none>' is not among the added tokens" in outcome.reason
    missing = msgspec.structs.replace(files, tokenizer_file=str(tmp_path / "gone.json"))
    assert "No such file" in get_verdict(missing, tmp_path).reason


def test_a_file_that_the_fast_library_suddenly_cannot_load(files, tmp_path, probes, monkeypatch, caplog):
    from multitok.tokenizer import fast_backend
    from multitok.tokenizer.errors import ModelError

    def fails(files):
        raise ModelError("out of luck")

    monkeypatch.setattr(fast_backend, "load_fast_tokenizer", fails)
    with caplog.at_level(logging.INFO):
        assert isinstance(choose_backend(files, LazyTokenizer(files), tmp_path), ReferenceBackend)
    assert "out of luck" in caplog.text
