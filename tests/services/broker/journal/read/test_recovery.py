"""Recovery after a crash at any instant and with any damage: every durable group, and no other."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.services.broker.journal.journals import (
    CrashingDisk,
    Driven,
    FailingDisk,
    acceptances,
    config,
    group,
    orders,
    served,
    snapshot,
)
from tests.services.broker.journal.other_versions import OTHERS, as_version, listing

from rolloutmq.schemas.errors import DamagedJournalError, JournalWaitsError, RecordVersionError
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.format.events import Accepted, Began, Dropped
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.format.records import (
    ALIGNMENT_BYTES,
    FILE_HEADER_BYTES,
    HEADER_BYTES,
    Record,
    scan,
)
from rolloutmq.services.broker.journal.read.record_file import RecordFile
from rolloutmq.services.broker.journal.read.recovery import Recovered
from rolloutmq.services.broker.journal.read.segments import LAST_NUMBER


def gone(number: int) -> Dropped:
    return Dropped(number, "expired", "stale")


def look(directory: Path, check: Callable[[Recovered], object] = id) -> Recovered:
    run = Driven(directory, config())
    try:
        check(run.found)
    finally:
        run.journal.close()
    return run.found


def dropped(found: Recovered) -> list[int]:
    return [event.order for event in found.events if isinstance(event, Dropped)]


# A process that is killed

LIVE = 60
"""A group is dropped when so many came after it."""

WRITER = """
import sys
from pathlib import Path
from tests.services.broker.journal.journals import Driven, config, group, snapshot
from tests.services.broker.journal.read.test_recovery import LIVE, gone, living
from rolloutmq.schemas.wire.replies import Durability

run = Driven(Path(sys.argv[1]), config(Durability(sys.argv[2]), commit_ms=1.0))
groups = {}
for order, event in living(run.found).items():
    groups[order] = group(order)
    groups[order].body = run.found.body(event)
number = max(groups, default=0)
run.start(snapshot(groups.values(), next_order=number + 1))
tickets = []
while True:
    for _ in range(5):
        number += 1
        groups[number] = group(number)
        past = [order for order in groups if order <= number - LIVE]
        for old in past:
            groups.pop(old).body.release()
        # In one call: by themselves the events would take the priority lane.
        run.journal.append([groups[number], *map(gone, past)])
        tickets.append((run.journal.ticket, number))
    if number % 50 == 0:
        run.journal.rotate(snapshot(groups.values(), next_order=number + 1))
    run.until(lambda: run.journal.behind_bytes < 50_000)
    while tickets and tickets[0][0] <= run.journal.done:
        print(tickets.pop(0)[1], flush=True)
"""


def living(found: Recovered) -> dict[int, Accepted]:
    """Return the groups accepted and not dropped."""
    groups = {event.order: event for event in acceptances(found.events)}
    for order in dropped(found):
        groups.pop(order, None)
    return groups


@pytest.mark.parametrize("level", [Durability.OS, pytest.param(Durability.DISK, marks=pytest.mark.extended)])
def test_killed_at_any_moment_it_loses_nothing_that_was_done(tmp_path: Path, level: Durability) -> None:
    rng = random.Random(3)
    for _ in range(5):
        done = _killed(tmp_path, level, rng.randrange(20, 200))

        def check(found: Recovered, done: int = done) -> None:
            live = living(found)
            first, last = min(live), max(live)
            assert list(live) == list(range(first, last + 1))
            assert last >= done
            assert done - LIVE < first <= max(1, last - LIVE + 1)
            assert served(found) >= set(live)
            assert found.damage == []

        look(tmp_path, check)
    assert len(list(tmp_path.glob("groups-*"))) < 20


def _killed(directory: Path, level: Durability, lines: int) -> int:
    """Run a writer until it has printed so many lines, kill it, and return the last number it printed."""
    command = [sys.executable, "-c", WRITER, str(directory), level.value]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        said += process.stdout.read().splitlines(keepends=True)
    return int([line for line in said if line.endswith("\n")][-1])


# A crash between any two calls


def test_a_crash_between_any_two_calls_loses_nothing_that_was_done(tmp_path: Path) -> None:
    """Groups, events, full segments, rotations, removals: after a kill and after a power cut."""
    journal = tmp_path / "journal"
    said: list[tuple[Path, int, int]] = []
    done = [0, 0]

    def instant(disk: CrashingDisk) -> None:
        for way in (disk.kill, disk.power_cut):
            target = tmp_path / f"crash-{len(said)}"
            way(target)
            said.append((target, done[0], done[1]))

    run = Driven(journal, config(), CrashingDisk(journal, instant))
    groups = [group(number, 15_000) for number in range(1, 13)]
    run.start()
    for index in range(0, 12, 2):
        run.write(*groups[index : index + 2])
        done[0] = index + 2
        run.write(gone(1000 + index))
        done[1] += 1
        if index in {4, 8}:
            for one in groups[:index]:
                one.body.release()
            done[1] = 0  # the events before it are in the log before
            run.journal.rotate(snapshot(groups[index : index + 2], next_order=index + 3))
            run.settle()
    run.journal.close()
    assert len(said) > 100
    for target, last, events in said:
        found = look(target, partial(_whole, last))
        assert len(dropped(found)) >= events, target
        shutil.rmtree(target)


def _whole(last: int, found: Recovered) -> None:
    named = orders(found)
    assert found.damage == []
    assert served(found) == set(named)
    assert sorted(set(named)) == named
    assert last <= (named[-1] if named else 0)
    assert not named or named == list(range(named[0], named[-1] + 1))


def test_lives_that_crash_one_after_the_other(tmp_path: Path) -> None:
    """The snapshot of the next life has the groups of the previous one, including those without an event."""
    for life in range(1, 6):
        here, there = tmp_path / f"life-{life}", tmp_path / f"life-{life + 1}"
        run = Driven(here, config())
        groups = [group(event.order) for event in acceptances(run.found.events)]
        for one, event in zip(groups, acceptances(run.found.events), strict=True):
            one.body = run.found.body(event)
        run.start(snapshot(groups, next_order=len(groups) + 1, epoch=life))
        run.write(group(len(groups) + 1), group(len(groups) + 2))
        _copy(here, there)
        log = there / f"events-{life:08d}.rmq"
        os.truncate(log, log.stat().st_size - 30)  # the record of the last commit, if nothing is behind it
        run.journal.close()
    found = look(tmp_path / "life-6")
    assert orders(found) == list(range(1, 11))


def _copy(here: Path, there: Path) -> None:
    """Copy a journal that may remove segments meanwhile."""
    there.mkdir()
    for path in here.glob("*.rmq"):
        with suppress(FileNotFoundError):
            shutil.copy(path, there)


# Damage


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of three lives: 40 groups, every fourth one dropped, rotations in between."""
    directory = tmp_path_factory.mktemp("journal") / "original"
    groups = [group(number) for number in range(1, 41)]
    for life in range(3):
        run = Driven(directory, config())
        for event in acceptances(run.found.events):
            groups[event.order - 1].body = run.found.body(event)
        known = groups[: life * 13]
        run.start(snapshot(known, next_order=len(known) + 1, epoch=life + 1))
        for number in range(life * 13 + 1, life * 13 + 14):
            run.write(groups[number - 1], *([gone(number)] if number % 4 == 0 else []))
        if life == 1:
            run.journal.rotate(snapshot(groups[:26], next_order=27, epoch=2))
        run.journal.close()
    return directory


def _mutations(rng: random.Random, directory: Path) -> Iterator[str]:
    """Damage one file after the other, each in another way, for ever."""
    while True:
        files = sorted(directory.glob("*.rmq"))
        path = rng.choice(files)
        data = bytearray(path.read_bytes())
        start = rng.randrange(len(data))
        match rng.randrange(6):
            case 0:
                data[start] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
                yield f"{path.name}: bit at {start}"
            case 1:
                os.truncate(path, start)
                yield f"{path.name}: cut at {start}"
            case 2:
                page = start - start % 4096
                data[page : page + 4096] = bytes(len(data[page : page + 4096]))
                path.write_bytes(data)
                yield f"{path.name}: page at {page}"
            case 3:
                other = rng.choice(files)
                path.write_bytes(other.read_bytes())
                yield f"{path.name}: is {other.name}"
            case 4:
                path.unlink()
                yield f"{path.name}: missing"
            case _:
                target = rng.randrange(len(data))
                data[target : target + 3000] = data[start : start + 3000]
                path.write_bytes(data)
                yield f"{path.name}: {start} again at {target}"


@pytest.mark.extended
def test_three_hundred_mutations_give_no_wrong_record(original: Path, tmp_path: Path) -> None:
    rng = random.Random(11)
    intact = 0
    for round_ in range(300):
        directory = tmp_path / str(round_)
        shutil.copytree(original, directory)
        what = next(_mutations(rng, directory))

        def check(found: Recovered, what: str = what) -> None:
            named = orders(found)
            assert set(named) <= set(range(1, 40)), what
            assert len(named) == len(set(named)), what
            whole = served(found)
            if what.startswith("groups"):
                assert set(named) == set(range(1, 40)), what
            assert len(whole) > 20, what

        found = look(directory, check)
        intact += not found.damage
        again = look(directory, check)  # what was cut or kept aside changes nothing
        assert orders(again) == orders(found), what
        shutil.rmtree(directory)
    assert 20 < intact < 280


def test_damaged_snapshot_falls_back_on_the_log_before_it(original: Path, tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    shutil.copytree(original, directory)
    newest = sorted(directory.glob("events-*"))[-1]
    flip(newest, FILE_HEADER_BYTES + HEADER_BYTES + 40)

    def check(found: Recovered) -> None:
        assert orders(found) == list(range(1, 40))
        assert dropped(found) == [28, 32, 36]
        assert served(found) == set(range(1, 40))
        assert [line.partition(":")[0] for line in found.damage] == [newest.name] * 2

    look(directory, check)


def test_only_log_without_its_snapshot_gives_its_facts_and_the_groups(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(group(1), gone(1), group(2))
    run.journal.close()
    flip(tmp_path / "events-00000001.rmq", FILE_HEADER_BYTES + HEADER_BYTES + 20)
    found = look(tmp_path)
    assert orders(found) == [1, 2]
    assert dropped(found) == [1]


def test_lost_facts_bring_back_the_groups_that_they_named(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    kept = group(1)
    run.write(kept)
    run.journal.rotate(snapshot([kept], next_order=2))
    sizes = []
    for number in (2, 3, 4):
        run.write(group(number), gone(100 + number))
        sizes.append(_used(tmp_path / "events-00000002.rmq"))
    run.journal.close()
    flip(tmp_path / "events-00000002.rmq", sizes[0] + HEADER_BYTES + 30)
    found = look(tmp_path)
    assert orders(found) == [1, 2, 4, 3]
    assert dropped(found) == [102, 104]
    assert len(found.damage) == 1
    assert (tmp_path / "quarantine" / f"events-00000002-{sizes[0]:012d}.damaged").exists()


def test_fallback_puts_what_a_life_left_unnamed_before_the_next_life(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(gone(101), group(1))
    unnamed = _used(tmp_path / "events-00000001.rmq")
    run.write(group(2))
    run.journal.close()
    os.truncate(tmp_path / "events-00000001.rmq", unnamed)
    again = Driven(tmp_path, config())
    assert orders(again.found) == [1, 2]
    groups = [group(1), group(2)]
    for one, event in zip(groups, acceptances(again.found.events), strict=True):
        one.body = again.found.body(event)
    again.start(snapshot(groups, next_order=3, epoch=2))
    again.write(gone(2))
    again.journal.close()
    flip(tmp_path / "events-00000002.rmq", FILE_HEADER_BYTES + HEADER_BYTES + 40)
    found = look(tmp_path)
    events = [event for event in found.events if not isinstance(event, Began)]
    assert [getattr(event, "order", 0) for event in events][-3:] == [1, 2, 2]
    assert events[-1] == gone(2)


def _used(path: Path) -> int:
    """Return the end of the last record of a log; zeros may follow."""
    data = path.read_bytes().rstrip(b"\0")
    return len(data) + -len(data) % 8


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def test_missing_segment_costs_its_groups_only_when_they_are_read(original: Path, tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    shutil.copytree(original, directory)
    (directory / "groups-00000001.rmq").unlink()

    def check(found: Recovered) -> None:
        assert orders(found) == list(range(1, 40))
        assert 20 < len(served(found)) < 39

    look(directory, check)


def test_facts_written_before_a_sync_that_never_came_are_not_needed(tmp_path: Path) -> None:
    """The event log as it was before the acceptances: the segments have the groups."""
    run = Driven(tmp_path, config()).start()
    run.write(gone(101))
    before = _used(tmp_path / "events-00000001.rmq")
    run.write(*map(group, range(1, 30)))
    run.journal.close()
    os.truncate(tmp_path / "events-00000001.rmq", before)
    found = look(tmp_path)
    assert orders(found) == list(range(1, 30))
    assert found.damage == []


def test_what_a_disk_cannot_read_is_damage(original: Path, tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    shutil.copytree(original, directory)
    disk = FailingDisk()
    disk.fail("pread", 5)
    run = Driven(directory, config(), disk)
    disk.heal()
    assert run.found.damage
    assert orders(run.found) == []
    run.journal.close()


def test_an_end_that_cannot_be_read_is_no_end(tmp_path: Path) -> None:
    run = Driven(tmp_path / "journal", config()).start()
    run.write(group(1, 20_000))
    shutil.copytree(tmp_path / "journal", tmp_path / "left")
    run.journal.close()
    disk = FailingDisk()
    with closing(RecordFile(disk, tmp_path / "left" / "groups-00000001.rmq")) as file:
        assert [type(found) for found in file.scan(FILE_HEADER_BYTES)] == [Record]
        end = next(file.scan(FILE_HEADER_BYTES)).offset + 20_480
        reads = [0]

        def beyond_the_first(_: int) -> None:
            reads[0] += 1
            if reads[0] > 1:
                raise OSError(errno.EIO, "bad sector")

        disk.plan["pread"] = beyond_the_first
        assert not file.ends(end)
        disk.heal()
        assert file.ends(end)


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("which", ["events-*.rmq", "groups-*.rmq", "*.rmq"])
def test_another_version_is_refused_before_anything_is_touched(
    original: Path, tmp_path: Path, version: int, which: str
) -> None:
    directory = tmp_path / "journal"
    shutil.copytree(original, directory)
    newest = max(directory.glob("events-*.rmq"))
    flip(newest, newest.stat().st_size - 20)  # an end that would be cut off
    (directory / "events-00000099.tmp").write_text("?")
    (directory / "spare-00000001.rmq").write_bytes(min(directory.glob("groups-*.rmq")).read_bytes())
    for path in directory.glob(which):
        as_version(path, version)
    before = listing(tmp_path)
    with pytest.raises(RecordVersionError, match=f"got version {version}"):
        look(directory)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("version", OTHERS)
def test_spares_that_another_version_left_are_removed_and_written_over_no_more(
    original: Path, tmp_path: Path, version: int
) -> None:
    directory = tmp_path / "journal"
    shutil.copytree(original, directory)
    spare = directory / "spare-00000001.rmq"
    spare.write_bytes(min(directory.glob("groups-*.rmq")).read_bytes())
    as_version(spare, version)
    found = look(directory)
    assert (orders(found), found.damage) == (list(range(1, 40)), [])
    assert not spare.exists()


def test_strangers_in_the_directory_are_left_alone(original: Path, tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    shutil.copytree(original, directory)
    (directory / "groups-00000099.rmq").mkdir()
    (directory / "events-1.rmq").write_text("?")
    (directory / "events-00000099.tmp").write_text("?")
    run = Driven(directory, config())
    assert orders(run.found) == list(range(1, 40))
    run.start(snapshot(next_order=40))
    run.write(group(40))
    run.journal.close()
    assert (directory / "groups-00000099.rmq").is_dir()
    assert (directory / "events-1.rmq").exists()
    assert not (directory / "events-00000099.tmp").exists()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_torn_end_gives_what_is_whole_before_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("torn")
    commits = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6))
    run = Driven(directory, config(segment_bytes=1 << 20)).start()
    ends: list[tuple[int, int, int]] = []
    number = 0
    events: list[AnyEvent] = []
    for commit in commits:
        entries: list[object] = []
        for kind in commit:
            number += kind > 0
            entries.append(group(number, 50 * kind) if kind else gone(number))
        run.write(*entries)  # type: ignore[arg-type]
        events += [entry for entry in entries if isinstance(entry, Dropped)]
        ends.append((_used_of(directory, "groups"), _used_of(directory, "events"), number))
    run.journal.close()
    log = directory / "events-00000001.rmq"
    begun = run.journal._commit_thread.log_bytes[0]
    kept_events = data.draw(st.integers(begun, log.stat().st_size))
    os.truncate(log, kept_events)
    # An event never names a group that is not durable: of the groups, no more is lost than of the events.
    # A record is whole without the zeros behind it.
    safe = max(
        (groups for groups, events_end, _ in ends if events_end <= kept_events + ALIGNMENT_BYTES - 1),
        default=0,
    )
    if number:
        segment = directory / "groups-00000001.rmq"
        kept_groups = data.draw(st.integers(max(safe, FILE_HEADER_BYTES), segment.stat().st_size))
        os.truncate(segment, kept_groups)
        durable = max((last for groups, _, last in ends if groups <= kept_groups), default=0)
    found = look(directory)
    named = orders(found)
    assert named == list(range(1, len(named) + 1))
    assert found.damage == []
    assert not number or len(named) >= durable
    assert [event for event in found.events if isinstance(event, Dropped)] == events[: len(dropped(found))]
    shutil.rmtree(directory)


def _used_of(directory: Path, stem: str) -> int:
    path = directory / f"{stem}-00000001.rmq"
    if not path.exists():
        return 0
    if stem == "events":
        return _used(path)
    found = [item for item in scan(path.read_bytes(), sealed=False) if isinstance(item, Record)]
    return found[-1].offset + found[-1].span if found else FILE_HEADER_BYTES


def test_many_groups_are_found_without_reading_them(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(segment_bytes=64 << 20)).start()
    run.write(*(group(number, 100_000) for number in range(1, 101)), gone(1))
    run.journal.close()
    read = [0]
    pread = disk.pread

    def counted(fd: int, nbytes: int, offset: int) -> bytes:
        read[0] += nbytes
        return pread(fd, nbytes, offset)

    disk.pread = counted  # type: ignore[method-assign]
    again = Driven(tmp_path, config(), disk)
    assert len(orders(again.found)) == 100
    assert read[0] < 2_500_000
    again.journal.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("match", ["events", "groups"])
def test_file_that_cannot_be_read_now_is_not_damaged(tmp_path: Path, number: int, match: str) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(*map(group, range(1, 9)))
    run.journal.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    disk = FailingDisk()
    disk.fail("open", number, match=match)
    with pytest.raises(JournalWaitsError):
        Driven(tmp_path, config(), disk)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    run = Driven(tmp_path, config())
    assert (run.found.damage, served(run.found)) == ([], set(range(1, 9)))
    run.journal.close()


def test_room_of_a_segment_that_was_never_begun_goes_back_at_once(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(group(1))
    run.journal.close()
    blank = tmp_path / "groups-00000002.rmq"
    blank.write_bytes(bytes(1 << 20))
    run = Driven(tmp_path, config())
    assert (blank.stat().st_size, run.found.damage, served(run.found)) == (0, [], {1})
    run.journal.close()


@pytest.mark.parametrize("stem", ["events", "groups"])
def test_a_file_with_a_number_that_no_other_can_follow_is_named(tmp_path: Path, stem: str) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(group(1))
    run.journal.close()
    (tmp_path / f"{stem}-{LAST_NUMBER + 1:08d}.rmq").write_bytes(b"of nobody")  # it cannot be the journal's
    again = Driven(tmp_path, config()).start()
    assert served(again.found) == {1}
    again.journal.close()
    (tmp_path / f"{stem}-{LAST_NUMBER:08d}.rmq").write_bytes(b"renamed")
    with pytest.raises(DamagedJournalError, match=str(LAST_NUMBER)):
        Driven(tmp_path, config())
