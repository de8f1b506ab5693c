"""Keeps the tokenizer.json that was built from a GGUF file, so that every process loads the same finished file.

A file and its checksum lie side by side under a name made of everything that decides the content. Both are written to
a temporary name and renamed; writers of the same name write the same bytes, so their order doesn't matter.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

import tokenizers

from multitok import __version__
from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.gguf_metadata import GgufMetadata
from multitok.tokenizer.gguf_tokenizer import BUILDER_VERSION, build_tokenizer

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/multitok``, or ``~/.cache/multitok``; a temporary folder for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    # The XDG specification: a relative path is to be ignored.
    if os.path.isabs(base):
        return Path(base) / "multitok"
    return Path(home) / ".cache" / "multitok" if os.path.isabs(home) else _private_temp_dir()


def cached_tokenizer_file(metadata: GgufMetadata, cache_dir: Path | None = None) -> Path:
    """Return a tokenizer.json for a GGUF file, building it where the cache has no intact one.

    Parameters
    ----------
    metadata : GgufMetadata
        Header of the file.
    cache_dir : Path or None
        Where to keep it; None for `default_cache_dir`. Where that can't be written, a private folder under the
        system's temporary one is used.

    Raises
    ------
    ModelError
        When no tokenizer can be built from the file, or it can't be stored anywhere.
    """
    name = _name(metadata.path)
    folder = (cache_dir or default_cache_dir()) / "tokenizers"
    target = folder / name
    if _is_intact(target):
        return target
    content = build_tokenizer(metadata).to_str().encode("utf-8")
    try:
        _write(target, content)
    except OSError as error:
        fallback = _private_temp_dir() / name
        logger.warning("the cache %s can't be written (%s); using %s", folder, error.strerror or error, fallback.parent)
        if not _is_intact(fallback):
            _write_or_explain(fallback, content)
        return fallback
    return target


def _name(path: Path) -> str:
    resolved = path.resolve()
    info = resolved.stat()
    identity = (
        str(resolved),
        info.st_size,
        info.st_mtime_ns,
        __version__,
        tokenizers.__version__,
        BUILDER_VERSION,
    )
    return f"{path.stem[:80]}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}.json"


def _checksum_file(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _is_intact(target: Path) -> bool:
    try:
        content = target.read_bytes()
        expected = _checksum_file(target).read_text(encoding="ascii")
    except (OSError, ValueError):
        return False
    if hashlib.sha256(content).hexdigest() == expected.strip():
        return True
    logger.warning("%s in the cache is damaged; building it again", target)
    return False


def _write(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    checksum = hashlib.sha256(content).hexdigest().encode("ascii")
    for path, data in ((target, content), (_checksum_file(target), checksum)):
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                # mkstemp makes it 0600; a cache may be shared with a user who only reads.
                os.fchmod(file.fileno(), 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def _write_or_explain(target: Path, content: bytes) -> None:
    try:
        _write(target, content)
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"the tokenizer can't be stored in {target.parent} ({reason}); set XDG_CACHE_HOME") from error


def _private_temp_dir() -> Path:
    """A folder that no other user can have prepared."""
    path = Path(tempfile.gettempdir()) / f"cache-multitok-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077:
            return path
    except OSError as error:
        logger.debug("%s can't be used: %s", path, error)
    return Path(tempfile.mkdtemp(prefix="cache-multitok-"))
