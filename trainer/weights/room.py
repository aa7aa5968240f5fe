"""Room for shared weights: a segment that was just made, mapped, or the one that a dead owner left, opened."""

import mmap
import os
from pathlib import Path

from rolloutmq.bus import segments
from rolloutmq.bus.segments import Segment
from rolloutmq.schemas.sharing import SegmentGoneError, SegmentInUseError


def mapped(segment: Segment) -> mmap.mmap:
    """Map a segment that was just made, for writing; what cannot be mapped is removed again."""
    try:
        return mmap.mmap(segment.fd, 0)
    except BaseException:
        segment.discard()
        raise


def open_left(address_file: Path) -> Segment | None:
    """Open the segment that the address file names if its owner is dead.

    Raises:
        SegmentInUseError: The owner lives.
    """
    address = segments.read_address(address_file)
    if address is None:
        return None
    try:
        left = segments.open_existing(Path(address.path), address.nonce, writable=True)
    except SegmentGoneError:
        return None
    owner = left.owner()
    if owner is not None and owner.alive():
        os.close(left.fd)
        raise SegmentInUseError(address.path, owner.pid)
    return left
