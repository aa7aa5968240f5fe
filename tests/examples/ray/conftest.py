"""A Ray cluster of several nodes on this machine, and a broker with keys that its actors reach by TCP."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.house import shared_memory

from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.remote import Remote, remote
from rolloutmq.schemas.network.keys import Role
from rolloutmq.testing import LocalBroker

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[3]
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
TRIES = 4
ENVIRON = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def cluster() -> Iterator["Cluster"]:
    """Three nodes, and this process as their driver."""
    ray = pytest.importorskip("ray", reason="needs Ray: make .venv-ray/.installed")
    from ray.cluster_utils import Cluster

    before, environ = shared_memory.children(), dict(os.environ)
    os.environ.update(ENVIRON)
    made = Cluster()
    try:
        for _ in range(3):
            add_node(made)
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        os.environ.clear()
        os.environ.update(environ)
        for left in shared_memory.children() - before:  # of a node that did not start
            os.kill(left, signal.SIGKILL)


def add_node(cluster: "Cluster") -> Any:
    """Add a node; on a loaded machine it may miss the 30 s that Ray gives it, and is tried again."""
    for left in reversed(range(TRIES)):
        try:
            return cluster.add_node(**NODE)
        except Exception:
            if not left:
                raise
    raise AssertionError


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Ray's driver keeps threads and sockets from its first use on; `cluster` looks for processes at its end."""


class KeyedBroker(LocalBroker):
    """A broker whose clients come by TCP with a key each, as from other hosts."""

    def __init__(self, root: Path, *settings: str) -> None:
        self._keys = KeyDirectory.create(root / "keys")
        self._root = root
        super().__init__(
            "broker.listen=tcp://127.0.0.1:0",
            f"broker.keys={root / 'keys'}",
            "broker.durability=os",
            f"broker.segment_bytes={1 << 24}",
            *settings,
            run_dir=root / "run",
        )

    def way(self, name: str, role: Role) -> Remote:
        """Return the way of a client with a new key."""
        file = self._root / f"{name}.key"
        save_bundle(file, self._keys.new(name, role))
        found = read_endpoints(self.run_dir)
        assert found is not None
        return remote(found.listen[0], file)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KeyedBroker]:
    """A running broker with keys. It knows the batch before the trainer comes, so nothing gets stale until then."""
    with KeyedBroker(tmp_path, "trainer.batch_sequences=4", "trainer.steps=12") as running:
        yield running
