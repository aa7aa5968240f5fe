"""The page of a whole run: valid for Prometheus, bounded, and safe against hostile names."""

import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client.openmetrics import exposition, parser
from tests.services.telemetry.export.events import (
    every_kind,
    finding,
    lane,
    latency,
    machines,
    pressure,
    row,
    settled,
    worker,
)
from tests.services.telemetry.export.prometheus.pages import key, metrics_of, read, text_of

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.schemas.wire.telemetry import Event, HostSample
from rolloutmq.services.telemetry.export.prometheus.run_metrics import SelfCounts

generate_openmetrics: Any = exposition.generate_latest
parse_openmetrics: Any = parser.text_string_to_metric_families

PAGE_LIMIT_BYTES = 4 << 20
HOSTILE = (
    'a"b',
    "back\\slash",
    "line\nbreak",
    '"} 1\nrolloutmq_up 5',
    "\x1b[31mred",
    "\u202eevil",
    "x" * 10_000,
    "",
)

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)


def test_each_event_counts_by_its_kind() -> None:
    page = read(metrics_of(every_kind()))
    assert page[key("telemetry_events_total", kind="batch_settled")] == 2
    assert page[key("telemetry_malformed_events_total")] == 1
    assert page[key("telemetry_lost_events_total")] == 2
    assert page[key("export_points_total", sink="wandb")] == 3
    assert page[key("export_dropped_points_total", sink="wandb")] == 4


@needs_promtool
def test_promtool_accepts_the_page() -> None:
    page = text_of(metrics_of(every_kind()))
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_promtool
def test_promtool_refuses_a_page_with_a_wrong_name() -> None:
    page = text_of(metrics_of(every_kind())).replace("rolloutmq_batches_total", "rolloutmq_batches")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0


def test_the_page_is_valid_in_openmetrics() -> None:
    metrics = metrics_of(every_kind())
    text = generate_openmetrics(metrics.families(0.0, SelfCounts())).decode()
    families = {family.name: family for family in parse_openmetrics(text)}
    assert families["rolloutmq_accepted_groups"].type == "counter"
    assert families["rolloutmq_hop_duration_seconds"].type == "histogram"
    assert text.endswith("# EOF\n")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_a_label(name: str) -> None:
    """Names of environments and workers are checked at the wire; hosts, engines, routes and reasons are not."""
    host: Event = next(event for event in machines(name) if isinstance(event, HostSample))
    events = [
        host,
        finding(name),
        pressure(trainer_waits_s={name: 1.0}),
        latency(
            row(Hop.CALL, [0.1], env=name[:200], engine=name[:200], status="2xx"),
            row(Hop.HTTP, [0.1], route=name[:200], status="2xx"),
            name=name,
        ),
    ]
    metrics = metrics_of(events)
    page = read(metrics)
    shown = name if len(name) <= 128 else name[:127] + "…"
    assert page[key("host_cpus", host=shown)] == 8
    assert page[key("trainer_wait_seconds_total", reason=shown)] == 1
    assert page[key("up")] == 1
    assert len(text_of(metrics)) < 30_000
    assert [*parse_openmetrics(generate_openmetrics(metrics.families(0.0, SelfCounts())).decode())]


def crowd(count: int) -> list[Event]:
    """Return the events of a run with so many environments, workers, hosts and processes."""
    lanes = [lane(f"env-{at}", split, reward_mean=0.5) for at in range(count) for split in Split]
    workers = [worker(f"env-{at}-0", f"env-{at}") for at in range(count)]
    waits = {f"reason-{at}": 1.0 for at in range(count)}
    events: list[Event] = [pressure(lanes, workers, trainer_waits_s=waits, blocked_s=waits)]
    hops = (Hop.ROLLOUT, Hop.SEND, Hop.QUEUE, Hop.TRAIN, Hop.COMMIT)
    for at in range(count):
        rows = [row(hop, [0.1], env=f"env-{at}", split=split) for hop in hops for split in Split]
        calls = [row(Hop.CALL, [0.1], env=f"env-{at}", engine=f"inference-{at}", status="2xx")]
        http = [row(Hop.HTTP, [0.1], route=f"/{at}", status="2xx")]
        events += [latency(*rows, *calls, *http, name=f"worker-{at}"), *machines(f"host-{at}")]
        events += [settled(env=f"env-{at}"), finding(f"f-{at}", f"env-{at}")]
    return events


def test_a_thousand_environments_and_workers_keep_the_page_bounded() -> None:
    large, larger = text_of(metrics_of(crowd(1000))), text_of(metrics_of(crowd(1500)))
    assert len(large) < PAGE_LIMIT_BYTES
    assert abs(len(larger) - len(large)) < len(large) / 20  # longer numbers, no further series
    assert large.count("\n") == larger.count("\n")


def test_a_second_page_of_the_same_events_is_the_same() -> None:
    metrics = metrics_of(every_kind())
    assert text_of(metrics) == text_of(metrics)
