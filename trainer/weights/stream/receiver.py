"""Receiver: keeps the weights of one run directory those of a sender, version by version.

    offer -> chunks into the stage -> whole -> lock, copy into the weights, version -> free

Engines of this host map the weights as if a trainer had written them. Until a version is whole they have the one
before, and the copy is one write under their lock. What a transfer brought stays in the stage when it breaks off: the
receiver tells the digests of its chunks, so the sender sends only those that differ, of the version newest by then.

A receiver killed during the copy leaves half-written weights, which engines refuse. Its next life finds the stage whole
and finishes the copy; it needs no sender for that.
"""

import logging
import os
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.transport.run_identity import run_id_of
from rolloutmq.schemas.errors import (
    MalformedError,
    MissingError,
    WeightsDamagedError,
)
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.lock import WRITE_PATIENCE_S
from rolloutmq.trainer.weights.stream.channel import Channel, Frame
from rolloutmq.trainer.weights.stream.chunks import (
    CHUNK_BYTES,
    HERE,
    Digests,
    checksum,
    count_of,
    digests,
    unknown,
)
from rolloutmq.trainer.weights.stream.messages import (
    CHUNK,
    Done,
    Follow,
    Kind,
    Offer,
    Take,
    decoded,
    require_manifest,
    require_offer,
    require_run,
    table_sum,
)
from rolloutmq.trainer.weights.stream.segment import WeightSegment, copy_parts
from rolloutmq.trainer.weights.stream.stage import Stage
from rolloutmq.trainer.weights.stream.whole import receive_whole, require_checksum

logger = logging.getLogger(__name__)

SPARE_BYTES: Final = 64 << 20
"""Shared memory that is left to others."""


class Receiver:
    """The weights of one run directory, which this process owns. Belongs to one thread. Close it.

    Args:
        layout: Run directory of this host; its `weights.json` and `stage.json` are written.

    Raises:
        SegmentInUseError: A live process owns the weights there.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self.run_id = run_id_of(layout)
        """Id of the run whose weights it takes; empty if its directory has none."""
        self.write = ""
        """Name of the write that the weights hold, by the sender's count; empty if unknown."""
        self._segment = WeightSegment.adopt(layout.weights)
        self._published = self._segment is not None
        self._stage = Stage.adopt(layout.stage)
        self._table: Digests = unknown(0)
        """Digests of the weights."""
        if self._segment is not None:
            torn = bool(self._segment.lock.is_torn())
            self._table = unknown(count_of(self._segment.data.size)) if torn else digests(self._segment.data)
        self.holds = self.version
        """The version that engines of this host have by now; for any thread."""
        if (
            self._stage is not None
            and self._segment is not None
            and self._stage.layout == self._segment.layout
        ):
            self._finish()

    def _finish(self) -> None:
        """Copy a version that was whole when the life before ended."""
        assert self._stage is not None
        if (whole := self._stage.whole) is not None:
            logger.info("transfer finished version=%d.%d", *msgspec.structs.astuple(whole[0]))
            self._switch(*whole)

    @property
    def version(self) -> PolicyVersion | None:
        """Version of the weights, or None before the first."""
        return self._segment.lock.version if self._segment is not None and self._published else None

    def follow(self, channel: Channel) -> None:
        """Take over version after version until the connection ends. Blocks.

        Returns when the sender asks for a new ticket.

        Raises:
            WeightsNotSentError: The sender is gone or silent, or has the weights of another run.
            WeightsDamagedError, WeightsMismatchError, MalformedError, LimitExceededError: It sent what cannot be.
            WeightsBusyError: A reader holds the lock of the weights; the version stays in the stage.
            MissingError: There is not enough shared memory.
        """
        while self.take_next(channel):
            pass

    def take_next(self, channel: Channel) -> bool:
        """Take over one version; return False if the sender asks for a new ticket. Raises what `follow` raises."""
        channel.send(Kind.FOLLOW, msgspec.msgpack.encode(Follow(self.write)))
        while (frame := channel.receive()).kind is Kind.IDLE:
            pass
        if frame.kind is Kind.RENEW:
            return False
        offer = decoded(_expected(frame, Kind.OFFER), Offer)
        began = time.monotonic()
        sent = self._take(channel, offer)
        logger.info(
            "weights received version=%d.%d chunks=%d of=%d seconds=%.3f",
            *(*msgspec.structs.astuple(offer.version), sent, count_of(offer.nbytes)),
            time.monotonic() - began,
        )
        return True

    def _take(self, channel: Channel, offer: Offer) -> int:
        require_run(offer, self.run_id)
        require_offer(offer)
        self._require_room(offer)
        known = self._segment is not None and self._segment.layout == offer.layout
        resumes = self._resumes(offer)
        take = Take(manifest=not known, digests=self._told(offer, known=known).tobytes(), resumes=resumes)
        channel.send(Kind.TAKE, msgspec.msgpack.encode(take))
        if not known:
            encoded = _expected(channel.receive(offer.manifest_bytes), Kind.MANIFEST)
            self._begin_layout(encoded, offer)
        if self._stage is None or self._stage.layout != offer.layout:
            self._begin_stage(offer)
        assert self._stage is not None
        self._stage.reopen()
        sent, done = self._receive_chunks(channel, offer)
        self._require_whole(channel, sent, done)
        if self.version == offer.version and not self._stage.table["known"].any():
            self.write = offer.write  # all of it is here: a write would only be news for the relays behind
            return sent
        self._stage.seal(offer.version, offer.write)
        self._switch(offer.version, offer.write)
        return sent

    def _resumes(self, offer: Offer) -> bool:
        """Return whether chunks of the offered layout are here from a transfer that broke off."""
        stage = self._stage
        if stage is None or stage.layout != offer.layout or not stage.table["known"].any():
            return False
        stage.complete()
        return True

    def _told(self, offer: Offer, *, known: bool) -> Digests:
        """Return the digests of the chunks that this side has of the offered layout."""
        if known:
            return self._have()
        if self._stage is not None and self._stage.layout == offer.layout:
            return self._stage.table
        return unknown(0)

    def _require_room(self, offer: Offer) -> None:
        """Require memory for the weights, once for the engines and once for the stage, before any is allocated."""
        info = os.statvfs(segment_file.SHM)
        free, mine = (
            info.f_bavail * info.f_frsize,
            self._segment.data.size if self._segment is not None else 0,
        )
        needed = 2 * offer.nbytes + SPARE_BYTES
        if free < needed and offer.nbytes > mine:
            raise MissingError(
                f"room in {segment_file.SHM}",
                f"weights of {offer.nbytes / 1e6:,.1f} MB need {needed / 1e6:,.1f} MB free (got {free / 1e6:,.1f} MB), "
                "twice themselves and 67 MB for others; enlarge it, in Docker by --shm-size",
            )

    def _have(self) -> Digests:
        """Return the digests of this side: of the stage, or else of the weights."""
        if self._stage is None:
            return self._table.copy()
        return np.where(self._stage.table["known"].astype(bool), self._stage.table, self._table)

    def _begin_layout(self, encoded: bytes, offer: Offer) -> None:
        """Make memory for another model. Engines keep the old one until the first version is whole."""
        manifest = require_manifest(encoded, offer)
        fresh = WeightSegment.create(encoded)
        self._leave_old()
        self._segment, self._published = fresh, False
        self._table = unknown(count_of(manifest.end))

    def _begin_stage(self, offer: Offer) -> None:
        if self._stage is not None:
            self._stage.close(self._layout.stage, remove=True)
            self._stage = None
        self._stage = Stage.create(offer.layout, offer.nbytes, self._layout.stage)

    def _leave_old(self) -> None:
        """Release the weights of another model; their file goes once the address names another."""
        if self._segment is None:
            return
        self._segment.close(remove=not self._published)
        self.write = ""

    def _receive_chunks(self, channel: Channel, offer: Offer) -> tuple[int, Done]:
        assert self._stage is not None
        assert self._segment is not None
        sent = 0
        while (frame := channel.receive()).kind in {Kind.CHUNK, Kind.WHOLE}:
            if frame.kind is Kind.WHOLE:
                sent += receive_whole(channel, frame, self._stage, self._segment.manifest)
            else:
                self._receive_chunk(channel, frame, offer)
                sent += 1
        return sent, decoded(_expected(frame, Kind.DONE), Done)

    def _receive_chunk(self, channel: Channel, frame: Frame, offer: Offer) -> None:
        assert self._stage is not None
        assert self._segment is not None
        if len(frame.body) != CHUNK.size:
            raise MalformedError(f"weights: a chunk with a header of {len(frame.body)} bytes")
        index, crc, total = CHUNK.unpack(frame.body)
        count = count_of(offer.nbytes)
        size = min(CHUNK_BYTES, offer.nbytes - index * CHUNK_BYTES)
        if index >= count or frame.data != size:
            raise MalformedError(f"weights: chunk {index} of {count} with {frame.data} bytes")
        place = self._stage.place(index)
        channel.data_into(frame, place.data)
        # What a cipher has authenticated needs no second proof; else the CRC32C shows damage on the way.
        if not channel.sealed:
            require_checksum(channel.peer, self._segment.manifest, index, same=checksum(place) == crc)
        self._stage.keep(index, (crc, total, 1))

    def _require_whole(self, channel: Channel, sent: int, done: Done) -> None:
        assert self._stage is not None
        have = self._have() if done.table is not None else self._stage.table
        missing = int((have["known"] == 0).sum())
        differs = done.table is not None and table_sum(have) != done.table
        if done.sent != sent or missing or differs:
            raise WeightsDamagedError(
                channel.peer,
                f"{sent} chunks of {done.sent} came, {missing} are missing, or the digests differ",
            )

    def _switch(self, version: PolicyVersion, write: str) -> None:
        """Make the staged version that of the weights."""
        assert self._stage is not None
        assert self._segment is not None
        parts = [(index * CHUNK_BYTES, part) for index, part in self._stage.kept()]
        after = self._have()
        after[after["known"] == HERE] = 0
        self._table["known"][self._stage.table["known"] != 0] = 0  # if the copy fails they hold anything
        with self._segment.writing(version, WRITE_PATIENCE_S):
            copy_parts(self._segment.data, parts)
        self._table = after
        self._stage.clear()
        self.write = write
        if not self._published:
            self._publish()
        self.holds = version

    def _publish(self) -> None:
        assert self._segment is not None
        before = segment_file.read_address(self._layout.weights)
        self._segment.write_address(self._layout.weights)
        self._published = True
        if before is not None and Path(before.path).parent == segment_file.SHM:
            Path(before.path).unlink(missing_ok=True)

    def close(self, *, remove: bool = False) -> None:
        """Release the weights for the next life of the receiver; with `remove`, remove them and their address."""
        if self._stage is not None:
            self._stage.close(self._layout.stage, remove=remove)
        if self._segment is None:
            return
        if remove:
            if self._published:
                self._layout.weights.unlink(missing_ok=True)
            self._segment.close(remove=True)
        elif self._published:
            self._segment.leave()
        else:
            self._segment.close(remove=True)
        self._stage = self._segment = None


def _expected(frame: Frame, kind: Kind) -> bytes:
    if frame.kind is not kind or frame.data:
        raise MalformedError(f"weights: expected {kind.name}, got {frame.kind.name}")
    return frame.body
