"""The servers that are compared: their command lines, with the same replayed ids and the same time per step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness.data import MODEL_NAME, BenchData
from harness.machine import version_in
from harness.server import ServerProcess, free_port

_PEERS = Path(__file__).parent.parent / "peers"
_MULTITOK = [
    *("{python}", "-m", "multitok", "serve", "--engine", "simulated", "--tokenizer", "{model}"),
    *("--served-model-name", MODEL_NAME, "--port", "{port}", "--cache-dir", "{cache}", "--log-level", "warning"),
    *("--engine-arg", "replay={replay}", "--engine-arg", "step_ms={step_ms}", "--engine-arg", "max_running=4096"),
]
_SGLANG = [
    *("{python}", "{peers}/sglang/serve.py", "--model-path", "{model}", "--served-model-name", MODEL_NAME),
    *("--device", "cpu", "--host", "127.0.0.1", "--port", "{port}"),
]
_VLLM = [
    *("{python}", "{peers}/vllm/serve.py", "{model}", "--served-model-name", MODEL_NAME),
    *("--host", "127.0.0.1", "--port", "{port}"),
]
_STUB_ENV = {"STUB_STEP_MS": "{step_ms}", "STUB_TOKENS": "{replay}", "HF_HUB_OFFLINE": "1"}
_VLLM_ENV = {
    **_STUB_ENV,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CACHE_ROOT": "{cache}/vllm",
    "PYTHONPATH": "{vllm_path}",
}


class System(msgspec.Struct, frozen=True, kw_only=True):
    """A server in one configuration; braces in command and environment are filled in at its start.

    Attributes
    ----------
    family : str
        'multitok', 'sglang' or 'vllm': whose Python runs it.
    front_in_scheduler : bool
        See `harness.stages.cpu_by_stage`.
    """

    name: str
    family: str
    command: list[str]
    environment: dict[str, str] = {}
    health: str = "/health"
    front_in_scheduler: bool = False


def _multitok(name: str, *options: str) -> System:
    return System(name=name, family="multitok", command=[*_MULTITOK, *options], health="/ready")


def _sglang(name: str, *options: str, rust: bool = False) -> System:
    environment = _STUB_ENV | ({"SGLANG_RUST_SERVER": "1"} if rust else {})
    command = [*_SGLANG, *options]
    return System(name=name, family="sglang", command=command, environment=environment, front_in_scheduler=rust)


def _vllm(name: str, *options: str, rust: bool = False) -> System:
    environment = _VLLM_ENV | ({"VLLM_USE_RUST_FRONTEND": "1"} if rust else {})
    return System(name=name, family="vllm", command=[*_VLLM, *options], environment=environment)


SYSTEMS = {
    system.name: system
    for system in (
        _multitok("multitok"),
        _multitok("multitok-0d", "--detokenizer-worker-num", "0"),
        _multitok("multitok-2w", "--tokenizer-worker-num", "2"),
        _multitok("multitok-4w", "--tokenizer-worker-num", "4"),
        _sglang("sglang"),
        _sglang("sglang-2t", "--tokenizer-worker-num", "2"),
        _sglang("sglang-rust", rust=True),
        _vllm("vllm"),
        _vllm("vllm-2", "--api-server-count", "2"),
        _vllm("vllm-rust", rust=True),
    )
}


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What commands are filled in with.

    Attributes
    ----------
    pythons : mapping of str to str
        The interpreter of each family; a family that isn't there is skipped.
    vllm_path : str
        Folders put in front of vLLM's own packages (peers/vllm/README.md).
    """

    data: BenchData
    pythons: Mapping[str, str]
    step_ms: float
    cache: Path
    vllm_path: str = ""

    def missing(self, system: System) -> str | None:
        """Say why a system can't be run; None when it can."""
        if system.family == "multitok":
            return None
        python = self.pythons.get(system.family)
        if not python:
            return f"no --{system.family}-python given"
        if not Path(python).is_file():
            return f"--{system.family}-python {python} is no file"
        packages = ("vllm", "vllm-cpu") if system.family == "vllm" else (system.family,)
        if not any(self.version_of(system.family, package) for package in packages):
            return f"{system.family} is not installed for --{system.family}-python {python}"
        return None

    def version_of(self, family: str, package: str) -> str | None:
        """Return the version of a peer's package; None where it isn't installed."""
        python = self.pythons.get(family)
        path = self.vllm_path if family == "vllm" else ""
        return version_in(python, package, path) if python and Path(python).is_file() else None

    def start(self, system: System, log: Path) -> ServerProcess:
        """Return the server, to be entered."""
        port = free_port()
        words = {
            "{python}": self.pythons.get(system.family, sys.executable),
            "{peers}": str(_PEERS),
            "{model}": str(self.data.model_dir),
            "{replay}": str(self.data.replay_file),
            "{step_ms}": f"{self.step_ms:g}",
            "{cache}": str(self.cache),
            "{port}": str(port),
            "{vllm_path}": self.vllm_path,
        }

        def fill(text: str) -> str:
            for word, value in words.items():
                text = text.replace(word, value)
            return text

        command = [fill(part) for part in system.command]
        environment = {key: fill(value) for key, value in system.environment.items() if fill(value)}
        return ServerProcess(command, environment, port, system.health, log)
