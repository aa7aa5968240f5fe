"""The SDK loads quickly, nothing that only the processes of a run need, and on Linux only."""

import subprocess
import sys

import pytest

HEAVY = (
    "pydantic",
    "typer",
    "torch",
    "transformers",
    "psutil",
    "rolloutmq.services",
    "rolloutmq.schemas.config",
)


def test_clients_load_no_configuration_models_and_no_services() -> None:
    code = "import sys; from rolloutmq import Consumer, Group, PolicyVersion, Producer; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    loaded = set(done.stdout.split())
    assert "rolloutmq.bus.producer.client" in loaded
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.parametrize("module", ["rolloutmq", "rolloutmq.launch.cli"])
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_refused_in_one_line(module: str, system: str) -> None:
    code = f"""
import sys
sys.platform = {system!r}
try:
    import {module}
except ImportError as error:
    print(type(error).__name__, error.name, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == (
        f"ImportError rolloutmq sys.platform: rolloutmq runs on Linux only (got {system}); "
        "use a Linux machine, a container or WSL 2\n"
    )
