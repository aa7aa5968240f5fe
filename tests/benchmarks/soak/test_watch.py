import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.soak import watch
from benchmarks.soak.plan import HIGH_GROUPS
from benchmarks.soak.watch import GRANTED_LIMIT
from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.shm.segment_file import SegmentFile, SegmentOwner
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import JournalStatus, LaneStatus, LedgerCounts, Pressure, StatusReply
from rolloutmq.schemas.wire.envelope import Split

EMPTY = StatusReply(
    pressure=Pressure(
        epoch=1, number=1, at=0.0, rollout_pressure=0.0, queued_sequences=0, batch_sequences=1, queued_groups=0,
        queued_bytes=0, leased_bytes=0, high_bytes=100, step=0, consumed_per_s=0.0, produced_per_s=0.0,
        staleness_max=0, trainer_wait="", ledger=LedgerCounts(), lanes=(), workers=(),
    ),
    run="run", total_steps=0, durability="disk", uptime_s=1.0, rejected_messages=0, rejected_by_reason={},
)  # fmt: skip
Change = Callable[[], StatusReply]


def pressure(**fields: Any) -> StatusReply:
    return msgspec.structs.replace(EMPTY, pressure=msgspec.structs.replace(EMPTY.pressure, **fields))


def lane(**fields: Any) -> LaneStatus:
    return LaneStatus(env="e", split=Split.TRAIN, weight=1.0, min_share=0.0, **fields)


def test_a_status_that_adds_up_is_fine() -> None:
    full = pressure(
        ledger=LedgerCounts(accepted=8, queued=1, leased=1, trained=1, committed=1, filtered=1, expired=1, dead=1,
                            discarded=1, rewound=5, lost_before_accept=3),
        queued_bytes=60, leased_bytes=30, granted_bytes=10,
        lanes=(lane(queued_groups=HIGH_GROUPS - 1, leased_groups=1, granted=GRANTED_LIMIT - HIGH_GROUPS),),
    )  # fmt: skip
    assert list(watch.broken(full)) == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (pressure(ledger=LedgerCounts(accepted=2, queued=1)), "add up to 1"),
        (pressure(queued_bytes=60, leased_bytes=30, granted_bytes=11), "101 bytes"),
        (
            pressure(lanes=(lane(queued_groups=HIGH_GROUPS, leased_groups=1),)),
            "groups are held, above the mark",
        ),
        (
            pressure(lanes=(lane(granted=GRANTED_LIMIT + 1),)),
            "0 groups are held and",
        ),
        (msgspec.structs.replace(EMPTY, journal=JournalStatus(quarantined=1)), "quarantine"),
    ],
)
def test_a_status_that_breaks_an_invariant_is_noticed(found: StatusReply, said: str) -> None:
    (line,) = watch.broken(found)
    assert said in line


def test_a_broker_that_grows_without_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = watch.MemoryWatch()
    assert memory.look(os.getpid(), 0) == ""
    monkeypatch.setattr(watch, "MEMORY_BYTES", 16 << 20)
    held = bytearray(os.urandom(64 << 20))
    assert "memory: the broker grew" in memory.look(os.getpid(), 0)
    assert memory.look(os.getpid(), len(held)) == ""
    assert memory.peak >= 32 << 20


def test_what_is_left_behind_is_found(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    layout.sockets.mkdir()
    assert watch.leftovers(run_dir, "soak-nobody", set(), 0.0) == []
    (layout.sockets / "serve").touch()
    layout.endpoints.touch()
    found = watch.leftovers(run_dir, "soak-nobody", set(), 0.0)
    assert found == ["left behind: endpoints.json of the broker", "left behind: serve of the broker"]


def test_shared_memory_counts_for_the_processes_of_the_soak_alone(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = segment_file.create("arena", 4096)
    try:
        own = SegmentOwner.current()
        line = f"left behind: shared memory {segment.path}"
        for later, is_own in ((-1, False), (1, True)):
            dead = own._replace(start_ticks=own.start_ticks + later)  # nobody with this pid started then
            with monkeypatch.context() as patch:
                patch.setattr(SegmentFile, "owner", lambda _, dead=dead: dead)
                assert (line in watch.leftovers(run_dir, "soak-nobody", {dead.pid}, 0.0)) == is_own
                assert watch.leftovers(run_dir, "soak-nobody", set(), 0.0) == []
    finally:
        segment.discard()
