"""The spool file: it is read whole or not at all."""

import struct
from pathlib import Path

import pytest

from rolloutmq.bus.encoding.codec import checksum, encode_group
from rolloutmq.bus.producer.session import SessionState
from rolloutmq.bus.producer.spool import Spool
from rolloutmq.bus.producer.spool_file import VERSION, SpoolFile, owner
from rolloutmq.schemas.errors import RecordVersionError, UnackedError, UsageError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.replies import Ack
from rolloutmq.schemas.wire.requests import RegisterProducer


def session(env: str = "e") -> SessionState:
    return SessionState(RegisterProducer(producer="p", env=env), Spool(1 << 20))


def ack(number: int, cumulative: int = 0, starts: int = 0) -> Ack:
    return Ack(epoch=1, session=number, cumulative=cumulative, byte_limit=0, start_limit=starts)


def add(to: SessionState, index: int) -> None:
    group = Group.build(f"g-{index}", tokens=[[index] * index], mask=[[1] * index], scores=[1.0])
    to.spool.add(group, encode_group(group, 1 << 20))


def filled(number: int = 7) -> SessionState:
    made = session()
    made.registered(ack(number), 0.0)
    for index in range(3):
        add(made, index)
    made.acked(ack(number, cumulative=1), 0.0)
    return made


def test_what_was_unacked_comes_back_with_its_numbers(tmp_path: Path) -> None:
    old, path = filled(), tmp_path / "spools" / "p.spool"
    SpoolFile(path, old).leave()
    assert [p.name for p in path.parent.iterdir()] == ["p.spool"]
    new = session()
    file = SpoolFile(path, new)
    assert file.load()
    assert (new.number, new.spool.last, new.spool.position) == (7, 3, old.spool.position)
    assert [e.header for e in new.spool] == [e.header for e in old.spool]
    assert [e.table for e in new.spool] == [e.table for e in old.spool]
    assert [bytes(f) for e in new.spool for f in e.frames] == [bytes(f) for e in old.spool for f in e.frames]
    file.remove()
    assert not path.exists()


def test_a_live_file_follows_the_number_of_the_session(tmp_path: Path) -> None:
    path = tmp_path / "p.spool"
    SpoolFile(path, filled()).leave()
    second = session()
    file = SpoolFile(path, second)
    file.load()
    second.registered(ack(9), 0.0)
    file.renew()
    third = session()
    assert SpoolFile(path, third).load()
    assert third.number == 9
    assert [e.header.seq for e in third.spool] == [1, 2]


def test_nothing_unacked_leaves_no_file(tmp_path: Path) -> None:
    path, made = tmp_path / "p.spool", filled()
    made.acked(ack(7, cumulative=3), 0.0)
    file = SpoolFile(path, made)
    file.leave()
    file.renew()
    assert not path.exists()
    assert not SpoolFile(path, session()).load()
    assert not SpoolFile(None, session()).load()


def test_groups_without_a_place_are_named_as_lost() -> None:
    with pytest.raises(UnackedError, match=r"2 groups are not acked and may be lost .*: g-1, g-2;"):
        SpoolFile(None, filled()).leave()


def test_groups_of_another_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.spool"
    SpoolFile(path, filled()).leave()
    with pytest.raises(UsageError, match="producer p of e"):
        SpoolFile(path, session("other")).load()
    assert path.exists()


def test_what_was_in_hand_at_the_end_counts_as_abandoned(tmp_path: Path) -> None:
    old, path = session(), tmp_path / "p.spool"
    old.registered(ack(7, starts=9), 0.0)
    permits = [old.credit.begin() for _ in range(3)]
    assert permits[0] is not None
    assert permits[1] is not None
    old.credit.abandon(permits[0])
    old.credit.arrive(permits[1])
    add(old, 1)
    SpoolFile(path, old).leave()
    new = session()
    SpoolFile(path, new).load()
    assert (new.credit.begun, new.credit.abandoned, new.credit.in_hand) == (3, 2, 0)
    assert new.registration().begun == 3


def test_any_damage_is_found_and_what_is_whole_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "p.spool"
    SpoolFile(path, filled()).leave()
    whole = path.read_bytes()
    headers = {e.header.seq: (e.header, [bytes(f) for f in e.frames]) for e in filled().spool}
    flipped = [whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :] for i in range(len(whole))]
    salvaged = set()
    for damaged in [b"", *flipped, *(whole[:end] for end in range(0, len(whole), 7))]:
        path.write_bytes(damaged)
        new = session()
        loaded = SpoolFile(path, new).load()
        came = {e.header.seq: (e.header, [bytes(f) for f in e.frames]) for e in new.spool}
        assert came.items() < headers.items()
        assert loaded == bool(came) == path.exists()
        assert new.number == (7 if came else 0)
        salvaged.add(tuple(came))
        (aside,) = tmp_path.glob("p.spool.damaged-*")
        assert aside.read_bytes() == damaged
        aside.unlink()
    assert salvaged == {(), (2,), (3,)}
    assert SpoolFile(path, session()).load() == path.exists()


def test_what_was_damaged_is_not_waited_for_under_the_old_numbers(tmp_path: Path) -> None:
    path = tmp_path / "p.spool"
    SpoolFile(path, filled()).leave()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last group
    path.write_bytes(data)
    new = session()
    assert SpoolFile(path, new).load()
    assert not new.goes_on(ack(7, cumulative=1))
    assert new.goes_on(ack(7, cumulative=3))


def test_a_session_that_came_to_a_bad_end_leaves_the_path_to_the_next(tmp_path: Path) -> None:
    path, fenced = tmp_path / "p.spool", filled()
    SpoolFile(path, fenced).set_aside()
    assert not path.exists()
    aside = tmp_path / "p.spool.session-7"
    assert owner(aside).producer == "p"
    assert SpoolFile(aside, session()).load()
    SpoolFile(path, session()).set_aside()
    assert list(tmp_path.iterdir()) == [aside]


def test_a_disk_that_fails_loses_the_groups_aloud_and_keeps_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.spool"
    SpoolFile(path, filled()).leave()
    before = path.read_bytes()
    live = session()
    file = SpoolFile(path, live)
    assert file.load()
    live.registered(ack(9), 0.0)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    file.renew()
    assert "spool file not renewed, old session kept" in caplog.text
    with pytest.raises(UnackedError, match=r"No space left on device\): g-1, g-2") as lost:
        file.leave()
    assert lost.value.group_ids == ("g-1", "g-2")
    assert [p.name for p in tmp_path.iterdir()] == ["p.spool"]
    assert path.read_bytes() == before


def as_version(path: Path, version: int) -> None:
    """Write a file of ours as that version did; the first one had another magic, and named no version."""
    data = path.read_bytes()
    _, _, size, _ = struct.unpack_from("<8sIQI", data)
    index = data[24 : 24 + size]
    if version == 1:
        head = struct.pack("<8sQI", b"RMQSPOOL", size, checksum([index]))
    else:
        covered = struct.pack("<IQ", version, size)
        head = b"RMQSAVED" + covered + struct.pack("<I", checksum([covered, index]))
    path.write_bytes(head + data[24:])


@pytest.mark.parametrize("version", [1, 2, 4])
def test_a_file_of_another_version_is_refused_and_stays(tmp_path: Path, version: int) -> None:
    path = tmp_path / "p.spool"
    SpoolFile(path, filled()).leave()
    whole = path.read_bytes()
    as_version(path, VERSION)
    assert path.read_bytes() == whole
    as_version(path, version)
    before = path.read_bytes()
    new = session()
    for read in (lambda: owner(path), SpoolFile(path, new).load):
        with pytest.raises(
            RecordVersionError, match=f"got version {version}, this one reads version {VERSION}"
        ):
            read()
    assert (path.read_bytes(), list(tmp_path.iterdir()), len(new.spool)) == (before, [path], 0)


def test_a_damaged_file_of_another_version_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "p.spool"
    SpoolFile(path, filled()).leave()
    as_version(path, 1)
    data = bytearray(path.read_bytes())
    data[40] ^= 1  # in its index, so that nobody knows whether it was one
    path.write_bytes(data)
    assert not SpoolFile(path, session()).load()
    assert not path.exists()
