"""The quickstart with its broker alone on one host: trainer, engine and workers join from others, with keys."""

import shutil
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.launch.commands.remote.hosts import Hosts, end, hosts_at, wait_until

from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.keys.bundle import load_bundle
from rolloutmq.launch.settings import load
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.http_server.access import authorization
from rolloutmq.testing.ledger import read_ledger

EXAMPLES = Path(__file__).parents[4] / "examples"
STEPS = 30

pytestmark = pytest.mark.extended


def quickstart(hosts: Hosts) -> None:
    """Give the hosts the run and the code of the quickstart."""
    port = hosts.port
    sets = [f'broker.listen="tcp://127.0.0.1:{port}"', 'broker.keys="keys"', f"trainer.steps={STEPS}"]
    config = load(EXAMPLES / "quickstart.toml", environ={}, assignments=sets)
    write_json(hosts.layout.config, config.model_copy(update={"base_dir": hosts.root}))
    shutil.copy(EXAMPLES / "sort_digits.py", hosts.code)


def status(url: str, token: str) -> int:
    """Return the status of a request with a token."""
    asked = urllib.request.Request(f"{url}/v1/models", headers=authorization(token))
    try:
        with urllib.request.urlopen(asked, timeout=60.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_the_quickstart_trains_with_nothing_but_its_broker_on_its_host(tmp_path: Path) -> None:
    with hosts_at(tmp_path) as hosts:
        quickstart(hosts)
        broker = hosts.broker()
        roles = (Role.WORKER, Role.TRAINER, Role.ENGINE)
        ways = {
            role: ("--connect", hosts.address, "--key", str(hosts.key(role.value, role))) for role in roles
        }
        trainer = hosts.start("trainer", *ways[Role.TRAINER], log="trainer.log")
        engine = hosts.start("engine", *ways[Role.ENGINE], "--name", "gpu7", log="engine.log")
        code = ("--code", str(hosts.code), "--name", "far")
        worker = hosts.start("worker", "sort3", *ways[Role.WORKER], *code, log="worker.log")
        wait_until(lambda: [one.name for one in engines_of(hosts.layout)] == ["inference.gpu7"], "the engine")
        (far,) = engines_of(hosts.layout)
        assert far.key == "engine"
        token = load_bundle(hosts.root / "worker.key").token
        assert [status(far.url, one) for one in ("", token, f"{token}x")] == [401, 200, 401]
        assert trainer.wait(120.0) == 0, hosts.log("trainer.log")
        end(worker)
        end(engine)
        assert engines_of(hosts.layout) == [], "an engine that has ended in order is forgotten"
        end(broker, signal.SIGTERM)
        ledger = read_ledger(hosts.layout.root)
        assert not ledger.problems
        assert ledger.counts["committed"] + ledger.counts["trained"] >= STEPS * 8
