"""SkyRL's simulated trainer, with SkyRL's own loop, buffer and staleness control, fed by workers of the bus."""

import math
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.integrations.skyrl.support import (
    RISE,
    SIZE,
    Stage,
    config,
    missing,
    play,
    score,
    sequence,
    verify,
    workers,
)

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import GetStatus, StatusReply
from rolloutmq.services.broker.server import Broker, running_broker

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

BATCH = 4
ROWS = 36


async def counts(broker: Broker) -> StatusReply:
    async with BrokerClient(broker.endpoints.serve) as client:
        reply = await client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply


def checked(steps: list[dict[str, Any]], lost: int = 0) -> tuple[dict[str, set[int]], dict[str, list[str]]]:
    """Check every row that SkyRL trained on; return the policies and the stop reasons of each instance.

    Args:
        steps: Lines of the player.
        lost: Last step of an earlier life. Its policies sampled some of the groups, though no checkpoint has them.
    """
    seen: dict[str, set[int]] = {}
    reasons: dict[str, list[str]] = {}
    for step in steps:
        rows = zip(
            step["uids"], step["prompt_token_ids"], step["response_ids"], step["loss_masks"],
            step["rollout_logprobs"], step["stop_reasons"], step["rewards"], strict=True,
        )  # fmt: skip
        for number, (uid, prompt, response, mask, logprobs, reason, rewards) in enumerate(rows):
            place = number % SIZE
            reasons.setdefault(uid, []).append(reason)
            if reason != "stop":
                assert (prompt, response, mask, logprobs) == ([int(uid) + 10], [1], [0], [0.0])
                continue
            served = {one for one, chosen in zip(logprobs, mask, strict=True) if chosen}
            assert len(served) == 1
            policy = round((-served.pop() - 1.0) / RISE)
            assert policy < step["step"] or policy < lost, "no group is newer than the policy before the step"
            tokens, chosen, expected = sequence(uid, place, policy)
            assert prompt + response == tokens
            assert mask == chosen[1:]
            assert logprobs == expected[1:]
            assert rewards == [0.0] * (len(response) - 1) + [score(uid, place)]
            seen.setdefault(uid, set()).add(policy)
    return seen, reasons


async def test_skyrl_trains_on_exact_groups_through_losses_deaths_and_delays(run_dir: Path) -> None:
    fates = {"3": "dead", "7": "late", "11": "lost", "15": "short", "19": "silent"}
    layout, settings = RunLayout(run_dir), config(max_deliveries=2, durability="os")
    write_json(layout.config, settings)
    stage = Stage(run_dir, run_dir.parent / "weights.json", fates)
    with running_broker(settings, layout) as broker:
        async with workers(stage):
            played = await play(run_dir, weights=str(stage.weights), batch=BATCH, rows=ROWS, deadline_s=10.0)
        assert played.code == 0, played.output
        ledger = (await counts(broker)).pressure.ledger
    steps = played.of("step")
    assert [one["step"] for one in steps] == list(range(1, ROWS // BATCH + 1))

    seen, reasons = checked(steps)
    assert len(reasons) == ROWS
    assert {uid: set(found) for uid, found in reasons.items() if uid in fates} == {
        "3": {"failed"},
        "7": {"deadline"},
        "11": {"stop"},
        "15": {"stop", "short"},
        "19": {"deadline"},
    }
    assert reasons["15"] == ["stop"] * (SIZE - 1) + ["short"]
    assert all(set(found) == {"stop"} for uid, found in reasons.items() if uid not in fates)
    assert len(set().union(*seen.values())) > 3, "the served log-probabilities change with the steps"

    metrics = [one for one in played.of("metrics") if "async/staleness_mean" in one]
    assert len(metrics) == ROWS // BATCH
    assert all(math.isfinite(one["async/staleness_mean"]) for one in metrics)
    assert sum(one["bus/groups_failed"] for one in metrics) == 1
    assert sum(one["bus/groups_deadline"] for one in metrics) == 2
    assert sum(one["bus/groups"] for one in metrics) == ROWS - 3

    assert sorted(stage.trained_on) == sorted({str(row) for row in range(ROWS)} - {"3", "19"})
    assert ledger.trained == ROWS - 3
    assert (ledger.filtered + ledger.queued, ledger.leased) == (1, 0), "the late group"
    verify(run_dir)


async def test_a_killed_trainer_continues_from_its_checkpoint_without_a_rollout_lost_or_repeated(
    run_dir: Path,
) -> None:
    """Killed after the optimizer step that its settlement would have followed, two steps after a checkpoint."""
    layout, settings = RunLayout(run_dir), config(durability="os")
    write_json(layout.config, settings)
    stage = Stage(run_dir, run_dir.parent / "weights.json", {})
    plan: dict[str, Any] = {"weights": str(stage.weights), "batch": BATCH, "rows": ROWS, "kind": "async"}
    saves = {"trainer.ckpt_interval": 3, "trainer.resume_mode": "latest"}
    with running_broker(settings, layout) as broker:
        async with workers(stage):
            first = await play(run_dir, dies_at=5, settings=saves, **plan)
            assert first.code == -signal.SIGKILL, first.output
            second = await play(
                run_dir,
                settings=saves | {"trainer.eval_interval": 4, "trainer.eval_before_train": False},
                evaluated=6,
                **plan,
            )
        assert second.code == 0, second.output
        ledger = (await counts(broker)).pressure.ledger
    assert [one["step"] for one in first.of("step")] == [1, 2, 3, 4, 5]
    assert [one["step"] for one in second.of("step")] == [4, 5, 6, 7, 8, 9]
    _, reasons = checked(first.of("step")[:3] + second.of("step"), lost=5)
    assert sorted(reasons) == sorted(map(str, range(ROWS)))
    assert {one for found in reasons.values() for one in found} == {"stop"}
    assert all(len(found) == SIZE for found in reasons.values()), "none is trained on twice"
    assert sorted(stage.trained_on) == sorted(map(str, range(ROWS))), "none is sampled twice"
    assert second.of("end") == [{"incarnation": 1, "step": 9}]
    evaluated = [one for one in second.of("metrics") if "eval/all/avg_score" in one]
    # SkyRL 0.3 tracks an evaluation with the step after it, 0.4 with its own.
    assert [one["step"] for one in evaluated] in ([5, 9], [4, 8, 9])
    assert (ledger.queued, ledger.leased) == (0, 0)
    verify(run_dir)


async def test_a_training_begun_anew_gets_no_group_of_other_prompts(run_dir: Path) -> None:
    """The uids and the name are the same; what the tasks are about is not."""
    layout, settings = RunLayout(run_dir), config(durability="os")
    write_json(layout.config, settings)
    stage = Stage(run_dir, run_dir.parent / "weights.json", {})
    plan: dict[str, Any] = {"weights": str(stage.weights), "batch": BATCH, "rows": 12}
    other = {"generator.sampling_params.max_generate_length": 77}
    with running_broker(settings, layout):
        async with workers(stage):
            first = await play(run_dir, dies_at=2, **plan)
            assert first.code == -signal.SIGKILL, first.output
            before = {*stage.trained_on}
            second = await play(run_dir, settings=other, **plan)
        assert second.code == 0, second.output
    _, reasons = checked(second.of("step"), lost=2)
    assert {one for found in reasons.values() for one in found} == {"stop"}
    sampled = Counter(uid for uid, _ in {(name.rpartition("/")[2], name) for name, _ in stage.answered})
    assert len(before) >= 8
    assert all(sampled[f"{uid}~0"] == 2 for uid in before), "all are sampled anew"


async def test_settings_for_unfinished_trajectories_are_those_of_skyrl(run_dir: Path) -> None:
    """As SkyRL's own generator applies them: no reward, and no token to learn from."""
    layout, settings = RunLayout(run_dir), config(durability="os")
    write_json(layout.config, settings)
    stage = Stage(run_dir, run_dir.parent / "weights.json", {"1": "cut"})
    chosen = {"generator.zero_reward_on_non_stop": True, "generator.apply_overlong_filtering": True}
    with running_broker(settings, layout) as broker:
        async with workers(stage):
            played = await play(run_dir, weights=str(stage.weights), batch=BATCH, rows=BATCH, settings=chosen)
        assert played.code == 0, played.output
        ledger = (await counts(broker)).pressure.ledger
    [step] = played.of("step")
    for uid, reason, mask, rewards in zip(
        step["uids"], step["stop_reasons"], step["loss_masks"], step["rewards"], strict=True
    ):
        assert reason == ("length" if uid == "1" else "stop")
        assert any(mask) == (uid != "1")
        assert uid != "1" or not any(rewards)
    assert sum(map(any, step["rewards"])) > SIZE, "others have theirs"
    assert (ledger.trained, ledger.filtered) == (BATCH - 1, 1)


async def test_groups_without_variance_are_filtered_and_a_last_short_mini_batch_too(run_dir: Path) -> None:
    layout, settings = RunLayout(run_dir), config(durability="os")
    write_json(layout.config, settings)
    stage = Stage(run_dir, run_dir.parent / "weights.json", {"2": "flat", "5": "flat", "9": "flat"})
    chosen = {
        "trainer.algorithm.zero_variance_filter": True,
        "trainer.fully_async.sample_full_batch": True,
    }
    with running_broker(settings, layout) as broker:
        async with workers(stage):
            played = await play(
                run_dir, weights=str(stage.weights), batch=BATCH, rows=12, epochs=2, settings=chosen
            )
        assert played.code == 0, played.output
        ledger = (await counts(broker)).pressure.ledger
    assert len(played.of("step")) == 4, "two full mini-batches in each epoch"
    assert (ledger.trained, ledger.filtered) == (16, 8)
    assert (ledger.queued, ledger.leased) == (0, 0)
    assert len(stage.trained_on) == 24, "each epoch has tasks of its own"
    verify(run_dir)


@pytest.mark.parametrize("kind", ["sim", "sync"])
async def test_dropped_groups_make_room_for_those_that_a_step_needs(run_dir: Path, kind: str) -> None:
    """Of 40 groups 8 have a variance, and the staleness bound of the bus lets a trainer hold 12."""
    layout = RunLayout(run_dir)
    settings = config({"pacing": True, "max_staleness": 2}, durability="os")
    write_json(layout.config, settings)
    flat = {str(row): "flat" for row in range(40) if row % 5}
    stage = Stage(run_dir, run_dir.parent / "weights.json", flat)
    chosen: dict[str, dict[str, Any]] = {
        "sim": {
            "trainer.algorithm.zero_variance_filter": True,
            "trainer.fully_async.sample_full_batch": True,
        },
        "sync": {"trainer.algorithm.dynamic_sampling.type": "filter"},
    }
    with running_broker(settings, layout) as broker:
        async with workers(stage):
            plan = {"weights": str(stage.weights), "batch": BATCH, "rows": 40, "kind": kind}
            played = await play(run_dir, settings=chosen[kind], **plan)
        assert played.code == 0, played.output
        ledger = (await counts(broker)).pressure.ledger
    assert len(played.of("step")) == 2
    assert {one for step in played.of("step") for one in step["stop_reasons"]} == {"stop"}
    assert (ledger.trained, ledger.filtered) == (8, 32)
    assert (ledger.queued, ledger.leased) == (0, 0)
    verify(run_dir)


async def test_a_resumed_trainer_drops_again_what_it_dropped_after_its_checkpoint(run_dir: Path) -> None:
    """It is killed behind the third step: SkyRL's second checkpoint does not know what was dropped for that step."""
    layout, settings = RunLayout(run_dir), config(durability="os")
    write_json(layout.config, settings)
    flat = {str(row): "flat" for row in range(ROWS) if row % 2}
    stage = Stage(run_dir, run_dir.parent / "weights.json", flat)
    plan: dict[str, Any] = {"weights": str(stage.weights), "batch": BATCH, "rows": ROWS, "kind": "async"}
    saves = {
        "trainer.algorithm.zero_variance_filter": True,
        "trainer.fully_async.sample_full_batch": True,
        "trainer.ckpt_interval": 1,
        "trainer.resume_mode": "latest",
    }
    with running_broker(settings, layout) as broker:
        async with workers(stage):
            first = await play(run_dir, dies_at=3, settings=saves, **plan)
            assert first.code == -signal.SIGKILL, first.output
            second = await play(run_dir, settings=saves, **plan)
        assert second.code == 0, second.output
        ledger = (await counts(broker)).pressure.ledger
    assert [one["step"] for one in second.of("step")] == [3, 4]
    assert sorted(stage.trained_on) == sorted(map(str, range(ROWS))), "none is sampled twice"
    assert (ledger.queued, ledger.leased) == (0, 0)
    verify(run_dir)


async def test_a_trainer_that_is_killed_after_an_exhausted_epoch_gets_its_step_again(run_dir: Path) -> None:
    """SkyRL saves an exhausted epoch under the number of the step that it has yet to take."""
    layout, settings = RunLayout(run_dir), config(durability="os")
    write_json(layout.config, settings)
    stage = Stage(run_dir, run_dir.parent / "weights.json", {"2": "flat", "5": "flat", "9": "flat"})
    plan: dict[str, Any] = {
        "weights": str(stage.weights),
        "batch": BATCH,
        "rows": 12,
        "epochs": 2,
        "kind": "async",
    }
    saves = {
        "trainer.algorithm.zero_variance_filter": True,
        "trainer.fully_async.sample_full_batch": True,
        "trainer.ckpt_interval": 100,
        "trainer.resume_mode": "latest",
    }
    with running_broker(settings, layout) as broker:
        async with workers(stage):
            first = await play(run_dir, dies_at=4, settings=saves, **plan)
            assert first.code == -signal.SIGKILL, first.output
            second = await play(run_dir, settings=saves, **plan)
        assert second.code == 0, second.output
        ledger = (await counts(broker)).pressure.ledger
    assert [one["step"] for one in first.of("step")] == [1, 2, 3, 4]
    assert [one["step"] for one in second.of("step")] == [4, 5], "SkyRL skips a number"
    assert {reason for one in second.of("step") for reason in one["stop_reasons"]} == {"stop"}, "none is lost"
    assert len(stage.trained_on) == len({name for name, _ in stage.answered}) == 24, "none is sampled twice"
    assert second.of("end") == [{"incarnation": 1, "step": 4}]
    assert (ledger.trained + ledger.committed, ledger.filtered) == (16, 8)
    assert (ledger.queued, ledger.leased) == (0, 0)
    verify(run_dir)


async def test_the_synchronous_trainer_settles_commits_and_resumes(run_dir: Path) -> None:
    layout, settings = RunLayout(run_dir), config(durability="os")
    write_json(layout.config, settings)
    stage = Stage(run_dir, run_dir.parent / "weights.json", {"6": "lost"})
    plan: dict[str, Any] = {"weights": str(stage.weights), "batch": BATCH, "rows": 24, "kind": "sync"}
    saves = {"trainer.ckpt_interval": 2, "trainer.resume_mode": "latest"}
    with running_broker(settings, layout) as broker:
        async with workers(stage):
            first = await play(run_dir, dies_at=4, settings=saves, **plan)
            assert first.code == -signal.SIGKILL, first.output
            second = await play(run_dir, settings=saves, **plan)
        assert second.code == 0, second.output
        ledger = (await counts(broker)).pressure.ledger
    assert [one["step"] for one in first.of("step")] == [1, 2, 3, 4]
    assert [one["step"] for one in second.of("step")] == [3, 4, 5, 6]
    seen, reasons = checked(first.of("step")[:2] + second.of("step"), lost=4)
    assert sorted(reasons) == sorted(map(str, range(24)))
    assert len(set().union(*seen.values())) > 3
    assert sorted(stage.trained_on) == sorted(map(str, range(24))), "none is sampled twice"
    assert second.of("end") == [{"incarnation": 1, "step": 6}]
    assert (ledger.queued, ledger.leased) == (0, 0)
    verify(run_dir)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_error_of_a_step_names_its_groups(run_dir: Path, kind: str) -> None:
    layout, settings = RunLayout(run_dir), config(durability="os")
    write_json(layout.config, settings)
    stage = Stage(run_dir, run_dir.parent / "weights.json", {})
    with running_broker(settings, layout):
        async with workers(stage):
            plan = {"weights": str(stage.weights), "batch": BATCH, "rows": 3 * BATCH, "kind": kind}
            played = await play(run_dir, fails_at=2, **plan)
    assert played.code == 1, played.output
    named = re.search(r"RuntimeError: planted\n.*Step 2 failed with the groups (.*);", played.output)
    assert named is not None, played.output
    assert len({*named[1].split(", ")}) == BATCH
