"""The file of unacked groups: it comes back whole, or not at all."""

from pathlib import Path

import pytest

from rolloutmq.bus.codec import encode_group
from rolloutmq.bus.saved import SpoolFile
from rolloutmq.bus.session import Session
from rolloutmq.bus.spool import Spool
from rolloutmq.schemas.delivery import Ack, RegisterProducer
from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.trajectory import Group


def session(env: str = "e") -> Session:
    return Session(RegisterProducer(producer="p", env=env), Spool(1 << 20))


def ack(number: int, cumulative: int = 0) -> Ack:
    return Ack(epoch=1, session=number, cumulative=cumulative, byte_limit=0, start_limit=0)


def filled(number: int = 7) -> Session:
    made = session()
    made.registered(ack(number), 0.0)
    for index in range(3):
        group = Group.build(f"g-{index}", tokens=[[index] * index], mask=[[1] * index], scores=[1.0])
        made.spool.add(group, encode_group(group, 1 << 20))
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


def test_groups_without_a_place_are_named_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    SpoolFile(None, filled()).leave()
    assert "groups=2 first=g-1" in caplog.text


def test_groups_of_another_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.spool"
    SpoolFile(path, filled()).leave()
    with pytest.raises(UsageError, match="producer p of e"):
        SpoolFile(path, session("other")).load()
    assert path.exists()


def test_any_damage_is_found_and_the_file_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "p.spool"
    SpoolFile(path, filled()).leave()
    whole = path.read_bytes()
    flipped = [whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :] for i in range(len(whole))]
    for damaged in [b"", *flipped, *(whole[:end] for end in range(0, len(whole), 7))]:
        path.write_bytes(damaged)
        new = session()
        assert not SpoolFile(path, new).load()
        assert not path.exists()
        assert len(new.spool) == new.number == 0
        aside = next(tmp_path.iterdir())
        assert aside.read_bytes() == damaged
        aside.unlink()
