"""SkyRL's simulated trainer, with SkyRL's own loop, buffer and staleness control, fed by workers of the bus."""

import math
from pathlib import Path

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

    seen: dict[str, set[float]] = {}
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
            assert policy < step["step"], "no group is newer than the policy before the step"
            tokens, chosen, expected = sequence(uid, place, policy)
            assert prompt + response == tokens
            assert mask == chosen[1:]
            assert logprobs == expected[1:]
            assert rewards == [0.0] * (len(response) - 1) + [score(uid, place)]
            seen.setdefault(uid, set()).add(policy)
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

    answered = [uid for uid, _ in stage.answered]
    assert sorted(answered) == sorted({str(row) for row in range(ROWS)} - {"3", "19"})
    assert ledger.trained == ROWS - 3
    assert (ledger.filtered + ledger.queued, ledger.leased) == (1, 0), "the late group"
    verify(run_dir)
