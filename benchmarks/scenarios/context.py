"""What all scenarios are given."""

from __future__ import annotations

import resource
from typing import Any

import msgspec
from harness.data import MODEL_NAME, BenchData
from harness.server import ServerProcess
from harness.systems import SYSTEMS, Environment

from multitok.bench.processes import ENGINE_ROLES, Process
from multitok.bench.requests import Body, Settings
from multitok.bench.workloads import Workload, make_sessions


class Context(msgspec.Struct, frozen=True):
    """Starts servers and makes requests.

    Attributes
    ----------
    scale : float
        More or less of everything.
    options : list of str
        For ``multitok serve``.
    """

    environment: Environment
    scale: float
    options: list[str]

    @property
    def data(self) -> BenchData:
        return self.environment.data

    def serve(self, *options: str) -> ServerProcess:
        """Return a multitok server, to be entered."""
        base = SYSTEMS["multitok"]
        system = msgspec.structs.replace(base, command=[*base.command, *options, *self.options])
        self.environment.cache.mkdir(parents=True, exist_ok=True)
        return self.environment.start(system, self.data.work / "scenario.log")

    def with_step(self, step_ms: float) -> Context:
        """Return the same with another time per step."""
        return Context(msgspec.structs.replace(self.environment, step_ms=step_ms), self.scale, self.options)

    def sessions(self, input_tokens: int, output_tokens: int, count: int = 64) -> tuple[Settings, list[list[Body]]]:
        """Return streamed one-request sessions."""
        settings = Settings(model=MODEL_NAME)
        workload = Workload(
            name="scenario",
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            stream=True,
            clients=1,
            sessions=count,
            warmup=0,
        )
        return settings, make_sessions(workload, self.data.maker, settings, self.data.template_overhead)


def front_cpu(processes: list[Process]) -> float:
    """Return CPU seconds of all but the scheduler."""
    return sum(process.cpu_s for process in processes if process.role not in ENGINE_ROLES)


def open_more_files() -> None:
    """Let this process, and the servers that it starts, have as many connections as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


Result = dict[str, Any]
