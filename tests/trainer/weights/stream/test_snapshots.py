"""Snapshots: they do not change, are made on demand only, and are bounded; a slow transfer stops no step."""

import gc
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from tests.trainer.weights.stream.support import Trainer, V, dial

from rolloutmq.trainer.weights.stream.chunks import digests
from rolloutmq.trainer.weights.stream.messages import Follow, Kind, Take
from rolloutmq.trainer.weights.stream.snapshots import Snapshots


@pytest.fixture
def snapshots(trainer: Trainer) -> Iterator[Snapshots]:
    made = Snapshots(trainer.layout.weights)
    yield made
    made.close()
    gc.collect()


def test_a_snapshot_does_not_change_and_keeps_its_label(trainer: Trainer, snapshots: Snapshots) -> None:
    trainer.step(1)
    found = snapshots.newer("")
    assert found is not None
    before = found.data.copy()
    trainer.step(2)
    assert found.version == V(0, 1)
    assert np.array_equal(found.data, before)
    assert np.array_equal(found.table(), digests(before))


def test_one_snapshot_serves_all_who_ask_for_a_write(trainer: Trainer, snapshots: Snapshots) -> None:
    trainer.step(1)
    first, second = snapshots.newer(""), snapshots.newer("")
    assert first is second
    assert first is not None
    assert first.users == 2
    assert snapshots.newer(first.write) is None


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
    data = used[0].data
    snapshots.release(used[0])
    freed = snapshots.newer(used[2].write)
    assert freed is not None
    assert freed.version == V(0, 4)
    assert freed.data is data  # no new memory


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
