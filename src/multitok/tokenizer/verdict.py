"""Decides which tokenizer library serves a model: the fast one only where its ids were those of the reference.

The comparison runs in a process of its own, so that what a library does with a probe text (threads, a crash, no end)
stays out of the process that loads the tokenizer and forks. Its result is kept beside the converted tokenizers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import msgspec

from multitok.tokenizer.backends import LazyTokenizer, ReferenceBackend, TokenizerBackend
from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.model_files import ModelFiles
from multitok.tokenizer.probe_texts import PROBE_VERSION
from multitok.tokenizer.token_bound import TokenBound
from multitok.tokenizer.tokenizer_cache import _private_temp_dir, default_cache_dir

logger = logging.getLogger(__name__)

# Seconds for a probe that takes one or two, on a machine that does other things.
_PROBE_TIMEOUT = 120.0


class Verdict(msgspec.Struct, frozen=True):
    """What a probe found out.

    Attributes
    ----------
    fast : bool
        The fast library gave the reference's ids on all texts.
    reason : str
        Why not, with the first difference.
    bound : TokenBound or None
        How many tokens a text has at least; None where nothing is known.
    """

    fast: bool
    reason: str
    bound: TokenBound | None


def choose_backend(files: ModelFiles, reference: LazyTokenizer, cache_dir: Path | None = None) -> TokenizerBackend:
    """Load the fast tokenizer where it may be used, else the reference.

    Parameters
    ----------
    files : ModelFiles
        The model.
    reference : LazyTokenizer
        The reference, loaded only where it is needed.
    cache_dir : Path or None
        Where verdicts are kept; None for the user's cache.
    """
    verdict = get_verdict(files, cache_dir)
    if verdict.fast:
        from multitok.tokenizer.fast_backend import FastBackend, load_fast_tokenizer

        try:
            tokenizer = load_fast_tokenizer(files)
        except ModelError as error:
            verdict = msgspec.structs.replace(verdict, fast=False, reason=str(error))
        else:
            return FastBackend(tokenizer, lambda: ReferenceBackend(reference.get()), verdict.bound)
    logger.info("%s: the reference is used, not the faster fastokens: %s", files.tokenizer_file, verdict.reason)
    return ReferenceBackend(reference.get(), verdict.bound)


def get_verdict(files: ModelFiles, cache_dir: Path | None = None) -> Verdict:
    """Return the verdict on a model's tokenizer from the cache, or probe it, which takes a few seconds.

    Parameters
    ----------
    files : ModelFiles
        The model.
    cache_dir : Path or None
        Where verdicts are kept; None for the user's cache. Where that can't be written, a private folder under the
        system's temporary one is used.
    """
    folder = (cache_dir or default_cache_dir()) / "tokenizers"
    try:
        name = _name(files)
    except (OSError, importlib.metadata.PackageNotFoundError) as error:
        return Verdict(fast=False, reason=str(error), bound=None)
    verdict = _read(folder / name)
    if verdict is not None:
        return verdict
    if not _is_writable(folder):
        folder = _private_temp_dir()
        verdict = _read(folder / name)
        if verdict is not None:
            return verdict
    try:
        verdict = _probe(files)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        # Not kept: the next start may have more luck.
        return Verdict(fast=False, reason=f"its comparison with the reference failed: {error}", bound=None)
    try:
        _write(folder / name, verdict)
    except OSError as error:
        logger.warning("the verdict on the tokenizer can't be kept in %s: %s", folder, error.strerror or error)
    return verdict


def _probe(files: ModelFiles) -> Verdict:
    # -P: a module of the working directory must not take the place of a library's.
    command = [sys.executable, "-P", "-m", "multitok.tokenizer.probe"]
    result = subprocess.run(
        command, input=msgspec.json.encode(files), capture_output=True, timeout=_PROBE_TIMEOUT, check=False
    )
    if result.returncode != 0:
        last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise subprocess.SubprocessError(f"exit status {result.returncode}{': ' if last else ''}{''.join(last)}")
    return msgspec.json.decode(result.stdout, type=Verdict)


def _name(files: ModelFiles) -> str:
    content = hashlib.sha256(Path(files.tokenizer_file).read_bytes()).hexdigest()
    versions = [importlib.metadata.version(package) for package in ("tokenizers", "fastokens")]
    # The libraries have code for each kind of processor, and the probe's texts depend on Python's Unicode version.
    machine = (platform.machine(), unicodedata.unidata_version)
    identity = (content, files.add_bos, files.bos_token, PROBE_VERSION, *versions, *machine)
    return f"verdict-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}.json"


def _read(path: Path) -> Verdict | None:
    try:
        checksum, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    try:
        if checksum == hashlib.sha256(content).hexdigest().encode():
            return msgspec.json.decode(content, type=Verdict)
    except msgspec.DecodeError as error:
        logger.debug("%s: %s", path, error)
    logger.warning("%s in the cache is damaged; the tokenizer is compared again", path)
    return None


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _write(path: Path, verdict: Verdict) -> None:
    content = msgspec.json.encode(verdict)
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
