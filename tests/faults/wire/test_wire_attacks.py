"""Hostile bytes on every border of a broker: memory stays bounded, each attack is counted, and no other peer notices.

A good producer and a good consumer work beside each attack, and every one of their groups arrives once.
"""

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from tests.bus.transport.listening import INSECURE
from tests.faults.support.borders import (
    LIMIT_S,
    MIB,
    BrokerProcess,
    Forger,
    Traffic,
    Wire,
    broker_process,
    connected,
    forger,
    run_config,
    small_group,
    traffic,
    wait_for,
    was_cut,
)

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.transport import sockets
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PROTOCOL_VERSION, ErrorCode, PolicyVersion, Split
from rolloutmq.schemas.wire.replies import GAP_WINDOW, Ack, ErrorReply
from rolloutmq.schemas.wire.requests import DeclareTables, Settle, Sync

NESTED = b"\x91" * (10 * MIB) + b"\xc0"
LIES = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
SMALL_BYTES = 48 * MIB
"""Growth that ordinary work may cause: buffers, arenas of the allocator, a few messages under way."""


def _empty_maps(count: int) -> bytes:
    """Return a list of so many empty maps, a byte each; decoded, it takes 64 times as much."""
    return b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all attacks: the next attack finds the remains of the last one."""
    run_dir = tmp_path_factory.mktemp("run")
    with broker_process(RunLayout(run_dir), run_config(max_group_bytes=16 * MIB)) as it:
        yield it


@pytest.fixture(scope="module")
def good(broker: BrokerProcess) -> Iterator[Traffic]:
    with traffic(broker.endpoints.serve) as it:
        yield it


@pytest.fixture
def before(broker: BrokerProcess) -> Counter[str]:
    """Rejected messages before the test."""
    return broker.rejections()


@pytest.fixture
def mallory(broker: BrokerProcess) -> Iterator[Forger]:
    with forger(broker.endpoints) as it:
        yield it


def _refused(mallory: Forger, request: bytes) -> ErrorReply:
    """Send bytes as a request and return the refusal."""
    with sockets.client_dealer(mallory.context, mallory.client.address) as dealer:
        assert dealer.poll(5000, zmq.POLLOUT)
        dealer.send_multipart([b"7", b"", request])
        assert dealer.poll(5000)
        reply = codec.decode_reply(dealer.recv_multipart()[-1])
    assert isinstance(reply, ErrorReply)
    return reply


def test_bombs_cost_no_more_than_their_bytes(
    broker: BrokerProcess, good: Traffic, mallory: Forger, before: Counter[str]
) -> None:
    bombs = [NESTED, _empty_maps(10 * MIB), *LIES, NESTED[-4000:], b"\x97" + b"\x80" * 4000]
    with broker.growth_below(SMALL_BYTES + 4 * len(NESTED)):
        for bomb in bombs:
            mallory.push.send_multipart([bomb, b"body"])
            assert _refused(mallory, bomb[: MIB - 100]).code is ErrorCode.MALFORMED
        counts = {"ingest: limit": 2, "ingest: malformed": len(bombs) - 2, "serve: malformed": len(bombs)}
        broker.wait_rejected(counts, before)
        with sockets.publisher(mallory.context, broker.endpoints.publish) as publisher:
            while broker.rejections() == before + Counter(counts):  # its subscription takes a moment
                publisher.send_multipart([b"step", NESTED[:60_000]])
            for bomb in bombs * 10:
                publisher.send_multipart([b"telemetry.x", bomb[:60_000]])
            wait_for(lambda: broker.rejections()["publish: malformed"] > 10 * len(bombs))
        good.advance()


def test_typed_bombs_are_refused_and_forgotten(broker: BrokerProcess, good: Traffic, mallory: Forger) -> None:
    """The types bound each value by the largest request; the broker keeps nothing of it."""
    settle = Settle(consumer="m", lease=1, generation=1, version=PolicyVersion(), trained=("g",) * 500_000)
    encoded = codec.encode(settle)
    assert len(encoded) < MIB
    with broker.growth_below(SMALL_BYTES + 64 * MIB):
        for _ in range(5):
            assert _refused(mallory, encoded).code in {ErrorCode.UNKNOWN, ErrorCode.LEASE_LOST}
        good.advance()
    with broker.growth_below(SMALL_BYTES):
        good.advance()


def test_bomb_in_a_body_reaches_nobody_but_its_batch(
    broker: BrokerProcess, good: Traffic, mallory: Forger
) -> None:
    """The broker decodes no body; the consumer counts the values before decoding, and rejects the group."""
    mallory.register()
    mine = psutil.Process()
    before = mine.memory_info().rss
    group = small_group("bomb", messages=[{"a": {}}] * 10)
    encoded = codec.encode_group(group, 16 * MIB)
    mallory.ask(DeclareTables(producer="mallory", session=mallory.session, tables=(encoded.table,)))
    body = bytearray(encoded.frames[0])
    rows = len(encoded.table.columns) + sum(c.blocks - 1 for c in encoded.table.columns)
    start = len(body)
    bomb = _empty_maps(3 * MIB)  # within the credit that a session begins with
    body += bomb
    row = 24 * (rows - 1)
    body[row : row + 24] = b"".join(n.to_bytes(8, "little") for n in (0, start, len(bomb)))
    header, _ = mallory.next(group, nbytes=len(body), crc=codec.checksum([bytes(body)]), position=len(body))
    with broker.growth_below(SMALL_BYTES + 4 * len(body)):
        mallory.push.send_multipart(mallory.message(header, [body]))
        wait_for(lambda: broker.status().pressure.ledger.dead == 1, 2 * LIMIT_S)
        good.advance()
    assert mine.memory_info().rss - before < SMALL_BYTES + 8 * len(body)
    assert "bomb" not in good.trained


def test_giant_multiparts_are_skipped(
    broker: BrokerProcess, good: Traffic, mallory: Forger, before: Counter[str]
) -> None:
    frame = bytes(900_000)
    with broker.growth_below(SMALL_BYTES + 2 * 300 * len(frame)):
        for count in (
            1,
            2,
        ):  # one at a time: the library has each whole before the broker sees its first frame
            mallory.push.send_multipart([b"envelope", *[frame] * 300])
            broker.wait_rejected({"ingest: limit": count}, before)
        mallory.push.send_multipart([b"envelope", *[b"x"] * 100_000])
        broker.wait_rejected({"ingest: limit": 3}, before)
        good.advance()
    with broker.growth_below(SMALL_BYTES):
        good.advance()


@pytest.mark.parametrize(("name", "kind", "limit"), [
    ("ingest", b"PUSH", 16 * MIB),
    ("serve", b"DEALER", MIB),
    ("publish", b"PUB", 64 << 10),
    ("events", b"SUB", 1 << 10),
])  # fmt: skip
def test_frame_that_is_announced_too_large_costs_the_connection(
    broker: BrokerProcess, good: Traffic, name: str, kind: bytes, limit: int
) -> None:
    with broker.growth_below(SMALL_BYTES):
        for nbytes in (limit + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1):
            with closing(Wire(getattr(broker.endpoints, name), kind)) as wire:
                wire.announce(nbytes)
                assert wire.was_cut()
        good.advance()


Forged = Callable[[Forger], list[Any]]


def _header(**changes: Any) -> Forged:
    """Make a message with a forged header; a callable gets the forger."""

    def forged(mallory: Forger) -> list[Any]:
        found = {k: v(mallory) if callable(v) else v for k, v in changes.items()}
        header, encoded = mallory.next(small_group("forged"), **found)
        return mallory.message(header, encoded.frames)

    return forged


def _envelope(**changes: Any) -> Forged:
    """Make a message with a forged envelope."""

    def forged(mallory: Forger) -> list[Any]:
        header, encoded = mallory.next(small_group("forged"))
        found = {k: v(mallory) if callable(v) else v for k, v in changes.items()}
        return mallory.message(header, encoded.frames, **found)

    return forged


def _of_another(mallory: Forger) -> int:
    """Return the session of the good producer: the one before."""
    return mallory.session - 1


FORGERIES: dict[str, tuple[Forged, str]] = {
    "old protocol": (_envelope(version=PROTOCOL_VERSION - 1), "ingest: version"),
    "new protocol": (_envelope(version=PROTOCOL_VERSION + 1), "ingest: version"),
    "huge protocol": (_envelope(version=1 << 60), "ingest: version"),
    "other run": (_envelope(run="another"), "wrong_run"),
    "other environment": (_envelope(env="another"), "wrong_environment"),
    "other split": (_envelope(split=Split.EVAL), "wrong_environment"),
    "producer that never was": (_envelope(producer="nobody"), "unknown_session"),
    "no session": (_envelope(session=0), "unknown_session"),
    "session to come": (_envelope(session=1 << 62), "unknown_session"),
    "session of another producer": (_envelope(session=_of_another), "fenced"),
    "own session for another's": (_envelope(producer="good"), "unknown_session"),
    "unknown table": (_header(table="0" * 16), "unknown_table"),
    "sequence sent before": (_header(seq=1), "duplicate"),
    "sequence beyond the window": (_header(seq=lambda m: m.seq + GAP_WINDOW + 2), "beyond_window"),
    "sequence at the end of numbers": (_header(seq=1 << 62), "beyond_window"),
    "position before its bytes": (_header(position=1), "position"),
    "position of the last": (_header(position=lambda m: m.position), "position"),
    "position too far": (_header(position=lambda m: m.position + MIB), "position"),
    "position beyond credit": (
        _header(seq=lambda m: m.seq + 2, position=1 << 40),
        "beyond_credit",
    ),
    "more bytes than came": (_header(nbytes=1 << 20), "ingest: malformed"),
    "more frames than came": (_header(frames=200), "ingest: malformed"),
}


def test_forged_envelopes_are_counted_and_change_nothing(
    broker: BrokerProcess, good: Traffic, mallory: Forger, before: Counter[str]
) -> None:
    mallory.register()
    for number in range(3):
        mallory.send_next(small_group(f"honest-{number}"))
    good.wait_trained("honest-2")
    told = _extent(mallory)
    counts: Counter[str] = Counter()
    for name, (forged, reason) in FORGERIES.items():
        counts[reason] += 1
        mallory.push.send_multipart(forged(mallory))
        try:
            broker.wait_rejected(counts, before)
        except AssertionError as error:
            error.add_note(name)
            raise
    refused = broker.status().rejected_messages
    assert refused == sum(n for why, n in broker.rejections().items() if why != "duplicate")
    assert _extent(mallory) == told
    mallory.send_next(small_group("honest-3"))
    good.wait_trained("honest-3")
    assert "forged" not in good.trained


def _extent(mallory: Forger) -> tuple[int, bytes]:
    """Return the extent of the session."""
    ack = mallory.ask(Sync(producer=mallory.name, session=mallory.session))
    assert isinstance(ack, Ack)
    return ack.cumulative, ack.gaps


def test_forged_sequence_holds_up_only_its_own_session(
    broker: BrokerProcess, good: Traffic, mallory: Forger, before: Counter[str]
) -> None:
    """A number ahead of its turn is accepted within the window; other sessions have numbers of their own."""
    mallory.register()
    header, encoded = mallory.next(small_group("ahead"), seq=GAP_WINDOW, position=2 * MIB)
    mallory.push.send_multipart(mallory.message(header, encoded.frames))
    good.wait_trained("ahead")
    mallory.register()
    mallory.send_next(small_group("anew"))
    good.wait_trained("anew")
    broker.wait_rejected({}, before)


def test_flood_of_replays_leaves_no_trace(
    broker: BrokerProcess, good: Traffic, mallory: Forger, before: Counter[str]
) -> None:
    first = mallory.register()
    mallory.send_next(small_group("once"))
    header, encoded = mallory.next(small_group("once"), seq=1, position=mallory.position)
    replay = mallory.message(header, encoded.frames)
    strangers = [mallory.message(header, encoded.frames, producer=f"m-{n}") for n in range(1000)]
    with broker.growth_below(SMALL_BYTES):
        for message in [replay] * 5000 + strangers * 5:
            mallory.push.send_multipart(message)
        broker.wait_rejected({"duplicate": 5000, "unknown_session": 5000}, before)
        good.advance()
    mallory.register()
    for _ in range(100):
        mallory.push.send_multipart(mallory.message(header, encoded.frames, session=first))
    broker.wait_rejected({"duplicate": 5000, "unknown_session": 5000, "fenced": 100}, before)
    assert good.trained.count("once") == 1


def test_names_that_peers_choose_are_in_no_count(
    broker: BrokerProcess, good: Traffic, mallory: Forger, before: Counter[str]
) -> None:
    """The broker chooses the reasons, so that they are few."""
    mallory.register()
    for number in range(200):
        header, encoded = mallory.next(small_group(f"g-{number}"), table=f"{number:016x}")
        mallory.push.send_multipart(mallory.message(header, encoded.frames, run=f"run-{number}"))
        mallory.push.send_multipart(mallory.message(header, encoded.frames))
    broker.wait_rejected({"unknown_table": 200, "wrong_run": 200}, before)
    good.advance(4)


def test_strangers_on_every_tcp_port(run_dir: Path) -> None:
    """A hundred peers without ZMTP: talkers, hangers-on and mutes. One that does not finish a greeting is cut off.

    The library treats a first byte other than 0xff as a peer of its own first version, which has no greeting: such a
    hanger-on is not cut off, and costs a descriptor.
    """
    hurry = "from rolloutmq.bus.transport import sockets; sockets.TCP_HANDSHAKE_MS = 1000"
    with (
        broker_process(RunLayout(run_dir), run_config(**INSECURE), hurry) as broker,
        traffic(broker.endpoints.serve) as good,
        broker.growth_below(SMALL_BYTES),
        ExitStack() as stack,
    ):
        places = broker.endpoints.listen
        strangers = [stack.enter_context(connected(place)) for place in places * 15]
        mutes, teasers, hangers = strangers[:30], strangers[30:50], strangers[50:]
        for teaser in teasers:
            teaser.sendall(b"\xff" + bytes(8))  # part of a greeting
        for hanger in hangers:
            hanger.sendall(GARBAGE[0])
        for number, place in enumerate(places * 15):
            with connected(place) as talker:
                _talk(talker, number)
        good.advance()
        assert all(was_cut(stranger, LIMIT_S) for stranger in (*mutes, *teasers))
        good.advance()


GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 64,
    b"\x16\x03\x01\x02\x00\x01",
    b"\xff" + bytes(63),
)


def _talk(talker: socket.socket, number: int) -> None:
    try:
        talker.sendall(os.urandom(5000) if number % 5 == 4 else GARBAGE[number % 5])
        if number % 2:
            talker.shutdown(socket.SHUT_WR)
            talker.settimeout(0.05)
            talker.recv(64)
    except OSError:
        return
