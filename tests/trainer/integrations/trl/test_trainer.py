"""TRL's GRPOTrainer on groups of known contents: what it is given is exact, and each batch is settled once.

`make test-trl` runs them, in TRL's own environment.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.integrations.trl.support import (
    SIZE,
    Played,
    Stage,
    broker,
    config,
    group,
    missing,
    play,
    push,
    settled,
    verify,
)

from rolloutmq import Group
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.loss_mask import trained_tokens

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

Row = tuple[list[int], list[float], list[int], float | None]
"""All tokens; log-probabilities and mask from the first trained token on; score."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("stage") / "player.log")
    yield made
    made.close()


def rows_of(groups: list[Group]) -> dict[str, list[Row]]:
    """Rows by group."""
    found = {}
    for one in groups:
        rows: list[Row] = []
        start = 0
        for ids, known, score in zip(one["tokens"], one["inference_logprobs"], one.scores, strict=True):
            chosen = trained_tokens(one)[start : start + len(ids)]
            start += len(ids)
            first = int(chosen.argmax())
            kept = [
                float(value) if use else 0.0 for value, use in zip(known[first:], chosen[first:], strict=True)
            ]
            rows.append((ids.tolist(), kept, chosen[first:].astype(int).tolist(), float(score)))
        found[one.group_id] = rows
    return found


def given(played: Played, number: int, ranks: int = 1) -> list[Row]:
    """All rows that TRL was given in one generation, in the order of the ranks."""
    rows: list[Row] = []
    for rank in range(ranks):
        one = played.of("generation", rank)[number]["generation"]
        parts = (one[name] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "bus_score"))
        rows += [(p + c, known, mask, score) for p, c, known, mask, score in zip(*parts, strict=True)]
    return rows


def in_groups(rows: list[Row]) -> list[list[Row]]:
    return [rows[start : start + SIZE] for start in range(0, len(rows), SIZE)]


def expected_advantages(rows: list[Row]) -> list[float]:
    """Each score less the mean of its group, as `scale_rewards="none"` has it."""
    scores = [score for *_, score in rows if score is not None]
    return [score - sum(scores) / len(scores) for score in scores]


@pytest.mark.parametrize(("ranks", "each"), [(1, 8), (2, 6)])
def test_rows_are_exact_whole_and_in_the_order_of_their_groups(
    run_dir: Path, stage: Stage, ranks: int, each: int
) -> None:
    """With 6 rows on each of two ranks the middle group lies on both; TRL's gather puts it together."""
    groups = [group(number) for number in range(12)]
    known = rows_of(groups)
    with broker(run_dir) as layout:
        push(run_dir, groups)
        steps = 2
        args = {"per_device_train_batch_size": each}
        played = (
            play(run_dir, steps, ranks=ranks, args=args)
            if ranks > 1
            else stage.play(run_dir, steps, args=args)
        )
        assert played.told["step"] == steps
        lines = settled(layout)
        for number, line in enumerate(lines):
            rows = given(played, number, ranks)
            assert sorted(map(repr, in_groups(rows))) == sorted(repr(known[one]) for one in line.trained)
            wanted = [value for one in in_groups(rows) for value in expected_advantages(one)]
            for rank in range(ranks):
                assert played.of("advantages", rank)[number]["advantages"] == pytest.approx(wanted, abs=1e-6)
        assert [line.version.step for line in lines] == [1, 2]
        assert sum(len(line.trained) for line in lines) * SIZE == steps * ranks * each
    verify(run_dir)


def test_the_loss_depends_on_the_logprobs_of_the_sampling_policy(tmp_path: Path, stage: Stage) -> None:
    """The same batch with other log-probabilities has another loss; without the correction TRL ignores them."""

    def loss_of(name: str, shift: float, **args: Any) -> float:
        run_dir = tmp_path / name / "run"
        run_dir.mkdir(parents=True, mode=0o700)
        groups = [group(number) for number in range(2)]
        moved = [
            group(number, inference_logprobs=[row + shift for row in one["inference_logprobs"]])
            for number, one in enumerate(groups)
        ]
        with broker(run_dir):
            push(run_dir, moved)
            (loss,) = stage.play(
                run_dir, 1, args={"vllm_importance_sampling_mode": "token_truncate", **args}
            ).losses[:1]
        return loss

    assert loss_of("a", 0.0) == loss_of("b", 0.0)
    assert abs(loss_of("c", -0.5) - loss_of("d", 0.0)) > 1e-3
    off = {"vllm_importance_sampling_correction": False}
    assert loss_of("e", -0.5, **off) == loss_of("f", 0.0, **off)


@pytest.mark.parametrize(
    ("args", "every"),
    [
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}, 1),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, 2),
        ({"num_iterations": 3, "per_device_train_batch_size": 8}, 3),
    ],
)
def test_a_batch_is_settled_after_the_last_optimizer_step_that_uses_it(
    run_dir: Path, stage: Stage, args: dict[str, int], every: int
) -> None:
    with broker(run_dir) as layout:
        push(run_dir, [group(number) for number in range(4)])
        played = stage.play(run_dir, 2 * every, args=args)
        assert played.told["step"] == 2 * every
        assert len(played.of("generation")) == 2
        # Before the callback of the bus has heard of a step, the policy is that of the batches before.
        before = [line["before"][1] for line in played.of("before")]
        assert before == [step // every for step in range(2 * every)]
        assert [line.version.step for line in settled(layout)] == [1, 2]
    verify(run_dir)


def test_a_batch_that_was_used_in_part_is_settled_at_the_end(run_dir: Path, stage: Stage) -> None:
    """Its groups were trained on; they must not come again."""
    with broker(run_dir) as layout:
        push(run_dir, [group(number) for number in range(4)])
        played = stage.play(run_dir, 4, args={"num_iterations": 2}, stop_at=3)
        assert played.told["step"] == 3
        assert [len(line.trained) for line in settled(layout)] == [2, 2]
        assert "generation used in part steps_left=1" in played.output
    verify(run_dir)


def test_a_lease_that_is_lost_during_a_step_ends_the_training(run_dir: Path, stage: Stage) -> None:
    """The groups are queued again: what the step has changed is in no checkpoint."""
    with broker(run_dir, config(broker={"lease_s": 0.5})) as layout:
        push(run_dir, [group(number) for number in range(2)])
        played = stage.play(run_dir, 1, hang_s=3.0)
        assert played.code != 0
        assert "LeaseLostError" in played.output
        assert "resume from the last checkpoint" in played.output
        assert stage.play(run_dir, 1).told["step"] == 1
        lives = [line.version.incarnation for line in settled(layout) if line.trained]
        assert lives == [0, 1]
    assert "2 trained" in verify(run_dir)


def test_the_error_of_a_step_names_its_groups(run_dir: Path, stage: Stage) -> None:
    with broker(run_dir) as layout:
        push(run_dir, groups := [group(number) for number in range(4)])
        played = stage.play(run_dir, 2, fails_at=2)
        (line,) = settled(layout)
        left = [one.group_id for one in groups if one.group_id not in line.trained]
        named = re.search(r"RuntimeError: planted\nStep 2 failed with the groups (.*);", played.output)
        assert named is not None, played.output
        assert sorted(named[1].split(", ")) == sorted(left)
        assert stage.play(run_dir, 1).told["step"] == 1, "they come again"
    verify(run_dir)


def test_a_broker_that_holds_many_trained_groups_gets_a_checkpoint_early(run_dir: Path, stage: Stage) -> None:
    with broker(run_dir, config(broker={"retain_bytes": 1})):
        push(run_dir, [group(number) for number in range(4)])
        assert stage.play(run_dir, 2, args={"save_strategy": "steps", "save_steps": 100}).told["step"] == 2
        assert {path.name for path in (run_dir / "trl").glob("checkpoint-*")} == {
            "checkpoint-1", "checkpoint-2",
        }  # fmt: skip
    assert "committed" in verify(run_dir)


def test_a_trainer_without_checkpoints_writes_none_and_the_broker_forgets(
    run_dir: Path, stage: Stage
) -> None:
    with broker(run_dir, config(broker={"retain_bytes": 1})):
        push(run_dir, [group(number) for number in range(4)])
        assert stage.play(run_dir, 2, args={"save_strategy": "no"}).told["step"] == 2
        assert not list((run_dir / "trl").glob("checkpoint-*"))
    verify(run_dir)


def test_a_broker_alone_is_enough(run_dir: Path, stage: Stage) -> None:
    """Its configuration is the default, which would start a trainer and engines with `rolloutmq up`."""
    model = {"hidden_size": 16, "layers": 1, "mlp_size": 16}
    with broker(run_dir, RunConfig.model_validate({"model": model})):
        push(run_dir, [group(number) for number in range(2)])
        assert stage.play(run_dir, 1).told["step"] == 1
        assert not RunLayout(run_dir).weights.exists()
    verify(run_dir)


def test_groups_without_a_signal_are_filtered(run_dir: Path, stage: Stage) -> None:
    with broker(run_dir) as layout:
        push(run_dir, [group(0), group(1, scores=[0.3] * SIZE)])
        assert stage.play(run_dir, 1).told["step"] == 1
        (line,) = settled(layout)
        assert (line.trained, line.filtered) == (("g0",), ("g1",))
    assert "1 filtered" in verify(run_dir)


def test_a_batch_without_any_signal_is_a_step_of_its_own(run_dir: Path, stage: Stage) -> None:
    """TRL steps nevertheless: the momentum of its optimizer moves the weights, so they are another version."""
    with broker(run_dir) as layout:
        push(run_dir, [group(number, scores=[0.3] * SIZE) for number in range(2)])
        push(run_dir, [group(number) for number in range(2, 4)])
        args = {"save_strategy": "steps", "save_steps": 2}
        assert stage.play(run_dir, 2, args=args).told["step"] == 2
        lines = settled(layout)
        assert [(line.version.step, len(line.trained), len(line.filtered)) for line in lines] == [
            (1, 0, 2),
            (2, 2, 0),
        ]
    assert "2 committed + 2 filtered" in verify(run_dir)


def test_an_unusable_group_is_a_dead_letter_and_filler_takes_its_place(run_dir: Path, stage: Stage) -> None:
    """The rows of the other groups have the advantages and the gradient that they would have alone."""
    bad = group(2, temperatures=[[0.5] * len(row) for row in group(2)["tokens"]])
    with broker(run_dir) as layout:
        push(run_dir, [group(0), group(1), bad, group(3)])
        played = stage.play(run_dir, 2)
        assert played.told["step"] == 2
        first, second = settled(layout)
        assert {*first.trained, *second.trained} == {"g0", "g1", "g3"}
        assert (*first.rejected, *second.rejected) == ("g2",)
        number = 0 if first.rejected else 1
        rows = in_groups(given(played, number))
        (filler,) = [one for one in rows if one[0][3] is None]
        assert all((mask, score) == ([0], None) for _, _, mask, score in filler)
        advantages = played.of("advantages")[number]["advantages"]
        place = rows.index(filler) * SIZE
        assert advantages[place : place + SIZE] == [0.0] * SIZE
        assert "temperatures: the group was sampled at 0.5, TRL scores at temperature=1" in played.output
    assert "1 dead" in verify(run_dir)


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"num_generations": 2},
        {},
        r"environment.mine.group_size: must be num_generations of the GRPOConfig, 2",
    ),
    ({"eval_strategy": "steps", "eval_steps": 1}, {"eval_first": True}, "eval_strategy: must be `no`"),
    ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, {}, "steps_per_generation: times num_it"),
    ({"num_iterations": 2}, {}, "max_steps: must be a multiple of the 2 optimizer steps"),
    (
        {"restore_callback_states_from_checkpoint": True},
        {},
        "restore_callback_states_from_checkpoint: must be",
    ),
    ({}, {"eval_first": True}, "TRL must not evaluate on groups that are meant for training"),
]


@pytest.mark.parametrize(("args", "plan", "error"), REFUSALS)
def test_what_does_not_fit_is_refused_before_a_group_is_pulled(
    run_dir: Path, stage: Stage, args: dict[str, Any], plan: dict[str, Any], error: str
) -> None:
    with broker(run_dir) as layout:
        played = stage.play(run_dir, 1, args={"per_device_eval_batch_size": 8, **args}, **plan)
        assert played.code != 0
        assert error in played.output
        assert played.of("generation") == []
        assert settled(layout) == []


def test_groups_that_trl_cannot_train_on_end_the_training_and_stay_queued(
    run_dir: Path, stage: Stage
) -> None:
    """An environment without a configuration may push anything: the first batch tells."""
    run = config(environment={})
    with broker(run_dir, run) as layout:
        push(run_dir, [group(number, inference_logprobs=None) for number in range(2)])
        played = stage.play(run_dir, 1)
        assert played.code != 0
        assert "no group of the first batch can be trained on: inference_logprobs: required" in played.output
        assert settled(layout) == []
        push(run_dir, [group(number, size=2) for number in range(2, 6)])
    assert "6 queued" in verify(run_dir)
