"""The key file of a client, and what is refused as one."""

from pathlib import Path

import pytest

from rolloutmq.bus.transport.keys.bundle import curve_keys, load_bundle, load_keys, save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.errors import ConfigError, MissingError, NotPrivateError
from rolloutmq.schemas.network.keys import Bundle, Role


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return KeyDirectory.create(tmp_path / "keys").new("w-1", Role.WORKER, ca="-----BEGIN CERTIFICATE-----\n")


def test_a_file_has_all_that_a_client_needs(bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "w.key"
    save_bundle(file, bundle)
    assert file.stat().st_mode & 0o777 == 0o600
    assert load_bundle(file) == bundle
    keys = load_keys(file)
    assert keys == curve_keys(bundle)
    assert bundle.secret not in repr(keys)


def test_a_file_is_not_written_over(bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "w.key"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"exists, and is not written over; name another file with --out"):
        save_bundle(file, bundle)
    assert file.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["w.key"]


def test_a_file_of_others_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "w.key"
    save_bundle(file, bundle)
    file.chmod(0o644)
    with pytest.raises(NotPrivateError, match=r"mode 0644\); close it to them, chmod go= "):
        load_bundle(file)


def test_what_is_no_key_file(tmp_path: Path) -> None:
    file = tmp_path / "w.key"
    with pytest.raises(MissingError, match=r"w\.key is missing: get a key file of `rolloutmq keys new`"):
        load_bundle(file)
    file.touch(0o600)
    file.write_text('{"name": "w"}')
    with pytest.raises(ConfigError, match=r"w\.key: is damaged, or no key file"):
        load_bundle(file)


def test_a_file_that_an_editor_has_saved_is_read_or_its_encoding_is_named(
    bundle: Bundle, tmp_path: Path
) -> None:
    """It was damaged, or no key file, at byte 0."""
    file = tmp_path / "w.key"
    save_bundle(file, bundle)
    text = file.read_text()
    file.write_text(text, encoding="utf-8-sig")
    assert load_bundle(file) == bundle
    file.write_text(text, encoding="utf-16")
    with pytest.raises(ConfigError, match=r"w\.key: is UTF-16, as some editors save it; save it as UTF-8"):
        load_bundle(file)
