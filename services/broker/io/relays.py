"""Relays of other hosts: who is heard, what it has, and tickets for one that serves further relays.

A relay tells the secret of its tickets over its connection to the broker, so a receiver needs nothing but its key. A
ticket is valid by the clock of the relay's host: the broker counts on from the time that its last heartbeat told, and
compares no clocks of two hosts. Pure, but for random numbers.
"""

from dataclasses import dataclass
from typing import Final

from rolloutmq.bus.transport.keys import ticket
from rolloutmq.schemas.network.address import host_and_port
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.joining import KEYS_SHOWN, JoinedRelay, RelayBeat, WeightsTicket
from rolloutmq.schemas.wire.replies import ErrorReply, Ok
from rolloutmq.services.broker.broker_state import refuse

GONE_S: Final = 30.0
"""Silence after which a relay is forgotten."""
TAKEN_S: Final = 10.0
"""Silence after which a relay of another host may have the name: a host that starts again has another network."""
RELAYS_LIMIT: Final = 1024
PREFIX: Final = "relay."


@dataclass(frozen=True)
class _Known:
    beat: RelayBeat
    at: float
    key: str


class Relays:
    """The relays that are heard. For one thread; times are of one steady clock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def beat(self, beat: RelayBeat, now: float, key: str) -> Ok | ErrorReply:
        """Note a heartbeat. The name belongs to its key as long as the relay is heard."""
        if not beat.name.startswith(PREFIX):
            return refuse(ErrorCode.INVALID, f"name: must be relay.NAME (got {beat.name!r})")
        if beat.serves and (host_and_port(beat.serves) is None or not beat.secret):
            return refuse(
                ErrorCode.INVALID, f"serves: must be tcp://HOST:PORT with a secret (got {beat.serves!r})"
            )
        known = self._known.get(beat.name)
        if known is not None and key and known.key not in {"", key}:
            return refuse(
                ErrorCode.FORBIDDEN,
                f"name: belongs to another key (got {beat.name} with key {key}); wait {GONE_S:.0f} seconds if "
                "this key replaces that one, else use another name",
            )
        if known is not None and _is_elsewhere(known.beat, beat) and now - known.at <= TAKEN_S:
            return refuse(
                ErrorCode.FORBIDDEN,
                f"name: a relay of another host called {known.beat.host} has it (got {beat.name} of host {beat.host}); "
                "give each relay a --name of its own",
            )
        if beat.ends:
            self._known.pop(beat.name, None)
            return Ok()
        if known is None and len(self._known) >= RELAYS_LIMIT:
            return refuse(ErrorCode.LIMIT, f"name: {RELAYS_LIMIT} relays of other hosts are known, the limit")
        self._known[beat.name] = _Known(beat, now, key)
        return Ok()

    def sweep(self, now: float) -> None:
        """Forget relays that have been silent for long."""
        for name, known in list(self._known.items()):
            if now - known.at > GONE_S:
                del self._known[name]

    def ticket(self, name: str, now: float, key: str) -> WeightsTicket | ErrorReply:
        """Return a ticket of a relay for a key, or why there is none."""
        known = self._known.get(name)
        if known is None:
            names = ", ".join(sorted(one for one, at in self._known.items() if at.beat.serves)) or "none"
            return refuse(
                ErrorCode.UNKNOWN, f"relay: no relay {name} is heard (those that serve others: {names})"
            )
        if circle := self._circle(name):
            return refuse(
                ErrorCode.INVALID,
                f"relay: {' and '.join(circle)} get the weights from each other, and none from the run; start one of "
                "them without --behind",
            )
        beat = known.beat
        parts = host_and_port(beat.serves)
        if parts is None:
            return refuse(
                ErrorCode.UNKNOWN, f"relay: {name} serves no others; start it with --listen tcp://HOST:PORT"
            )
        made = ticket.issue(beat.secret, key or "without a key", beat.at + max(0.0, now - known.at))
        return WeightsTicket(port=parts[1], host=parts[0], shown=made.shown, key=made.key, sealed=beat.sealed)

    def _circle(self, name: str) -> list[str]:
        """Return the relays of the circle that a relay is part of, or gets the weights from; empty if there is none."""
        chain = [name]
        while (known := self._known.get(chain[-1])) is not None and known.beat.behind:
            if known.beat.behind in chain:
                return chain[chain.index(known.beat.behind) :]
            chain.append(known.beat.behind)
        return []

    def report(self, now: float) -> tuple[JoinedRelay, ...]:
        """Return the relays, by name."""
        return tuple(
            JoinedRelay(
                name=name,
                host=known.beat.host,
                key=known.key,
                silent_s=max(0.0, now - known.at),
                version=known.beat.version,
                waits_for=known.beat.waits_for,
                serves=known.beat.serves,
            )
            for name, known in sorted(self._known.items())[:KEYS_SHOWN]
        )


def _is_elsewhere(known: RelayBeat, beat: RelayBeat) -> bool:
    return (known.host, known.network) != (beat.host, beat.network)
