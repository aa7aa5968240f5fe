"""A long log of batches is read anew by each iteration, and has what one in memory has."""

from pathlib import Path

import msgspec
import pytest

from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.monitor.report import settled_log
from rolloutmq.services.monitor.report.settled_log import LoggedBatches, read_log, read_settled


def batch(step: int, incarnation: int = 0, **fields: object) -> SettledBatch:
    line = {
        "at": float(step),
        "version": PolicyVersion(incarnation, step),
        "trained": (f"g-{incarnation}-{step}",),
    }
    return msgspec.convert({**line, "rewards": (float(step),), **fields}, SettledBatch)


def resume(step: int, incarnation: int) -> SettledBatch:
    return SettledBatch(at=0.5, version=PolicyVersion(incarnation, step), resumed=True)


LINES = (*map(batch, range(1, 8)), resume(4, 1), batch(5, 1), batch(6, 1), resume(5, 2), batch(6, 2))


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    found = RunLayout(run_dir)
    found.trained.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in LINES))
    return found


def test_a_long_log_has_what_one_in_memory_has(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = read_log(layout.trained)
    monkeypatch.setattr(settled_log, "KEPT_BYTES", 10)
    read = read_log(layout.trained)
    assert isinstance(read.batches, LoggedBatches)
    for once, again in ((kept.batches, read.batches), (kept.voided, read.voided)):
        assert list(once) == list(again) == list(again)
        assert len(once) == len(again)
        assert (once[0], once[-1], list(once[1:3])) == (again[0], again[-1], list(again[1:3]))
    assert [one.version.step for one in kept.batches] == [1, 2, 3, 4, 5, 6]
    assert [one.trained for one in kept.voided] == [("g-0-5",), ("g-0-6",), ("g-0-7",), ("g-1-6",)]
    assert kept.step_points() == read.step_points()
    assert kept.ids() == read.ids()
    assert kept.resumed_at == read.resumed_at == (0.5, 0.5)


def test_lines_that_are_added_meanwhile_are_left_out(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settled_log, "KEPT_BYTES", 10)
    log = read_log(layout.trained)
    with layout.trained.open("ab") as file:
        file.write(msgspec.json.encode(batch(7, 2)) + b"\n")
    assert log.batches[-1].version.step == 6
    with pytest.raises(IndexError):
        log.batches[6]


def test_the_log_of_the_broker_counts_where_the_trainer_wrote_none(layout: RunLayout) -> None:
    layout.settled.write_bytes(layout.trained.read_bytes())
    layout.trained.write_bytes(b"")
    assert len(read_settled(layout).batches) == 6
    layout.trained.write_bytes(msgspec.json.encode(resume(3, 1)) + b"\n")
    assert read_settled(layout).resumed_at == (0.5,)
    assert not read_settled(layout).batches
