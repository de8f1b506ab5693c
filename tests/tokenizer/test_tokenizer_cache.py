"""The cache of built tokenizers: hits, damage, no permission, many writers at once."""

import concurrent.futures
import logging
import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest
from gguf_files import byte_level
from tokenizers import Tokenizer

from multitok.tokenizer import tokenizer_cache
from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.gguf_metadata import GgufMetadata
from multitok.tokenizer.tokenizer_cache import cached_tokenizer_file, default_cache_dir


@pytest.fixture
def metadata(tmp_path) -> GgufMetadata:
    return GgufMetadata(byte_level(tmp_path / "model.gguf", "gpt-2"))


@pytest.fixture
def builds(monkeypatch):
    """Paths of the tokenizers that were really built."""
    made = []
    build = tokenizer_cache.build_tokenizer
    monkeypatch.setattr(tokenizer_cache, "build_tokenizer", lambda m: made.append(m.path) or build(m))
    return made


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_second_start_finds_the_first_ones_file(tmp_path, metadata, builds):
    first = cached_tokenizer_file(metadata, tmp_path / "cache")
    assert Tokenizer.from_file(str(first)).encode("he").ids == [256]
    assert cached_tokenizer_file(metadata, tmp_path / "cache") == first
    assert len(builds) == 1
    assert len(content(first.parent)) == 2


def test_a_changed_file_is_another_entry(tmp_path, metadata, builds):
    first = cached_tokenizer_file(metadata, tmp_path / "cache")
    byte_level(tmp_path / "model.gguf", "gpt-2", merges=("h e", "l l"))
    second = cached_tokenizer_file(GgufMetadata(tmp_path / "model.gguf"), tmp_path / "cache")
    assert second != first and len(builds) == 2
    assert Tokenizer.from_file(str(second)).encode("ll").ids == [257]


@pytest.mark.parametrize("name", ["__version__", "BUILDER_VERSION"])
def test_another_version_is_another_entry(tmp_path, metadata, builds, monkeypatch, name):
    first = cached_tokenizer_file(metadata, tmp_path / "cache")
    monkeypatch.setattr(tokenizer_cache, name, "other")
    assert cached_tokenizer_file(metadata, tmp_path / "cache") != first
    assert len(builds) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no checksum", "checksum is not text", "folder"])
def test_a_damaged_entry_is_built_again(tmp_path, metadata, builds, damage):
    path = cached_tokenizer_file(metadata, tmp_path / "cache")
    whole, checksum = path.read_bytes(), path.with_name(path.name + ".sha256")
    match damage:
        case "cut":
            path.write_bytes(whole[:1000])
        case "flipped":
            path.write_bytes(whole.replace(b'"he"', b'"hf"'))
        case "empty":
            path.write_bytes(b"")
        case "no checksum":
            checksum.unlink()
        case "checksum is not text":
            checksum.write_bytes(b"\xff\xfe")
        case "folder":
            checksum.unlink()
            checksum.mkdir()
    again = cached_tokenizer_file(metadata, tmp_path / "cache")
    assert len(builds) == 2
    assert again.read_bytes() == whole


def test_a_cache_that_cannot_be_written_gives_a_private_temporary_one(tmp_path, metadata, monkeypatch, caplog, builds):
    (tmp_path / "file").write_text("")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with caplog.at_level(logging.WARNING):
        path = cached_tokenizer_file(metadata, tmp_path / "file")
    assert "can't be written (Not a directory)" in caplog.text
    assert path.parent == temporary / f"cache-multitok-{os.geteuid()}"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert Tokenizer.from_file(str(path)).encode("he").ids == [256]
    assert cached_tokenizer_file(metadata, tmp_path / "file") == path


def test_a_temporary_folder_that_others_could_have_prepared_is_not_used(tmp_path, metadata, monkeypatch):
    (tmp_path / "file").write_text("")
    temporary = tmp_path / "tmp"
    prepared = temporary / f"cache-multitok-{os.geteuid()}"
    prepared.mkdir(parents=True)
    prepared.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    path = cached_tokenizer_file(metadata, tmp_path / "file")
    assert path.parent != prepared and path.is_file()
    assert list(prepared.iterdir()) == []


def test_default_place_follows_the_xdg_specification(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path("/home/somebody/.cache/multitok")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path("/home/somebody/.cache/multitok")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert default_cache_dir() == Path("/var/cache/me/multitok")


def _write_once(arguments: tuple[str, str]) -> bytes:
    model, cache = arguments
    return cached_tokenizer_file(GgufMetadata(Path(model)), Path(cache)).read_bytes()


def test_many_processes_that_start_at_once_all_get_a_whole_file(tmp_path, metadata):
    jobs = [(str(metadata.path), str(tmp_path / "cache"))] * 12
    with concurrent.futures.ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_write_once, jobs))
    assert len(set(results)) == 1
    assert Tokenizer.from_str(results[0].decode()).encode("he").ids == [256]
    assert len(content(tmp_path / "cache" / "tokenizers")) == 2


def test_a_user_without_a_home_gets_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_cache_dir() == tmp_path / f"cache-multitok-{os.geteuid()}"


def test_no_place_at_all_is_an_error_for_the_user(tmp_path, metadata, monkeypatch):
    def full(target, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer_cache, "_write", full)
    with pytest.raises(ModelError, match=r"can't be stored in .* \(No space left on device\); set XDG_CACHE_HOME"):
        cached_tokenizer_file(metadata, tmp_path / "cache")
