"""The SDK loads quickly, nothing that only the processes of a run need, and on Linux only."""

import subprocess
import sys
import tomllib
from pathlib import Path

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


def program() -> tuple[str, str]:
    """Return the module and the function that the installed program `rolloutmq` calls."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    module, _, function = tomllib.loads(text)["project"]["scripts"]["rolloutmq"].partition(":")
    return module, function


@pytest.mark.parametrize("words", [["doctor"], ["--help"]])
def test_the_program_says_on_another_system_in_one_line_why_it_ends(words: list[str]) -> None:
    module, function = program()
    code = f"""
import sys
sys.platform, sys.argv = "darwin", ["rolloutmq", *{words}]
from {module} import {function}
sys.exit({function}())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "rolloutmq: sys.platform: rolloutmq runs on Linux only (got darwin); "
        "use a Linux machine, a container or WSL 2\n"
    )


def test_the_program_raises_an_import_that_fails_for_another_reason() -> None:
    """It would hide a damaged installation."""
    module, function = program()
    code = f"""
import sys
sys.modules["rolloutmq.launch.cli"] = None
from {module} import {function}
{function}()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "ModuleNotFoundError" in done.stderr


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
