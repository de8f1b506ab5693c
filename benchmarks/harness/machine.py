"""Where a result comes from: the machine and the versions, without names or paths."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("multitok", "msgspec", "pyzmq", "uvloop", "httptools", "uvicorn", "tokenizers", "fastokens", "minijinja")
_TICKS = os.sysconf("SC_CLK_TCK")


def describe_machine() -> dict[str, Any]:
    """Return what a reader needs to know about this machine."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")), "")
    memory = Path("/proc/meminfo").read_text().split()[1]
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "load_average": os.getloadavg()[0],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this checkout, with a mark where files differ from it; None where there is no git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def version_in(python: str, package: str, path: str = "") -> str | None:
    """Return a package's version in another environment, with `path` in front; None when it isn't there."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    environment = os.environ | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, env=environment)
    return done.stdout.strip() if done.returncode == 0 else None


class BusyMeter:
    """How busy the whole machine was since this was made: noise from elsewhere shows here."""

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        fields = [int(field) / _TICKS for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4], fields[7]

    def read(self) -> dict[str, float]:
        """Return the share of time that all cores were busy, and that the hypervisor took."""
        total, idle, stolen = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return {"busy": round(1 - idle / max(total, 1e-9), 3), "stolen": round(stolen / max(total, 1e-9), 3)}
