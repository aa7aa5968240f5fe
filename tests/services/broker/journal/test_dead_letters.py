"""Dead letters: a buried group is returned unchanged, or is known to be damaged."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tests.services.broker.journal.handmade import Handmade, flip
from tests.services.broker.journal.other_versions import OTHERS, as_version

from rolloutmq.bus.encoding.codec import decode_group
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.broker.journal.stored_group import StoredGroup

ROOM = 1 << 20


@pytest.fixture
def made(run_dir: Path) -> Handmade:
    return Handmade(run_dir)


@pytest.fixture
def store(made: Handmade) -> DeadLetterStore:
    return DeadLetterStore(made.layout.dead, ROOM, sync=True)


def group(made: Handmade, order: int, name: str = "") -> StoredGroup:
    made.accept(order, name)
    return made.groups[order]


def bury(store: DeadLetterStore, dead: StoredGroup) -> bool:
    return store.bury(dead, dead.body.frames, "lost with 3 leases", 5.0)


def test_what_is_buried_is_found_as_it_was(made: Handmade, store: DeadLetterStore) -> None:
    dead = group(made, 4)
    dead.deliveries, dead.failures = 5, 3
    assert bury(store, dead)
    for one in (store, DeadLetterStore(made.layout.dead, ROOM, sync=False)):
        found = one.find("g4")
        assert found is not None
        assert found.frames is not None
        assert (found.order, found.reason, found.failures, found.letter.deliveries) == (
            4,
            "lost with 3 leases",
            3,
            5,
        )
        assert found.letter.at == 5.0
        assert found.meta.header == dead.header
        assert decode_group(dead.header, dead.table, found.frames).columns["tokens"].values.tolist() == [
            1,
            2,
            3,
            4,
            5,
        ]
    assert store.find("g5") is None
    assert not list(made.layout.dead.glob("*.tmp"))


@pytest.mark.usefixtures("open_umask")
def test_a_letter_is_for_its_user_alone(made: Handmade, store: DeadLetterStore) -> None:
    assert bury(store, group(made, 4))
    assert [path.stat().st_mode & 0o777 for path in made.layout.dead.iterdir()] == [0o600]


def test_entries_come_in_their_order_without_reading_the_contents(
    made: Handmade, store: DeadLetterStore
) -> None:
    for order in (12, 3, 7):
        bury(store, group(made, order))
    flip(made.layout.dead / f"{7:012d}.rmq", -20)
    entries = list(store.entries())
    assert [entry.order for entry in entries] == [3, 7, 12]
    assert all(entry.letter is not None and entry.letter.kept for entry in entries)
    found = store.find("g7")
    assert found is not None
    assert (found.frames, found.damaged) == (None, True)


@pytest.mark.parametrize("name", ["../../etc/x", "a/b", "a\0b", "." * 128, "ä" * 100])
def test_any_id_is_safe(made: Handmade, store: DeadLetterStore, name: str) -> None:
    assert bury(store, group(made, 1, name))
    assert store.find(name) is not None
    assert [path.name for path in made.layout.dead.iterdir()] == ["000000000001.rmq"]


def test_several_groups_of_one_id_come_oldest_first(made: Handmade, store: DeadLetterStore) -> None:
    for order in (5, 2):
        bury(store, group(made, order, "same"))
    for expected in (2, 5):
        found = store.find("same")
        assert found is not None
        assert found.order == expected
        store.remove(expected)
    assert store.find("same") is None


def test_without_room_only_the_letter_stays(made: Handmade) -> None:
    dead = group(made, 1)
    store = DeadLetterStore(made.layout.dead, 2 * dead.header.nbytes, sync=False)
    for order in (1, 2, 3):
        assert bury(store, group(made, order))
    assert [entry.letter.kept for entry in store.entries() if entry.letter] == [True, False, False]
    found = store.find("g2")
    assert found is not None
    assert (found.frames, found.damaged) == (None, False)
    store.remove(1)
    assert bury(store, group(made, 2))
    assert [entry.letter.kept for entry in store.entries() if entry.letter] == [True, False]


def test_room_is_counted_over_lives(made: Handmade) -> None:
    nbytes = group(made, 1).header.nbytes
    for order, kept in ((1, True), (2, False)):
        store = DeadLetterStore(made.layout.dead, 2 * nbytes, sync=False)
        assert bury(store, group(made, order))
        found = store.find(f"g{order}")
        assert found is not None
        assert (found.frames is not None) is kept


def test_contents_that_are_lost_are_said_to_be(made: Handmade, store: DeadLetterStore) -> None:
    assert store.bury(group(made, 1), None, "damaged", 1.0)
    found = store.find("g1")
    assert found is not None
    assert (found.frames, found.letter.kept) == (None, False)


def test_burying_again_takes_the_place(made: Handmade, store: DeadLetterStore) -> None:
    dead = group(made, 1)
    bury(store, dead)
    assert store.bury(dead, None, "again", 6.0)
    (entry,) = store.entries()
    assert entry.letter is not None
    assert entry.letter.reason == "again"


def test_bit_flips_are_noticed_and_none_is_a_crash(made: Handmade, store: DeadLetterStore) -> None:
    dead = group(made, 1)
    bury(store, dead)
    (path,) = made.layout.dead.iterdir()
    data = path.read_bytes()
    for offset in range(0, len(data), 3):
        flip(path, offset)
        (entry,) = store.entries()
        found = DeadLetterStore(made.layout.dead, ROOM, sync=False).find("g1")
        path.write_bytes(data)
        if entry.letter is None:
            assert entry.problem
            assert found is None
        elif found is not None and found.frames is not None:
            assert found.letter == entry.letter
            assert b"".join(found.frames) == b"".join(dead.body.frames)


@pytest.mark.parametrize("nbytes", [0, 3, 20, 60, 200])
def test_a_file_that_is_cut_is_listed_as_damaged(made: Handmade, store: DeadLetterStore, nbytes: int) -> None:
    bury(store, group(made, 1))
    (path,) = made.layout.dead.iterdir()
    path.write_bytes(path.read_bytes()[:nbytes])
    (entry,) = store.entries()
    assert entry.problem
    assert store.open(1) is None


def test_a_file_under_another_name_is_not_taken_for_another_group(
    made: Handmade, store: DeadLetterStore
) -> None:
    bury(store, group(made, 1))
    (path,) = made.layout.dead.iterdir()
    path.rename(path.with_name("000000000002.rmq"))
    (entry,) = store.entries()
    assert entry.problem == "the file has the letter of order 1"
    assert DeadLetterStore(made.layout.dead, ROOM, sync=False).find("g1") is None


def test_a_disk_that_refuses_is_not_the_end(
    made: Handmade, store: DeadLetterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    dead = group(made, 1)
    monkeypatch.setattr(os, "fsync", refuse)
    assert not bury(store, dead)
    assert list(made.layout.dead.iterdir()) == []
    monkeypatch.undo()
    assert bury(store, dead)


def test_no_directory_is_an_empty_store(store: DeadLetterStore) -> None:
    assert list(store.entries()) == []
    assert store.find("g1") is None
    store.remove(1)


@pytest.mark.parametrize("version", OTHERS)
def test_letter_of_another_version_is_named_and_harms_no_other(
    made: Handmade, store: DeadLetterStore, version: int
) -> None:
    assert bury(store, group(made, 4))
    as_version(next(made.layout.dead.iterdir()), version)
    later = DeadLetterStore(made.layout.dead, ROOM, sync=True)
    assert bury(later, group(made, 5))
    theirs, ours = later.entries()
    assert theirs.letter is None
    assert f"got version {version}" in theirs.problem
    assert (ours.letter is not None, ours.problem) == (True, "")
    assert later.open(4) is None
    assert later.find("g4") is None
    assert later.find("g5") is not None


def test_a_pipe_in_place_of_a_letter_is_not_waited_for(made: Handmade, store: DeadLetterStore) -> None:
    assert bury(store, group(made, 4))
    os.mkfifo(made.layout.dead / "000000000009.rmq")
    os.mkfifo(made.layout.saved)
    require_own_records(made.layout)
    assert [(entry.order, entry.letter is None) for entry in store.entries()] == [(4, False), (9, True)]
    assert store.open(9) is None
