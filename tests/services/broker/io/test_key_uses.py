"""Use of keys: what is told of each, and what is forgotten."""

import pytest

from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.joining import HOSTS_SHOWN, KEYS_SHOWN
from rolloutmq.services.broker.io import key_uses
from rolloutmq.services.broker.io.key_uses import OTHER, REASONS_LIMIT, KeyUses


def test_the_key_that_was_heard_last_comes_first() -> None:
    uses = KeyUses()
    uses.heard("w", 1.0)
    uses.heard("e", 2.0)
    uses.heard("w", 4.0)
    first, second = uses.report({"w": Role.WORKER}, {"w": {"10.0.0.7"}}, 5.0)
    assert (first.name, first.role, first.hosts, first.silent_s) == ("w", "worker", ("10.0.0.7",), 1.0)
    assert (second.name, second.role, second.hosts) == ("e", "", ()), "a revoked key has no role any more"


def test_refusals_are_counted_by_reason_and_bounded() -> None:
    uses = KeyUses()
    uses.refused("w", "drain workers", 1.0)
    uses.refused("w", "drain workers", 1.0)
    for number in range(2 * REASONS_LIMIT):
        uses.refused("w", f"reason {number}", 2.0)
    (use,) = uses.report({}, {}, 2.0)
    assert use.refused["drain workers"] == 2
    assert len(use.refused) == REASONS_LIMIT + 1
    assert sum(use.refused.values()) == 2 + 2 * REASONS_LIMIT
    assert use.refused[OTHER] == REASONS_LIMIT + 1


def test_keys_and_hosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_uses, "KEYS_LIMIT", KEYS_SHOWN + 8)
    uses = KeyUses()
    uses.refused("first", "x", -1.0)
    for number in range(KEYS_SHOWN + 100):
        uses.heard(f"k{number}", float(number))
    told = uses.report({}, {f"k{KEYS_SHOWN + 99}": {f"10.0.0.{n}" for n in range(50)}}, 1000.0)
    assert len(told) == KEYS_SHOWN
    assert told[0].name == f"k{KEYS_SHOWN + 99}"
    assert len(told[0].hosts) == HOSTS_SHOWN
    uses.heard("first", 2000.0)
    assert uses.report({}, {}, 2000.0)[0].refused == {}, "what was forgotten is forgotten whole"
