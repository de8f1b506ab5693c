"""Starts SGLang's scheduler processes with SGLang's own launcher, and knows whether they live.

The launcher does all that it does for SGLang's own server (checks, plugins, environment, one process per GPU, the
data-parallel controller, the bootstrap server of a prefill engine), but for the tokenizer manager and the detokenizer.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.engine import Engine as SGLangLauncher
from sglang.srt.managers.disagg_service import start_disagg_service
from sglang.srt.server_args import PortArgs, prepare_server_args

from multitok.engines.settings import EngineSettings
from multitok.engines.sglang_link import SGLangLink
from multitok.engines.sglang_process import SchedulerProcess, failure_of

_log = logging.getLogger(__name__)
# Where each of them is bound, as a short name: a unix socket's path holds 107 characters.
_SOCKETS = {
    "tokenizer_ipc_name": "t",
    "scheduler_input_ipc_name": "s",
    "detokenizer_ipc_name": "d",
    "rpc_ipc_name": "r",
    "metrics_ipc_name": "m",
}
_REAP_S = 10.0


class SGLangProcesses:
    """SGLang's schedulers, loaded, and the link to them.

    Parameters
    ----------
    settings : EngineSettings
        The model, and what the user wants.
    command_line : sequence of str
        For SGLang's parser.

    Attributes
    ----------
    link : SGLangLink
        To the schedulers.
    model_config : sglang.srt.configs.model_config.ModelConfig
        What SGLang knows about the model.
    infos : list of dict
        What each scheduler said when it was ready.
    load_format : str
        Of the weights.

    Raises
    ------
    ValueError
        SGLang refuses the options.
    RuntimeError
        A scheduler could not start; the message has its own words.
    """

    def __init__(self, settings: EngineSettings, command_line: Sequence[str]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="s", dir=settings.runtime_dir))
        self._failure_file = self._directory / "failure"
        self._children: list[Any] = []
        self._pidfds: dict[int, int] = {}
        self._daemons: list[Any] = []
        self._link: SGLangLink | None = None
        self._bootstrap_server: Any = None
        try:
            with _own_logging():
                server_args, port_args = self._arguments(command_line, settings.rank)
                self.load_format = str(server_args.load_format)
                self.infos = self._launch(server_args, port_args)
        except BaseException:
            self.end()
            raise

    @property
    def link(self) -> SGLangLink:
        """The link to the schedulers."""
        assert self._link is not None
        return self._link

    def failure(self, ready: Sequence[int]) -> str | None:
        """Return why SGLang can't go on; None while all its processes live.

        Parameters
        ----------
        ready : sequence of int
            Descriptors that `SGLangLink.wakeup` reports.
        """
        dead = [pid for pid, descriptor in self._pidfds.items() if descriptor in ready]
        if not dead:
            return None
        words = failure_of(self._failure_file)
        if words is not None:
            return f"SGLang's scheduler failed: {words}"
        codes = [child.exitcode for child in self._children if child.pid == dead[0]]
        ended = f" with exit code {codes[0]}" if codes and codes[0] is not None else ""
        return f"SGLang's process {dead[0]} ended{ended}"

    def end(self) -> None:
        """Kill all processes, wait for them, and remove what they met at."""
        for child in self._children:
            child.kill()
        for pid, descriptor in self._pidfds.items():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            if not select.select([descriptor], [], [], _REAP_S)[0]:
                _log.error("SGLang's process %d does not end", pid)
            os.close(descriptor)
        self._pidfds.clear()
        for child in self._children:
            child.join(_REAP_S)
        if self._daemons:
            SGLangLauncher._terminate_weight_cache_daemons(self._daemons)
        if self._bootstrap_server is not None and hasattr(self._bootstrap_server, "close"):
            self._bootstrap_server.close()
        if self._link is not None:
            self._link.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _arguments(self, command_line: Sequence[str], rank: int) -> tuple[Any, Any]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                server_args = prepare_server_args(list(command_line))
        except SystemExit:
            lines = said.getvalue().strip().splitlines() or ["no reason given"]
            raise ValueError(f"SGLang does not take the options after --: {lines[-1]}") from None
        try:
            # Each rank of multitok is an SGLang of its own, with its own GPUs.
            server_args.base_gpu_id += rank * _gpus_of(server_args)
            server_args.resolve_once()
            port_args = PortArgs.init_new(server_args)
        except Exception as error:
            raise ValueError(f"SGLang does not take the options after --: {error}") from error
        for name, file in _SOCKETS.items():
            address = getattr(port_args, name)
            # With data-parallel attention they are TCP ports on the host that the user names.
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
                setattr(port_args, name, f"ipc://{self._directory}/{file}")
        return server_args, port_args

    def _launch(self, server_args: Any, port_args: Any) -> list[dict[str, Any]]:
        parent = self

        class Launcher(SGLangLauncher):  # type: ignore[misc]
            @classmethod
            def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
                return [], []

            @classmethod
            def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
                # A failing scheduler sends SIGQUIT, on which SGLang would kill this process before it could say why.
                signal.signal(signal.SIGQUIT, _on_failed_child)
                launched, children = super()._launch_scheduler_processes(*args, **kwargs)
                parent._children += children
                return launched, children

        try:
            *_, launched, watchdog, self._daemons = Launcher._launch_subprocesses(
                server_args,
                self._init_front,
                SchedulerProcess(str(self._failure_file)),
                None,
                port_args=port_args,
            )
        except Exception as error:
            if not self._children:
                raise ValueError(f"SGLang does not take the options after --: {error}") from error
            raise RuntimeError(f"SGLang could not start: {failure_of(self._failure_file) or error}") from error
        # It would send SIGQUIT to this process, which finds out itself.
        watchdog.stop()
        for pid in launched.all_child_pids:
            descriptor = os.pidfd_open(pid)
            self._pidfds[pid] = descriptor
            self.link.wakeup.register(descriptor, select.EPOLLIN)
        return list(launched.scheduler_infos)

    def _init_front(self, server_args: Any, port_args: Any) -> tuple[Any, None]:
        """Do what SGLang's tokenizer manager does while the schedulers load."""
        self._link = SGLangLink(port_args)
        self.model_config = ModelConfig.from_server_args(server_args)
        # Of a prefill engine: where the decode engines find it.
        self._bootstrap_server = start_disagg_service()
        return _Front(), None


def _gpus_of(server_args: Any) -> int:
    """Return how many GPUs one SGLang has."""
    replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
    return int(server_args.tp_size * server_args.pp_size * replicas * server_args.gpu_id_step)


class _Front:
    """What SGLang's launcher takes for the tokenizer manager."""

    max_req_input_len = 0

    def set_startup_time(self, _: object) -> None:
        """Do nothing."""


def _on_failed_child(*_: object) -> None:
    _log.error("a process of SGLang says that it fails")


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Undo what SGLang does to the log of the process that starts it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
