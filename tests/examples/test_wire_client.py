"""The client without this package: it pushes a group, pulls it, and settles it."""

import subprocess
import sys
from pathlib import Path

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify
from rolloutmq.services.broker.server import running_broker

CLIENT = Path(__file__).parents[2] / "examples" / "clients" / "wire_client.py"
ALONE = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
assert not [name for name in sys.modules if name.split(".")[0] == "rolloutmq"]
"""


def test_a_client_without_the_package_produces_and_trains(run_dir: Path) -> None:
    config = RunConfig(
        environment={"wire": EnvironmentConfig(entry="a:B", group_size=2)},
        broker=BrokerConfig(durability="os"),
    )
    layout = RunLayout(run_dir)
    with running_broker(config, layout):
        for _ in range(2):  # another life of both clients: a new session, and the trainer's second step
            ended = subprocess.run(
                [sys.executable, "-c", ALONE, str(CLIENT), str(run_dir)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr
            assert "tokens [1, 2, 3, 4, 5]" in ended.stdout
    verdict = verify(layout.journal, layout.dead, Witness)
    assert verdict.problems == []
    assert (verdict.accepted, verdict.counts["trained"]) == (2, 2)
