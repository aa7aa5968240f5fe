"""Use of keys: when each was heard last, and what the broker refused it. For the status.

Both are bounded: a key that is given up long ago makes room for a new one, and the reasons of one key are those of a
table. Pure; the caller passes times of one steady clock.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.joining import HOSTS_SHOWN, KEYS_SHOWN, KeyUse

KEYS_LIMIT: Final = 4096
"""Most remembered keys; the one that was heard longest ago is forgotten first."""
REASONS_LIMIT: Final = 16
"""Most reasons of one key; further ones count as `OTHER`."""
OTHER: Final = "other requests"


class KeyUses:
    """Every key that was heard since the start of the broker. For one thread."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._refused: dict[str, Counter[str]] = {}

    def heard(self, key: str, now: float) -> None:
        """Note a message of a key."""
        if key not in self._heard and len(self._heard) >= KEYS_LIMIT:
            oldest = min(self._heard, key=self._heard.__getitem__)
            del self._heard[oldest]
            self._refused.pop(oldest, None)
        self._heard[key] = now

    def refused(self, key: str, what: str, now: float) -> None:
        """Note that a message of a key was refused."""
        self.heard(key, now)
        counts = self._refused.setdefault(key, Counter())
        counts[what if what in counts or len(counts) < REASONS_LIMIT else OTHER] += 1

    def report(
        self, roles: Mapping[str, Role], hosts: Mapping[str, Iterable[str]], now: float
    ) -> tuple[KeyUse, ...]:
        """Return the keys that were heard last, the newest first.

        Args:
            roles: Role of each key that may enter.
            hosts: Hosts from which each key has entered.
            now: Present time.
        """
        newest = sorted(self._heard.items(), key=lambda item: (-item[1], item[0]))[:KEYS_SHOWN]
        return tuple(
            KeyUse(
                name=key,
                role=roles[key].value if key in roles else "",
                hosts=tuple(sorted(hosts.get(key, ()))[:HOSTS_SHOWN]),
                silent_s=max(0.0, now - at),
                refused=dict(self._refused.get(key, {})),
            )
            for key, at in newest
        )
