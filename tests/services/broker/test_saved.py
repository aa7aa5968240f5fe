"""Saved groups: all of a group comes back; what is damaged is kept aside and said."""

import logging
from pathlib import Path

import msgspec
import pytest
import zmq

from rolloutmq.schemas.envelope import (
    ColumnSpec,
    ColumnTable,
    Dtype,
    GroupHeader,
    PolicyVersion,
    RewardSummary,
    Split,
)
from rolloutmq.services.broker import saved
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.ledger import State
from rolloutmq.services.broker.retained import Kept
from rolloutmq.services.broker.segment import write_segment


def _group(number: int) -> StoredGroup:
    table = ColumnTable((ColumnSpec("tokens", Dtype.I32, 1),))
    frames = (b"b" * number, zmq.Frame(b"f" * 70_000, copy=True))
    header = GroupHeader(
        seq=number,
        position=number * 10,
        group_id=f"g-{number}",
        table=table.id,
        frames=len(frames),
        nbytes=number + 70_000,
        crc=5,
        sequences=4,
        tokens=40,
        oldest=PolicyVersion(1, 2),
        newest=PolicyVersion(1, 3),
        started_at=1.0,
        finished_at=2.0,
        rewards=RewardSummary(0.5, 0.0, 1.0),
        task="t",
    )
    return StoredGroup(
        header=header,
        env="sort3",
        split=Split.EVAL,
        run="r",
        producer="sort3-0",
        session=9,
        table=table,
        frames=frames,
        accepted_at=50.0,
        accepted_wall=1000.0,
        deliveries=2,
        failures=1,
    )


def _fields(group: StoredGroup) -> dict[str, object]:
    fields = msgspec.structs.asdict(group)
    fields["frames"] = tuple(bytes(frame) for frame in group.frames)
    del fields["accepted_at"], fields["order"]
    return fields


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "saved.rmq"


def test_groups_come_back_whole_and_in_order_and_keep_their_age(path: Path) -> None:
    groups = [_group(number) for number in (1, 2, 3)]
    assert saved.save(path, iter(groups)) == 3
    found = saved.load(path, now=7.0, wall=1010.0)
    assert [_fields(group) for group in found.groups] == [_fields(group) for group in groups]
    assert [group.accepted_at for group in found.groups] == [-3.0] * 3
    saved.retire(path, found)
    assert not path.exists()


def test_nothing_to_save_leaves_no_file(path: Path) -> None:
    saved.save(path, [_group(1)])
    assert saved.save(path, []) == 0
    assert not path.exists()
    assert saved.load(path, 0.0, 0.0) == ([], [], 0)
    saved.retire(path, saved.load(path, 0.0, 0.0))


def test_damaged_file_gives_what_is_whole_and_is_kept(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved.save(path, [_group(number) for number in (1, 2, 3)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = saved.load(path, 0.0, 1000.0)
    assert [group.header.group_id for group in found.groups] == ["g-1", "g-3"]
    assert found.damaged == 1
    with caplog.at_level(logging.ERROR):
        saved.retire(path, found)
    (aside,) = path.parent.iterdir()
    assert aside.name.startswith("saved.rmq.damaged-")
    assert aside.read_bytes() == data
    assert "stretches=1 groups_read=2" in caplog.text


def test_record_of_another_kind_or_form_is_damage(path: Path) -> None:
    write_segment(path, [(77, b"", []), (saved.GROUP, b"\xc1", [])])
    assert saved.load(path, 0.0, 0.0) == ([], [], 2)


def test_settled_batches_come_back_with_their_shards_and_what_became_of_each_group(path: Path) -> None:
    a, b, c, waiting = [_group(number) for number in (1, 2, 3, 4)]
    first = Kept(
        version=PolicyVersion(1, 7),
        stepped=True,
        split=Split.EVAL,
        shards=[[a], [], [b]],
        states=[[State.TRAINED], [], [State.FILTERED]],
        short=True,
    )
    second = Kept(
        version=PolicyVersion(1, 8), stepped=False, split=Split.EVAL, shards=[[c]], states=[[State.FILTERED]]
    )
    assert saved.save(path, [waiting], [("trainers", first), ("others", second)]) == 4
    found = saved.load(path, now=7.0, wall=1010.0)
    assert [_fields(group) for group in found.groups] == [_fields(waiting)]
    assert [consumers for consumers, _ in found.kept] == ["trainers", "others"]
    for (_, batch), original in zip(found.kept, (first, second), strict=True):
        assert (batch.version, batch.stepped, batch.split, batch.short, batch.states) == (
            original.version,
            original.stepped,
            original.split,
            original.short,
            original.states,
        )
        assert [[_fields(group) for group in shard] for shard in batch.shards] == [
            [_fields(group) for group in shard] for shard in original.shards
        ]
