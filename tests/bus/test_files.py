"""Files of a run are private, follow no link, and are forced to disk."""

import grp
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.services.process.open_descriptors import opened

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.bus.files import (
    append_whole,
    copy_private,
    decode_json,
    force,
    make_private,
    open_regular,
    private_fd,
    private_file,
    read_regular,
    require_private,
    sum_of,
    write_private,
)
from rolloutmq.schemas.errors import NotPrivateError

SOMEBODY = 1


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
def test_a_directory_in_which_only_its_user_writes_is_private(run_dir: Path, mode: int) -> None:
    (run_dir / "logs").mkdir()
    (run_dir / "config.json").touch()
    (run_dir / "link").symlink_to("config.json")
    run_dir.chmod(mode)
    require_private(run_dir)
    run_dir.chmod(0o700)


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o1777])
@pytest.mark.parametrize("inner", ["", "logs"])
def test_a_directory_in_which_others_write_is_refused(run_dir: Path, mode: int, inner: str) -> None:
    (run_dir / "logs").mkdir()
    (place := run_dir / inner).chmod(mode)
    with pytest.raises(NotPrivateError, match=rf"^{place}: other users may write .*mode {mode:04o}.*go-w"):
        require_private(run_dir)
    place.chmod(mode & ~0o022)
    require_private(run_dir)


@pytest.mark.parametrize("members", [(), ("me", "somebody")])
def test_a_group_may_write_if_it_is_of_one_user(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, members: tuple[str, ...]
) -> None:
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_name="me", pw_gid=7))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name="me", gr_gid=7, gr_mem=members))
    run_dir.chmod(0o770)
    if not members:
        require_private(run_dir)
        return
    with pytest.raises(NotPrivateError, match="other users may write"):
        require_private(run_dir)


def test_a_directory_of_another_user_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: here + SOMEBODY)
    with pytest.raises(NotPrivateError, match=rf"^{run_dir}: belongs to user {here} .*of your own"):
        require_private(run_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to somebody")
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_another_user_left_in_it_is_refused(run_dir: Path, kind: str) -> None:
    path = run_dir / "dropped.jsonl"
    match kind:
        case "file":
            path.touch()
        case "directory":
            path.mkdir()
        case _:
            path.symlink_to("/etc/passwd")
    os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    with pytest.raises(NotPrivateError, match=rf"^{path}: belongs to user {SOMEBODY} "):
        require_private(run_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to somebody")
def test_a_link_of_another_user_to_a_directory_of_ones_own_is_refused(tmp_path: Path, run_dir: Path) -> None:
    (link := tmp_path / "link").symlink_to(run_dir)
    require_private(link)
    os.chown(link, SOMEBODY, SOMEBODY, follow_symlinks=False)
    with pytest.raises(NotPrivateError, match=rf"^{link}: belongs to user {SOMEBODY} "):
        require_private(link)


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("mode", ["wb", "ab", "a+b"])
def test_a_new_file_is_for_its_user_alone(tmp_path: Path, mode: str) -> None:
    with private_file(path := tmp_path / "new", mode):
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("open_umask")
def test_a_copy_is_for_its_user_alone_and_so_is_what_a_library_wrote(tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(data := os.urandom(3_000_000))
    copy_private(source, copied := tmp_path / "copied")
    assert copied.read_bytes() == data
    assert copied.stat().st_mode & 0o777 == 0o600
    make_private(source)
    assert source.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", ["wb", "ab", "a+b", "rb+"])
@pytest.mark.parametrize("there", [True, False])
def test_no_link_is_followed(tmp_path: Path, mode: str, there: bool) -> None:
    (link := tmp_path / "link").symlink_to(victim := tmp_path / "victim")
    if there:
        victim.write_text("precious")
    before = opened()
    with (
        pytest.raises(OSError, match=r"symbolic link, which a run does not follow.*link"),
        private_file(link, mode),
    ):
        pass
    with pytest.raises(OSError, match="symbolic link"):
        write_private(link, b"")
    with pytest.raises(OSError, match="symbolic link"):
        os.close(private_fd(link, os.O_RDWR | os.O_CREAT))
    assert opened() == before
    assert victim.read_text() == "precious" if there else not victim.exists()


def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    write_private(path := tmp_path / "file", data)
    assert sum_of(path) == checksum([data])


def test_a_file_and_a_directory_are_forced_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[Path] = []

    def noted(fd: int) -> None:
        forced.append(Path(f"/proc/self/fd/{fd}").readlink())

    monkeypatch.setattr(os, "fsync", noted)
    (file := tmp_path / "file").touch()
    before = opened()
    force(file)
    force(tmp_path)
    assert forced == [file, tmp_path]
    assert opened() == before


def test_a_disk_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    before = opened()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        force(tmp_path)
    assert opened() == before
    with pytest.raises(FileNotFoundError):
        force(tmp_path / "nothing")


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    before = opened()
    for use in (read_regular, open_regular, lambda one: private_file(one, "ab")):
        with pytest.raises(OSError, match="file"):
            use(path)
    assert opened() == before


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    assert read_regular(path) == b"x" * 100_000


@pytest.mark.parametrize(
    "text", [b'{"a": "\xff"}', b"[" * 5000, b'{"b": ' + b"[" * 5000, b"9" * 5000, b"", b"[]"]
)
def test_json_that_cannot_be_read_is_one_error(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_json(text, dict[str, str])


@pytest.mark.parametrize("left", [0, 3])
def test_data_that_does_not_fit_is_not_appended(tmp_path: Path, left: int) -> None:
    path = tmp_path / "log"
    append_whole(path, b"first\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 + left, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_whole(path, b"second\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    append_whole(path, b"third\n")
    assert path.read_bytes() == b"first\nthird\n"
