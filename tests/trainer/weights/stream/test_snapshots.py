"""Snapshots: they do not change, are made on demand only, and are bounded; a slow transfer stops no step."""

import gc
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from tests.trainer.weights.stream.support import Trainer, V, dial

from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.stream import snapshots as module
from rolloutmq.trainer.weights.stream.chunks import Bytes, digest, digests
from rolloutmq.trainer.weights.stream.messages import Follow, Kind, Take
from rolloutmq.trainer.weights.stream.snapshots import Snapshot, Snapshots


@pytest.fixture
def snapshots(trainer: Trainer) -> Iterator[Snapshots]:
    made = Snapshots(trainer.layout.weights)
    yield made
    made.close()
    gc.collect()


def contents(snapshot: Snapshot) -> Bytes:
    parts = []
    for index in range(len(snapshot)):
        with snapshot.chunk(index) as data:
            parts.append(data.copy())
    return np.concatenate(parts)


def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each write that is copied."""
    made: list[str] = []
    copy = Snapshot.copy

    def noted(self: Snapshot) -> None:
        made.append(self.write)
        copy(self)

    monkeypatch.setattr(Snapshot, "copy", noted)
    return made


def test_a_snapshot_does_not_change_and_keeps_its_label(trainer: Trainer, snapshots: Snapshots) -> None:
    trainer.step(1)
    found = snapshots.newer("")
    assert found is not None
    before = contents(found)
    trainer.step(2)
    assert found.version == V(0, 1)
    assert np.array_equal(contents(found), before)
    assert np.array_equal(found.table(), digests(before))


def test_one_snapshot_serves_all_who_ask_for_a_write(trainer: Trainer, snapshots: Snapshots) -> None:
    trainer.step(1)
    first, second = snapshots.newer(""), snapshots.newer("")
    assert first is second
    assert first is not None
    assert first.users == 2
    assert snapshots.newer(first.write) is None


def test_without_a_writer_nothing_is_copied(
    trainer: Trainer, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, computed = copies(monkeypatch), []

    def counted(data: Bytes) -> tuple[int, int, int]:
        computed.append(data.size)
        return digest(data)

    monkeypatch.setattr(module, "digest", counted)
    write = ""
    for step in (1, 2, 3):
        trainer.step(step)
        found = snapshots.newer(write)
        assert found is not None
        table = found.table().copy()
        assert np.array_equal(table, digests(contents(found)))
        write = found.write
        snapshots.release(found)
    again = snapshots.newer("")
    assert again is not None
    assert again.write == write
    assert np.array_equal(again.table(), table)
    assert made == []
    assert len(computed) == 3 * len(again)  # not anew for a second receiver
    snapshots.release(again)


def test_a_writer_that_waits_gets_the_weights_once_they_are_copied(
    trainer: Trainer, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = copies(monkeypatch)
    monkeypatch.setattr(module, "HOLD_S", 1000.0)
    found = snapshots.newer("")
    assert found is not None
    before = contents(found)
    stepping = threading.Thread(target=trainer.step, args=(1,))
    with found.chunk(0) as data:
        kept = data.copy()
        stepping.start()
        stepping.join(0.05)
        assert stepping.is_alive()  # while a chunk is read, nobody writes it
        assert np.array_equal(data, kept)
    stepping.join(60.0)
    assert not stepping.is_alive()
    assert made == [found.write]
    assert np.array_equal(contents(found), before)


def test_after_a_while_the_weights_are_unlocked(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOLD_S", 0.0)
    copied = threading.Event()
    copy = Snapshot.copy

    def noted(self: Snapshot) -> None:
        copy(self)
        copied.set()

    monkeypatch.setattr(Snapshot, "copy", noted)
    assert snapshots.newer("") is not None
    assert copied.wait(60.0)  # nobody writes, and nobody has released it


def test_weights_of_another_segment_are_followed_during_a_transfer(
    trainer: Trainer, snapshots: Snapshots
) -> None:
    trainer.step(1)
    found = snapshots.newer("")
    assert found is not None
    before = contents(found)
    old = trainer.share
    trainer.layout.weights.unlink()  # otherwise the segment would be adopted
    trainer.share = WeightShare.create_or_adopt(trainer.model, trainer.layout.weights, version=V(0, 2))
    old.close(unlink=True)
    other = snapshots.newer(found.write)
    assert other is not None
    assert other.write != found.write
    assert np.array_equal(contents(found), before)
    snapshots.release(found)
    snapshots.release(other)


def test_versions_nobody_asks_for_are_skipped(trainer: Trainer, snapshots: Snapshots) -> None:
    first = snapshots.newer("")
    assert first is not None
    for step in (1, 2, 3):
        trainer.step(step)
    second = snapshots.newer(first.write)
    assert second is not None
    assert second.version == V(0, 3)


def test_at_most_so_many_are_kept_and_the_newest_serves_the_rest(
    trainer: Trainer, snapshots: Snapshots
) -> None:
    used = []
    for step in (1, 2, 3):
        trainer.step(step)
        used.append(snapshots.newer(""))
    trainer.step(4)
    late = snapshots.newer("")
    assert late is used[2]
    assert used[2] is not None
    assert snapshots.newer(used[2].write) is None  # waits until a transfer ends
    assert used[0] is not None
    memory = used[0].memory
    snapshots.release(used[0])
    freed = snapshots.newer(used[2].write)
    assert freed is not None
    assert freed.version == V(0, 4)
    assert freed.memory is memory  # no new memory


def test_half_written_weights_are_not_offered(trainer: Trainer, snapshots: Snapshots) -> None:
    first = snapshots.newer("")
    assert first is not None
    with pytest.raises(RuntimeError), trainer.share.writing(V(0, 1)):
        raise RuntimeError
    assert snapshots.newer(first.write) is None
    with trainer.share.writing(V(0, 2), restoring=True), torch.no_grad():
        next(trainer.model.parameters()).fill_(1.0)
    second = snapshots.newer(first.write)
    assert second is not None
    assert second.version == V(0, 2)


def test_a_receiver_that_does_not_read_stops_no_step(trainer: Trainer) -> None:
    with trainer.served() as address:
        stuck = dial(address)
        stuck.send(Kind.FOLLOW, msgspec.msgpack.encode(Follow("")))
        assert stuck.receive().kind is Kind.OFFER
        stuck.send(Kind.TAKE, msgspec.msgpack.encode(Take(manifest=True, digests=b"")))
        assert stuck.receive(1 << 20).kind is Kind.MANIFEST

        def work() -> None:
            for step in range(1, 20):
                trainer.step(step)

        stepping = threading.Thread(target=work)
        stepping.start()
        stepping.join(60.0)  # the sender is blocked, in the middle of its chunks
        assert not stepping.is_alive()
        assert trainer.share.version == V(0, 19)
        stuck.close()


def test_weights_that_are_not_there_yet_are_awaited(trainer: Trainer) -> None:
    empty = Snapshots(trainer.layout.root / "absent.json")
    assert empty.newer("") is None
    empty.close()
