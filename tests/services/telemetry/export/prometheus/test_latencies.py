"""Samples of latency add up to histograms that Prometheus understands."""

import msgspec
import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.services.telemetry.export.events import latency, row
from tests.services.telemetry.export.prometheus.pages import key, metrics_of, read, text_of

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop, LatencySample
from rolloutmq.services.telemetry.export.prometheus.bounds import CHURN_S, PROCESSES
from rolloutmq.services.telemetry.export.prometheus.latencies import BOUNDS_S, SERIES
from rolloutmq.services.telemetry.export.prometheus.run_metrics import SelfCounts

QUEUE = {"hop": "queue", "env": "math", "split": "train"}


def test_durations_add_up_in_buckets() -> None:
    first = latency(row(Hop.QUEUE, [0.003, 0.3, 9000.0], env="math", tokens=30))
    second = latency(row(Hop.QUEUE, [0.3], env="math", tokens=10))
    page = read(metrics_of([first, second]))
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in page.items()
        if name == "hop_duration_seconds_bucket"
    }
    assert [*map(float, buckets)] == [*BOUNDS_S, float("inf")]
    assert (buckets["0.002"], buckets["0.005"], buckets["0.2"], buckets["0.5"]) == (0, 1, 1, 3)
    assert (buckets["5000.0"], buckets["+Inf"]) == (3, 4)
    assert page[key("hop_duration_seconds_count", **QUEUE)] == 4
    assert page[key("hop_duration_seconds_sum", **QUEUE)] == pytest.approx(9000.603)
    assert page[key("hop_tokens_total", **QUEUE)] == 40


def exemplars(*samples: LatencySample) -> dict[str, tuple[str, float, float]]:
    """Return id, seconds and time of the exemplar of each bucket of the queue, by its bound."""
    encode, kind = choose_encoder("application/openmetrics-text;version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    page = encode(metrics_of(samples).families(0.0, SelfCounts(1, 2, (), ()))).decode()
    return {
        one.labels["le"]: (
            one.exemplar.labels["group_id"],
            one.exemplar.value,
            float(one.exemplar.timestamp or 0.0),
        )
        for family in text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
        for one in family.samples
        if one.exemplar is not None and one.labels.get("hop") == "queue"
    }


def test_the_slowest_group_of_a_sample_is_the_exemplar_of_its_bucket() -> None:
    slow = row(Hop.QUEUE, [0.003, 0.3], env="math", slowest_s=0.3, slowest_id='g-"7"\n')
    later = row(Hop.QUEUE, [0.4, 7000.0], env="math", slowest_s=7000.0, slowest_id="g-8")
    call = row(Hop.CALL, [0.3], env="math", engine="e", status="2xx", slowest_s=0.3, slowest_id="x")
    found = exemplars(latency(slow, call, at=12.5), latency(later, at=13.5))
    assert found == {"0.5": ('g-"7"\n', 0.3, 12.5), "+Inf": ("g-8", 7000.0, 13.5)}
    again = row(Hop.QUEUE, [0.25], env="math", slowest_s=0.25, slowest_id="g-9")
    found = exemplars(latency(slow, at=12.5), latency(again, at=14.0))
    assert found == {"0.5": ("g-9", 0.25, 14.0)}, "the last one"


@pytest.mark.parametrize("bound", BOUNDS_S)
def test_an_exemplar_lies_in_its_bucket(bound: float) -> None:
    for seconds, le in (
        (bound, str(bound)),
        (bound * 1.001, [*map(str, BOUNDS_S), "+Inf"][BOUNDS_S.index(bound) + 1]),
    ):
        slow = row(Hop.QUEUE, [seconds], env="math", slowest_s=seconds, slowest_id="g")
        assert [*exemplars(latency(slow, at=1.0))] == [le]


@pytest.mark.parametrize(("group_id", "at"), [("g" * 121, 1.0), ("", 1.0), ("g", 0.0), ("g", 1e300)])
def test_what_openmetrics_cannot_tell_is_no_exemplar(group_id: str, at: float) -> None:
    slow = row(Hop.QUEUE, [0.3], env="math", slowest_s=0.3, slowest_id=group_id)
    assert exemplars(latency(slow, at=at)) == {}
    assert exemplars(latency(msgspec.structs.replace(slow, slowest_id="g" * 120), at=1.0)) != {}


def test_the_text_format_has_no_exemplars() -> None:
    slow = row(Hop.QUEUE, [0.3], env="math", slowest_s=0.3, slowest_id="g-7")
    assert "g-7" not in text_of(metrics_of([latency(slow, at=1.0)]))


@pytest.mark.parametrize("bound", BOUNDS_S)
def test_a_duration_is_at_most_two_percent_from_the_side_of_its_bound(bound: float) -> None:
    page = read(metrics_of([latency(row(Hop.QUEUE, [bound * 0.979, bound, bound * 1.021], env="math"))]))
    assert page[key("hop_duration_seconds_bucket", **QUEUE, le=str(bound))] == 2


def test_each_kind_of_hop_has_its_labels() -> None:
    page = read(
        metrics_of(
            [
                latency(
                    row(Hop.CALL, [0.1], env="math", engine="inference", status="5xx", tokens=7),
                    name="math-0",
                ),
                latency(row(Hop.ROLLOUT, [1.0], env="math", split=Split.EVAL)),
                latency(row(Hop.HTTP, [0.1], route="/latest", status="2xx"), name="gateway", gpus=("GPU-1",)),
            ]
        )
    )
    call = {"env": "math", "engine": "inference", "status": "5xx"}
    assert page[key("call_duration_seconds_count", **call)] == 1
    assert page[key("call_tokens_total", **call)] == 7
    assert page[key("hop_duration_seconds_count", hop="rollout", env="math", split="eval")] == 1
    http = {"process": "gateway", "route": "/latest", "status": "2xx"}
    assert page[key("http_request_duration_seconds_count", **http)] == 1
    assert page[key("process_gpu_info", process="gateway", gpu="GPU-1", host="h")] == 1


def test_rollouts_of_workers_are_not_added_to_those_of_the_broker() -> None:
    told = row(Hop.ROLLOUT, [1.0, 3.0], env="math")
    page = read(metrics_of([latency(told), latency(told, name="math-0"), latency(told, name="math-0")]))
    assert page[key("hop_duration_seconds_count", hop="rollout", env="math", split="train")] == 2
    assert page[key("worker_finished_rollouts_total", worker="math-0", env="math")] == 4
    assert page[key("worker_rollout_seconds_total", worker="math-0", env="math")] == pytest.approx(8.0)


def test_a_row_without_an_environment_is_one_of_the_others() -> None:
    page = read(metrics_of([latency(row(Hop.QUEUE, [1.0]))]))
    assert page[key("hop_duration_seconds_count", hop="queue", env="_other", split="train")] == 1


def test_a_status_is_one_of_the_classes() -> None:
    rows = [row(Hop.HTTP, [0.1], route="/x", status=status) for status in ("2xx", "", "999", '"}\n')]
    page = read(metrics_of([latency(*rows, name="gateway")]))
    counts = {
        dict(labels)["status"]: value
        for (name, labels), value in page.items()
        if name.endswith("_seconds_count")
    }
    assert counts == {"2xx": 1, "": 1, "_other": 2}


def test_combinations_of_labels_are_bounded_and_nothing_is_left_out() -> None:
    rows = [
        row(Hop.CALL, [0.1], env=f"e{env}", engine=f"inference-{engine}", status="2xx")
        for env in range(50)
        for engine in range(20)
    ]
    page = read(metrics_of([latency(*rows[at : at + 250]) for at in range(0, 1000, 250)]))
    counts = [value for (name, _), value in page.items() if name == "call_duration_seconds_count"]
    assert len(counts) == SERIES + 1
    assert sum(counts) == 1000


def test_ever_new_processes_do_not_grow_the_page() -> None:
    metrics = metrics_of([])
    for number in range(10 * PROCESSES):
        event = latency(row(Hop.HTTP, [0.1], route="/x", status="2xx"), name=f"engine-{number}")
        metrics.feed(event, number * CHURN_S)
    counts = [name for name, _ in read(metrics, 10 * PROCESSES * CHURN_S) if name.endswith("_seconds_count")]
    assert len(counts) <= PROCESSES + 1


def test_sums_stay_finite() -> None:
    event = latency(row(Hop.QUEUE, [1.0], env="math"))
    huge = latency(row(Hop.QUEUE, [1e6] * 10, env="math"))
    page = read(metrics_of([event, *([huge] * 10)]))
    assert page[key("hop_duration_seconds_sum", **QUEUE)] == pytest.approx(1e8 + 1)
