from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from multitok.launcher import runtime_dir
from multitok.launcher.listen import listen_unix
from multitok.launcher.runtime_dir import RuntimeDir, remove_abandoned
from multitok.launcher.shared_memory import block_name, write_to_shared_memory


@pytest.fixture
def parent(monkeypatch):
    """A short TMPDIR of this test."""
    with tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def let_go(directory: RuntimeDir) -> None:
    os.close(directory._fd)


def test_it_is_private_whatever_the_umask_and_lies_in_tmpdir(parent):
    before = os.umask(0)
    try:
        directory = RuntimeDir.create()
    finally:
        os.umask(before)
    path = Path(directory.path)
    assert path.parent == parent
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert path.name == f"multitok-{directory.nonce}"
    let_go(directory)


def test_a_tmpdir_that_is_too_long_for_a_socket_gives_way_to_tmp(parent, monkeypatch):
    long = parent / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory = RuntimeDir.create()
    assert Path(directory.path).parent == Path("/tmp")
    # The longest address fits into it.
    listen_unix(os.path.join(directory.path, "detokenizer.99")).close()
    directory.remove()
    let_go(directory)


def test_the_longest_tmpdir_that_is_taken_has_room_for_a_socket(parent, monkeypatch):
    for length in range(30, 90):
        long = parent / ("x" * length)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        directory = RuntimeDir.create()
        listen_unix(os.path.join(directory.path, "detokenizer.99")).close()
        directory.remove()
        let_go(directory)


def test_removing_takes_its_files_and_the_blocks_of_its_start(parent):
    directory = RuntimeDir.create()
    block = write_to_shared_memory(1, block_name(directory.nonce, "x"))
    listen_unix(os.path.join(directory.path, "s0")).close()
    directory.remove()
    assert not Path(directory.path).exists()
    assert not (Path("/dev/shm") / block.name).exists()
    let_go(directory)


def test_what_nobody_holds_is_removed_and_what_somebody_holds_is_kept(parent):
    held, abandoned, shared = (RuntimeDir.create() for _ in range(3))
    Path(abandoned.path, "s0").touch()
    let_go(abandoned)
    child = RuntimeDir(shared.path)  # the launcher is gone, a child is not
    let_go(shared)
    foreign = parent / "multitok-no-lock"
    foreign.mkdir()
    remove_abandoned()
    assert not Path(abandoned.path).exists()
    assert Path(held.path).exists()
    assert Path(shared.path).exists()
    assert foreign.exists(), "a directory without a lock is none of ours"
    let_go(child)
    remove_abandoned()
    assert not Path(shared.path).exists()
    let_go(held)


def test_one_that_is_being_made_outlives_the_cleaning_of_another_start(parent, monkeypatch):
    lock = fcntl.flock
    cleaned = []

    def other_start_is_faster(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not cleaned:
            cleaned.append(True)
            remove_abandoned()
        lock(fd, operation)

    monkeypatch.setattr(runtime_dir.fcntl, "flock", other_start_is_faster)
    directory = RuntimeDir.create()
    assert cleaned
    assert Path(directory.path, "lock").exists()
    remove_abandoned()
    assert Path(directory.path, "lock").exists()
    let_go(directory)


def test_the_last_to_leave_removes_it(parent):
    launcher = RuntimeDir.create()
    block = write_to_shared_memory(1, block_name(launcher.nonce, "x"))
    code = (
        "import sys; from multitok.launcher.runtime_dir import RuntimeDir\n"
        "directory = RuntimeDir(sys.argv[1])\n"
        "print('here', flush=True)\n"
        "sys.stdin.readline()\n"
        "directory.leave(30.0)\n"
        "print('left', flush=True)\n"
    )
    command = [sys.executable, "-c", code, launcher.path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        for child in (first, second):
            assert child.stdout.readline() == "here\n"
        first.stdin.write("leave\n")
        let_go(launcher)
        # The second is still there, so the first must wait.
        second.stdin.write("leave\n")
        for child in (first, second):
            assert child.stdout.readline() == "left\n"
    assert not Path(launcher.path).exists()
    assert not (Path("/dev/shm") / block.name).exists()


def test_one_who_leaves_while_another_hangs_gives_up_in_time_and_removes_nothing(parent):
    launcher, hanging = RuntimeDir.create(), None
    hanging = RuntimeDir(launcher.path)
    launcher.leave(0.05)
    assert Path(hanging.path).exists()
    hanging.leave(1.0)
    assert not Path(hanging.path).exists()
