"""Versions sent whole: every byte arrives, damage is refused, and a receiver that does not read holds nothing."""

import gc
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.trainer.weights.stream.channels import pair
from tests.trainer.weights.stream.support import Trainer

from rolloutmq.schemas.errors import MalformedError, WeightsDamagedError, WeightsNotSentError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.trainer.weights.stream import whole as module
from rolloutmq.trainer.weights.stream.channel import Channel
from rolloutmq.trainer.weights.stream.chunks import CHUNK_BYTES, checksum, chunk
from rolloutmq.trainer.weights.stream.messages import WHOLE, Kind
from rolloutmq.trainer.weights.stream.segment import WeightSegment
from rolloutmq.trainer.weights.stream.snapshots import Snapshot, Snapshots
from rolloutmq.trainer.weights.stream.stage import Stage
from rolloutmq.trainer.weights.stream.whole import receive_whole, send_whole

SEALED = [False, pytest.param(True, id="sealed")]


class Case:
    """A version of a trainer, a snapshot of it, and the stage of a receiver."""

    def __init__(self, trainer: Trainer, host: RunLayout) -> None:
        trainer.step(3)
        self.file = host.stage
        self.truth = WeightSegment.read(trainer.layout.weights)
        self.stage = Stage.create("a" * 64, self.truth.data.size, host.stage)
        self.snapshots = Snapshots(trainer.layout.weights)
        found = self.snapshots.newer("")
        assert found is not None
        self.snapshot = found

    def received(self, channel: Channel) -> int:
        return receive_whole(channel, channel.receive(), self.stage, self.truth.manifest)

    def close(self) -> None:
        self.snapshots.release(self.snapshot)
        self.snapshots.close()
        self.stage.close(self.file, remove=True)
        self.truth.close()
        vars(self).clear()


@pytest.fixture
def case(trainer: Trainer, host: RunLayout) -> Iterator[Case]:
    made = Case(trainer, host)
    yield made
    made.close()
    gc.collect()


def sending(channel: Channel, snapshot: Snapshot) -> threading.Thread:
    def send() -> None:
        with suppress(WeightsNotSentError):  # the receiver has left
            send_whole(channel, snapshot)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("sealed", SEALED)
def test_every_byte_arrives(sealed: bool, case: Case) -> None:
    if sealed:
        pytest.importorskip("cryptography")
    assert case.truth.data.size % module.PIECE_BYTES, "the last piece is shorter"
    with pair(sealed=sealed) as (sender, receiver):
        for _ in range(2):
            thread = sending(sender, case.snapshot)
            assert case.received(receiver) == len(case.snapshot)
            thread.join()
            ((first, data),) = case.stage.kept()
            assert first == 0
            assert np.array_equal(data, case.truth.data)
            case.stage.clear()


def test_a_checksum_is_computed_once_for_all_receivers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pair() as (sender, receiver):
            thread = sending(sender, case.snapshot)
            case.received(receiver)
            thread.join()
        monkeypatch.setattr(Snapshot, "note_checksum", None)
    assert [case.snapshot.known_checksum(index) for index in range(len(case.snapshot))] == [
        checksum(chunk(case.truth.data, index)) for index in range(len(case.snapshot))
    ]


def test_a_checksum_takes_the_place_of_no_digest(case: Case) -> None:
    """Another receiver may have asked for the digest while the chunk was under way."""
    found = case.snapshot.digest(2)
    case.snapshot.note_checksum(2, 1)
    assert case.snapshot.digests[2].item() == found
    assert case.snapshot.known_checksum(2) == found[0]


def test_a_wrong_checksum_names_the_tensors_and_keeps_what_was_before(case: Case) -> None:
    case.snapshot.note_checksum(2, 1)
    with pair() as (sender, receiver):
        thread = sending(sender, case.snapshot)
        with pytest.raises(WeightsDamagedError, match=r"chunk 2 \(\d\.\w+.* does not match its checksum"):
            case.received(receiver)
        receiver.interrupt()
        thread.join()
    assert [(first, data.size) for first, data in case.stage.kept()] == [(0, 2 * CHUNK_BYTES)]


@pytest.mark.parametrize("change", ["byte", "order"])
def test_a_changed_or_moved_record_is_refused_without_a_wait(
    change: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that receives ahead waits for a record that never comes: the error must not wait for it."""
    pytest.importorskip("cryptography")
    with pair(sealed=True) as (sender, receiver):
        first = sender.load_record(chunk(case.truth.data, 0)).data.copy()
        second = sender.load_record(chunk(case.truth.data, 1)).data.copy()
        first[5] ^= change == "byte"
        sender.send(Kind.WHOLE, WHOLE.pack(len(case.snapshot)))
        # The frame takes the counter's third number, so both records are out of their order.
        for record in (first, second):
            sender._send(record)
        monkeypatch.setattr(receiver._in, "_count", 2)
        frame = receiver.receive()
        monkeypatch.setattr(receiver._in, "_count", 0 if change == "byte" else 1)
        with pytest.raises(WeightsDamagedError, match="a frame was changed on its way"):
            receive_whole(receiver, frame, case.stage, case.truth.manifest)
    assert [*case.stage.kept()] == []
    assert not [one for one in threading.enumerate() if one.name == "weights-reader"]


@pytest.mark.parametrize("body", [b"", b"12345", WHOLE.pack(1)], ids=["empty", "long", "other count"])
def test_another_number_of_chunks_is_refused(body: bytes, case: Case) -> None:
    with pair() as (sender, receiver):
        sender.send(Kind.WHOLE, body)
        with pytest.raises(MalformedError, match=r"does not have \d+ chunks"):
            case.received(receiver)


def test_a_chunk_that_trickles_is_left_in_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_S", 0.0)
    with pair() as (sender, receiver):
        sender.send(Kind.WHOLE, WHOLE.pack(len(case.snapshot)))
        fill, filled = receiver.fill, []

        def short(view: Any, until: float | None = None) -> None:
            filled.append(until)
            fill(view, until)

        frame = receiver.receive()
        monkeypatch.setattr(receiver, "fill", short)
        sender._send(bytes(100))
        sender.interrupt()  # without the limit the error would tell of this
        with pytest.raises(WeightsNotSentError, match="a frame took more than"):
            receive_whole(receiver, frame, case.stage, case.truth.manifest)
    assert len(set(filled)) == 1, "one limit for the whole chunk"
    assert filled[0] is not None


def test_a_receiver_that_does_not_read_keeps_no_writer_waiting(trainer: Trainer, case: Case) -> None:
    with pair() as (sender, receiver):
        thread = sending(sender, case.snapshot)
        stepping = threading.Thread(target=trainer.step, args=(4,))
        stepping.start()
        stepping.join(60.0)
        assert not stepping.is_alive()
        receiver.interrupt()
        thread.join()
