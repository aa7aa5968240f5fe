"""Decoders under hostile bytes: a value or the documented error, at a bounded cost."""

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.decoders import (
    MESSAGES,
    OWNER,
    SPOOL_MAGIC,
    fuzz_one,
    seeds,
    segment_seed,
    with_checksums,
    with_index_checksum,
)
from tests.fuzz.mutations import EDITS, mutate

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.producer.session import SessionState
from rolloutmq.bus.producer.spool import Spool
from rolloutmq.bus.producer.spool_file import SpoolFile
from rolloutmq.schemas.errors import WireError
from rolloutmq.schemas.wire.envelope import ENVELOPE_LIMIT_BYTES, PolicyVersion
from rolloutmq.schemas.wire.requests import Settle
from rolloutmq.services.broker.journal.format import events_codec
from rolloutmq.services.broker.journal.format.records import FILE_HEADER_BYTES, HEADER_BYTES, Record, scan

MIB = 1 << 20
REGRESSIONS: dict[str, bytes] = {
    "nothing": b"",
    "text that is no UTF-8": b"\x91\xa2\xff\xfe",
    "deeper than the interpreter": b"\x91" * 5000,
    "deeper than an opaque column may be": b"\x81\xa1a" * 3000 + b"\xc0",
    "length of an array that is not there": b"\xdd\xff\xff\xff\xff",
    "length of a map that is not there": b"\xdf\xff\xff\xff\xff",
    "length of a text that is not there": b"\xdb\xff\xff\xff\xff",
    "extension of an unknown type": b"\xc9\x00\x00\x00\x01\x7f\x00",
    "time before all time": b"\xd7\xff" + b"\xff" * 8,
    "map with a list for a key": b"\x81\x90\xc0",
    "map with a map for a key": b"\x81\x80\xc0",
    "byte that means nothing": b"\xc1",
    "spool without an index": b"RMQSAVED" + bytes(16),
    "spool whose index has all bytes there are": b"RMQSAVED" + b"\xff" * 16,
    "spool of version 1": b"RMQSPOOL" + bytes(12),
    "group without parts": b"RMQGROUP",
    "group of a part without an end": b"RMQGROUP\xff\xff\xff\xff",
    "segment of a beginning": b"RMQSEG\r\n",
    "segment of zeros": b"RMQSEG\r\n" + bytes(4096),
}
"""Bytes that once were, or might be, too much for a decoder."""


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions(name: str) -> None:
    fuzz_one(REGRESSIONS[name])


def test_a_mutated_segment_with_correct_checksums_is_read() -> None:
    """Otherwise the fuzzer would never reach what lies behind the checksums."""
    mutated = bytearray(segment_seed())
    mutated[FILE_HEADER_BYTES + HEADER_BYTES + 2 * 8] ^= (
        0xFF  # first byte of the meta, after the lengths of two frames
    )
    (first, *_) = scan(bytes(mutated), sealed=True)
    assert not isinstance(first, Record)
    (first, *_) = scan(with_checksums(bytes(mutated)), sealed=True)
    assert isinstance(first, Record)
    assert bytes(first.meta) == bytes([ord("m") ^ 0xFF]) + b"eta"


def test_seeds_are_valid_for_some_decoder() -> None:
    for seed in seeds():
        fuzz_one(seed)
    decoded = [seed for seed in seeds() if any(_decodes(decode, seed) for decode in MESSAGES.values())]
    assert len(decoded) >= 15


def _decodes(decode: Callable[[Any], Any], data: bytes) -> bool:
    try:
        decode(data)
    except WireError:
        return False
    return True


EDIT = st.tuples(st.sampled_from(EDITS), st.floats(0.0, 1.0), st.integers(0, 1 << 16))


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, len(seeds()) - 1), st.lists(EDIT, max_size=8))
def test_mutations_of_what_is_valid(seed: int, edits: list[tuple[str, float, int]]) -> None:
    fuzz_one(mutate(seeds()[seed], edits, seeds()))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_anything(data: bytes) -> None:
    fuzz_one(data)


def test_single_bits_and_lengths_of_all_that_is_valid() -> None:
    rng = random.Random(7)
    for seed in seeds():
        for _ in range(40):
            fuzz_one(mutate(seed, [("flip", rng.random(), rng.randrange(8))], ()))
            fuzz_one(mutate(seed, [("cut", rng.random(), 0)], ()))


def _hostile(nbytes: int) -> dict[str, bytes]:
    """Return the most expensive messages of that size."""
    count = nbytes - 16
    return {
        "empty maps": b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count,
        "empty lists": b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count,
        "nested": b"\x91" * count + b"\xc0",
        "letters": b"\xdd" + (count // 2).to_bytes(4, "big") + b"\xa1a" * (count // 2),
        "map of letters": b"\xdf" + (count // 2).to_bytes(4, "big") + b"\xa1a" * (count // 2),
        "lies": b"\xdd\xff\xff\xff\xff" * (nbytes // 5),
    }


BORDERS: dict[str, tuple[Callable[[bytes], Any], int]] = {
    "envelope": (lambda data: codec.decode_envelope(data, 1, 100), ENVELOPE_LIMIT_BYTES),
    "request": (codec.decode_request, MIB),
    "reply": (codec.decode_reply, codec.MESSAGE_LIMIT_BYTES),
    "event": (codec.decode_event, 64 << 10),
    "ack": (codec.decode_ack, ENVELOPE_LIMIT_BYTES),
    "table": (codec.decode_table, codec.TABLE_LIMIT_BYTES),
}
TIMES = 8
"""How many times its size a message may cost that no type allows; msgpack as any value is up to 90 times its size."""


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("beyond", [False, True], ids=["within", "beyond"])
def test_hostile_message_costs_no_more_than_its_bytes(border: str, beyond: bool) -> None:
    decode, limit = BORDERS[border]
    for name, data in _hostile(2 * limit if beyond else limit).items():
        cost = _cost(decode, data)
        assert cost < TIMES * len(data) + 64_000, f"{name}: {cost / len(data):.1f} times its size"


def test_hostile_message_that_its_type_allows_is_bounded_by_its_limit() -> None:
    """The most that a request of one MiB can become."""
    settle = codec.encode(
        Settle(consumer="c", lease=1, generation=1, version=PolicyVersion(), trained=("g",) * 500_000)
    )
    assert len(settle) < MIB
    assert _cost(codec.decode_request, settle) < 64 * MIB


def _cost(decode: Callable[[bytes], Any], data: bytes) -> int:
    """Return the peak of allocated bytes during decoding."""
    tracemalloc.start()
    try:
        decode(data)
    except WireError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    ("decode", "seed"), [(events_codec.decode_events, -2), (events_codec.decode_meta, -1)]
)
def test_text_that_is_no_utf8_is_no_fact(decode: Callable[[bytes], Any], seed: int) -> None:
    decode(seeds()[seed])
    with pytest.raises(msgspec.MsgspecError):
        decode(seeds()[seed].replace(b"sort3", b"so\xff\xfe3"))


def test_spool_with_text_that_is_no_utf8_is_set_aside(tmp_path: Path) -> None:
    """Its checksum is right: a defect wrote it, and a producer must come up all the same."""
    saved = next(seed for seed in seeds() if seed.startswith(SPOOL_MAGIC))
    path = tmp_path / "p.rmq"
    path.write_bytes(with_index_checksum(saved.replace(b"sort3", b"so\xff\xfe3")))
    assert not SpoolFile(path, SessionState(OWNER, Spool(MIB))).load()
    assert not path.exists()
