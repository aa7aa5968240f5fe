"""Other hosts as lines of a label and a text, for status, `top` and the page. Pure."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rolloutmq.schemas.printable import printable
from rolloutmq.schemas.wire.control import WorkerStatus
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.joining import JoinedEngine, JoinedRelay, KeyUse, NetworkStatus

ENGINE_AWAY: Final = "engine_away"
"""A worker does not reach an engine; without any in its reach it starts no rollout, and holds no permit."""
SHOWN: Final = 8
"""Most lines of one kind."""
SILENT_S: Final = 5.0
"""Silence of a process of another host from which it is unwell."""


class NetworkLine(NamedTuple):
    """One line. `is_unwell`: a person should look."""

    label: str
    text: str
    is_unwell: bool = False


def lines(
    network: NetworkStatus | None, workers: Iterable[WorkerStatus] = (), placed: Container[str] = ()
) -> list[NetworkLine]:
    """Return what is known of other hosts, nothing without a listener.

    Args:
        network: What the broker told.
        workers: The workers of the run.
        placed: Those that a cluster runs for the orchestrator: they have not joined by themselves.
    """
    if network is None:
        return []
    unreached = unreachable(workers := list(workers))
    return [
        _listener(network),
        *_first([_key(one) for one in _relevant(network.keys)], "keys"),
        *_first(
            [*_workers(network, (one for one in workers if one.worker not in placed))], "hosts with workers"
        ),
        *_first(
            [_engine(one, network.version, unreached, one.name in placed) for one in network.engines],
            "engines",
        ),
        *_first([_relay(one, network.version) for one in network.relays], "relays"),
    ]


def unreachable(workers: Iterable[WorkerStatus]) -> dict[str, str]:
    """Return the engines that workers do not reach, by name, with the number of those workers and a reason."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for worker in workers:
        if worker.state != "gone" and not worker.is_silent:
            for engine, why in worker.engines_away.items():
                found[engine].append(f"worker {worker.worker}: {why}")
    return {
        engine: printable(f"unreachable from {len(told)} worker{'s' * (len(told) > 1)}: {told[0]}")
        for engine, told in sorted(found.items())
    }


def engine_trouble(network: NetworkStatus | None, workers: Iterable[WorkerStatus] = ()) -> str:
    """Return which engines are out of a worker's reach, and which of other hosts lag or do not answer; empty if none.

    Args:
        network: What the broker told of other hosts.
        workers: The workers of the run.
    """
    found = [f"{ENGINE_AWAY}, engine {name} is {text}" for name, text in unreachable(workers).items()]
    found += [] if network is None else filter(None, (_trouble(one, network) for one in network.engines))
    if not found:
        return ""
    more = len(found) - 1
    return f"{found[0]}; {more} other engine{'s' * (more > 1)} too" if more else found[0]


def _trouble(engine: JoinedEngine, network: NetworkStatus) -> str:
    if engine.silent_s > SILENT_S:
        return f"engine {engine.name} has not been heard for {engine.silent_s:.0f} s"
    if not _is_stuck(engine, network.version):
        return ""
    lag = f"engine {engine.name} has {_lag(engine.version, network.version)}, for {engine.unchanged_s:.0f} s"
    near = [one for one in network.relays if one.host == engine.host]
    silent = next((one for one in near if one.silent_s > SILENT_S), None)
    waiting = next((one for one in near if one.waits_for), None)
    if silent is not None:
        return f"{lag}: {silent.name} has not been heard for {silent.silent_s:.0f} s"
    return (
        f"{lag}: {waiting.name} waits, {waiting.waits_for}" if waiting else f"{lag}: its relay may be stuck"
    )


def _is_stuck(engine: JoinedEngine, newest: PolicyVersion) -> bool:
    return engine.version is not None and engine.version < newest and engine.unchanged_s > SILENT_S


def _first(found: Sequence[NetworkLine], what: str) -> list[NetworkLine]:
    more = len(found) - SHOWN
    return [*found] if more <= 0 else [*found[:SHOWN], NetworkLine(found[0].label, f"and {more} more {what}")]


def _relevant(keys: Sequence[KeyUse]) -> list[KeyUse]:
    """Return the keys, those with refusals first."""
    return sorted(keys, key=lambda one: -sum(one.refused.values()))


def _listener(network: NetworkStatus) -> NetworkLine:
    if network.insecure:
        return NetworkLine("listen", f"{network.listen} insecure: asks for no key", True)
    text = f"{network.listen}, keys in use: {len(network.keys)} of {network.known_keys}"
    if network.keys_problem:
        text += f"; the list of keys is not read, and that of before counts: {network.keys_problem}"
    return NetworkLine("listen", text, bool(network.keys_problem))


def _key(key: KeyUse) -> NetworkLine:
    role = f"role {key.role}" if key.role else "revoked"
    hosts = f" from {', '.join(key.hosts)}" if key.hosts else ""
    refused = ", ".join(f"{what} {count}" for what, count in sorted(key.refused.items(), key=_by_count))
    text = f"{key.name}, {role}{hosts}, heard {_ago(key.silent_s)}"
    return NetworkLine("key", f"{text}; refused: {refused}" if refused else text, bool(refused))


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def _workers(network: NetworkStatus, workers: Iterable[WorkerStatus]) -> Iterator[NetworkLine]:
    """Yield a line for the workers of each host and key."""
    groups: defaultdict[tuple[str, str], list[WorkerStatus]] = defaultdict(list)
    for one in workers:
        if one.joined and one.state != "gone":
            groups[one.host, network.workers.get(one.worker, "")].append(one)
    for (host, key), found in sorted(groups.items()):
        silent = sum(one.is_silent for one in found)
        names = ", ".join(one.worker for one in found[:3]) + (", ..." if len(found) > 3 else "")
        count = f"{len(found)} worker{'s' if len(found) > 1 else ''}"
        lost = f"; {silent} silent" if silent else ""
        yield NetworkLine("joined", f"{count} on {_place(host, key)}: {names}{lost}", bool(silent))


def _engine(
    engine: JoinedEngine, newest: PolicyVersion, unreached: Mapping[str, str], is_placed: bool
) -> NetworkLine:
    text = f"{engine.name} on {_place(engine.host, engine.key)}, heard {_ago(engine.silent_s)}"
    is_stuck = _is_stuck(engine, newest)
    if engine.version is not None:
        text += f", {_lag(engine.version, newest)}"
        text += f", unchanged for {engine.unchanged_s:.0f} s; its relay may be stuck" if is_stuck else ""
    if engine.name in unreached:
        text += f"; {unreached[engine.name]}"
    label = "placed" if is_placed else "joined"
    return NetworkLine(label, text, engine.silent_s > SILENT_S or is_stuck or engine.name in unreached)


def _relay(relay: JoinedRelay, newest: PolicyVersion) -> NetworkLine:
    text = f"{relay.name} on {_place(relay.host, relay.key)}: {_lag(relay.version, newest)}"
    if relay.serves:
        text += f", serves {relay.serves}"
    if relay.waits_for:
        text += f"; waits: {relay.waits_for}"
    if relay.silent_s > SILENT_S:
        text += f"; silent for {relay.silent_s:.0f} s"
    return NetworkLine("relay", text, bool(relay.waits_for) or relay.silent_s > SILENT_S)


def _lag(version: PolicyVersion | None, newest: PolicyVersion) -> str:
    if version is None:
        return "no version yet"
    name = f"version {version.incarnation}.{version.step}"
    if version.incarnation < newest.incarnation:
        return f"{name}, of an earlier trainer"
    behind = newest.step - version.step
    if version.incarnation > newest.incarnation or behind <= 0:
        return f"{name}, the newest"
    return f"{name}, {behind} step{'s' if behind > 1 else ''} behind"


def _place(host: str, key: str) -> str:
    return f"{host or 'an unnamed host'}, {f'key {key}' if key else 'without a key'}"


def _ago(seconds: float) -> str:
    return "now" if seconds < SILENT_S else f"{seconds:.0f} s ago"
