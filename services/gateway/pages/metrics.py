"""`/metrics`: state of the run in Prometheus' text format (version 0.0.4). Pure."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from rolloutmq.schemas.wire.control import LaneStatus, StatusReply

if TYPE_CHECKING:
    from rolloutmq.services.gateway.service import Gateway

PREFIX: Final = "rolloutmq_"
Labels = tuple[tuple[str, str], ...]
Samples = Iterable[tuple[Labels, float]]


def exposition(gateway: "Gateway", status: StatusReply | None) -> str:
    """Return the page; without a broker, only the gateway's own values."""
    step = gateway.step(status)
    lines = [
        *_metric("up", "gauge", "1 while the broker replies.", [((), float(gateway.watch.answers))]),
        *_metric("step", "counter", "Batches delivered, counted from the starting step.", _if_known(step)),
        *_metric(
            "gateway_groups", "counter", "Groups accepted by this gateway.", [((), gateway.posted_groups)]
        ),
        *_metric("environments", "gauge", "Connected environments.", [((), len(gateway.registry.here()))]),
    ]
    if status is not None:
        lines += _of_broker(status)
    return "\n".join(lines) + "\n"


def _of_broker(status: StatusReply) -> Iterator[str]:
    pressure = status.pressure
    yield from _metric("rollout_pressure", "gauge", "Queued batches.", [((), pressure.rollout_pressure)])
    yield from _metric("held_bytes", "gauge", "Queued bytes.", [((), pressure.queued_bytes)])
    yield from _metric("leased_bytes", "gauge", "Leased bytes.", [((), pressure.leased_bytes)])
    yield from _metric("high_bytes", "gauge", "Global high-water mark in bytes.", [((), pressure.high_bytes)])
    ledger = [
        (((("state", name)),), float(getattr(pressure.ledger, name)))
        for name in (
            *("accepted", "queued", "leased", "trained", "committed"),
            *("filtered", "expired", "dead", "discarded"),
        )
    ]
    yield from _metric("groups", "gauge", "Accepted groups by state.", ledger)
    waits = [((("reason", why),), seconds) for why, seconds in pressure.trainer_waits_s.items()]
    yield from _metric("trainer_wait_seconds", "counter", "Time trainers waited, by reason.", waits)
    waits = [((("reason", why),), seconds) for why, seconds in pressure.producer_waits_s.items()]
    yield from _metric("producer_wait_seconds", "counter", "Time producers waited, by reason.", waits)
    lanes = pressure.lanes
    yield from _metric("queued_groups", "gauge", "Queued groups.", _by_env(lanes, "queued_groups"))
    yield from _metric("queued_sequences", "gauge", "Queued sequences.", _by_env(lanes, "queued_sequences"))
    yield from _metric("accepted_groups", "counter", "Accepted groups.", _by_env(lanes, "accepted_groups"))
    yield from _metric(
        "oldest_seconds", "gauge", "Age of the oldest queued group.", _by_env(lanes, "oldest_age_s")
    )
    known = [lane for lane in lanes if lane.reward_mean is not None]
    yield from _metric("reward_mean", "gauge", "Mean raw score.", _by_env(known, "reward_mean"))
    yield from _metric(
        "reward_deviation", "gauge", "Deviation of the raw scores.", _by_env(known, "reward_deviation")
    )


def _if_known(value: float | None) -> Samples:
    return [] if value is None else [((), value)]


def _by_env(lanes: Iterable[LaneStatus], name: str) -> Samples:
    return [
        ((("env", lane.env), ("split", lane.split.name.lower())), float(getattr(lane, name)))
        for lane in lanes
    ]


def _metric(name: str, kind: str, says: str, samples: Samples) -> Iterator[str]:
    full = f"{PREFIX}{name}_total" if kind == "counter" else f"{PREFIX}{name}"
    yield f"# HELP {full} {says}"
    yield f"# TYPE {full} {kind}"
    for labels, value in samples:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
        yield f"{full}{{{shown}}} {value:.10g}" if shown else f"{full} {value:.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
