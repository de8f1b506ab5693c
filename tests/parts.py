"""What the tests of several parts share: a private directory with real sockets, children as real processes."""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from multitok.config import ModelPorts, PortArgs, ServerArgs
from multitok.detokenizer.table_states import BYTE_ALPHABET
from multitok.ipc.sockets import bind_pull, connect_push
from multitok.launcher.child_process import ChildProcess
from multitok.launcher.listen import listen_unix
from multitok.launcher.load_board import LoadBoard
from multitok.launcher.runtime_dir import RuntimeDir
from multitok.launcher.shared_memory import SharedBlock, block_name, write_to_shared_memory
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.to_child import ToChild
from multitok.messages.to_launcher import Failed, Hello, Ready, ToLauncher
from multitok.messages.to_scheduler import life_mark
from multitok.tokenizer.model_files import ModelFiles
from multitok.tokenizer.model_settings import ModelSettings

DEADLINE_S = 30.0
EOS = 256
VOCAB_SIZE = 257
T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout: float = DEADLINE_S) -> T:
    """Return what `condition` gives once it is true; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.002)
    return value


def ends_within(pidfd: int, timeout: float = DEADLINE_S) -> bool:
    """Whether a process ends in time."""
    return bool(select.select([pidfd], [], [], timeout)[0])


def pack(ids: list[int]) -> bytes:
    return b"".join(i.to_bytes(4, "little", signed=True) for i in ids)


def unpack(ids: bytes) -> list[int]:
    return list(memoryview(bytes(ids)).cast("i"))


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids are the bytes of the text, and 256 its end-of-sequence token."""
    tokenizer = Tokenizer(models.BPE(dict(BYTE_ALPHABET), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def byte_model(folder: Path, **changes: Any) -> ModelFiles:
    """A model of bytes, for the simulated engine."""
    file = folder / "tokenizer.json"
    byte_tokenizer().save(str(file))
    files = ModelFiles(
        name="bytes",
        task="generate",
        model_path="",
        tokenizer_file=str(file),
        chat_template=None,
        bos_token=None,
        eos_token="<eos>",
        add_bos=False,
        eos_token_ids=[EOS],
        context_length=100,
        vocab_size=VOCAB_SIZE,
    )
    return msgspec.structs.replace(files, **changes)


class Inbox:
    """A PULL socket of one address, and what its frames hold."""

    def __init__(self, socket: zmq.Socket[bytes], token: bytes, message_type: Any) -> None:
        self.socket = socket
        self._token = token
        self._decoder: FrameDecoder[Any] = FrameDecoder(token, message_type)

    def frames(self, timeout: float = DEADLINE_S) -> list[bytes]:
        """Return the next message's frames; fail when none comes."""
        assert self.socket.poll(int(timeout * 1000)), "no message came"
        return self.socket.recv_multipart()

    def pairs(self, life: int = 1) -> list[bytes]:
        """Be a life of a scheduler: return the next message's headers and payloads; it must be for this life."""
        mark, *pairs = self.frames()
        assert mark == life_mark(self._token, life)
        return pairs

    def next(self, timeout: float = DEADLINE_S) -> Any:
        """Return the next message of one frame."""
        (frame,) = self.frames(timeout)
        assert self._decoder.is_ours(frame)
        return self._decoder.decode(frame)

    def is_empty(self) -> bool:
        return not self.socket.poll(0)


class Site:
    """What a launcher makes for its children, for one test."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 1,
        detokenizers: int = 1,
        ranks: int = 1,
        models: list[list[int]] | None = None,
        task: str = "generate",
        **args: Any,
    ) -> None:
        self.runtime_dir = RuntimeDir.create()
        self.token = secrets.token_bytes(8)
        self.files = byte_model(folder, task=task)
        self.server_args = ServerArgs(
            engine="simulated",
            tokenizer_worker_num=workers,
            detokenizer_worker_num=detokenizers,
            data_parallel_size=ranks,
            **args,
        )
        ranks_of_models = models or [list(range(ranks))]
        names = [self.files.name, *(f"{self.files.name}-{i}" for i in range(1, len(ranks_of_models)))]
        self.settings = [ModelSettings(name=name, args=self.server_args, files=self.files) for name in names]
        multi = self.server_args.multi
        self.port_args = PortArgs(
            runtime_dir=self.runtime_dir.path,
            start_token=self.token,
            models=[
                ModelPorts(
                    name=name,
                    tokenizer_file=self.files.tokenizer_file,
                    vocab_size=self.files.vocab_size,
                    ranks=its_ranks,
                )
                for name, its_ranks in zip(names, ranks_of_models, strict=True)
            ],
            router_ipc_name="router" if multi else None,
            control_ipc_name="control" if multi else None,
            scheduler_ipc_names=[f"s{i}" for i in range(ranks)],
            detokenizer_ipc_names=[f"d{i}" for i in range(detokenizers)],
        )
        fixed = [*self.port_args.scheduler_ipc_names, *self.port_args.detokenizer_ipc_names]
        fixed += ["router", "control"] if multi else []
        self._listeners = {name: listen_unix(os.path.join(self.runtime_dir.path, name)) for name in fixed}
        self._blocks: list[SharedBlock] = []
        self.children: list[ChildProcess] = []
        self._pushes: dict[str, zmq.Socket[bytes]] = {}
        self._kept: list[Any] = []

    def keep(self, part: T) -> T:
        """Hold a part with sockets until they are closed, at the end of the test."""
        self._kept.append(part)
        return part

    def ports(self, *addresses: str, **changes: Any) -> PortArgs:
        """The ports of a part that lives in this process and binds `addresses`."""
        fds = {address: os.dup(self._listeners[address].fileno()) for address in addresses}
        return msgspec.structs.replace(self.port_args, listen_fds=fds, **changes)

    def inbox(self, address: str, message_type: Any) -> Inbox:
        """Be the receiver of an address."""
        listener = self._listeners.get(address)
        fd = None if listener is None else os.dup(listener.fileno())
        return self.keep(Inbox(bind_pull(self.port_args.endpoint(address), fd), self.token, message_type))

    def send_frames(self, address: str, frames: list[bytes] | list[bytearray]) -> None:
        if address not in self._pushes:
            self._pushes[address] = connect_push(self.port_args.endpoint(address))
        self._pushes[address].send_multipart(frames)

    def send_pairs(self, address: str, pairs: list[bytes] | list[bytearray], life: int = 1) -> None:
        """Send headers and payloads to a life of a scheduler."""
        self.send_frames(address, [life_mark(self.token, life), *pairs])

    def send(self, address: str, *messages: Any) -> None:
        """Send one message, a frame each of `messages`."""
        self.send_frames(address, [encode_frame(self.token, message) for message in messages])

    def board(self) -> LoadBoard:
        self._share()
        return LoadBoard(self._blocks[3].name, *self._sizes())

    def child(self, role: str, addresses: list[str], index: int = 0) -> ChildProcess:
        """Start a part as a process."""
        self._share()
        listeners = {address: self._listeners[address] for address in addresses}
        child = ChildProcess.spawn(role, index, 1, [block.name for block in self._blocks], listeners)
        self.children.append(child)
        return child

    def ready_child(self, role: str, addresses: list[str], index: int = 0) -> ChildProcess:
        """Start a part and wait until it says that it is ready."""
        child = self.child(role, addresses, index)
        assert isinstance(self.hear(child), Hello)
        said = self.hear(child)
        assert isinstance(said, Ready), said
        return child

    def kill(self, child: ChildProcess) -> None:
        """Let a part die at once."""
        child.kill()
        assert self.ending(child) == "died of SIGKILL"

    def next_life(self, child: ChildProcess, addresses: list[str], *briefing: ToChild) -> ChildProcess:
        """Start the life after `child`, which has to know the briefing, and wait until it says that it is ready."""
        listeners = {address: self._listeners[address] for address in addresses}
        blocks = [block.name for block in self._blocks]
        started = ChildProcess.spawn(child.role, child.index, child.life + 1, blocks, listeners, briefing)
        self.children.append(started)
        assert isinstance(self.hear(started), Hello)
        assert isinstance(self.hear(started), Ready)
        return started

    @staticmethod
    def hear(child: ChildProcess, timeout: float = DEADLINE_S) -> ToLauncher:
        """Return the next thing that a child says."""
        assert select.select([child.channel], [], [], timeout)[0], "the child said nothing"
        packet = child.channel.recv(65536)
        assert packet, "the child has closed its channel"
        message: ToLauncher = msgspec.msgpack.decode(packet, type=ToLauncher)
        return message

    def hear_failure(self, child: ChildProcess) -> Failed:
        while not isinstance(said := self.hear(child), Failed):
            pass
        return said

    def ending(self, child: ChildProcess) -> str:
        """Wait until a child has ended; returns how, in words."""
        assert ends_within(child.pidfd), f"{child.name} goes on"
        self.children.remove(child)
        return child.reap()

    def die(self, child: ChildProcess) -> None:
        """Be a launcher that is gone: its channel has ended, and it holds the directory no more."""
        child.channel.close()
        os.close(self.runtime_dir._fd)

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.reap()
        zmq.Context.instance().destroy(linger=0)
        for listener in self._listeners.values():
            listener.close()
        for block in self._blocks:
            block.remove()
        self.runtime_dir.remove()

    def _sizes(self) -> tuple[int, int, int]:
        return (
            len(self.port_args.scheduler_ipc_names),
            len(self.port_args.detokenizer_ipc_names),
            self.server_args.tokenizer_worker_num,
        )

    def _share(self) -> None:
        if not self._blocks:
            nonce = self.runtime_dir.nonce
            self._blocks = [
                write_to_shared_memory(self.server_args, block_name(nonce, "server_args")),
                write_to_shared_memory(self.port_args, block_name(nonce, "port_args")),
                write_to_shared_memory(self.settings, block_name(nonce, "models")),
                LoadBoard.create(block_name(nonce, "board"), *self._sizes()),
            ]


def channel_pair() -> tuple[socket.socket, int]:
    """The launcher's end of a channel, and the descriptor of a child's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return ours, theirs.detach()
