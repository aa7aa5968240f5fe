"""Check for the configured vLLM, before anything is started. Imports little."""

import os
from pathlib import Path

from rolloutmq.schemas.errors import ConfigError

FIELD = "inference.vllm.python"


def require_vllm(python: Path) -> None:
    """Check that the Python of vLLM exists and has vLLM installed.

    Raises:
        ConfigError: One of them is missing.
    """
    if not os.access(python, os.X_OK):
        raise ConfigError(FIELD, f"{python} does not exist; create it with `make .venv-vllm/.installed`")
    if not any(python.parent.parent.glob("lib/python3*/site-packages/vllm/__init__.py")):
        raise ConfigError(
            FIELD, f"the environment of {python} has no vLLM; install one with `make .venv-vllm/.installed`"
        )
