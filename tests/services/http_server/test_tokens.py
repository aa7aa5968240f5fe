"""Whose a token is: that of the run, or of a key of the list, by its hash alone."""

from pathlib import Path

import pytest

from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.keys.watched_file import WatchedFile
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.http_server import tokens
from rolloutmq.services.http_server.tokens import OWN, Holder, Listed, TokenStore

TOKEN = "0123456789abcdef"
RUN = Holder(OWN, Role.ADMIN)


def watched(keys: KeyDirectory) -> WatchedFile[tuple[Listed, ...]]:
    return WatchedFile[tuple[Listed, ...]](keys.authorized, keys.records)


def test_without_tokens_a_store_is_open() -> None:
    assert TokenStore().is_open
    assert TokenStore().holder("") is None
    assert not TokenStore({TOKEN: RUN}).is_open


def test_a_list_without_a_key_opens_nothing(tmp_path: Path) -> None:
    store = TokenStore(listed=watched(KeyDirectory.create(tmp_path / "keys")))
    assert not store.is_open
    assert store.holder("") is None


@pytest.mark.parametrize("token", ["", TOKEN[:-1], f"{TOKEN}0", "\u00e9", "\udcff", TOKEN.upper()])
def test_any_other_token_is_nobodys(tmp_path: Path, token: str) -> None:
    keys = KeyDirectory.create(tmp_path / "keys")
    keys.new("w", Role.WORKER)
    store = TokenStore({TOKEN: RUN}, watched(keys))
    assert store.holder(TOKEN) == RUN
    assert store.holder(token) is None


def test_keys_are_found_by_token_and_by_name(tmp_path: Path) -> None:
    now = [0.0]
    keys = KeyDirectory.create(tmp_path / "keys")
    bundles = [keys.new(f"w-{number}", Role.WORKER) for number in range(20)]
    store = TokenStore({TOKEN: RUN}, watched(keys), lambda: now[0])
    for bundle in bundles:
        assert store.holder(bundle.token) == store.named(bundle.name) == Holder(bundle.name, Role.WORKER)
    assert store.named(OWN) is None
    keys.revoke("w-3")
    now[0] = 1.0
    assert store.holder(bundles[3].token) == store.named("w-3") == Holder("w-3", Role.WORKER, is_revoked=True)


def test_the_whole_hash_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TokenStore({TOKEN: RUN})
    start = tokens._hash(TOKEN)[:16]
    monkeypatch.setattr(tokens, "_hash", lambda _: start + "0" * 48)
    assert store.holder("another token with the same start") is None


def test_a_damaged_list_leaves_the_tokens_of_before(tmp_path: Path) -> None:
    now = [0.0]
    keys = KeyDirectory.create(tmp_path / "keys")
    token = keys.new("w", Role.WORKER).token
    store = TokenStore(listed=watched(keys), clock=lambda: now[0])
    keys.authorized.write_bytes(b"{")
    now[0] = 1.0
    assert store.holder(token) == Holder("w", Role.WORKER)
