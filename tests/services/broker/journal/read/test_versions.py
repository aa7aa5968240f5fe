"""Records of another version: distinguished from damaged ones, and left untouched."""

import errno
import os
from pathlib import Path

import pytest
from tests.services.broker.journal.handmade import Handmade, began, flip
from tests.services.broker.journal.journals import FailingDisk
from tests.services.broker.journal.other_versions import OTHERS, as_version, beginning, listing

from rolloutmq.schemas.errors import JournalWaitsError, RecordVersionError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.format.records import (
    FILE_HEADER_BYTES,
    HEADER_BYTES,
    RECORD_MAGIC,
    VERSION,
    read_segment,
    write_segment,
)
from rolloutmq.services.broker.journal.read.versions import require_own_records, require_version_of


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    """A run with an event log, a segment, a saved state and a dead letter."""
    made = Handmade(run_dir)
    made.log(began(), [made.accept(1), made.accept(2)])
    write_segment(made.layout.saved, [(1, b"", [b"body"])])
    dead = made.groups[2]
    DeadLetterStore(made.layout.dead, 1 << 20, sync=False).bury(dead, dead.body.frames, "odd", 1.0)
    return made.layout


def files(layout: RunLayout) -> list[Path]:
    return [*sorted(layout.journal.iterdir()), layout.saved, *layout.dead.iterdir()]


def test_a_run_of_this_version_passes_and_so_does_an_empty_one(layout: RunLayout, tmp_path: Path) -> None:
    assert len(files(layout)) == 4
    require_own_records(layout)
    require_own_records(RunLayout(tmp_path / "none"))


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("index", range(4))
def test_one_file_of_another_version_is_enough(layout: RunLayout, index: int, version: int) -> None:
    path = as_version(files(layout)[index], version)
    before = listing(layout.root)
    with pytest.raises(RecordVersionError) as caught:
        require_own_records(layout)
    assert (caught.value.path, caught.value.theirs, caught.value.ours) == (str(path), version, VERSION)
    said = str(caught.value)
    assert f"got version {version}, this one reads version {VERSION}" in said
    assert "finish the run with the RolloutMQ that wrote them, or start in another run directory" in said
    assert listing(layout.root) == before


@pytest.mark.parametrize("version", OTHERS)
def test_a_segment_that_was_begun_and_never_written_to_tells_its_version_too(
    layout: RunLayout, version: int
) -> None:
    (layout.journal / "groups-00000002.rmq").write_bytes(beginning(b"\2\0\0\0rest", version) + bytes(4096))
    with pytest.raises(RecordVersionError) as caught:
        require_own_records(layout)
    assert caught.value.theirs == max(version, 2)  # no record says which of the first two it was


@pytest.mark.parametrize("version", [1, 2])
def test_a_log_under_the_name_that_those_versions_gave_it_refuses(layout: RunLayout, version: int) -> None:
    as_version(layout.journal / "events-00000001.rmq", version)
    with pytest.raises(RecordVersionError, match=rf"facts-00000001\.rmq.*got version {version}"):
        require_own_records(layout)


@pytest.mark.parametrize("data", [b"", b"RMQSEG", bytes(4096)])
def test_a_log_under_that_name_refuses_though_it_is_damaged(layout: RunLayout, data: bytes) -> None:
    (layout.journal / "facts-00000001.rmq").write_bytes(data)
    with pytest.raises(RecordVersionError, match=r"facts-00000001\.rmq.*got version 2"):
        require_own_records(layout)


@pytest.mark.parametrize("version", OTHERS)
def test_what_nobody_reads_refuses_nothing(layout: RunLayout, version: int) -> None:
    original = (layout.journal / "groups-00000001.rmq").read_bytes()
    for name in ("spare-00000001.rmq", "spare-00000002.rmq", "events-00000002.tmp"):
        (layout.journal / name).write_bytes(original)
        as_version(layout.journal / name, version)
    (layout.journal / "quarantine").mkdir()
    (layout.journal / "quarantine" / "groups-00000001-whole.damaged").write_bytes(beginning(b"12345678", 2))
    require_own_records(layout)


@pytest.mark.parametrize("version", OTHERS)
def test_a_segment_written_over_one_of_another_version_is_ours(layout: RunLayout, version: int) -> None:
    """Behind the end of the records are leftovers of the spare, here from its second block on."""
    path = layout.journal / "groups-00000001.rmq"
    old = layout.root / "old"
    old.write_bytes(path.read_bytes())
    as_version(old, version)
    ours = path.read_bytes()
    path.write_bytes(ours.ljust(8192, b"\0") + old.read_bytes()[FILE_HEADER_BYTES:] + old.read_bytes())
    require_own_records(layout)
    assert len(list(read_segment(path))) >= 2


def test_a_bit_that_flips_makes_no_other_version(layout: RunLayout) -> None:
    """Neither in the header of a file, nor in the version of any record."""
    path = layout.journal / "groups-00000001.rmq"
    data = path.read_bytes()
    spots = [*range(FILE_HEADER_BYTES + HEADER_BYTES), data.rindex(RECORD_MAGIC) + 4]
    for spot in spots:
        for bit in range(8):
            flipped = bytearray(data)
            flipped[spot] ^= 1 << bit
            path.write_bytes(flipped)
            require_own_records(layout)


def test_a_flipped_beginning_of_another_version_is_not_claimed(layout: RunLayout) -> None:
    path = layout.journal / "groups-00000001.rmq"
    as_version(path, 2)
    flip(path, 10)
    require_own_records(layout)


def test_a_disk_that_cannot_answer_tells_no_version(layout: RunLayout) -> None:
    disk = FailingDisk()
    disk.fail("open", errno.EIO)
    require_version_of(layout.journal, disk)
    disk.fail("open", errno.EACCES)
    with pytest.raises(JournalWaitsError, match="free or repair it: nothing is lost"):
        require_version_of(layout.journal, disk)
    disk.fail("open", errno.EMFILE)
    with pytest.raises(JournalWaitsError, match=os.strerror(errno.EMFILE)):
        require_version_of(layout.journal, disk)
    require_version_of(layout.root / "none", Disk())
