from __future__ import annotations

import fcntl
import os
import secrets
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from multitok.config import ModelPorts, PortArgs, ServerArgs
from multitok.engines.base import EngineInfo
from multitok.launcher import shared_memory
from multitok.launcher.shared_memory import (
    SharedBlock,
    block_name,
    open_block,
    read_from_shared_memory,
    remove_abandoned_blocks,
    remove_block,
    remove_blocks_of,
    write_to_shared_memory,
)
from multitok.tokenizer.model_files import ModelFiles
from parts import byte_model

SHM = Path("/dev/shm")
SERVER_ARGS = ServerArgs(model=["m.gguf"], engine_arg=["a=1", "b=ü"], tokenizer_worker_num=4, drain_timeout=0.5)
PORT_ARGS = PortArgs(
    runtime_dir="/tmp/x",
    start_token=bytes(range(8)),
    models=[
        ModelPorts(name="m", tokenizer_file="/t.json", vocab_size=3, ranks=[0]),
        ModelPorts(name="n", tokenizer_file="/u.json", vocab_size=4, ranks=[1]),
    ],
    router_ipc_name=None,
    control_ipc_name="control",
    scheduler_ipc_names=["s0", "s1"],
    detokenizer_ipc_names=[],
    listen_fds={"s0": 7},
)
ENGINE_INFOS = [
    EngineInfo(
        name=name,
        version="1",
        task="generate",
        vocab_size=9,
        context_length=5,
        eos_token_ids=[1],
        sampling=["seed"],
    )
    for name in ("simulated", "openvino")
]


@pytest.fixture
def nonce():
    """A start's nonce, whose blocks are removed at the end."""
    nonce = secrets.token_hex(4)
    yield nonce
    remove_blocks_of(nonce)


def abandon(name: str) -> None:
    """Let go of a block's lock without removing it, as a killed process does."""
    code = f"from multitok.launcher.shared_memory import SharedBlock; SharedBlock({name!r}, b'x')"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("value", "value_type"),
    [(SERVER_ARGS, ServerArgs), (PORT_ARGS, PortArgs), (ENGINE_INFOS, list[EngineInfo]), ([], list[EngineInfo])],
)
def test_what_is_written_is_read(nonce, value, value_type):
    block = write_to_shared_memory(value, block_name(nonce, "x"))
    assert read_from_shared_memory(block.name, value_type) == value


def test_the_files_of_a_model_are_written_and_read(nonce, tmp_path):
    files = byte_model(tmp_path, chat_template="{{ '🦜' }}" * 10_000)
    block = write_to_shared_memory(files, block_name(nonce, "files"))
    assert read_from_shared_memory(block.name, ModelFiles) == files


def test_another_process_reads_it(nonce):
    block = write_to_shared_memory(SERVER_ARGS, block_name(nonce, "args"))
    code = (
        "import sys; from multitok.config import ServerArgs;"
        "from multitok.launcher.shared_memory import read_from_shared_memory as read;"
        "print(read(sys.argv[1], ServerArgs).engine_arg)"
    )
    done = subprocess.run([sys.executable, "-c", code, block.name], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['a=1', 'b=ü']"


def test_only_this_user_can_read_a_block_whatever_the_umask(nonce):
    before = os.umask(0)
    try:
        block = write_to_shared_memory(SERVER_ARGS, block_name(nonce, "args"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((SHM / block.name).stat().st_mode) == 0o600


def test_a_name_has_the_pid_and_the_nonce_and_is_never_taken_twice(nonce):
    name = block_name(nonce, "args")
    assert str(os.getpid()) in name.split("-")
    assert nonce in name.split("-")
    write_to_shared_memory(SERVER_ARGS, name)
    with pytest.raises(FileExistsError):
        write_to_shared_memory(SERVER_ARGS, name)


def test_a_block_is_msgpack_behind_its_length_and_checksum(nonce):
    block = write_to_shared_memory({"a": 1}, block_name(nonce, "x"))
    content = (SHM / block.name).read_bytes()
    assert int.from_bytes(content[:8], "little") == len(content) - 12
    assert msgspec.msgpack.decode(content[12:]) == {"a": 1}


@pytest.mark.parametrize("length", [0, 5, 12, -1])
def test_a_cut_block_is_refused(nonce, length):
    block = write_to_shared_memory(SERVER_ARGS, block_name(nonce, "x"))
    path = SHM / block.name
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=f"shared block {block.name} is (cut|damaged)"):
        read_from_shared_memory(block.name, ServerArgs)


def test_a_block_with_something_behind_its_end_is_refused(nonce):
    block = write_to_shared_memory(SERVER_ARGS, block_name(nonce, "x"))
    with (SHM / block.name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="damaged"):
        read_from_shared_memory(block.name, ServerArgs)


@pytest.mark.parametrize("position", [0, 9, 12, -1])
def test_a_damaged_block_is_refused(nonce, position):
    block = write_to_shared_memory(SERVER_ARGS, block_name(nonce, "x"))
    path = SHM / block.name
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        read_from_shared_memory(block.name, ServerArgs)


def test_a_block_that_holds_something_else_is_refused(nonce):
    block = write_to_shared_memory(PORT_ARGS, block_name(nonce, "x"))
    with pytest.raises(msgspec.ValidationError):
        read_from_shared_memory(block.name, ServerArgs)


def test_a_block_that_is_not_there_is_an_error(nonce):
    with pytest.raises(FileNotFoundError):
        read_from_shared_memory(block_name(nonce, "x"), ServerArgs)


def test_a_removed_block_is_gone_and_may_be_removed_again(nonce):
    block = write_to_shared_memory(SERVER_ARGS, block_name(nonce, "x"))
    block.remove()
    assert not (SHM / block.name).exists()
    remove_block(block.name)


def test_abandoned_blocks_are_removed_and_held_ones_kept(nonce):
    held, mapped, abandoned = (block_name(nonce, what) for what in ("held", "mapped", "abandoned"))
    block = write_to_shared_memory(SERVER_ARGS, held)
    abandon(mapped)
    fd = open_block(mapped)
    abandon(abandoned)
    assert (SHM / abandoned).exists()
    remove_abandoned_blocks()
    assert not (SHM / abandoned).exists()
    assert (SHM / held).exists()
    assert (SHM / mapped).exists(), "held by one who only opened it"
    os.close(fd)
    remove_abandoned_blocks()
    assert not (SHM / mapped).exists()
    block.remove()


def test_the_blocks_of_one_start_are_removed_together(nonce):
    other = secrets.token_hex(4)
    mine = [write_to_shared_memory(1, block_name(nonce, what)) for what in "ab"]
    theirs = write_to_shared_memory(1, block_name(other, "a"))
    remove_blocks_of(nonce)
    assert not any((SHM / block.name).exists() for block in mine)
    assert (SHM / theirs.name).exists()
    theirs.remove()


def test_a_block_outlives_the_cleaning_of_another_start_that_runs_while_it_is_made(nonce, monkeypatch):
    lock = fcntl.flock
    cleaned = []

    def other_start_is_faster(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not cleaned:
            cleaned.append(True)
            remove_abandoned_blocks()
        lock(fd, operation)

    monkeypatch.setattr(shared_memory.fcntl, "flock", other_start_is_faster)
    block = SharedBlock(block_name(nonce, "x"), b"content")
    assert cleaned
    assert (SHM / block.name).read_bytes() == b"content"
