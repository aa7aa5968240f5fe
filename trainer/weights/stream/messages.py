"""Messages of a transfer, and the bounds of what a peer may send. Pure.

A receiver asks, a sender answers, over one connection:

    receiver  FOLLOW  the write it has            sender  IDLE ...  while there is no other
                                                  sender  OFFER     a write: version, layout, size
    receiver  TAKE    the digests of its chunks   sender  MANIFEST  if the layout is new to the receiver
                                                  sender  CHUNK ... whose digest differs, or WHOLE and all chunks
                                                  sender  DONE      numbers of both, and the sum of all digests
                                                  sender  RENEW     instead of an OFFER: connect with a new ticket

A write is named by the nonce of its segment and its number in it: a restored version has the number of the version that
it replaces, and other bytes. A frame has a header, a small body, and the bytes of at most one chunk.
"""

import hashlib
import math
import struct
from enum import IntEnum
from typing import Final, TypeVar

import msgspec

from rolloutmq.schemas.errors import (
    LimitExceededError,
    MalformedError,
    WeightsMismatchError,
    WeightsNotSentError,
)
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.layout import PhysicalTensor, TensorSpec
from rolloutmq.trainer.weights.lock import TENSORS_AT
from rolloutmq.trainer.weights.manifest import DTYPES, FORMAT, MANIFEST_LIMIT_BYTES, WeightManifest
from rolloutmq.trainer.weights.stream.chunks import DIGEST, Digests, count_of

HEADER: Final = struct.Struct("<BII")
"""Kind of the frame, bytes of its body, bytes of its data."""
CHUNK: Final = struct.Struct("<IIQ")
"""Number of the chunk, and its digest."""
WHOLE: Final = struct.Struct("<I")
"""Number of the chunks that follow, see `whole`."""
NAME_BYTES: Final = 128
"""Longest name of a write."""
SMALL_BYTES: Final = 1 << 12
"""Largest body of a frame that is neither a manifest nor a table of digests."""
_M = TypeVar("_M")
_ITEM_BYTES: Final[dict[str, int]] = dict(zip(DTYPES, (4, 2, 2, 8, 8, 4, 1, 1, 1), strict=True))


class Kind(IntEnum):
    """Kind of a frame."""

    FOLLOW = 1
    IDLE = 2
    OFFER = 3
    TAKE = 4
    MANIFEST = 5
    CHUNK = 6
    DONE = 7
    RENEW = 8
    WHOLE = 9
    """A version that is sent whole."""


class Follow(msgspec.Struct, frozen=True):
    """A receiver waits for another write than this one; empty for any."""

    write: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A sender's newest write, which does not change during the transfer."""

    write: str
    version: PolicyVersion
    layout: str
    """SHA-256 of the encoded manifest."""
    manifest_bytes: int
    nbytes: int
    """Bytes of the tensors' memory."""
    run_id: str = ""
    """Id of the run whose weights they are."""


class Take(msgspec.Struct, frozen=True):
    """A receiver takes the offer; the digests of the chunks that it has follow as data of the body."""

    manifest: bool
    """Whether it needs the manifest; it then has no chunk."""
    digests: bytes
    resumes: bool = False
    """Whether it has chunks of a transfer that broke off, and so needs only the others."""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a transfer."""

    sent: int
    same: int
    table: int | None
    """CRC32C of all digests of the write; None if it was sent whole, without digests."""


def decoded(body: bytes | memoryview, kind: type[_M]) -> _M:
    """Decode the body of a frame.

    Raises:
        MalformedError: It is no such message.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"weights: not a message {kind.__name__}: {error}") from None


def layout_of(encoded: bytes) -> str:
    """Return the name of a layout: equal manifests have equal ones."""
    return hashlib.sha256(encoded).hexdigest()


def require_run(offer: Offer, run_id: str) -> None:
    """Check that offered weights are those of a run.

    Raises:
        WeightsNotSentError: They are of another run of the same address: an earlier one, or the next.
    """
    if offer.run_id not in {"", run_id} and run_id:
        raise WeightsNotSentError(
            "from", f"the sender has the weights of another run (got {offer.run_id[:8]}, not {run_id[:8]})"
        )


def require_offer(offer: Offer) -> None:
    """Check an offer before anything is allocated.

    Raises:
        MalformedError: A name is too long, or a number is impossible.
        LimitExceededError: The manifest is too large.
    """
    if not (0 < len(offer.write.encode()) <= NAME_BYTES and len(offer.layout) == 64):
        raise MalformedError("weights: an offer without a write or a layout")
    if min(offer.version.incarnation, offer.version.step) < 0 or min(offer.nbytes, offer.manifest_bytes) < 1:
        raise MalformedError("weights: an offer with an impossible number")
    if offer.manifest_bytes > MANIFEST_LIMIT_BYTES:
        raise LimitExceededError("manifest of offered weights", offer.manifest_bytes, MANIFEST_LIMIT_BYTES)


def take_limit(nbytes: int) -> int:
    """Return the largest body of a `Take` for so many bytes of tensors."""
    return SMALL_BYTES + count_of(nbytes) * DIGEST.itemsize


def require_manifest(encoded: bytes, offer: Offer) -> WeightManifest:
    """Decode the manifest of an offer, and check that each tensor lies in the offered bytes.

    Raises:
        WeightsMismatchError: It is not the offered one, or describes impossible tensors; names the first.
    """
    if layout_of(encoded) != offer.layout:
        raise WeightsMismatchError("manifest", "differs from the offered one")
    try:
        manifest = msgspec.json.decode(encoded, type=WeightManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsMismatchError("manifest", str(error)) from None
    if (manifest.format, manifest.base) != (FORMAT, TENSORS_AT):
        raise WeightsMismatchError(
            "manifest",
            f"has format {manifest.format} and base {manifest.base}, not {FORMAT} and {TENSORS_AT}",
        )
    _require_tensors(manifest, offer.nbytes)
    return manifest


def _require_tensors(manifest: WeightManifest, nbytes: int) -> None:
    names = [name for spec in manifest.tensors for name in (spec.name, *spec.ties)]
    if not names or len(set(names)) != len(names):
        raise WeightsMismatchError("manifest", "has no tensors, or two of one name")
    placed: list[TensorSpec | PhysicalTensor] = [*manifest.tensors, *manifest.fused]
    for one in placed:
        _require_tensor(one)
    end = 0
    for spec in sorted(manifest.tensors, key=lambda one: one.offset):
        if spec.offset < end:
            raise WeightsMismatchError(spec.name, "lies over another tensor")
        end = spec.offset + spec.nbytes
    if manifest.end != nbytes:
        raise WeightsMismatchError("manifest", f"its tensors end at {manifest.end}, not at {nbytes}")


def _require_tensor(spec: TensorSpec | PhysicalTensor) -> None:
    item = _ITEM_BYTES.get(spec.dtype)
    if item is None:
        raise WeightsMismatchError(spec.name, f"has the type {spec.dtype}, which cannot be shared")
    if min(spec.shape, default=0) < 0 or spec.nbytes != item * math.prod(spec.shape):
        raise WeightsMismatchError(spec.name, f"{spec.shape} of {spec.dtype} are not {spec.nbytes} bytes")
    if isinstance(spec, TensorSpec) and spec.stride != _dense(spec.shape):
        raise WeightsMismatchError(spec.name, f"stride {spec.stride} is not dense")
    if spec.offset < 0 or spec.offset % item:
        raise WeightsMismatchError(spec.name, f"lies at {spec.offset}, which does not fit {spec.dtype}")


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, size = list[int](), 1
    for length in reversed(shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))


def table_sum(table: Digests) -> int:
    """Return the CRC32C of a table of digests."""
    import google_crc32c

    return int(google_crc32c.value(table.tobytes()))
