"""One act of a soak with real processes, and one that fails."""

from pathlib import Path

import pytest

from benchmarks.soak import plan, stage
from benchmarks.soak.board import Board
from benchmarks.soak.books import ProducerLife, read_producer
from benchmarks.soak.cast import Cast, Place
from benchmarks.soak.plan import Act, Fault, Kind
from benchmarks.soak.stage import STALL_S, Performance, Progress, Tally

GROUPS = 300


def act(*faults: Fault, durability: str = "disk") -> Act:
    """Two ranks with checkpoints, at that durability."""
    from msgspec.structs import replace

    found = next(iter(plan.acts(3 * GROUPS, 3, 5)))
    t0, e0, *_ = found.trainers
    two = replace(t0, ranks=2, sequences=64, tokens=0, commits=True, window=0)
    return replace(found, durability=durability, transport="ipc", trainers=(two, e0), faults=faults)


def play(which: Act, tmp_path: Path) -> tuple[list[str], Tally]:
    tally = Tally()
    violations = Performance(which, tmp_path / "act", tally, lambda *_: None).play()
    return violations, tally


@pytest.mark.extended
@pytest.mark.parametrize("durability", ["disk", "memory"])
def test_a_short_act_holds(tmp_path: Path, durability: str) -> None:
    faults = (
        Fault(20, Kind.KILL, "broker", 0.1),
        Fault(60, Kind.KILL, "t0/1", 0.0),
        Fault(60, Kind.STOP, "p0", 0.3),
        Fault(120, Kind.LEAVE, "p1", 0.0),
        Fault(120, Kind.KILL, "p2", 0.0),
        Fault(180, Kind.KILL, "t0", 0.2),
        Fault(240, Kind.STOP, "broker", 0.4),
        Fault(240, Kind.DRAIN, "p0", 0.0),
    )
    violations, tally = play(act(*faults, durability=durability), tmp_path)
    assert violations == []
    assert tally.groups >= GROUPS
    assert (tally.kills, tally.stops, tally.asked) == (4, 2, 2)
    assert tally.lives >= 9 + tally.kills


@pytest.mark.extended
def test_an_act_that_loses_an_acked_group_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_one_more(path: Path) -> ProducerLife:
        life = read_producer(path)
        return ProducerLife(
            life.producer, life.life, life.built + 1, life.sent, life.acked | {life.built}, life.took_over
        )

    monkeypatch.setattr(stage, "read_producer", with_one_more)
    violations, _ = play(act(durability="os"), tmp_path)
    assert len(violations) == 4  # one of each producer
    assert all(line.startswith("lost: p") and "the journal does not know it" in line for line in violations)


def test_a_trainer_that_stands_still_while_another_works_is_stuck(tmp_path: Path) -> None:
    place = Place(tmp_path / "act", "token")
    troupes = Cast(act(), place).troupes
    with Board(place.board) as board:
        progress = Progress(troupes)
        assert progress.stuck(board, 100.0) == ""
        assert progress.stuck(board, 100.0 + STALL_S) == ""
        board.settled(troupes["e0"].cells[0], 1)
        board.settled(troupes["t0"].cells[1], 1)
        assert progress.stuck(board, 101.0 + STALL_S) == ""
        board.settled(troupes["e0"].cells[0], 1)
        assert progress.stuck(board, 102.0 + 2 * STALL_S).startswith("t0 settled no group")
