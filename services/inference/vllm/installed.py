"""Whether there is a vLLM where the configuration says: looked at before anything is started. Imports little."""

import os
from pathlib import Path

from rolloutmq.schemas.errors import ConfigError

FIELD = "inference.vllm.python"


def require_vllm(python: Path) -> None:
    """Refuse an environment that is not there, or has no vLLM.

    Raises:
        ConfigError: It is as the text says.
    """
    if not os.access(python, os.X_OK):
        raise ConfigError(FIELD, f"{python} is not there; `make .venv-vllm/.installed` makes it")
    if not any(python.parent.parent.glob("lib/python3*/site-packages/vllm/__init__.py")):
        raise ConfigError(FIELD, f"{python} has no vLLM beside it")
