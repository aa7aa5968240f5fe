"""The address of a broker of another host."""

from pathlib import Path

import pytest

import rolloutmq
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.errors import MissingError, UsageError
from rolloutmq.schemas.network.keys import Role


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


def test_a_missing_key_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"none\.key is missing"):
        rolloutmq.remote("tcp://h:1", key=tmp_path / "none.key")
