"""The SDK loads quickly: its clients load nothing that only the processes of a run need."""

import subprocess
import sys

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
