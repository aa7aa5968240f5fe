"""The join over hand-made logs: whatever happens to a group, exactly one figure shows it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.evaluation import EvaluationConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import DamagedFileError
from rolloutmq.schemas.files import AckedGroup, DroppedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.services.monitor.report.metrics import bounds_in_force, read_metrics
from rolloutmq.services.monitor.report.plot import bound_text, key_figures
from rolloutmq.services.monitor.report.settled_log import read_trainer_log
from rolloutmq.services.monitor.report.summary import (
    LedgerFigures,
    settle_accounts,
    summarise,
)
from rolloutmq.services.telemetry.recorder import line_of

CONFIG = RunConfig(
    environment={
        "sort3": EnvironmentConfig(entry="a:B", max_staleness=4),
        "exam": EnvironmentConfig(entry="a:B", max_staleness=99, split="eval"),
    },
    evaluation=EvaluationConfig(enabled=True),
)


def batch(step: int, *trained: str, incarnation: int = 0, **fields: Any) -> SettledBatch:
    usual: dict[str, Any] = {"at": 100.0 + step, "staleness": (1,) * len(trained)}
    version = PolicyVersion(incarnation, step)
    return SettledBatch(version=version, trained=trained, **(usual | fields))


def resumed(step: int, incarnation: int = 1) -> SettledBatch:
    return SettledBatch(at=0.0, version=PolicyVersion(incarnation, step), resumed=True)


def write(path: Path, records: Iterable[Any], torn: bytes = b"") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records) + torn)


def acks(layout: RunLayout, producer: str, *names: str, torn: bytes = b"") -> None:
    numbered = enumerate(names, 1)
    write(
        layout.ack_log(producer),
        [AckedGroup(group_id=name, session=1, seq=seq, at=1.0) for seq, name in numbered],
        torn,
    )


def dropped(name: str, state: str) -> DroppedGroup:
    return DroppedGroup(at=1.0, group_id=name, state=state, reason="because")


def join(layout: RunLayout, *saved: str, wall_s: float | None = 10.0) -> dict[str, Any]:
    return summarise(layout, CONFIG, saved_ids=lambda _: saved, wall_s=wall_s)


def groups(summary: dict[str, Any]) -> dict[str, int]:
    """Return the figures of groups that are not zero, without their prefix."""
    return {
        name.removeprefix("groups_"): value
        for name, value in summary.items()
        if name.startswith("groups_") and value
    }


def test_every_group_is_in_exactly_one_place(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    acks(layout, "w-0", "a", "b", "c", "d")
    acks(layout, "w-1", "e", "f", "g", "h", "i")
    write(layout.trained, [batch(1, "a", "b", filtered=("c",), rejected=("d",))])
    write(
        layout.dropped,
        [dropped("e", "expired"), dropped("f", "dead"), dropped("g", "discarded"), dropped("d", "dead")],
    )

    figures = groups(join(layout, "h", "i"))

    assert figures == {
        "accepted": 9,
        "trained": 2,
        "filtered": 1,
        "dead": 2,
        "expired": 1,
        "discarded": 1,
        "in_flight": 2,
    }
    assert figures.pop("accepted") == sum(figures.values())


def test_acked_group_that_nobody_names_is_lost(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    acks(layout, "w-0", "a", "b")
    write(layout.trained, [batch(1, "a")])

    assert groups(join(layout)) == {"accepted": 2, "trained": 1, "lost": 1}


def test_group_learned_from_in_two_steps_is_trained_twice(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    acks(layout, "w-0", "a", "b")
    write(layout.trained, [batch(1, "a", "b"), batch(2, "a"), batch(3, "a")])

    assert groups(join(layout)) == {"accepted": 2, "trained": 2, "trained_twice": 1}


def test_group_twice_in_one_batch_is_trained_twice(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write(layout.trained, [batch(1, "a", "a")])

    assert groups(join(layout))["trained_twice"] == 1


def test_resuming_voids_later_steps_and_their_groups_may_come_again(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    acks(layout, "w-0", "a", "b", "c", "d")
    write(
        layout.trained,
        [
            batch(1, "a"),
            batch(2, "b", filtered=("d",), staleness=(9,)),
            resumed(1),
            batch(2, "b", filtered=("d",), incarnation=1, rewound=True),
            batch(3, "c", incarnation=1),
        ],
    )

    summary = join(layout)

    assert groups(summary) == {"accepted": 4, "trained": 3, "filtered": 1, "rewound": 2}
    assert summary["steps"] == 3
    assert summary["trainer_resumes"] == 1
    assert summary["staleness_max"] == 1  # The 9 was of a step whose weights are gone.


def test_voided_group_that_never_came_again_is_lost_even_without_an_ack(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write(layout.trained, [batch(1, "a"), batch(2, "b"), resumed(1)])

    assert groups(join(layout)) == {"accepted": 2, "trained": 1, "lost": 1}


def test_group_before_the_checkpoint_that_comes_again_is_trained_twice(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write(layout.trained, [batch(1, "a"), resumed(1), batch(2, "a", incarnation=1)])

    assert groups(join(layout))["trained_twice"] == 1


def test_second_resume_voids_what_the_first_had_left() -> None:
    log = read_trainer_log(
        [batch(1, "a"), batch(2, "b"), resumed(2), batch(3, "c", incarnation=1), resumed(1, 2)]
    )

    assert [one.trained for one in log.batches] == [("a",)]
    assert {name for one in log.voided for name in one.trained} == {"b", "c"}
    assert len(log.resumed_at) == 2


def test_killed_worker_without_ack_lines_still_had_its_groups_accepted(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    acks(layout, "w-0", "a", torn=b'{"group_id":"b","ses')
    write(layout.trained, [batch(1, "a", "b", "c")])

    assert groups(join(layout, "d")) == {"accepted": 4, "trained": 3, "in_flight": 1}


def test_group_that_was_saved_though_trained_is_counted_once() -> None:
    accounts = settle_accounts(["a"], read_trainer_log([batch(1, "a")]).ids(), [], ["a"])

    assert accounts.trained == {"a"}
    assert not accounts.in_flight
    assert not accounts.lost


def test_torn_last_line_is_left_out_and_a_torn_middle_is_an_error(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write(layout.trained, [batch(1, "a")], torn=b'{"at":1.0,"vers')
    assert join(layout)["groups_trained"] == 1

    with layout.trained.open("ab") as file:
        file.write(b"\n" + msgspec.json.encode(batch(2, "b")) + b"\n")

    with pytest.raises(DamagedFileError, match=r"trained\.jsonl, line 2"):
        join(layout)


def test_id_under_two_numbers_is_reported(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    acks(layout, "w-0", "a", "b")
    acks(layout, "w-1", "a")

    assert join(layout)["groups_acked_twice"] == 1


def test_groups_for_evaluation_are_counted_apart(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    acks(layout, "sort3-0", "a", "b")
    evaluated = [
        AckedGroup(group_id=name, session=1, seq=seq, at=1.0, split=Split.EVAL)
        for seq, name in enumerate(("x", "y", "z"), 1)
    ]
    write(layout.ack_log("sort3-0.eval"), evaluated)
    write(layout.trained, [batch(1, "a")])
    write(layout.dropped, [dropped("y", "dead"), dropped("b", "expired")])

    summary = summarise(layout, CONFIG, saved_ids=lambda _: ["z"])

    counts = {state: summary[f"groups_{state}"] for state in ("accepted", "trained", "expired", "dead")}
    assert counts == {"accepted": 2, "trained": 1, "expired": 1, "dead": 0}
    assert (summary["groups_in_flight"], summary["groups_lost"], summary["groups_evaluated"]) == (0, 0, 3)


def test_the_ledger_of_a_run_counts_groups_for_evaluation_apart_too(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write(
        layout.ack_log("e-0.eval"),
        [AckedGroup(group_id="x", session=1, seq=1, at=1.0, split=Split.EVAL)],
    )
    states = {"a": "trained", "x": "trained", "b": "in_flight"}
    ledger = LedgerFigures(3, {"trained": 2, "filtered": 0, "in_flight": 1}, 0, states, is_whole=True)
    assert ledger.without({"x"}).counts == {"trained": 1, "filtered": 0, "in_flight": 1}
    outside = CONFIG.model_copy(update={"trainer": TrainerConfig(enabled=False)})

    summary = summarise(layout, outside, saved_ids=lambda _: ["b"], ledger=ledger)

    assert (summary["groups_accepted"], summary["groups_settled"]) == (2, 1)
    assert (summary["groups_lost"], summary["groups_evaluated"]) == (0, 1)


@pytest.mark.parametrize(
    ("steps", "first", "last"),
    [(400, 25.5, 375.5), (120, 15.5, 105.5), (60, 8.0, 53.0), (3, 1.0, 3.0), (1, 1.0, 1.0)],
)
def test_rewards_are_means_of_the_first_and_last_quarter_at_most_fifty_steps(
    run_dir: Path, steps: int, first: float, last: float
) -> None:
    layout = RunLayout(run_dir)
    write(layout.trained, [batch(step, f"g{step}", rewards=(float(step),)) for step in range(1, steps + 1)])
    assert (join(layout)["reward_first"], join(layout)["reward_last"]) == (first, last)


def test_steps_are_those_of_the_final_policy(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write(layout.trained, [batch(step, f"g{step}", rewards=(float(step),)) for step in range(1, 121)])

    summary = join(layout)

    assert summary["steps"] == 120
    assert summary["steps_per_s"] == pytest.approx(1.0)


def test_the_rate_of_steps_stands_a_clock_that_was_set_back(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    moments = [1000.0, 1002.0, 1004.0, 100.0, 102.0, 104.0]  # an hour back between two steps of two seconds
    steps = [batch(step, f"g{step}", at=at, rewards=(0.0,)) for step, at in enumerate(moments, start=1)]
    write(layout.trained, steps)
    assert join(layout)["steps_per_s"] == pytest.approx(0.5)


def test_batch_without_a_signal_is_no_step_but_its_scores_count(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write(
        layout.trained,
        [
            batch(0, filtered=("a", "b"), rewards=(1.0, 1.0)),
            batch(1, "c", "d", rewards=(0.0, 0.0)),
        ],
    )

    summary = join(layout)

    assert (summary["steps"], summary["batches"], summary["batches_without_signal"]) == (1, 2, 1)
    assert summary["reward_first"] == pytest.approx(0.5)


def test_staleness_is_the_worst_of_any_group_against_the_training_bound(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write(layout.trained, [batch(1, "a", "b", staleness=(0, 3)), batch(2, "c", staleness=(2,))])

    summary = join(layout)

    assert (summary["staleness_max"], summary["staleness_bound"]) == (3, 4)


def test_the_bound_is_the_one_in_force_at_the_end_and_the_largest_before_is_told(run_dir: Path) -> None:
    """Set from the configured 4 to 6 and then to 1; a line whose lanes were left out says nothing."""
    layout = RunLayout(run_dir)
    write(layout.trained, [batch(1, "a", staleness=(5,))])
    told = [
        (101.0, {"sort3": 4, "v": 9}),
        (102.0, {"sort3": 6, "v": 9}),
        (103.0, {"sort3": 1, "v": 9}),
        (104.0, {}),
    ]
    splits = {"sort3": 0, "v": 1}
    write(
        layout.metrics,
        [
            {
                "t": t,
                "kind": "pressure",
                "lanes": [
                    {"env": env, "split": splits[env], "max_staleness": most} for env, most in bounds.items()
                ],
            }
            for t, bounds in told
        ],
    )

    summary = join(layout)

    assert (summary["staleness_bound"], summary["staleness_bound_max"]) == (1, 6)
    assert bound_text(summary) == "1, 6 before"
    seen = read_metrics(layout.metrics)
    assert bounds_in_force(CONFIG, seen.bounds) == [(0.0, 4), (102.0, 6), (103.0, 1)]


def test_workers_count_from_the_first_ready_to_the_last_step(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write(layout.trained, [batch(1, "a"), batch(9, "b")])
    ready = [(99.0, 0), (101.0, 2), (104.0, 1), (106.0, 4), (120.0, 0)]
    write(
        layout.metrics,
        [
            {"t": t, "topic": "pressure", "kind": "pressure", "worker_states": {"ready": count}}
            for t, count in ready
        ],
    )

    summary = join(layout)

    assert (summary["workers_min"], summary["workers_max"]) == (1, 4)


def test_the_time_between_two_lives_is_in_no_figure(run_dir: Path) -> None:
    """Nobody worked then, and workers that end or start with a life are not missing."""
    layout = RunLayout(run_dir)
    lives = (Life(100.0, 110.0), Life(1100.0, 1111.5))
    write(
        layout.trained,
        [
            batch(1, "a", rewards=(0.0,)),
            batch(3, "b", rewards=(0.0,)),
            batch(2, at=1104.0, resumed=True, incarnation=1),
            batch(3, "b", at=1105.0, rewards=(0.0,), incarnation=1),
            batch(4, "c", at=1109.0, rewards=(0.0,), incarnation=1),
        ],
    )
    ready = [(100.5, 2), (103.5, 0), (1100.0, 0), (1101.0, 1), (1103.0, 2), (1108.0, 3), (1110.0, 0)]
    write(
        layout.metrics,
        [
            {"t": t, "topic": "pressure", "kind": "pressure", "worker_states": {"ready": count}}
            for t, count in ready
        ],
    )
    two = {
        **CONFIG.model_dump(),
        "environment": {"sort3": {"entry": "a:B", "min_workers": 2}},
        "evaluation": {},
    }
    config = RunConfig.model_validate(two)
    summary = summarise(layout, config, saved_ids=lambda _: [], wall_s=1011.5, lives=lives)
    assert (summary["wall_s"], summary["lives"], summary["downtime_s"]) == (21.5, 2, 990.0)
    assert summary["steps_per_s"] == round(2 / (1109.0 - 101.0 - 990.0), 3)
    assert (summary["workers_min"], summary["workers_max"]) == (2, 3)
    alone = summarise(layout, config, saved_ids=lambda _: [], wall_s=12.0)
    assert (alone["wall_s"], alone["lives"], alone["downtime_s"]) == (12.0, 0, 0.0)


def test_scores_are_told_by_environment(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    of = {"a": "math", "b": "code", "c": "math", "d": "code", "unknown": ""}
    acked = [
        AckedGroup(group_id=name, session=1, seq=seq, at=1.0, env=env)
        for seq, (name, env) in enumerate(of.items())
    ]
    write(layout.ack_log("w"), acked)
    write(
        layout.trained,
        [
            batch(1, "a", "b", filtered=("unknown",), rewards=(0.25, 100.0, 7.0)),
            batch(2, "c", filtered=("d",), rewards=(0.75, 300.0)),
        ],
    )
    summary = join(layout)
    assert summary["environments"] == {
        "code": {"reward_first": 100.0, "reward_last": 300.0},
        "math": {"reward_first": 0.25, "reward_last": 0.75},
    }


def test_findings_about_rewards_are_named_once(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    found = HealthFinding(env="math", at=1.0, finding="collapse", problem="no signal", numbers={"flat": 1.0})
    other = msgspec.structs.replace(found, env="trainer", finding="clipping")
    lines = [line_of(b"telemetry.health.math", one, 1.0) for one in (other, found, found)]
    layout.metrics.write_bytes(b"".join(lines))

    assert join(layout)["findings"] == ["math.collapse", "trainer.clipping"]


def test_empty_run_has_a_summary_without_rewards(run_dir: Path) -> None:
    summary = join(RunLayout(run_dir), wall_s=None)

    assert summary["reward_first"] is None
    assert summary["steps"] == 0
    assert groups(summary) == {}
    assert msgspec.json.encode(summary)


def test_a_dead_group_that_was_queued_again_counts_where_it_came_to(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write(layout.dropped, [dropped("a", "dead"), dropped("b", "dead"), dropped("a", "expired")])

    assert groups(join(layout, "b")) == {"accepted": 2, "expired": 1, "in_flight": 1}


def test_a_trainer_that_leaves_no_log_loses_nothing(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    acks(layout, "sort3-0", "a", "b", "c", "d")
    write(layout.dropped, [dropped("b", "expired")])
    own = CONFIG.model_copy(update={"trainer": TrainerConfig(enabled=False)})
    summary = summarise(layout, own, saved_ids=lambda _: ["c"], wall_s=1.0)
    assert (summary["groups_settled"], summary["groups_in_flight"], summary["groups_expired"]) == (2, 1, 1)
    assert summary["groups_lost"] is summary["groups_trained"] is summary["groups_trained_twice"] is None
    assert "lost" not in key_figures(summary)
    assert join(layout, "c")["groups_lost"] == 2, "a trainer of the run would have said what it did with them"


def test_the_ledger_speaks_for_a_trainer_without_a_log(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    acks(layout, "sort3-0", "a", "b", "gone")
    counts = {"trained": 3, "filtered": 1, "expired": 1, "dead": 0, "discarded": 0, "in_flight": 1}
    states = {"a": "trained", "b": "in_flight", "c": "filtered", "d": "expired"}
    whole = LedgerFigures(6, counts, 2, states, is_whole=True)
    found = settle_accounts(
        ["a", "b"], read_trainer_log([]).ids(), [dropped("d", "expired")], ["a", "b"], whole
    )
    named = [found.trained, found.in_flight, found.filtered, found.expired, found.lost]
    assert [sorted(names) for names in named] == [["a"], ["b"], ["c"], ["d"], []]

    summary = summarise(layout, CONFIG, saved_ids=lambda _: ["a", "b"], wall_s=1.0, ledger=whole)
    assert [summary[f"groups_{name}"] for name in counts] == [*counts.values()]
    assert (summary["groups_accepted"], summary["groups_lost"]) == (7, 1), "nothing names the acked `gone`"
    assert (summary["groups_rewound"], summary["groups_trained_twice"]) == (2, None)
    assert summary["staleness_max"] is None
    assert "1 lost" in key_figures(summary)
    assert "twice" not in key_figures(summary)

    trimmed = LedgerFigures(6, counts, 2, states, is_whole=False)
    outside = CONFIG.model_copy(update={"trainer": TrainerConfig(enabled=False)})
    summary = summarise(layout, outside, saved_ids=lambda _: ["b"], wall_s=1.0, ledger=trimmed)
    assert (summary["groups_accepted"], summary["groups_lost"], summary["groups_settled"]) == (6, None, 4)


def test_without_a_log_of_the_trainer_that_of_the_broker_tells_the_steps(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    acks(layout, "sort3-0", "a", "b", "c", "d")
    lines = [
        batch(1, "a", rewards=(0.25,), staleness=(2,)),
        batch(2, "b", rewards=(0.5,)),
        resumed(1),
        batch(2, "b", incarnation=1, rewards=(0.75,), rewound=True),
        batch(2, incarnation=1, filtered=("c",), rewards=(0.0,), staleness=()),
    ]
    write(layout.settled, lines)
    own = CONFIG.model_copy(update={"trainer": TrainerConfig(enabled=False)})
    summary = summarise(layout, own, saved_ids=lambda _: ["d"], wall_s=1.0)
    assert (summary["steps"], summary["batches"], summary["batches_without_signal"]) == (2, 3, 1)
    assert (summary["reward_first"], summary["reward_last"]) == (0.25, 0.75)
    assert (summary["trainer_resumes"], summary["staleness_max"]) == (1, 2)
    assert groups(summary) == {"accepted": 4, "trained": 2, "filtered": 1, "in_flight": 1, "rewound": 1}
    counts = {"trained": 2, "filtered": 1, "expired": 0, "dead": 0, "discarded": 0, "in_flight": 1}
    ledger = LedgerFigures(4, counts, 1, {}, is_whole=False)
    summary = summarise(layout, own, saved_ids=lambda _: ["d"], wall_s=1.0, ledger=ledger)
    assert (summary["steps"], summary["staleness_max"], summary["groups_trained"]) == (2, 2, 2)
    write(layout.trained, [batch(1, "a", rewards=(1.0,))])
    assert join(layout, "d")["steps"] == 1, "what a trainer logs by itself comes first"


def test_trainers_that_share_the_groups_are_told_with_their_steps(run_dir: Path) -> None:
    """Two names at one run: 4 batches in 2 steps, and nobody said why."""
    layout = RunLayout(run_dir)
    lines = [
        msgspec.structs.replace(batch(step, f"{name}{step}"), consumer=name)
        for name, steps in (("t1", (1, 2)), ("t2", (1, 2, 3)))
        for step in steps
    ]
    write(layout.settled, lines)
    assert join(layout)["trainers"] == {"t1": 2, "t2": 3}
    write(layout.settled, lines[:3])
    assert join(layout)["trainers"] == {"t1": 2, "t2": 1}
    later = [msgspec.structs.replace(batch(3, "x"), consumer="t3")]
    write(layout.settled, [*lines[:2], *later])
    assert "trainers" not in join(layout), "one after the other"


def test_figures_of_learning_have_their_first_and_last_means(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    lines = [
        {"t": float(step), "kind": "step_figures", "step": step, "figures": {"loss": float(step)}}
        for step in range(1, 121)
    ]
    write(layout.metrics, lines)
    assert join(layout)["learning"] == {"loss": {"first": 15.5, "last": 105.5}}


def test_figures_of_a_step_that_nobody_settled_do_not_count(run_dir: Path) -> None:
    """Its trainer logged it, and then lost its lease or was taken over."""
    layout = RunLayout(run_dir)
    logged = [
        {"t": float(step), "kind": "step_figures", "step": step, "figures": {"loss": float(step)}}
        for step in (1, 2, 3)
    ]
    write(layout.metrics, [*logged, logged[1] | {"t": 4.0, "figures": {"loss": 2.5}}])
    write(layout.settled, [batch(step, f"g{step}") for step in (1, 2)])
    assert join(layout)["learning"] == {"loss": {"first": 1.0, "last": 2.5}}


def test_tokens_are_those_of_the_counted_batches(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    lives = [(0, step) for step in (1, 2, 3)] + [(1, step) for step in (3, 4)]
    settled = {"kind": "batch_settled", "stepped": True, "tokens": 5}
    write(
        layout.metrics,
        [
            settled | {"t": float(n), "incarnation": life, "step": step}
            for n, (life, step) in enumerate(lives)
        ],
    )
    assert join(layout)["tokens"] == 4 * 5


def test_workers_of_a_resumed_run_count_though_nobody_logged_a_batch(run_dir: Path) -> None:
    """Such as with a trainer of one's own and a broker that was killed before it wrote: it had `workers 0 to 0`."""
    layout = RunLayout(run_dir)
    lives = [Life(100.0, 110.0), Life(200.0, 210.0)]
    ready = [(101.0, 0), (102.0, 2), (109.0, 3), (201.0, 0), (205.0, 2)]
    write(
        layout.metrics,
        [
            {"t": t, "topic": "pressure", "kind": "pressure", "worker_states": {"ready": count}}
            for t, count in ready
        ],
    )
    summary = summarise(layout, CONFIG, saved_ids=lambda _: [], lives=lives)
    assert summary["workers_max"] == 3


def test_workers_of_a_resumed_run_follow_the_broker_where_the_trainer_is_ones_own(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    lives = [Life(100.0, 110.0), Life(200.0, 210.0)]
    write(layout.settled, [batch(1, "a", at=105.0), batch(2, "b", at=206.0)])
    ready = [(101.0, 2), (104.0, 1), (109.0, 0), (201.0, 0), (203.0, 2), (208.0, 0)]
    write(
        layout.metrics,
        [
            {"t": t, "topic": "pressure", "kind": "pressure", "worker_states": {"ready": count}}
            for t, count in ready
        ],
    )
    summary = summarise(layout, CONFIG, saved_ids=lambda _: [], lives=lives)
    assert (summary["workers_min"], summary["workers_max"]) == (1, 2)
