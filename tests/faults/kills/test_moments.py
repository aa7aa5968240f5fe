"""Moments of a lane over the death of the broker: those of every acked group, and a leased batch keeps its own."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from tests.faults.support.processes import (
    BrokerProcess,
    config,
    feed,
    made,
    status,
)

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.control import LaneStatus
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify

pytestmark = pytest.mark.usefixtures("impatient")


def lane(run_dir: Path) -> LaneStatus:
    (found,) = status(run_dir).pressure.lanes
    return found


def assert_of(found: LaneStatus, ids: Iterable[str]) -> None:
    groups = list(ids)
    scores = np.concatenate([made(name).scores for name in groups])
    assert found.reward_groups == len(groups)
    assert found.reward_mean == pytest.approx(scores.mean(), rel=1e-12)
    assert found.reward_deviation == pytest.approx(scores.std(), rel=1e-9)


def names(first: int, last: int) -> list[str]:
    return [f"g-{number}" for number in range(first, last)]


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_a_killed_broker_has_the_moments_of_every_acked_group(run_dir: Path, durability: str) -> None:
    """Killed with groups queued, settled and committed, and sent again by a producer that does not know."""
    with BrokerProcess(run_dir, config(durability=durability)) as broker:
        feed(run_dir, names(0, 40))
        with Consumer.blocking(run_dir, sequences=8, group="g") as consumer:
            batch = consumer.pull(1, PolicyVersion(0, 0))
            assert_of(lane(run_dir), names(0, 40))
            before = batch.moments["e"]
            batch.ack()
            consumer.commit(PolicyVersion(0, 1))
        broker.kill_and_start()
        assert_of(lane(run_dir), names(0, 40))
        feed(run_dir, names(20, 50), producer="again")
        assert_of(lane(run_dir), names(0, 50))
        broker.kill_and_start()
        broker.kill_and_start()
        assert_of(lane(run_dir), names(0, 50))
        with Consumer.blocking(run_dir, sequences=8, group="g") as consumer:
            later = consumer.pull(2, PolicyVersion(0, 1)).moments["e"]
        assert (before.groups, later.groups) == (40, 50)
        assert later.mean == lane(run_dir).reward_mean
    layout = RunLayout(run_dir)
    assert verify(layout.journal, layout.dead, Witness).problems == []


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_a_batch_has_the_same_moments_after_a_kill(run_dir: Path, durability: str) -> None:
    """A trainer that resumes gets each batch with what it brought, though more groups have come."""
    with BrokerProcess(run_dir, config(durability=durability)) as broker:
        feed(run_dir, names(0, 20))
        seen: list[Moments] = []
        with Consumer.blocking(run_dir, sequences=8) as consumer:
            for step in (1, 2):
                batch = consumer.pull(step, PolicyVersion(0, step - 1))
                seen.append(batch.moments["e"])
                if step == 1:
                    batch.ack()
                    feed(run_dir, names(20, 30), producer="more")
                    broker.kill_and_start()
            broker.kill()
        broker.start()
        with Consumer.blocking(run_dir, sequences=8, resume=PolicyVersion(1, 0)) as consumer:
            for step in (1, 2):
                batch = consumer.pull(step, PolicyVersion(1, step - 1))
                assert batch.moments["e"] == seen[step - 1]
                batch.ack()
        assert [moments.groups for moments in seen] == [20, 30]


def test_at_memory_an_orderly_end_keeps_the_moments_and_a_kill_begins_anew(run_dir: Path) -> None:
    with BrokerProcess(run_dir, config(durability="memory")) as broker:
        feed(run_dir, names(0, 12))
        assert broker.end() == 0
        broker.start()
        assert_of(lane(run_dir), names(0, 12))
        feed(run_dir, names(12, 20), producer="more")
        assert_of(lane(run_dir), names(0, 20))
        broker.kill_and_start()
        assert [one.reward_groups for one in status(run_dir).pressure.lanes] in ([], [0])
        feed(run_dir, names(20, 25), producer="later")
        assert_of(lane(run_dir), names(20, 25))
