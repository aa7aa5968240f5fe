"""The fuzzer of the decoders: every decoder of outside bytes, and valid bytes to begin with.

`fuzz_one(data)` feeds `data` to each decoder. A decoder may return a value or raise its documented error; any other
exception is a defect. Where a checksum would reject every mutation, the bytes are tried a second time with a correct
checksum, as an attacker would send them.
"""

import logging
import random
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from tests.fuzz.campaign import Fuzzer
from tests.fuzz.mutations import mutate, some_edits

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.encoding.opaque_columns import check_values
from rolloutmq.bus.producer.session import SessionState
from rolloutmq.bus.producer.spool import Spool
from rolloutmq.bus.producer.spool_file import SpoolFile
from rolloutmq.schemas.errors import RecordVersionError, UsageError, WireError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import Drain, StepDone, StepSkipped, WorkerBeat, WorkerState
from rolloutmq.schemas.wire.envelope import (
    PROTOCOL_VERSION,
    Envelope,
    ErrorCode,
    GroupHeader,
    PolicyVersion,
    Split,
)
from rolloutmq.schemas.wire.health import LaneScores
from rolloutmq.schemas.wire.replies import Ack, Batch, Delivery, ErrorReply, Registered, Rejected, RunInfo
from rolloutmq.schemas.wire.requests import DeclareTables, Pull, RegisterConsumer, RegisterProducer, Settle
from rolloutmq.schemas.wire.telemetry import HostSample
from rolloutmq.services.broker.journal.format import events, events_codec
from rolloutmq.services.broker.journal.format.records import (
    FILE_HEADER_BYTES,
    HEADER_BYTES,
    RECORD_MAGIC,
    VERSION,
    Damage,
    Record,
    encode_record,
    file_header,
    scan,
)

GROUP_MAGIC: Final = b"RMQGROUP"
"""Begins a group as one run of bytes: header and table, each after its length, then the frames likewise."""
SPOOL_MAGIC: Final = b"RMQSAVED"
SEGMENT_MAGIC: Final = b"RMQSEG"
NONCE: Final = b"\x01\x02\x03\x04\x05\x06\x07\x08"
OWNER: Final = RegisterProducer(producer="p", env="sort3")
_LENGTH: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<8sIQI")
_RECORD: Final = struct.Struct("<4sHHIIQIII")

MESSAGES: Final[dict[str, Callable[[Any], Any]]] = {
    "request": codec.decode_request,
    "reply": codec.decode_reply,
    "event": codec.decode_event,
    "ack": codec.decode_ack,
    "drain": codec.decode_drain,
    "table": codec.decode_table,
    "header": codec.decode_header,
}


class DecoderFuzzer(Fuzzer):
    """Feeds mutations of valid messages to every decoder."""

    name = "decoders"

    def attempt(self, rng: random.Random) -> str:
        """Try one message."""
        self._data = mutate(rng.choice(seeds()), some_edits(rng), seeds())
        fuzz_one(self._data)
        return ""

    def keep(self, _: Path) -> str:
        """Show the message, ready to be added to the regression tests."""
        return repr(self._data)


def fuzz_one(data: bytes) -> None:
    """Feed bytes to every decoder; raise any undocumented error."""
    for decode in MESSAGES.values():
        _message(decode, data)
    _envelope(data)
    _opaque(data)
    _events(data)
    if data.startswith(GROUP_MAGIC[:4]):
        _group(data)
        _spool(data)
    if data.startswith(SEGMENT_MAGIC[:4]):
        _segment(data)


def _message(decode: Callable[[Any], Any], data: bytes) -> None:
    with suppress(WireError):
        again = msgspec.msgpack.encode(decode(data))
        assert msgspec.msgpack.encode(decode(again)) == again, "what was decoded does not come back"


def _envelope(data: bytes) -> None:
    for frames, nbytes in ((1, 100), (300, 100), (0, 0)):
        with suppress(WireError):
            envelope = codec.decode_envelope(data, frames, nbytes)
            assert sum(header.frames for header in envelope.groups) == frames
            assert sum(header.nbytes for header in envelope.groups) == nbytes


def _opaque(data: bytes) -> None:
    with suppress(WireError):
        check_values([data])
        codec.decode_value(data)


def _events(data: bytes) -> None:
    for decode in (events_codec.decode_events, events_codec.decode_meta):
        with suppress(msgspec.MsgspecError):
            decode(data)


def _group(data: bytes) -> None:
    parts = _parted(data[len(GROUP_MAGIC) :])
    with suppress(WireError, IndexError):
        header, table = codec.decode_header(parts[0]), codec.decode_table(parts[1])
        right = msgspec.structs.replace(
            header,
            frames=max(1, len(parts) - 2),
            nbytes=max(1, sum(map(len, parts[2:]))),
            crc=codec.checksum(parts[2:]),
        )
        for described in (header, right):
            with suppress(WireError):
                _read_through(codec.decode_group(described, table, parts[2:]))


def _read_through(group: Group) -> None:
    """Use a decoded group as a trainer does: it must be sound."""
    group.check()
    for column in group.columns.values():
        if column.lengths:
            assert len(column.rows()) == group.sequences
    assert np.isfinite(group.rewards().mean)


def _parted(data: bytes) -> list[bytes]:
    """Return the length-prefixed parts; the last one may be cut short."""
    parts, at = [], 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        parts.append(data[at + _LENGTH.size : at + _LENGTH.size + length])
        at += _LENGTH.size + length
    return parts


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _spool(data: bytes) -> None:
    _load(data)
    if len(data) >= _HEAD.size:
        _load(with_index_checksum(data))


def with_index_checksum(data: bytes) -> bytes:
    """Return a saved spool with a correct index checksum."""
    _, version, size, _ = _HEAD.unpack_from(data)
    index = data[_HEAD.size : _HEAD.size + size]
    crc = codec.checksum([struct.pack("<IQ", version, len(index)), index])
    return _HEAD.pack(SPOOL_MAGIC, version, len(index), crc) + data[_HEAD.size :]


def _load(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "p.rmq"
        path.write_bytes(data)
        session = SessionState(OWNER, Spool(1 << 20))
        with _quiet("rolloutmq.bus.producer.spool_file"), suppress(UsageError, RecordVersionError):
            loaded = SpoolFile(path, session).load()
            assert loaded == (len(session.spool) > 0)


class _quiet:  # noqa: N801 - a context manager
    """Silence the logs of damaged files: there are thousands."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def __enter__(self) -> None:
        self._logger.disabled = True

    def __exit__(self, *_: object) -> None:
        self._logger.disabled = False


def _segment(data: bytes) -> None:
    for tried in (data, with_checksums(data)):
        for sealed in (True, False):
            _scan(tried, sealed)


def _scan(data: bytes, sealed: bool) -> None:
    """Assert that the records lie in the file, in order and without overlap."""
    end = 0
    for item in scan(data, sealed=sealed):
        assert end <= item.offset <= len(data)
        if isinstance(item, Damage):
            assert not (sealed and item.torn)
            end = item.offset + item.nbytes
        else:
            end = item.offset + HEADER_BYTES + _nbytes(item)
        assert end <= len(data)


def _nbytes(record: Record) -> int:
    return record.meta.nbytes + sum(8 + frame.nbytes for frame in record.frames)


def with_checksums(data: bytes) -> bytes:
    """Return a segment with correct checksums in its header and first record."""
    start = FILE_HEADER_BYTES + HEADER_BYTES
    if len(data) < start:
        return data
    _, _, kind, meta, frames, nbytes, gap, _, _ = _RECORD.unpack_from(data, FILE_HEADER_BYTES)
    payload, end = data[start : start + nbytes], frames * 8 + meta
    checksums = codec.checksum([payload[:end]]), codec.checksum([payload[end + gap :]])
    header = _RECORD.pack(RECORD_MAGIC, VERSION, kind, meta, frames, nbytes, gap, *checksums)
    crc = codec.checksum([NONCE + FILE_HEADER_BYTES.to_bytes(8, "little"), header])
    return file_header(NONCE) + header + _LENGTH.pack(crc) + data[start:]


@cache
def seeds() -> tuple[bytes, ...]:
    """Return valid bytes for each decoder."""
    return (*_message_seeds(), _group_seed(), segment_seed(), spool_seed(), *_facts_seeds())


def _sample() -> tuple[Group, codec.EncodedGroup, GroupHeader]:
    tokens = [[1, 2, 3], [4, 5, 6, 7]]
    group = Group.build(
        "g-1",
        tokens=tokens,
        mask=[[True] * len(row) for row in tokens],
        scores=[0.0, 1.0],
        inference_logprobs=[[-0.5] * len(row) for row in tokens],
        messages=[{"role": "user", "content": "3 1 2"}, [1, 2.5, None, b"x", True]],
    )
    encoded = codec.encode_group(group, 1 << 20)
    return group, encoded, codec.header_of(group, encoded, seq=1, position=encoded.nbytes)


def _message_seeds() -> list[bytes]:
    _, encoded, header = _sample()
    version = PolicyVersion(1, 7)
    ack = Ack(epoch=3, session=4, cumulative=5, gaps=b"\x05", byte_limit=6, start_limit=7)
    delivery = Delivery(header=header, env="sort3", producer="p", session=4)
    envelope = Envelope(PROTOCOL_VERSION, "p", 4, "default", "sort3", Split.TRAIN, (header,) * 3)
    messages: list[Any] = [
        ack,
        Registered(ack=ack, info=RunInfo()),
        Batch(
            lease=1,
            generation=2,
            step=3,
            groups=(delivery,) * 2,
            tables=codec.encode_tables((encoded.table,)),
        ),
        ErrorReply(code=ErrorCode.UNKNOWN, detail="d"),
        OWNER,
        DeclareTables(producer="p", session=4, tables=(encoded.table,)),
        RegisterConsumer(consumer="t", resume=version),
        Pull(consumer="t", step=1, version=version, sequences=4, request_id="r"),
        Settle(
            consumer="t",
            lease=1,
            generation=2,
            version=version,
            trained=("a", "b"),
            rejected=(Rejected(group_id="c", reason="r"),),
        ),
        WorkerBeat(worker="w", env="sort3", state=WorkerState.READY, error="e"),
        Drain(worker="w"),
        _step_done(),
        StepSkipped(
            run="r",
            incarnation=1,
            step=2,
            at=3.0,
            reason="r",
            groups=2,
            filtered=1,
            rejected=1,
            scores=(_lane(),),
        ),
        _host_sample(),
    ]
    parts = (envelope, header, encoded.table)
    opaque = [{"role": "user", "content": ["a", 1, 2.5, None, True, b"x"]}] * 3
    return [*map(msgspec.msgpack.encode, (*messages, *parts, opaque))]


def _step_done() -> StepDone:
    return StepDone(
        run="default", incarnation=1, step=2, at=3.0, reward=0.5, loss=0.1, tokens=10, groups=2, filtered=0,
        staleness_max=1, staleness_mean=0.5, pull_s=0.1, step_s=0.2, extra={"kl": 0.1},
    )  # fmt: skip


def _lane() -> LaneScores:
    return LaneScores(
        env="e", groups=1, flat=1, sequences=2, mean=1.0, m2=0.0, low=1.0, high=1.0, at_low=2, at_high=2, tokens=4,
        sxx=0.0, syy=0.0, sxy=0.0,
    )  # fmt: skip


def _host_sample() -> HostSample:
    return HostSample(
        host="h", number=1, at=2.0, cpus=2, cpu_percent=50.0, memory_used_bytes=1, memory_total_bytes=2,
        shm_free_bytes=3, disk_free_bytes=4, load_1m=0.5,
    )  # fmt: skip


def _group_seed() -> bytes:
    _, encoded, header = _sample()
    frames = [bytes(frame) for frame in encoded.frames]
    return GROUP_MAGIC + _joined([codec.encode(header), codec.encode(encoded.table), *frames])


def segment_seed() -> bytes:
    data = bytearray(file_header(NONCE))
    for kind, meta, frames in ((1, b"meta", [b"frame", b"f" * 100]), (2, b"", []), (3, b"m", [b""])):
        for part in encode_record(NONCE, len(data), kind, meta, frames):
            data += part
    return bytes(data)


def spool_seed() -> bytes:
    group, encoded, _ = _sample()
    session = SessionState(OWNER, Spool(1 << 20))
    session.number = 4
    for _ in range(2):
        session.spool.add(group, encoded)
    with tempfile.TemporaryDirectory() as directory, _quiet("rolloutmq.bus.producer.spool_file"):
        path = Path(directory) / "p.rmq"
        SpoolFile(path, session).leave()
        return path.read_bytes()


def _facts_seeds() -> list[bytes]:
    _, encoded, header = _sample()
    run = "sort3", Split.TRAIN, "default", "p", 4
    accepted = events.Accepted(1, header, *run, 0.5, events.RecordAddress(1, 24))
    listed = [
        accepted,
        events.Declared(4, (encoded.table,)),
        events.Leased(1, 1, "t", Split.TRAIN, 1, PolicyVersion(), 4, ((1, 2), (3,))),
        events.Dropped(1, "dead", "poison"),
        events.Numbers(2, 2, 1),
    ]
    return [
        events_codec.encode(listed),
        events_codec.encode(events.GroupMeta(1, header, *run, encoded.table, 0.5)),
    ]
