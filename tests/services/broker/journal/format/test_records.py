"""Segments: a reader returns written records, or reports them missing, and never anything else."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.services.broker.journal.other_versions import OTHERS, as_version

from rolloutmq.schemas.errors import RecordVersionError
from rolloutmq.services.broker.journal.format.records import (
    FILE_HEADER_BYTES,
    HEADER_BYTES,
    RECORD_MAGIC,
    Damage,
    Record,
    beginning_of,
    encode_record,
    file_header,
    read_segment,
    scan,
    write_segment,
)

Written = tuple[int, bytes, list[bytes]]
NONCE = b"\x01\x02\x03\x04\x05\x06\x07\x08"
RECORDS = st.lists(
    st.tuples(st.integers(1, 0xFFFF), st.binary(max_size=40), st.lists(st.binary(max_size=200), max_size=5)),
    max_size=6,
)


def _segment(records: list[Written], nonce: bytes = NONCE) -> bytes:
    data = bytearray(file_header(nonce))
    for kind, meta, frames in records:
        for part in encode_record(nonce, len(data), kind, meta, frames):
            data += part
    return bytes(data)


def _plain(record: Record) -> Written:
    return record.kind, bytes(record.meta), [bytes(frame) for frame in record.frames]


def _read(data: bytes, *, sealed: bool = True) -> tuple[list[Written], list[Damage]]:
    found = list(scan(data, sealed=sealed))
    return (
        [_plain(item) for item in found if isinstance(item, Record)],
        [item for item in found if isinstance(item, Damage)],
    )


def _random_records(rng: random.Random, count: int) -> list[Written]:
    return [
        (1 + number, rng.randbytes(rng.randrange(60)), [rng.randbytes(rng.randrange(300)) for _ in "ab"])
        for number in range(count)
    ]


@given(RECORDS, st.binary(min_size=8, max_size=8))
def test_what_is_written_is_read(records: list[Written], nonce: bytes) -> None:
    assert _read(_segment(records, nonce)) == (records, [])


def test_frames_may_be_any_buffer() -> None:
    frames = [b"bytes", bytearray(b"array"), memoryview(b"a_view"), zmq.Frame(b"frame")]
    parts = encode_record(NONCE, 24, 1, b"", frames)
    assert [len(part) for part in parts[1:5]] == [5, 5, 6, 5]
    data = file_header(NONCE) + b"".join(parts)
    assert _read(data)[0] == [(1, b"", [b"bytes", b"array", b"a_view", b"frame"])]


def _mutations(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """Yield flips, cuts, zeros, moved and repeated stretches without end."""
    while True:
        spoiled = bytearray(data)
        start = rng.randrange(len(data))
        end = min(len(data), start + rng.randrange(1, 200))
        spoiled[start] ^= 1 << rng.randrange(8)
        yield bytes(spoiled)
        yield data[:start]
        yield data[:start] + bytes(end - start) + data[end:]
        yield data[:start] + data[end:]
        yield data[:start] + data[start:end] + data[start:]
        target = rng.randrange(len(data))
        yield data[:target] + data[start:end] + data[target + end - start :]


def test_three_hundred_mutations_never_give_a_wrong_record() -> None:
    rng = random.Random(7)
    damaged = 0
    for _ in range(10):
        records = _random_records(rng, 6)
        mutations = _mutations(rng, _segment(records))
        for _ in range(30):
            read, damage = _read(next(mutations))
            order = [records.index(record) for record in read]  # ValueError: was never written
            assert order == sorted(set(order))
            damaged += bool(damage)
    assert damaged > 200


def test_one_bad_record_costs_only_itself() -> None:
    records = _random_records(random.Random(1), 5)
    data = bytearray(_segment(records))
    offsets = [item.offset for item in scan(bytes(data), sealed=True)]
    for spoiled in (offsets[2] + 4, offsets[2] + 6, offsets[2] + HEADER_BYTES + 3):
        copy = bytearray(data)
        copy[spoiled] ^= 0x10
        read, damage = _read(bytes(copy))
        assert read == records[:2] + records[3:]
        assert damage == [Damage(offsets[2], offsets[3] - offsets[2], torn=False)]


def test_torn_tail_is_cut_where_the_segment_was_still_open() -> None:
    records = _random_records(random.Random(2), 3)
    data = _segment(records)
    *_, last = (item.offset for item in scan(data, sealed=True))
    for cut in range(last + 1, len(data) - 7):
        assert _read(data[:cut], sealed=False) == (
            records[:2],
            [Damage(last, cut - last, torn=True)],
        )
        assert _read(data[:cut], sealed=True)[1] == [Damage(last, cut - last, torn=False)]
    assert _read(data[:last], sealed=False) == (records[:2], [])


def test_preallocated_space_is_the_end() -> None:
    records = _random_records(random.Random(3), 2)
    data = _segment(records) + bytes(4096)
    assert _read(data, sealed=False) == (records, [])


def test_record_within_a_body_is_never_taken_for_one() -> None:
    inner = encode_record(NONCE, 0, 9, b"inner", [b"x"])
    forged = _segment([(9, b"forged", [b"x" * 40])], nonce=b"anothern")[24:]
    records = [(1, b"", [b"".join(map(bytes, inner)), forged]), (2, b"next", [b"y"])]
    data = bytearray(_segment(records))
    data[24 + 8] ^= 1  # the outer header: a reader that looks for magic comes upon the inner ones
    read, damage = _read(bytes(data))
    assert read == [records[1]]
    assert len(damage) == 1
    assert data.count(RECORD_MAGIC) == 4


def test_file_without_its_header_gives_nothing() -> None:
    data = _segment(_random_records(random.Random(4), 2))
    for spoiled in (b"", data[:10], b"x" + data[1:], bytes(9) + data[9:]):
        assert _read(spoiled) == ([], [Damage(0, len(spoiled), torn=False)])
    assert _read(data[:10], sealed=False)[1] == [Damage(0, 10, torn=True)]


def test_length_in_a_right_header_is_not_believed_beyond_the_file() -> None:
    data = _segment([(1, b"", [bytes(1000)])])
    assert _read(data[:200])[0] == []


def test_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "saved.rmq"
    records: list[Written] = [(1, b"a", [bytes(100_000)]), (2, b"b", [])]
    assert write_segment(path, records) == 2
    assert [_plain(r) for r in read_segment(path) if isinstance(r, Record)] == records

    def failing() -> Iterator[Written]:
        yield records[0]
        raise OSError("no space")

    before = path.read_bytes()
    with pytest.raises(OSError, match="no space"):
        write_segment(path, failing())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("version", OTHERS)
def test_file_of_another_version_is_refused_and_not_damaged(tmp_path: Path, version: int) -> None:
    path = tmp_path / "saved.rmq"
    write_segment(path, [(1, b"a", [bytes(1000)])])
    as_version(path, version)
    before = path.read_bytes()
    with pytest.raises(RecordVersionError, match=f"got version {version}"):
        read_segment(path)
    assert path.read_bytes() == before


def test_beginning_is_checked_whatever_version_it_names() -> None:
    data = _segment(_random_records(random.Random(5), 1))
    for spoiled in range(FILE_HEADER_BYTES):
        for bit in range(8):
            copy = bytearray(data)
            copy[spoiled] ^= 1 << bit
            assert beginning_of(copy) is None
