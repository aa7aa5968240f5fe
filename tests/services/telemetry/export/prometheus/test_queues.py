"""The broker's state as metrics: counters that never fall while the broker lives, and sums beyond the bound."""

from tests.services.telemetry.export.events import lane, pressure, worker
from tests.services.telemetry.export.prometheus.pages import key, metrics_of, read

from rolloutmq.schemas.wire.control import WorkerState
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.telemetry.export.prometheus.bounds import ENVIRONMENTS, WORKERS


def test_a_lane_has_its_labels() -> None:
    event = pressure(
        [
            lane(queued_groups=3, accepted_groups=9, oldest_age_s=1.5, reward_mean=0.5),
            lane(split=Split.EVAL, queued_groups=1),
        ]
    )
    page = read(metrics_of([event]))
    assert page[key("queued_groups", env="math", split="train")] == 3
    assert page[key("queued_groups", env="math", split="eval")] == 1
    assert page[key("accepted_groups_total", env="math", split="train")] == 9
    assert page[key("oldest_seconds", env="math", split="train")] == 1.5
    assert page[key("reward_mean", env="math", split="train")] == 0.5
    assert key("reward_mean", env="math", split="eval") not in page
    assert page[key("groups", state="leased")] == 2
    assert page[key("trainer_wait_seconds_total", reason="no_batch")] == 2.5
    assert page[key("policy_step")] == 7


def test_workers_are_counted_by_state_and_shown_each() -> None:
    event = pressure(
        workers=[
            worker("math-0", produced=5, blocked_s=1.5),
            worker("math-1", state=WorkerState.DRAINING),
            worker("math-2", silent_s=9.0),
        ]
    )
    page = read(metrics_of([event]))
    states = {
        state: page.get(key("workers", env="math", state=state)) for state in ("ready", "draining", "silent")
    }
    assert states == {"ready": 1, "draining": 1, "silent": 1}
    assert page[key("worker_groups_total", worker="math-0", env="math")] == 5
    assert page[key("worker_blocked_seconds_total", worker="math-0", env="math")] == 1.5
    assert page[key("worker_silent_seconds", worker="math-2", env="math")] == 9.0


def test_the_broker_is_up_while_it_is_heard() -> None:
    metrics = metrics_of([])
    assert read(metrics)[key("up")] == 0
    metrics.feed(pressure(), 10.0)
    assert read(metrics, 11.0)[key("up")] == 1
    page = read(metrics, 20.0)
    assert page[key("up")] == 0
    assert page[key("policy_step")] == 7  # what was known last


def test_environments_beyond_the_bound_add_up() -> None:
    lanes = [
        lane(f"env-{at:04}", queued_groups=2, accepted_groups=10, reward_mean=1.0)
        for at in range(ENVIRONMENTS + 50)
    ]
    page = read(metrics_of([pressure(lanes)]))
    assert page[key("queued_groups", env="_other", split="train")] == 100
    assert page[key("accepted_groups_total", env="_other", split="train")] == 500
    assert key("reward_mean", env="_other", split="train") not in page
    assert page[key("telemetry_merged_names", label="env")] == 50
    assert sum(name == "queued_groups" for name, _ in page) == ENVIRONMENTS + 1


def test_a_sum_beyond_the_bound_does_not_fall_when_one_of_it_leaves() -> None:
    lanes = [lane(f"env-{at:04}", accepted_groups=10) for at in range(ENVIRONMENTS + 3)]
    workers = [worker(f"w-{at:04}", produced=4) for at in range(WORKERS + 3)]
    metrics = metrics_of([pressure(lanes, workers)])
    other, rest = (
        key("accepted_groups_total", env="_other", split="train"),
        key("worker_groups_total", worker="_other", env="_other"),
    )
    assert (read(metrics)[other], read(metrics)[rest]) == (30, 12)
    metrics.feed(pressure(lanes[:-1], workers[:-2]), 1.0)
    assert (read(metrics, 1.0)[other], read(metrics, 1.0)[rest]) == (30, 12)
    metrics.feed(pressure(lanes, workers), 2.0)  # it is back, and its counter with it
    assert read(metrics, 2.0)[other] >= 30


def test_a_new_life_of_the_broker_begins_anew() -> None:
    lanes = [lane(f"env-{at:04}", accepted_groups=10) for at in range(ENVIRONMENTS + 3)]
    metrics = metrics_of([pressure(lanes)])
    read(metrics)
    metrics.feed(pressure([lane("env-0000", accepted_groups=1)], epoch=2), 1.0)
    page = read(metrics, 1.0)
    assert page[key("accepted_groups_total", env="env-0000", split="train")] == 1
    assert page.get(key("accepted_groups_total", env="_other", split="train"), 0) == 0


def test_counters_of_the_broker_outlive_telemetry() -> None:
    event = pressure([lane(accepted_groups=9)], [worker("w", produced=3)])
    before, after = metrics_of([event, event]), metrics_of([event])
    counter = [
        name
        for name, _ in read(after)
        if name.endswith("_total") and not name.startswith(("telemetry", "export"))
    ]
    assert "accepted_groups_total" in counter
    first, second = read(before), read(after)
    assert {name: first[name] for name in first if name[0] in counter} == {
        name: second[name] for name in second if name[0] in counter
    }
