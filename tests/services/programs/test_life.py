"""The life of a program, told from its requests."""

import math

import pytest

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.wire.control import WorkerState
from rolloutmq.services.programs.life import ON_ITS_WAY_S, ProgramLife, ProgramTable

SECTION = EnvironmentConfig(command=("x",), concurrency=4, group_size=4, enough_batches=3, drain_quiet_s=5.0)
BATCH = 32


def life(now: float = 0.0) -> ProgramLife:
    return ProgramLife("e-0", "e", SECTION, 7, now)


def test_it_is_ready_once_it_registered_or_posted() -> None:
    one = life()
    assert one.state(0.0) is WorkerState.STARTING
    one.begin(1.0)
    assert one.state(1.0) is WorkerState.READY
    assert one.beat("here", 1.0).in_hand == 1


def test_a_drained_program_is_gone_once_it_was_quiet_and_posts_nothing() -> None:
    one = life()
    one.spoke = True
    one.drain(10.0)
    assert one.state(14.9) is WorkerState.DRAINING
    post = one.begin(14.9)
    assert math.isinf(one.delivers_for_s(30.0)), "a post in progress may wait for room for minutes"
    one.end(post, 1, 30.0)
    assert one.state(34.9) is WorkerState.DRAINING
    assert one.delivers_for_s(34.0) == 1.0
    one.drain(34.9)  # again, by somebody else: only the first order counts
    assert one.state(35.0) is WorkerState.GONE
    assert one.beat("here", 35.0).produced == 1


def test_a_program_that_never_spoke_has_nothing_to_deliver() -> None:
    one = life()
    one.drain(1.0)
    assert one.state(1.0) is WorkerState.GONE


@pytest.mark.parametrize(("queued", "waiting"), [(0, 0), (20, 0), (22, 2), (24, 4), (100, 4)])
def test_slots_that_may_not_start_a_rollout_wait(queued: int, waiting: int) -> None:
    """Enough are 24 groups: as many rollouts as are missing may run, and no more than there are slots."""
    one = life()
    one.told(queued, BATCH, 4, 10.0)
    assert one.beat("here", 12.0).blocked_s == 2.0 * waiting
    one.told(0, BATCH, 4, 13.0)
    assert one.beat("here", 20.0).blocked_s == 3.0 * waiting


def test_before_a_trainer_says_its_batch_nobody_waits() -> None:
    one = life()
    one.told(0, 0, 4, 1.0)
    assert one.beat("here", 9.0).blocked_s == 0.0


def test_posts_without_room_wait_after_a_moment_and_never_more_than_all_slots() -> None:
    one = life()
    first = one.begin(0.0)
    assert one.beat("here", ON_ITS_WAY_S).blocked_s == 0.0
    assert one.beat("here", ON_ITS_WAY_S + 2.0).blocked_s == 2.0
    for _ in range(9):
        one.begin(3.0)
    before = one.beat("here", 10.0).blocked_s
    assert one.beat("here", 11.0).blocked_s == before + 4.0
    one.end(first, 1, 11.0)
    assert one.produced == 1


def test_a_table_has_the_running_processes_of_environments_with_a_command() -> None:
    table = ProgramTable({"e": SECTION})
    assert table
    assert not ProgramTable({})
    assert [table.env_of(name) for name in ("e-0", "other-0", "e", "e-x", "e-²", "")] == ["e"] + [None] * 5
    assert table.see({"e-0": 7, "other-0": 8}, 1.0) == []
    first = table.get("e-0")
    assert first is not None
    assert table.see({"e-0": 7}, 2.0) == []
    assert table.get("e-0") is first
    assert table.see({"e-0": 9}, 3.0) == [first], "another process has another life"
    second = table.get("e-0")
    assert second is not None
    assert (second.pid, second.spoke) == (9, False)
    assert table.see({}, 4.0) == [second]
    assert table.lives() == []
