"""verl's own trainers with a real TransferQueue, fed by workers of the bus. `make test-verl` runs them."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.integrations.verl.played import SIZE, columns, sequence
from tests.trainer.integrations.verl.support import (
    ENDED_WITHIN_S,
    PLAYER,
    PYTHON,
    Played,
    Stage,
    config,
    environment,
    missing,
    play,
    verify,
    workers,
)

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import GetStatus, LedgerCounts, StatusReply
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.server import running_broker

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

BATCH = 4
FILTER = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "reward"}


def checked(steps: list[dict[str, Any]]) -> list[int]:
    """Check every trajectory that verl trained on, bit for bit; return the rows of the data set, one for each group."""
    rows: list[int] = []
    for step in steps:
        of_uid: dict[str, list[int]] = {}
        for one in step["rows"]:
            uid, session, index = one["key"].split("_")
            assert (uid, index, one["data"]) == (one["uid"], "0", str(one["row"]))
            tokens, mask, logprobs, score = sequence(one["row"], int(session))
            start = mask.index(1)
            assert one["prompts"] == tokens[:start]
            assert one["responses"] == tokens[start:]
            assert one["response_mask"] == mask[start:]
            served = np.asarray(logprobs[start:], np.float32)
            assert np.asarray(one["rollout_log_probs"], np.float32).tobytes() == served.tobytes()
            assert one["old_log_probs"] == one["rollout_log_probs"]
            assert one["rm_scores"] == [0.0] * (len(tokens) - start - 1) + [score]
            tag = one["tag"]
            assert (tag["status"], tag["prompt_len"]) == ("success", start)
            assert (tag["seq_len"], tag["response_len"]) == (len(tokens), len(tokens) - start)
            assert tag["global_steps"] <= step["step"]
            of_uid.setdefault(uid, []).append(one["row"])
        for found in of_uid.values():
            assert len({*found}) == 1
            rows.append(found[0])
    return rows


def test_keys_fields_and_tags_are_those_of_verls_own_workers() -> None:
    given = json.dumps({"columns": columns(7), "size": SIZE})
    ended = subprocess.run(
        [str(PYTHON), str(PLAYER.with_name("own_rows.py")), given],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]


@pytest.mark.parametrize(
    ("mode", "settings", "error"),
    [
        (
            "colocate_async",
            {"trainer.v1.sampler.custom_sampler.path": None, "trainer.v1.sampler.custom_sampler.name": None},
            "trainer.v1.sampler.custom_sampler.name: must be BusReplayBufferAsync of ",
        ),
        ("colocate_async", {"+bus.environment": "mind"}, "bus.environment: must be one of mine (got mind)"),
        ("sync", {"+bus.environment": "mind"}, "bus.environment: must be one of mine (got mind)"),
    ],
)
async def test_a_wrong_setting_ends_verls_trainer_at_its_start(
    run_dir: Path, mode: str, settings: dict[str, Any], error: str
) -> None:
    layout, run = RunLayout(run_dir), config(durability="os")
    write_json(layout.config, run)
    with running_broker(run, layout):
        ended = await play(run_dir, batch=BATCH, rows=4 * BATCH, mode=mode, settings=settings)
    assert ended.code == 1, ended.output[-6000:]
    assert f"ConfigError: {error}" in ended.output, ended.output[-6000:]
    assert not ended.of("step")


async def lives(run_dir: Path, stage: Stage, *plans: dict[str, Any]) -> tuple[list[Played], LedgerCounts]:
    """Play lives of a trainer, one after another; return them and the ledger."""
    layout, run = RunLayout(run_dir), config(max_deliveries=2, durability="os")
    write_json(layout.config, run)
    with running_broker(run, layout) as broker:
        async with workers(stage):
            found = [await play(run_dir, batch=BATCH, **plan) for plan in plans]
        async with BrokerClient(broker.endpoints.serve) as client:
            reply = await client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    verify(run_dir)
    for one in found[:-1]:
        assert one.code == -signal.SIGKILL, one.output[-6000:]
    assert found[-1].code == 0, found[-1].output[-6000:]
    return found, reply.pressure.ledger


def trained(ledger: LedgerCounts) -> int:
    """Return the groups that were trained on, those that a checkpoint covers included."""
    return ledger.trained + ledger.committed


async def test_verl_trains_on_exact_groups_and_validates(run_dir: Path) -> None:
    """A short group keeps its trajectories, a dead task none: verl's synchronous trainer pads the step."""
    stage = Stage(run_dir, {3: "short", 9: "dead", 14: "lost"})
    [played], ledger = await lives(
        run_dir, stage, {"rows": 24, "save_freq": 4, "test_freq": 3, "validated": 3}
    )
    steps = played.of("step")
    assert [one["step"] for one in steps] == list(range(1, 7))
    assert [len(one["rows"]) for one in steps] == [15, 16, 12, 16, 16, 16]
    rows = checked(steps)
    assert [sorted(rows[at : at + BATCH]) for at in (0, BATCH)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(rows) == sorted({*range(24)} - {9})
    validated = 2 * 3
    assert (trained(ledger), ledger.filtered, ledger.queued, ledger.leased) == (23 + validated, 0, 0, 0)
    metrics = played.of("metrics")
    assert sum(one["bus/groups_failed_total"] for one in metrics) == 1
    assert sum(one["bus/groups_short_total"] for one in metrics) == 1
    assert [one["step"] for one in metrics if any(name.startswith("val-") for name in one)] == [3, 6]
    assert played.of("end") == [{"step": 7, "left": {"train": 0, "val": 0}}]


async def test_an_asynchronous_trainer_replaces_the_prompts_that_failed(run_dir: Path) -> None:
    """And a group without variance, which verl's own filter drops."""
    fates = {3: "dead", 7: "late", 11: "lost", 15: "short", 19: "silent", 5: "flat"}
    stage = Stage(run_dir, fates, version=PolicyVersion(0, 0))
    plan = {"rows": 64, "steps": 8, "mode": "colocate_async", "deadline_s": 10.0, "save_freq": 4}
    plan["settings"] = FILTER
    [played], ledger = await lives(run_dir, stage, plan)
    steps = played.of("step")
    assert [len(one["rows"]) for one in steps] == [BATCH * SIZE] * 8
    rows = checked(steps)
    assert len({*rows}) == len(rows) == 8 * BATCH
    assert not {*rows} & {3, 5, 7, 15, 19}
    assert 11 in rows
    assert trained(ledger) == 8 * BATCH
    assert ledger.leased == 0
    assert ledger.accepted == trained(ledger) + ledger.filtered + ledger.queued
    assert ledger.filtered >= 2, "the short group and the flat one"
    assert len({*stage.answered}) == len(stage.answered), "none is sampled twice"


async def test_a_synchronous_trainer_replaces_groups_without_variance_if_verl_filters(run_dir: Path) -> None:
    """By `acc`, which is the score of an environment without metrics."""
    stage = Stage(run_dir, {1: "flat", 6: "flat"})
    settings = FILTER | {"algorithm.filter_groups.metric": "acc"}
    plan = {"rows": 64, "steps": 3, "gen_batch_size": 1, "save_freq": 3, "settings": settings}
    [played], ledger = await lives(run_dir, stage, plan)
    steps = played.of("step")
    assert [len(one["rows"]) for one in steps] == [BATCH * SIZE] * 3
    rows = checked(steps)
    assert len({*rows}) == len(rows)
    assert not {*rows} & {1, 6}
    assert trained(ledger) == 3 * BATCH
    assert (ledger.queued, ledger.leased) == (0, 0), "verl drops the surplus of a step"
    assert ledger.filtered == ledger.accepted - 3 * BATCH >= 2


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
async def test_a_killed_trainer_continues_from_its_checkpoint_without_a_rollout_lost_or_repeated(
    run_dir: Path, mode: str
) -> None:
    """Killed after an optimizer step that its settlement would have followed, two steps after a checkpoint.

    The separate trainer has two mini-batches in a step, and is killed between them.
    """
    stage = Stage(run_dir)
    plan = {"rows": 48, "steps": 9, "mode": mode, "save_freq": 3}
    (first, second), ledger = await lives(run_dir, stage, plan | {"dies_at": 5}, plan)
    parts = 2 if mode == "separate_async" else 1
    before = [part for step in range(1, 5) for part in [step] * parts]
    assert [one["step"] for one in first.of("step")] == [*before, 5]
    assert [one["step"] for one in second.of("step")] == [
        part for step in range(4, 10) for part in [step] * parts
    ]
    rows = checked(first.of("step")[: 3 * parts] + second.of("step"))
    assert len({*rows}) == len(rows) == 9 * BATCH, "none is trained on twice"
    if mode == "sync":
        assert sorted(rows) == list(range(36))
    assert {*rows} <= {*stage.answered}
    assert len({*stage.answered}) == len(stage.answered), "none is sampled twice"
    assert trained(ledger) == 9 * BATCH
    assert (ledger.filtered, ledger.leased) == (0, 0)
    assert ledger.accepted == trained(ledger) + ledger.queued, "prompts ahead of the last step"


async def test_the_error_of_a_step_names_its_groups(run_dir: Path) -> None:
    layout, run = RunLayout(run_dir), config(durability="os")
    write_json(layout.config, run)
    with running_broker(run, layout):
        async with workers(Stage(run_dir)):
            played = await play(run_dir, batch=BATCH, rows=3 * BATCH, fails_at=2)
    assert played.code == 1, played.output[-6000:]
    named = re.search(r"RuntimeError: planted\n.*Step 2 failed with the groups (.*);", played.output)
    assert named is not None, played.output[-6000:]
    assert len({*named[1].split(", ")}) == BATCH
