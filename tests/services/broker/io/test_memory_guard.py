"""The memory guard: the choice of a remedy, connections that are cut or spared, and `ingest` after a cut."""

import errno
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq
from tests.services.broker.bench import Bench

from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.sockets import address_of
from rolloutmq.schemas.wire.control import SetValues, ValuesSet
from rolloutmq.services.broker.io import memory_guard
from rolloutmq.services.broker.io.memory_guard import (
    CONNECTION_BYTES,
    LONGEST_S,
    REMOTE_CUTS,
    REMOTE_SETTLE_S,
    SETTLE_S,
    SHORTEST_S,
    TRIM_AGAIN_S,
    MemoryAccounts,
    MemoryGuard,
    MemoryRemedy,
    UnexplainedMemory,
    cut,
    held_bytes,
    most,
    taken_by,
    trim,
)
from rolloutmq.services.broker.io.receive import discard

MIB = 1 << 20

ALLOWANCE = 100 * MIB

ACCOUNTED = 1000 * MIB

WITHIN = ACCOUNTED + ALLOWANCE

BEYOND = WITHIN + 1


def _cut(it: UnexplainedMemory, now: float, held: int = BEYOND) -> None:
    assert it.look(now, held, ACCOUNTED) is MemoryRemedy.TRIM
    assert it.due == now
    assert it.look(now, held, ACCOUNTED) is MemoryRemedy.CUT


def test_what_is_accounted_for_and_the_allowance_are_left_alone() -> None:
    it = UnexplainedMemory(ALLOWANCE)
    for now, held in enumerate((0, ACCOUNTED, WITHIN)):
        assert it.look(now, held, ACCOUNTED) is MemoryRemedy.NOTHING


@pytest.mark.parametrize(("room", "pause_s"), [
    (1 << 40, LONGEST_S),
    (256 * MIB, 1 / 16),
    (MIB, SHORTEST_S),
    (0, SHORTEST_S),
])  # fmt: skip
def test_the_less_room_the_sooner_the_next_look(room: int, pause_s: float) -> None:
    it = UnexplainedMemory(1 << 41)
    it.look(7.0, (1 << 41) - room, 0)
    assert it.due == 7.0 + pause_s


def test_a_trim_that_was_enough_is_all() -> None:
    it = UnexplainedMemory(ALLOWANCE)
    for now in range(3):
        assert it.look(now, BEYOND, ACCOUNTED) is MemoryRemedy.TRIM
        assert it.look(now, WITHIN, ACCOUNTED) is MemoryRemedy.NOTHING


def test_a_cut_that_helped_may_come_again_at_once() -> None:
    it = UnexplainedMemory(ALLOWANCE)
    for round in range(3):
        _cut(it, round)
        assert it.look(it.due, ACCOUNTED, ACCOUNTED) is MemoryRemedy.NOTHING


def test_what_a_cut_frees_may_take_a_moment_and_a_trim() -> None:
    it = UnexplainedMemory(ALLOWANCE)
    _cut(it, 0.0, 2 * BEYOND)
    assert it.due == SHORTEST_S
    assert it.look(it.due, 2 * BEYOND, ACCOUNTED) is MemoryRemedy.NOTHING
    while it.due < SETTLE_S:
        assert it.look(it.due, BEYOND, ACCOUNTED) is MemoryRemedy.NOTHING
    assert it.look(it.due, BEYOND, ACCOUNTED) is MemoryRemedy.TRIM
    assert it.look(it.due, ACCOUNTED, ACCOUNTED) is MemoryRemedy.NOTHING
    _cut(it, 1.0)


def test_what_a_cut_does_not_free_is_taken_as_it_is_until_as_much_again_has_come() -> None:
    it = UnexplainedMemory(ALLOWANCE)
    level = ACCOUNTED + 3 * ALLOWANCE
    _cut(it, 0.0, level)
    assert it.look(it.due, level, ACCOUNTED) is MemoryRemedy.NOTHING
    remedies = set()
    now = 0.0
    while now < 300:
        now = it.due
        remedies.add(it.look(now, level + ALLOWANCE, ACCOUNTED))
    assert remedies == {MemoryRemedy.NOTHING, MemoryRemedy.TRIM}
    _cut(it, now + TRIM_AGAIN_S, level + ALLOWANCE + 1)


def test_trims_in_vain_become_rare() -> None:
    it = UnexplainedMemory(ALLOWANCE)
    _cut(it, 0.0)
    trims = 0
    while it.due < 600:
        trims += it.look(it.due, BEYOND, ACCOUNTED) is MemoryRemedy.TRIM
    assert trims < 40


def test_who_shrank_to_the_accounts_has_the_old_limit_again() -> None:
    it = UnexplainedMemory(ALLOWANCE)
    _cut(it, 0.0, ACCOUNTED + 3 * ALLOWANCE)
    it.look(1.0, ACCOUNTED + 3 * ALLOWANCE, ACCOUNTED)
    assert it.look(2.0, ACCOUNTED, ACCOUNTED) is MemoryRemedy.NOTHING
    _cut(it, 3.0)


def test_nothing_is_known_of_the_process() -> None:
    """Where the system reports no memory, the process holds 0 bytes and nothing is cut."""
    it = UnexplainedMemory(ALLOWANCE)
    assert it.look(0.0, 0, ACCOUNTED) is MemoryRemedy.NOTHING
    assert math.isfinite(it.due)


LIMIT_MS = 5000


@pytest.fixture
def context() -> Iterator[sockets.Context]:
    made = sockets.make_context()
    yield made
    made.term()


def _pair(context: sockets.Context, address: str) -> tuple[sockets.Socket, sockets.Socket]:
    pull = sockets.ingest_pull(context, MIB)
    pull.bind(address)
    return pull, sockets.producer_push(context, address_of(pull))


def _sent(push: sockets.Socket, pull: sockets.Socket, *frames: bytes) -> list[bytes]:
    """Send a message until it arrives; messages under way when the connection ended are lost."""
    until = time.monotonic() + LIMIT_MS / 1e3
    while time.monotonic() < until:
        if push.poll(50, zmq.POLLOUT):
            push.send_multipart(frames, zmq.NOBLOCK)
        if pull.poll(50):
            return pull.recv_multipart()
    raise AssertionError("it did not arrive")


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_whoever_came_by_the_address_is_cut_and_comes_back(
    context: sockets.Context, tmp_path: Path, kind: str
) -> None:
    address, other = (
        (f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b") if kind == "ipc" else 2 * ("tcp://127.0.0.1:*",)
    )
    pull, push = _pair(context, address)
    pull_2, push_2 = _pair(context, other)
    with pull, push, pull_2, push_2:
        assert _sent(push, pull, b"1") == _sent(push_2, pull_2, b"1") == [b"1"]
        assert cut([address_of(pull)]) == 1
        assert cut(["inproc://nobody"]) == 0
        assert _sent(push, pull, b"2") == _sent(push_2, pull_2, b"2") == [b"2"]


def test_only_what_is_beyond_is_looked_into(
    context: sockets.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [0]
    trims: list[int] = []
    monkeypatch.setattr(memory_guard, "held_bytes", lambda: held[0])
    monkeypatch.setattr(memory_guard, "trim", lambda: trims.append(held[0]))
    pull, push = _pair(context, f"ipc://{tmp_path}/a")
    with pull, push:
        it = MemoryGuard([address_of(pull)], 100, lambda: 1000)
        assert it.check(0.0) is MemoryRemedy.NOTHING
        held[0] = 1101
        assert it.check(it.due - 0.001) is MemoryRemedy.NOTHING
        assert not trims
        assert it.check(it.due) is MemoryRemedy.CUT
        assert trims == [1101]


def test_peers_of_other_hosts_are_cut_first_the_largest_of_them_before_all() -> None:
    it = UnexplainedMemory(ALLOWANCE, REMOTE_CUTS)
    assert it.look(0.0, ACCOUNTED + ALLOWANCE // 2, ACCOUNTED) is MemoryRemedy.NOTHING
    assert it.is_calm
    sent = [ALLOWANCE, ALLOWANCE, ALLOWANCE, ALLOWANCE, ALLOWANCE // 2]
    found = []
    for remote_bytes in sent:
        assert it.look(max(1.0, it.due), BEYOND, ACCOUNTED) is MemoryRemedy.TRIM, "a cut needs a fresh trim"
        found.append(it.look(it.due, BEYOND, ACCOUNTED, partial(int, remote_bytes)))
        assert not it.is_calm
    senders, every_remote, every = REMOTE_CUTS
    assert found == [senders, every_remote, every_remote, every_remote, every]


def test_a_cut_that_helps_is_followed_by_no_harder_one() -> None:
    it = UnexplainedMemory(ALLOWANCE, REMOTE_CUTS)
    for round in range(3):
        assert it.look(round, BEYOND, ACCOUNTED) is MemoryRemedy.TRIM
        assert it.look(round, BEYOND, ACCOUNTED, lambda: BEYOND) is MemoryRemedy.CUT_SENDERS
        assert it.due == round + REMOTE_SETTLE_S
        assert it.look(it.due, WITHIN, ACCOUNTED) is MemoryRemedy.NOTHING


def test_the_fewest_peers_that_took_in_enough_are_chosen() -> None:
    a, b, c, d = (("10.0.0.1", port, 7761) for port in range(4))
    grown = {a: 10, b: 500, c: 100, d: 0}
    assert most(grown, 400) == {b}
    assert most(grown, 501) == {b, c}
    assert most(grown, 9000) == {a, b, c}, "who took in nothing lately holds nothing"
    assert most(grown, 0) == set()


def test_the_peer_of_another_host_that_took_in_most_is_cut_and_others_are_spared(
    context: sockets.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [0]
    monkeypatch.setattr(memory_guard, "held_bytes", lambda: held[0])
    pull, local = _pair(context, f"ipc://{tmp_path}/a")
    pull.bind("tcp://127.0.0.1:*")
    listener = address_of(pull)
    watched = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
    with (
        pull,
        local,
        sockets.producer_push(context, listener) as greedy,
        sockets.producer_push(context, listener) as modest,
    ):
        for one in (local, greedy, modest):
            assert _sent(one, pull, b"hello") == [b"hello"]
        it = MemoryGuard([f"ipc://{tmp_path}/a", listener], MIB, lambda: 0)
        assert it.check(0.0) is MemoryRemedy.NOTHING
        assert _sent(greedy, pull, bytes(MIB)) == [bytes(MIB)]
        assert _sent(modest, pull, bytes(64)) == [bytes(64)]
        monitors = [one.get_monitor_socket(watched) for one in (local, modest, greedy)]
        held[0] = MIB + 2 * CONNECTION_BYTES
        assert it.check(it.due) is MemoryRemedy.NOTHING, "each connection has some memory of its own"
        held[0] += 1
        assert it.check(it.due) is MemoryRemedy.CUT_SENDERS
        assert monitors[2].poll(LIMIT_MS), "the greedy one was not cut"
        assert _sent(greedy, pull, b"back") == [b"back"]
        assert not any(one.poll(0) for one in monitors[:2])
        for one, monitor in zip((local, modest, greedy), monitors, strict=True):
            one.disable_monitor()
            monitor.close(0)


def test_a_process_out_of_descriptors_knows_no_connection(
    context: sockets.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data plane goes on; the guard of descriptors makes room."""
    pull, push = _pair(context, "tcp://127.0.0.1:*")
    with pull, push:
        assert _sent(push, pull, b"1") == [b"1"]
        address = address_of(pull)
        assert list(taken_by([address]).values()) > [0]

        def full(_: Path) -> Iterator[Path]:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(Path, "iterdir", full)
        assert taken_by([address]) == {}
        assert cut([address]) == 0


def test_what_waits_is_dropped_whole(context: sockets.Context, tmp_path: Path) -> None:
    pull, push = _pair(context, f"ipc://{tmp_path}/a")
    with pull, push:
        assert push.poll(LIMIT_MS, zmq.POLLOUT)
        for _ in range(10):
            push.send_multipart([b"envelope", b"body", b"more"])
        assert pull.poll(LIMIT_MS)
        discard(pull, time.monotonic())
        assert pull.recv() == b"envelope"
        assert pull.recv_multipart() == [b"body", b"more"]
        while pull.poll(100):
            discard(pull, time.monotonic() + LIMIT_MS / 1e3)
        assert _sent(push, pull, b"new") == [b"new"]


def test_what_this_process_holds_is_seen() -> None:
    before = held_bytes()
    block = b"x" * (64 * MIB)
    assert held_bytes() - before > 60 * MIB
    del block
    trim()
    assert held_bytes() - before < 16 * MIB


def test_a_mark_that_was_raised_is_in_the_accounts() -> None:
    bench = Bench()
    accounts = MemoryAccounts(bench.core, None, None)
    before = accounts()
    bench.ask(SetValues(values={"broker.high_bytes": 1 << 32}), ValuesSet)
    assert accounts() - before > 1 << 32
