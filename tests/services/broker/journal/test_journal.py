"""The journal: when a batch begins and is done, its records, and the removal of files."""

import logging
import threading
from pathlib import Path

import pytest
from tests.services.broker.journal.journals import (
    SMALL,
    Driven,
    FailingDisk,
    acceptances,
    config,
    contents,
    group,
    orders,
    path_of,
    served,
    snapshot,
)
from tests.services.process.open_descriptors import opened

from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.event_buffer import Entry
from rolloutmq.services.broker.journal.format.events import Dropped, Numbers
from rolloutmq.services.broker.journal.format.records import BLOCK_BYTES
from rolloutmq.services.broker.journal.inspect.history import JournalHistory
from rolloutmq.services.broker.journal.journal import BEHIND_SLOW_BYTES, Journal
from rolloutmq.services.broker.journal.stored_group import BodyMemory

LEVELS = [Durability.OS, Durability.DISK]


def gone(number: int) -> Dropped:
    return Dropped(number, "expired", "stale")


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("groups-*"))


def logs(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("events-*"))


@pytest.mark.parametrize("level", LEVELS)
def test_what_was_appended_comes_back_in_order(tmp_path: Path, level: Durability) -> None:
    run = Driven(tmp_path, config(level)).start()
    run.write(group(1), gone(1), group(2))
    run.write(gone(7))
    run.write(group(3))
    run.journal.close()
    found = Driven(tmp_path, config(level))
    events = list(found.found.events)
    assert events[:3] == snapshot()
    assert [getattr(event, "order", None) for event in events[3:]] == [1, 1, 2, 7, 3]
    assert served(found.found) == {1, 2, 3}
    assert (found.found.damage, found.found.empty) == ([], False)
    found.journal.close()


def test_nothing_is_empty(tmp_path: Path) -> None:
    run = Driven(tmp_path / "journal", config())
    assert (run.found.empty, list(run.found.events), run.found.damage) == (True, [], [])
    assert (run.journal.ticket, run.journal.done) == (0, 0)
    run.journal.close()
    run.journal.close()


def test_a_batch_gathers_while_one_is_written(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(), disk).start()
    journal = run.journal
    writing, go_on = threading.Event(), threading.Event()

    def stop(_: int) -> None:
        writing.set()
        go_on.wait()

    disk.plan["pwritev"] = stop
    assert run.append(group(1)) == 1
    journal.advance(0.0, urgent=True)
    assert writing.wait(5)
    assert [run.append(group(2)), run.append(gone(2))] == [2, 2]
    journal.advance(0.0, urgent=True)
    assert (journal.done, journal.next_deadline()) == (0, float("inf"))
    assert journal.behind_bytes > group(1).body.nbytes + group(2).body.nbytes
    go_on.set()
    run.until(lambda: journal.done == 1)
    run.until(lambda: journal.done == 2)
    assert journal.behind_bytes == 0
    assert journal.status().commits == 2
    journal.close()


def test_batches_are_bounded_and_the_thread_goes_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many groups that arrive at once are several commits, and the events behind them keep their place."""
    monkeypatch.setattr("rolloutmq.services.broker.journal.journal.BATCH_BYTES", 8 << 20)
    run = Driven(tmp_path, config(segment_bytes=64 << 20)).start()
    before = run.journal.status().commits
    for number in range(1, 8):
        run.append(group(number, 3 << 20))
    run.append(gone(7))
    assert run.journal.ticket == 3
    run.settle()
    assert run.journal.status().commits == before + 3
    run.journal.close()
    found = Driven(tmp_path, config())
    assert [getattr(event, "order", None) for event in found.found.events][3:] == [*range(1, 8), 7]
    found.journal.close()


def test_commits_keep_their_distance_unless_somebody_waits_or_much_does(tmp_path: Path) -> None:
    run = Driven(tmp_path, config(commit_ms=1000.0)).start()
    journal = run.journal

    def begun(now: float, *, urgent: bool = False) -> bool:
        journal.advance(now, urgent=urgent)
        return journal.next_deadline() == float("inf")

    def finish() -> None:
        while journal.done < journal.ticket:
            assert run.woken.wait(5)
            run.woken.clear()
            journal.advance(0.0, urgent=False)

    assert journal.next_deadline() == float("inf")
    run.append(group(1))
    assert begun(100.0)  # the first one at once
    finish()
    run.append(group(2))
    assert not begun(100.9)
    assert journal.next_deadline() == 101.0
    assert begun(101.0)
    finish()
    run.append(group(3))
    assert begun(101.1, urgent=True)
    finish()
    run.append(group(4, 9 << 20))
    assert journal.next_deadline() == float("-inf")
    assert begun(101.2)
    finish()
    journal.close()


def test_at_os_nothing_is_synced_before_the_end(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(Durability.OS), disk).start()
    run.write(*map(group, range(1, 40)), gone(1))
    assert len(segments(tmp_path)) > 1
    assert {"fdatasync", "sync_directory"}.isdisjoint(disk.calls)
    run.journal.close()
    assert disk.calls.count("fdatasync") == 2


def test_at_disk_acceptances_wait_for_one_sync_and_facts_for_two(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(segment_bytes=1 << 20), disk).start()
    for number in range(6):  # what is done ahead of time is done after each commit, one thing after the other
        run.write(gone(number), group(1))

    def syncs(*entries: Entry) -> list[str]:
        disk.calls.clear()
        run.write(*entries)
        return [call for call in disk.calls if call in {"pwritev", "fdatasync"}]

    assert syncs(group(2), group(3)) == ["pwritev", "fdatasync", "pwritev"]
    assert syncs(group(4), gone(3)) == ["pwritev", "fdatasync", "pwritev", "fdatasync"]
    assert syncs(gone(4)) == ["pwritev", "fdatasync"]
    run.journal.close()


def test_acceptances_are_synced_in_time_although_nothing_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.services.broker.journal.write.commit_thread.EVENTS_SYNC_S", 0.02)
    disk = FailingDisk()
    synced = threading.Event()
    run = Driven(tmp_path, config(), disk).start()
    run.write(gone(0))
    run.write(group(1))
    disk.plan["fdatasync"] = lambda fd: synced.set() if "events" in path_of(fd) else None
    run.write(group(2))
    assert synced.wait(5)
    run.journal.close()


def test_a_body_may_leave_memory_once_it_is_durable(tmp_path: Path) -> None:
    ram = BodyMemory(0)
    run = Driven(tmp_path, config(), ram=ram).start()
    one = group(1, ram=ram)
    run.append(one)
    assert ram.used_bytes == one.body.nbytes
    run.settle()
    assert ram.used_bytes == 0
    assert not one.body.in_memory
    assert one.body.load()
    assert tuple(map(bytes, one.body.frames)) == contents(1, len(one.body.frames[0]))
    run.journal.close()


def test_a_group_that_leaves_before_it_is_written_is_written_all_the_same(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    one = group(1)
    run.append(one, gone(1))
    one.body.release()
    run.settle()
    run.journal.close()
    found = Driven(tmp_path, config())
    assert orders(found.found)[:1] == [1]
    assert acceptances(found.found.events)[0].place is not None
    found.journal.close()


def test_a_segment_goes_when_nothing_in_it_is_needed_and_the_facts_that_say_so_are_durable(
    tmp_path: Path,
) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(), disk).start()
    groups = [group(number, 20_000) for number in range(1, 8)]  # three in a segment
    run.write(*groups)
    for one in groups[:5]:
        one.body.release()
    disk.calls.clear()
    run.write(*(gone(number) for number in range(1, 6)))
    run.until(lambda: "groups-00000001.rmq" not in segments(tmp_path))
    assert disk.calls.index("fdatasync") < disk.calls.index("rename")  # it is kept to be written over
    assert "groups-00000002.rmq" in segments(tmp_path)
    groups[5].body.release()
    # Nothing is appended any more: it goes nevertheless.
    run.until(lambda: "groups-00000002.rmq" not in segments(tmp_path))
    assert "groups-00000003.rmq" in segments(tmp_path)
    groups[6].body.release()
    run.journal.advance(0.0, urgent=True)
    assert "groups-00000003.rmq" in segments(tmp_path)  # it is still written to
    run.journal.close()


def test_a_new_life_removes_what_nothing_needs(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(*(group(number, 20_000) for number in range(1, 8)))
    run.journal.close()
    again = Driven(tmp_path, config())
    event = acceptances(again.found.events)[3]
    one = group(4)
    one.body = again.found.body(event)
    again.start(snapshot([one], next_order=8))
    again.until(lambda: segments(tmp_path)[0] == "groups-00000002.rmq" and len(segments(tmp_path)) == 2)
    again.journal.close()
    assert segments(tmp_path) == ["groups-00000002.rmq"]


def test_no_segment_goes_while_facts_are_read_back(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(group(1), gone(1), group(2))
    run.journal.close()
    again = Driven(tmp_path, config())
    first, second = acceptances(again.found.events)
    again.found.body(first).release()  # for a moment, nothing in the segment is needed
    one = group(2)
    one.body = again.found.body(second)
    again.start(snapshot([one], next_order=3))
    again.write(gone(9))
    again.write(gone(9))
    assert one.body.load()
    again.journal.close()
    assert segments(tmp_path) == ["groups-00000001.rmq"]


def test_for_a_replay_every_segment_stays(tmp_path: Path) -> None:
    run = Driven(tmp_path, config(replay=True)).start()
    groups = [group(number, 20_000) for number in range(1, 8)]
    run.write(*groups)
    for one in groups:
        one.body.release()
    run.write(gone(1))
    run.journal.close()
    again = Driven(tmp_path, config(replay=True)).start(snapshot(next_order=8))
    again.write(gone(1))
    again.journal.close()
    assert len(segments(tmp_path)) == 3


def test_a_large_group_gets_a_segment_that_is_large_enough(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(group(1), group(2, 10 * SMALL), group(3))
    run.write(group(4, 20 * SMALL), group(5))
    run.journal.close()
    found = Driven(tmp_path, config())
    assert served(found.found) == {1, 2, 3, 4, 5}
    found.journal.close()


def test_a_rotation_begins_a_log_with_what_came_before_it(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    one, two = group(1), group(2)
    run.append(one, gone(9))
    run.journal.rotate(snapshot([one], next_order=2))
    run.write(two, gone(8))
    run.journal.close()
    assert logs(tmp_path) == ["events-00000001.rmq", "events-00000002.rmq"]
    found = Driven(tmp_path, config())
    assert isinstance(next(iter(found.found.events)), Numbers)
    assert orders(found.found) == [1, 2]
    assert gone(9) not in list(found.found.events)
    assert served(found.found) == {1, 2}
    found.journal.close()


def test_a_snapshot_is_wanted_when_the_facts_outgrow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.services.broker.journal.journal.SNAPSHOT_AFTER_BYTES", 1000)
    run = Driven(tmp_path, config()).start()
    wanted = [run.journal.wants_snapshot]
    run.write(*(gone(number) for number in range(200)))
    wanted.append(run.journal.wants_snapshot)
    run.journal.rotate(snapshot())
    wanted.append(run.journal.wants_snapshot)
    run.settle()
    wanted.append(run.journal.wants_snapshot)
    assert wanted == [False, True, False, False]
    run.journal.close()


def test_old_logs_go_above_their_limit_but_for_the_last_two(tmp_path: Path) -> None:
    run = Driven(tmp_path, config(history_bytes=1)).start()
    for _ in range(4):
        run.write(gone(1))
        run.journal.rotate(snapshot())
        run.settle()
    run.until(lambda: len(logs(tmp_path)) == 2)
    run.journal.close()
    assert logs(tmp_path) == ["events-00000004.rmq", "events-00000005.rmq"]
    kept = Driven(tmp_path, config()).start()
    kept.journal.close()
    assert len(logs(tmp_path)) == 3


def test_the_end_commits_all_with_a_snapshot(tmp_path: Path) -> None:
    run = Driven(tmp_path, config(commit_ms=60_000.0)).start()
    one = group(1)
    run.append(one)
    run.journal.close(snapshot=snapshot([one], next_order=2))
    assert run.journal.done == run.journal.ticket
    used = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert used < one.body.nbytes + BLOCK_BYTES + 2000
    found = Driven(tmp_path, config())
    assert served(found.found) == {1}
    found.journal.close()


def test_a_group_that_was_never_written_is_written_with_the_first_snapshot(tmp_path: Path) -> None:
    one = group(1)
    run = Driven(tmp_path, config()).start(snapshot([one], next_order=2))
    assert one.body.place is not None
    run.journal.close()
    found = Driven(tmp_path, config())
    assert served(found.found) == {1}
    found.journal.close()


def test_numbers_are_never_used_again(tmp_path: Path) -> None:
    used = []
    for life in range(3):
        run = Driven(tmp_path, config()).start(snapshot(next_order=life + 1))
        one = group(life + 1)
        run.write(one)
        one.body.release()
        run.write(gone(life + 1))
        run.journal.close()
        assert one.body.place is not None
        used.append(one.body.place[0].number)
        for path in tmp_path.glob("groups-*"):
            path.unlink()
    assert used == sorted(set(used))


def test_status_tells_how_far_behind_it_is(tmp_path: Path) -> None:
    run = Driven(tmp_path, config(segment_bytes=BEHIND_SLOW_BYTES * 2)).start()
    assert run.journal.status().health == "ok"
    run.append(group(1, BEHIND_SLOW_BYTES + 1))
    assert run.journal.status().health == "slow"
    run.settle()
    status = run.journal.status()
    assert (status.health, status.behind_bytes, status.segments > 0) == ("ok", 0, True)
    assert status.nbytes >= BEHIND_SLOW_BYTES * 2
    run.journal.close()


def test_after_the_end_nothing_is_open(tmp_path: Path) -> None:
    before = opened()
    run = Driven(tmp_path, config(), ram=BodyMemory(0)).start()
    groups = [group(number, ram=BodyMemory(0)) for number in range(1, 60)]
    run.write(*groups)
    for one in groups:
        one.body.shed()
        assert one.body.load()
    run.journal.close()
    assert opened() == before
    assert "journal" not in {thread.name for thread in threading.enumerate()}


def test_missing_segments_are_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(group(1))
    run.journal.close()
    (tmp_path / "groups-00000001.rmq").unlink()
    again = Driven(tmp_path, config())
    one = group(1)
    (event,) = acceptances(again.found.events)
    one.body = again.found.body(event)
    assert not one.body.load()
    with caplog.at_level(logging.ERROR):
        again.start(snapshot([one], next_order=2))
    assert "groups-00000001.rmq groups=1" in caplog.text
    again.journal.close()


def test_history_understands_what_is_written(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    one, two = group(1), group(2)
    run.write(one, gone(5))
    run.journal.rotate(snapshot([one], next_order=2))
    run.write(two)
    history = JournalHistory(tmp_path)
    assert [getattr(event, "order", 0) for _, event in history if not isinstance(event, Numbers)] == [
        0,
        0,
        1,
        5,
        2,
    ]
    assert history.damage == []
    run.journal.close()


def test_directory_is_private(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", config(), BodyMemory(0), lambda: None).close()
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o700
