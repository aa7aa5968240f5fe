"""A trainer that needs more groups for one step than its window has leases, killed again and again."""

from pathlib import Path

import pytest
from tests.faults.kills.test_trainer_faults import audited, ledger, names
from tests.faults.support.processes import DIED_OF_POISON, BufferingTrainer, feed

pytestmark = pytest.mark.usefixtures("impatient")

NEEDED = 200
RESUMED = [pytest.param(False, id="going on"), pytest.param(True, id="resumed", marks=pytest.mark.extended)]


def resume(life: int, *, resumed: bool) -> tuple[int, int] | None:
    return (life - 1, 0) if resumed and life else None


@pytest.mark.parametrize("resumed", RESUMED)
def test_a_step_gets_all_its_groups_after_three_kills(run_dir: Path, *, resumed: bool) -> None:
    """Each has lost as many leases as may fail, and no group is at fault."""
    with audited(run_dir):
        feed(run_dir, names(NEEDED), nbytes=1000, slots=64)
        for life in range(3):
            with BufferingTrainer(run_dir, NEEDED, resume=resume(life, resumed=resumed)) as trainer:
                assert sorted(trainer.held()) == sorted(names(NEEDED))
        with BufferingTrainer(run_dir, NEEDED, resume=resume(3, resumed=resumed)) as trainer:
            assert sorted(trainer.held()) == sorted(names(NEEDED))
            assert trainer.train() == ()
            assert trainer.wait() == 0
        counts = ledger(run_dir)
        assert (counts.committed, counts.dead, counts.queued, counts.leased) == (NEEDED, 0, 0, 0)


@pytest.mark.extended
@pytest.mark.parametrize("resumed", RESUMED)
def test_a_deadly_group_among_them_ends_and_no_other(run_dir: Path, *, resumed: bool) -> None:
    deadly = f"g-{NEEDED // 2}"
    with audited(run_dir):
        feed(run_dir, names(NEEDED), nbytes=1000, slots=64)
        for life in range(4):
            about = {"resume": resume(life, resumed=resumed), "dies_of": (deadly,)}
            with BufferingTrainer(run_dir, NEEDED - 1, **about) as trainer:
                assert trainer.held() == ()
                assert trainer.wait() == DIED_OF_POISON
        with BufferingTrainer(run_dir, NEEDED - 1, resume=resume(4, resumed=resumed)) as trainer:
            assert sorted(trainer.held()) == sorted(set(names(NEEDED)) - {deadly})
            assert trainer.train() == ()
            assert trainer.wait() == 0
        counts = ledger(run_dir)
        assert (counts.committed, counts.dead, counts.accepted) == (NEEDED - 1, 1, NEEDED)
