"""Versions that are sent whole: chunk behind chunk without frames between them, both sides.

    WHOLE  then for each chunk  its bytes, its CRC32C        in a clear connection
                                its ciphertext and tag       in a sealed one

The checksum follows its chunk, so each side takes a piece from memory once: the checksum brings it into the cache of
the core, and the network's copy finds it there. In a sealed connection another thread encrypts, or receives, ahead.
"""

import struct
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Final

from rolloutmq.schemas.errors import MalformedError, WeightsDamagedError
from rolloutmq.trainer.weights.manifest import WeightManifest
from rolloutmq.trainer.weights.stream.ahead import ahead
from rolloutmq.trainer.weights.stream.channel import FRAME_S, LOADED, Channel, Frame, Loaded
from rolloutmq.trainer.weights.stream.chunks import CHUNK_BYTES, Bytes, checksum, count_of, tensors_at
from rolloutmq.trainer.weights.stream.messages import WHOLE, Kind
from rolloutmq.trainer.weights.stream.snapshots import Snapshot
from rolloutmq.trainer.weights.stream.stage import Stage

PIECE_BYTES: Final = 256 << 10
"""Half the second cache of a core."""
MARK: Final = struct.Struct("<I")
"""The CRC32C behind a chunk."""


def send_whole(channel: Channel, snapshot: Snapshot) -> int:
    """Send all chunks of a snapshot; return their number. Blocks and raises as `Channel.send`."""
    channel.send(Kind.WHOLE, WHOLE.pack(len(snapshot)))
    if channel.sealed:
        with closing(ahead(_sealed(channel, snapshot), LOADED, "weights-cipher")) as records:
            for record in records:
                channel.unload(record)
    else:
        for index in range(len(snapshot)):
            Departure(channel, snapshot, index).run()
    return len(snapshot)


def _sealed(channel: Channel, snapshot: Snapshot) -> Iterator[Loaded]:
    for index in range(len(snapshot)):
        with snapshot.chunk(index) as data:
            record = channel.load_record(data)
        yield record


class Departure:
    """A chunk on its way out of a clear connection. While the network takes nothing, nobody reads the snapshot."""

    def __init__(self, channel: Channel, snapshot: Snapshot, index: int) -> None:
        self._channel = channel
        self._snapshot = snapshot
        self._index = index
        self._summed = self._sent = 0
        """Bytes that the checksum has, and those that the network has, at last with the checksum."""
        self._crc = 0

    def run(self) -> None:
        """Send it. Blocks and raises as `Channel.send`."""
        known = self._snapshot.known_checksum(self._index)
        while True:
            with self._snapshot.chunk(self._index) as data:
                if known is not None:
                    self._summed, self._crc = data.size, known
                if self._passes(data):
                    break
            self._channel.wait()
        if known is None:
            self._snapshot.note_checksum(self._index, self._crc)

    def _passes(self, data: Bytes) -> bool:
        """Send as much as the network takes at once; return whether that was the rest."""
        while self._sent < data.size + MARK.size:
            if self._summed < data.size and self._sent == self._summed:
                piece = data[self._summed : self._summed + PIECE_BYTES]
                self._crc = checksum(piece, self._crc)
                self._summed += piece.size
            mark = MARK.pack(self._crc) if self._summed == data.size else b""
            left = self._summed + len(mark) - self._sent
            took = self._channel.push(data[self._sent : self._summed], mark[max(0, self._sent - data.size) :])
            self._sent += took
            if took < left:
                return False
        return True


def receive_whole(channel: Channel, frame: Frame, stage: Stage, manifest: WeightManifest) -> int:
    """Receive all chunks of a version into a stage, and keep each that is whole; return their number. Blocks.

    Args:
        frame: The received frame WHOLE.
        manifest: That of the version, for the names in an error.

    Raises:
        MalformedError: The frame announces another number of chunks than the stage has.
        WeightsDamagedError: A chunk is not what was sent; names its tensors.
        WeightsNotSentError, MissingError: See `Channel.receive` and `Stage.place`.
    """
    count = count_of(stage.nbytes)
    if len(frame.body) != WHOLE.size or frame.data or WHOLE.unpack(frame.body) != (count,):
        raise MalformedError(f"weights: a whole version that does not have {count} chunks")
    if channel.sealed:
        _open_all(channel, stage)
    else:
        for index in range(count):
            require_checksum(channel.peer, manifest, index, same=_receive(channel, stage.place(index)))
            stage.keep_whole(index)
    return count


def _open_all(channel: Channel, stage: Stage) -> None:
    sizes = [min(CHUNK_BYTES, stage.nbytes - start) for start in range(0, stage.nbytes, CHUNK_BYTES)]
    with closing(ahead(channel.records(sizes), LOADED, "weights-reader")) as records:
        try:
            for index, record in enumerate(records):
                channel.open_record(record, stage.place(index))
                stage.keep_whole(index)
        except BaseException:
            channel.interrupt()  # the other thread waits for more
            raise


def _receive(channel: Channel, place: Bytes) -> bool:
    """Receive a chunk; return whether its checksum is the one behind it."""
    crc, until = 0, time.monotonic() + FRAME_S
    for start in range(0, place.size, PIECE_BYTES):
        piece = place[start : start + PIECE_BYTES]
        channel.fill(piece, until)
        crc = checksum(piece, crc)
    return bool(MARK.unpack(channel.exactly(MARK.size))[0] == crc)


def require_checksum(peer: str, manifest: WeightManifest, index: int, *, same: bool) -> None:
    """Require that the checksum of a received chunk is that which came with it.

    Raises:
        WeightsDamagedError: It is not; names the tensors of the chunk.
    """
    if not same:
        names = tensors_at(manifest, index)
        raise WeightsDamagedError(peer, f"chunk {index} ({names}) does not match its checksum")
