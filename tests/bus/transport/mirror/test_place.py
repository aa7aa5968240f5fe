"""Directories of this host for runs of others, and URLs as this host can use them."""

import stat
from pathlib import Path

import pytest

from rolloutmq.bus.transport.mirror.place import directory_of, usable_url
from rolloutmq.schemas.errors import UnusablePathError


@pytest.mark.parametrize(
    ("told", "address", "url"),
    [
        ("http://10.0.0.7:8000", "tcp://h:1", "http://10.0.0.7:8000"),
        ("http://0.0.0.0:8000", "tcp://head.cluster:1", "http://head.cluster:8000"),
        ("http://[::]:8000/v1", "tcp://[fd00::1]:1", "http://[fd00::1]:8000/v1"),
        ("https://engine-1:8000", "tcp://h:1", "https://engine-1:8000"),
        ("file:///etc/passwd", "tcp://h:1", ""),
        ("http://user:word@host:1", "tcp://h:1", ""),
        ("http://host:1/x?y=z", "tcp://h:1", ""),
        ("http://host:1\r\nX: y", "tcp://h:1", ""),
        ("unix:/x", "tcp://h:1", ""),
        ("", "tcp://h:1", ""),
    ],
)
def test_urls_are_checked_and_placed(told: str, address: str, url: str) -> None:
    assert usable_url(told, address) == url


def test_the_directory_is_private_and_named_by_run_and_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = directory_of("sums", "tcp://[fd00::1]:7760")
    assert found.is_relative_to(tmp_path / "state" / "rolloutmq")
    assert found.name == "sums@_fd00_1_7760"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert directory_of("sums", "tcp://[fd00::1]:7760") == found
    assert directory_of("other", "tcp://[fd00::1]:7760") != found


def test_a_given_directory_is_taken_and_closed_to_others(tmp_path: Path) -> None:
    given = tmp_path / "a" / "b"
    assert directory_of("sums", "tcp://h:1", given) == given
    assert stat.S_IMODE(given.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(UnusablePathError):
        directory_of("sums", "tcp://h:1", tmp_path / "file")


def test_without_a_home_the_temporary_directory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert directory_of("sums", "tcp://h:1").parent.parent == tmp_path
