"""Addresses: private, short enough, claimed by one broker at a time."""

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest

from rolloutmq.bus.transport import bindings
from rolloutmq.schemas.errors import AddressInUseError
from rolloutmq.schemas.files import RunLayout


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_sockets_lie_in_a_private_directory_and_are_removed(layout: RunLayout) -> None:
    with bindings.bindings(layout) as addresses:
        paths = [Path(addresses[name].removeprefix("ipc://")) for name in bindings.SOCKETS]
        assert {path.parent for path in paths} == {layout.sockets.resolve()}
        assert _mode(layout.sockets) == 0o700
        for path in paths:
            path.touch()
    assert list(layout.sockets.iterdir()) == []


def test_long_run_directory_gets_a_short_place_of_its_own(run_dir: Path) -> None:
    layout = RunLayout(run_dir / ("x" * 100))
    with bindings.bindings(layout) as addresses:
        directory = Path(addresses["serve"].removeprefix("ipc://")).parent
        assert directory.parent == Path(tempfile.gettempdir())
        assert _mode(directory) == 0o700
        for address in addresses.values():
            assert len(address.removeprefix("ipc://").encode()) <= bindings.IPC_PATH_LIMIT_BYTES
    assert not directory.exists()


def test_wide_open_directory_is_closed_first(layout: RunLayout) -> None:
    layout.sockets.mkdir()
    layout.sockets.chmod(0o777)
    with bindings.claim(layout):
        assert _mode(layout.sockets) == 0o700


def test_link_is_no_private_directory(layout: RunLayout, tmp_path: Path) -> None:
    layout.sockets.symlink_to(tmp_path)
    with pytest.raises(AddressInUseError, match="no directory"), bindings.claim(layout):
        pass


def test_second_broker_is_told_who_holds_the_sockets(layout: RunLayout) -> None:
    with (
        bindings.claim(layout),
        pytest.raises(AddressInUseError, match=f"process {os.getpid()}"),
        bindings.claim(layout),
    ):
        pass
    with bindings.claim(layout):
        pass


def test_only_the_broker_of_a_launcher_is_stopped_by_down(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remedy() -> str:
        with pytest.raises(AddressInUseError) as caught, bindings.claim(layout):
            pass
        return caught.value.remedy

    with bindings.claim(layout):
        assert remedy().startswith("stop that broker in this process, a LocalBroker with its `stop()`, or ")
        with monkeypatch.context() as patch:
            pid = os.getpid()
            patch.setattr("os.getpid", lambda: pid + 1)
            assert remedy().startswith(f"end that broker, which was started by hand, with `kill {pid}`, or ")
        layout.owner.write_text("{}")
        assert remedy().startswith(f"stop that run with `rolloutmq down {layout.root}`, or ")


@pytest.mark.parametrize("deleted", ["sockets/lock", "sockets"])
def test_deleting_the_lock_makes_no_way_for_a_second_broker(layout: RunLayout, deleted: str) -> None:
    layout.journal.mkdir()
    aside = layout.root.with_name("aside")
    with bindings.claim(layout):
        (layout.root / deleted).rename(aside)
        with (
            pytest.raises(
                AddressInUseError, match=rf"stop that run with `rolloutmq down {layout.root}`, or choose"
            ),
            bindings.claim(layout),
        ):
            pass
        elsewhere = RunLayout(layout.root.with_name("elsewhere"))
        elsewhere.root.mkdir()
        elsewhere.journal.symlink_to(layout.journal)
        with pytest.raises(AddressInUseError, match="in use by another broker"), bindings.claim(elsewhere):
            pass
    with bindings.claim(layout), pytest.raises(AddressInUseError), bindings.claim(elsewhere):
        pass


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK])
def test_a_file_system_that_locks_no_directory_will_do(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    flock = fcntl.flock

    def refuse_directories(fd: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        flock(fd, operation)

    monkeypatch.setattr("fcntl.flock", refuse_directories)
    with bindings.claim(layout), pytest.raises(AddressInUseError), bindings.claim(layout):
        pass


def test_epochs_grow_even_if_the_clock_goes_back(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = []
    for wall_ns in (5_000, 4_000, 6_000):
        monkeypatch.setattr("time.time_ns", lambda wall_ns=wall_ns: wall_ns)
        with bindings.claim(layout) as epoch:
            epochs.append(epoch)
    assert epochs == [5_000, 5_001, 6_000]


def test_ports_follow_each_other() -> None:
    wanted = bindings.listen_addresses("tcp://0.0.0.0:7760")
    assert wanted == [
        ("serve", ["tcp://0.0.0.0:7760"]),
        ("ingest", ["tcp://0.0.0.0:7761"]),
        ("events", ["tcp://0.0.0.0:7762"]),
        ("publish", ["tcp://0.0.0.0:7763"]),
    ]


def test_ports_of_a_killed_broker_are_tried_first() -> None:
    before = [f"tcp://[::1]:{port}" for port in (9, 7, 5, 3)]
    wanted = bindings.listen_addresses("tcp://[::1]:0", before)
    assert wanted[1] == ("ingest", ["tcp://[::1]:7", "tcp://[::1]:*"])
    assert bindings.listen_addresses("tcp://[::1]:0")[1] == ("ingest", ["tcp://[::1]:*"])


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("gpu-7", "http://gpu-7:80"),
    ],
)
def test_a_server_that_is_bound_to_all_addresses_is_reached_at_one(host: str, url: str) -> None:
    assert bindings.http_url(host, 80) == url


@pytest.mark.parametrize("epoch", ["-5", "4611686018427387904", "9" * 60, "1e999", '"x"'])
def test_an_epoch_that_no_broker_had_is_damage(layout: RunLayout, epoch: str) -> None:
    """Epochs go into messages as 64 bits, and each one is larger than the last."""
    with bindings.claim(layout) as first:
        pass
    (layout.sockets / "lock").write_bytes(f'{{"pid":1,"epoch":{epoch}}}'.ljust(128).encode())
    with bindings.claim(layout) as second:
        assert first < second < 1 << 62
