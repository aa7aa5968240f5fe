"""The address of a broker of another host."""

from pathlib import Path

import pytest
from tests.bus.transport.listening import INSECURE

import rolloutmq
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import MissingError, UsageError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.broker.server import running_broker


@pytest.fixture
def key(tmp_path: Path) -> Path:
    save_bundle(tmp_path / "w.key", KeyDirectory.create(tmp_path / "keys").new("w", Role.WORKER))
    return tmp_path / "w.key"


@pytest.mark.parametrize("address", ["tcp://gpu-7:7760", "tcp://10.0.0.7:1", "tcp://[fe80::1%eth0]:65535"])
def test_an_address_and_a_key(key: Path, address: str) -> None:
    found = rolloutmq.remote(address, key)
    assert (found.address, found.key, str(found)) == (address, key, address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "gpu-7:7760",
        "tcp://gpu-7",
        "tcp://gpu-7:0",
        "tcp://h:65536",
        "tcp://h:1/x",
        "ipc:///x",
        "tcp://:1",
    ],
)
def test_an_address_that_is_none(key: Path, address: str) -> None:
    with pytest.raises(UsageError, match=r"^address: must be tcp://HOST:PORT, as in broker\.listen \(got '"):
        rolloutmq.remote(address, key)


def test_a_broker_that_asks_for_no_key_is_reached_without_one(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"broker": INSECURE})
    (tmp_path / "run").mkdir()
    with running_broker(config, RunLayout(tmp_path / "run")) as served:
        found = resolve_blocking(rolloutmq.remote(served.endpoints.listen[0]))
        assert (found.epoch, found.key) == (served.endpoints.epoch, "")
        assert found.publish == served.endpoints.listen[3]


def test_a_missing_key_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"none\.key is missing"):
        rolloutmq.remote("tcp://h:1", key=tmp_path / "none.key")
