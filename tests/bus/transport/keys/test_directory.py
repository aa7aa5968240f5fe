"""The key directory: private, one name once, and what a revocation leaves."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from rolloutmq.bus.transport.keys.directory import KeyDirectory, hash_of_token
from rolloutmq.schemas.errors import ConfigError, MissingError, NotPrivateError, UnusablePathError
from rolloutmq.schemas.network.keys import KeyList, Role


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    return KeyDirectory.create(tmp_path / "keys")


def test_files_are_for_their_user_alone_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys = KeyDirectory.create(tmp_path / "keys")
        keys.new("w", Role.WORKER)
    finally:
        os.umask(before)
    assert keys.path.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in keys.path.iterdir()} == {
        "server.key": 0o600,
        "authorized.json": 0o600,
    }


def test_the_directory_has_no_secret_of_a_client(keys: KeyDirectory) -> None:
    bundle = keys.new("w-1", Role.WORKER)
    (record,) = keys.records()
    assert (record.name, record.role, record.public, record.revoked) == (
        "w-1",
        Role.WORKER,
        bundle.public,
        None,
    )
    assert record.token == hash_of_token(bundle.token)
    assert bundle.server == keys.server().public
    kept = b"".join(path.read_bytes() for path in keys.path.iterdir())
    assert bundle.secret.encode() not in kept
    assert bundle.token.encode() not in kept


def test_secrets_are_in_no_text(keys: KeyDirectory) -> None:
    bundle, server = keys.new("w-1", Role.WORKER), keys.server()
    assert bundle.secret not in repr(bundle)
    assert bundle.token not in repr(bundle)
    assert server.secret not in repr(server)


def test_it_is_made_once(keys: KeyDirectory) -> None:
    before = keys.server()
    with pytest.raises(
        ConfigError, match=r"has keys already; make one for a client with `rolloutmq keys new "
    ):
        KeyDirectory.create(keys.path)
    assert keys.server() == before


def test_a_name_is_given_once(keys: KeyDirectory) -> None:
    keys.new("w-1", Role.WORKER)
    with pytest.raises(
        ConfigError, match=r"^name: a key of this name is in use.*\(got w-1\); choose another"
    ):
        keys.new("w-1", Role.ADMIN)
    keys.revoke("w-1")
    with pytest.raises(ConfigError, match=r"^name: a key of this name was revoked"):
        keys.new("w-1", Role.ADMIN)
    assert [key.role for key in keys.records()] == [Role.WORKER]


@pytest.mark.parametrize("name", ["", "../w", "w/1", "-w", "w" * 65, "w\n"])
def test_a_name_that_is_none(keys: KeyDirectory, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name: must be 1 to 64 letters"):
        keys.new(name, Role.WORKER)
    assert keys.records() == ()


def test_a_revocation_is_kept_and_may_be_repeated(keys: KeyDirectory) -> None:
    keys.new("w-1", Role.WORKER)
    keys.new("w-2", Role.WORKER)
    first = keys.revoke("w-1")
    assert first.revoked is not None
    assert keys.revoke("w-1") == first
    assert [(key.name, key.revoked) for key in keys.records()] == [("w-1", first.revoked), ("w-2", None)]
    with pytest.raises(ConfigError, match=r"there is no key of this name \(got x; keys: w-1, w-2\)"):
        keys.revoke("x")


def test_commands_at_the_same_time_lose_no_key(keys: KeyDirectory) -> None:
    with ThreadPoolExecutor(4) as pool:
        bundles = list(pool.map(lambda number: keys.new(f"w-{number}", Role.WORKER), range(12)))
    assert {key.public for key in keys.records()} == {bundle.public for bundle in bundles}


def test_a_missing_directory_says_how_to_make_it(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "file" / "keys"):
        (tmp_path / "file").touch()
        with pytest.raises(
            MissingError, match=rf"{path} is missing: make keys with `rolloutmq keys init {path}`"
        ):
            KeyDirectory(path).server()


@pytest.mark.parametrize("name", ["", "server.key", "authorized.json"])
@pytest.mark.parametrize("mode", [0o004, 0o040, 0o020])
def test_what_others_may_read_is_refused(keys: KeyDirectory, name: str, mode: int) -> None:
    path = keys.path / name
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(NotPrivateError, match=r"other users may use it, and it holds a secret \(mode 0"):
        (keys.records if name == "authorized.json" else keys.server)()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"keys": [{"name": "x"}]}', b"\xff" * 20, b"[" * 100_000]
)
def test_damage_is_named(keys: KeyDirectory, damage: bytes) -> None:
    keys.authorized.write_bytes(damage)
    with pytest.raises(ConfigError, match=r"authorized\.json: is damaged, or no key file"):
        keys.records()
    with pytest.raises(ConfigError, match=r"authorized\.json: is damaged"):
        keys.new("w", Role.WORKER)
    assert keys.authorized.read_bytes() == damage


def test_one_name_for_two_keys_is_damage(keys: KeyDirectory) -> None:
    keys.new("w-1", Role.WORKER)
    keys.new("w-2", Role.ADMIN)
    first, second = keys.records()
    for twice in (
        (first, msgspec.structs.replace(second, name="w-1")),
        (first, msgspec.structs.replace(second, public=first.public)),
    ):
        keys.authorized.write_bytes(msgspec.json.encode(KeyList(keys=twice)))
        with pytest.raises(ConfigError, match="has a name or a public key twice"):
            keys.records()


def test_a_pipe_is_not_waited_for(keys: KeyDirectory) -> None:
    keys.authorized.unlink()
    os.mkfifo(keys.authorized, 0o600)
    with pytest.raises(UnusablePathError, match="not a regular file"):
        keys.records()
