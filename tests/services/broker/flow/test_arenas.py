"""Producer arenas: when a slot is released, and how forged addresses are refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from tests.services.broker.bench import TABLE, WALL, Bench, Peer, config, header, ids

from rolloutmq.bus.shm.arena import Arena, MappedArena
from rolloutmq.bus.shm.arena_allocator import ArenaBlock
from rolloutmq.schemas.errors import SegmentGoneError
from rolloutmq.schemas.wire.control import LatestExample, LatestExampleReply, Reset
from rolloutmq.schemas.wire.envelope import ArenaRef, Envelope, PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Ack, Batch, InfoReply, Ok, Registered, Rejected
from rolloutmq.schemas.wire.requests import DeclareTables, GetInfo, Goodbye, Pull, RegisterProducer
from rolloutmq.services.broker.actions import Action, Bury, Reply
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.flow import arenas
from rolloutmq.services.broker.flow.sequence_window import SequenceWindow
from rolloutmq.services.broker.journal.stored_group import BodyMemory, GroupBody

MIB = 1 << 20


class ArenaBench(Bench):
    """A bench whose broker reads arenas."""

    def __init__(self, settings: Any = None, epoch: int = 1) -> None:
        super().__init__(settings, epoch)
        self.core = BrokerCore(self.settings, epoch=epoch, open_arena=MappedArena)


class ArenaProducer(Peer):
    """A producer whose groups lie in an arena."""

    def __init__(self, bench: Bench, name: str = "p", nbytes: int = 64 * MIB, **given: Any) -> None:
        self.arena = Arena(nbytes)
        given.setdefault("arena", self.arena.ref)
        self.request = RegisterProducer(producer=name, env="e", group_size=4, **given)
        self.registered = bench.ask(self.request, Registered).ack
        super().__init__(bench, name, "e", Split.TRAIN, self.registered)
        bench.ask(DeclareTables(producer=name, session=self.session, tables=(TABLE,)), Ok)
        self.slots: dict[int, ArenaBlock] = {}

    def lay(self, groups: int = 1, nbytes: int = 100) -> list[str]:
        """Send new groups, all in one message; return their ids. Each is filled with its own number."""
        heads, offsets = [], []
        for _ in range(groups):
            head = self.next(nbytes=nbytes)
            slot = self.arena.slots.allocate(nbytes)
            assert slot is not None
            slot.number(head.seq)
            self.slots[head.seq] = slot
            self.arena.memory[slot.offset : slot.offset + slot.nbytes] = content(head.seq, nbytes)
            heads.append(head)
            offsets.append(slot.offset)
        self.send_refs(heads, offsets)
        return [head.group_id for head in heads]

    def send_refs(
        self, heads: list[Any], offsets: list[int], frames: tuple[bytes, ...] = (), arena: int = 0
    ) -> None:
        about = 1, self.name, self.session, "default", "e", Split.TRAIN
        envelope = Envelope(*about, tuple(heads), tuple(offsets), arena or self.arena.ref.ino)
        self.bench.ingest(envelope, list(frames))

    @property
    def released(self) -> int:
        return self.sync().released


def content(seq: int, nbytes: int) -> bytes:
    return bytes([seq % 256]) * nbytes


@pytest.fixture
def bench() -> Iterator[ArenaBench]:
    one = ArenaBench(config(e={"stale": "pass"}, broker={"durability": "memory"}))
    yield one
    one.core.validate()
    one.core.close()


def taken(bench: Bench, step: int = 0, sequences: int = 8, **given: Any) -> tuple[Batch, tuple[Any, ...]]:
    """Pull a batch with addresses in shared memory, and its frames."""
    pull = Pull(
        step=step,
        version=PolicyVersion(0, step),
        sequences=sequences,
        request_id=given.pop("request_id", f"step-{step}"),
        wait_s=0.0,
        **{"arenas": True, "consumer": "c", **given},
    )
    (reply,) = bench.send(pull, (b"taken",))
    assert isinstance(reply.message, Batch), reply.message
    return reply.message, reply.frames


def read(batch: Batch) -> dict[str, bytes]:
    """Read groups from arenas, as a trainer does."""
    views = [MappedArena(ref).view for ref in batch.arenas]
    found = {}
    for delivery in batch.groups:
        if delivery.place is not None:
            index, offset = delivery.place
            found[delivery.header.group_id] = bytes(views[index][offset : offset + delivery.header.nbytes])
    return found


def test_a_broker_says_how_large_an_arena_may_be_if_it_reads_any(bench: ArenaBench) -> None:
    assert bench.ask(GetInfo(), InfoReply).arena_bytes == bench.settings.broker.high_bytes
    assert Bench().ask(GetInfo(), InfoReply).arena_bytes == 0


def test_a_trainer_reads_where_the_producer_wrote(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    assert peer.registered.arena
    names = peer.lay(2)
    bench.consumer()
    batch, frames = taken(bench)
    assert frames == ()
    assert read(batch) == {names[0]: content(1, 100), names[1]: content(2, 100)}
    assert all(ref.fd != peer.arena.ref.fd for ref in batch.arenas)


def test_the_same_pull_gets_the_same_batch_as_frames(bench: ArenaBench) -> None:
    names = ArenaProducer(bench).lay(2)
    bench.consumer()
    told, _ = taken(bench)
    again, frames = taken(bench, arenas=False)
    assert ids(again) == ids(told) == tuple(names)
    assert again.lease == told.lease
    assert again.arenas == ()
    assert frames == (content(1, 100), content(2, 100))
    # They leave later: nobody else's bytes may be in them by then.
    assert all(isinstance(frame, bytes) for frame in frames)


def test_places_and_frames_come_in_one_batch(bench: ArenaBench) -> None:
    laid, framed = ArenaProducer(bench), bench.producer("q")
    names = [*laid.lay(), *framed.send(), *laid.lay()]
    bench.consumer()
    batch, frames = taken(bench, sequences=12)
    assert ids(batch) == tuple(names)
    assert [delivery.place is None for delivery in batch.groups] == [False, True, False]
    assert frames == (f"{names[1]}/0".encode(),)


def test_what_is_released_is_exact_and_never_falls(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    assert peer.released == 0
    peer.lay(6)
    assert peer.released == 0
    bench.consumer()
    taken(bench)
    assert peer.released == 0  # leased: somebody reads it
    batch, _ = taken(bench)
    bench.settle(batch)
    assert peer.released == 2
    batch, _ = taken(bench, 1)
    assert peer.released == 2
    bench.settle(batch)
    assert peer.released == 4
    batch, _ = taken(bench, 2)
    bench.settle(batch, no_signal=True)
    assert peer.released == 6 == peer.sync().cumulative


def test_a_group_behind_a_gap_is_not_released_before_it_is_closed(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    lost = peer.next(nbytes=100)
    slot = peer.arena.slots.allocate(100)
    assert slot is not None
    peer.lay(2)
    bench.consumer()
    batch, _ = taken(bench)
    bench.settle(batch)
    assert (peer.released, peer.sync().cumulative) == (0, 0)
    peer.send_refs([lost], [slot.offset])
    assert (peer.released, peer.sync().cumulative) == (0, 3)


def test_the_kept_groups_of_a_trainer_are_not_in_the_way_and_come_again_whole(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    names = peer.lay(2)
    bench.consumer()
    bench.settle(taken(bench)[0])
    assert peer.released == 2
    for slot in peer.slots.values():
        peer.arena.memory[slot.offset : slot.offset + slot.nbytes] = bytes(100)  # it uses the memory again
    bench.consumer("d", resume=PolicyVersion())
    batch, frames = taken(bench, consumer="d")
    assert (batch.rewound, ids(batch)) == (True, tuple(names))
    assert frames == (content(1, 100), content(2, 100))


def test_a_lost_lease_releases_nothing(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    peer.lay(2)
    bench.consumer()
    taken(bench)
    bench.consumer()
    assert peer.released == 0
    batch, _ = taken(bench)
    assert [delivery.deliveries for delivery in batch.groups] == [2, 2]
    assert len(read(batch)) == 2


def test_a_rejected_group_is_buried_with_its_own_bytes(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    names = peer.lay(2)
    bench.consumer()
    batch, _ = taken(bench)
    buried: list[Bury] = []
    done = bench._done

    def watched(actions: list[Action]) -> list[Action]:
        buried.extend(action for action in actions if isinstance(action, Bury))
        return done(actions)

    bench._done = watched  # type: ignore[method-assign]
    rejected = tuple(Rejected(group_id=name, reason="bad") for name in names)
    bench.settle(batch, trained=(), rejected=rejected, version=PolicyVersion())
    assert [bury.frames for bury in buried] == [(content(1, 100),), (content(2, 100),)]
    assert all(isinstance(frame, bytes) for bury in buried for frame in bury.frames or ())
    assert peer.released == 2


def test_a_straggler_that_holds_much_back_is_copied(bench: ArenaBench) -> None:
    """A group of another size is in no batch and lies in front of a trained stream."""
    peer = ArenaProducer(bench)
    lone = peer.next(nbytes=100, sequences=3)
    slot = peer.arena.slots.allocate(100)
    assert slot is not None
    peer.arena.memory[slot.offset : slot.offset + slot.nbytes] = content(1, 100)
    peer.send_refs([lone], [slot.offset])
    bench.consumer()
    for step in range(4):
        peer.lay(2, nbytes=arenas.STRAGGLER_BYTES // 6)
        batch, _ = taken(bench, step)
        assert lone.group_id not in ids(batch)
        assert peer.released == 0
        bench.settle(batch)
    assert peer.released == 9
    assert bench.waiting() == [lone.group_id]
    peer.arena.memory[slot.offset : slot.offset + slot.nbytes] = bytes(100)
    batch, frames = taken(bench, 9, sequences=3)
    assert ids(batch) == (lone.group_id,)
    assert frames == (content(1, 100),)


def test_a_large_straggler_and_one_that_is_read_stay(bench: ArenaBench) -> None:
    large = arenas.STRAGGLER_BYTES
    peer = ArenaProducer(bench)
    bench.consumer()
    evals = ArenaProducer(bench, "q")
    evals.lay(2)
    leased, _ = taken(bench)
    for _ in range(2):
        evals.lay(1, nbytes=large)
    state = bench.core._state
    for group in [group for group in state.groups if group.header.nbytes == large]:
        state.dropper.drop([group], arenas_dead(), "stale", WALL)
    assert evals.released == 0  # far more than four times as much waits, and a trainer reads the first
    assert len(read(leased)) == 2
    assert peer.released == 0


def arenas_dead() -> Any:
    from rolloutmq.services.broker.journal.format.events import GroupState

    return GroupState.EXPIRED


def test_an_ack_is_due_at_once_when_much_came_free(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    bench.consumer()
    peer.lay(2, nbytes=arenas.RELEASE_ACK_BYTES // 2)
    batch, _ = taken(bench)
    bench.tick(0.01)
    bench.published.clear()
    bench.settle(batch)
    bench.tick()
    told = [said.message for said in bench.published if isinstance(said.message, Ack)]
    assert [ack.released for ack in told] == [2]


def test_a_late_registration_of_a_producer_that_has_connected_anew_refuses_no_message(
    bench: ArenaBench,
) -> None:
    """The broker was slow, as after a resume: the producer gave up its first request and closed the arena of it."""
    given_up = Arena(MIB)
    ref = given_up.ref
    given_up.close()
    late = RegisterProducer(producer="p", env="e", group_size=4, arena=ref, key="first")
    assert not bench.ask(late, Registered).ack.arena
    peer = ArenaProducer(bench, key="second")
    assert peer.registered.arena
    peer.lay()
    status = bench.status()
    assert (status.rejected_messages, status.rejected_by_reason) == (0, {"arena_unreachable": 1})
    assert status.as_frames == {}


@pytest.mark.parametrize(
    "lie",
    [
        lambda ref: replace(ref, ino=ref.ino + 1),
        lambda ref: replace(ref, nbytes=ref.nbytes - 4096),
        lambda ref: replace(ref, nbytes=1 << 40),
        lambda ref: replace(ref, fd=1 << 40),
        lambda ref: replace(ref, pid=1 << 40),
    ],
)
def test_who_names_what_cannot_be_read_is_told_and_sends_frames(
    bench: ArenaBench, lie: Callable[[ArenaRef], ArenaRef]
) -> None:
    honest = Arena(MIB)
    peer = ArenaProducer(bench, arena=lie(honest.ref))
    assert not peer.registered.arena
    assert bench.core._state.rejected["arena_unreachable"] == 1
    assert bench.status().rejected_messages == 0, "nothing was refused: its groups come as frames"
    peer.lay()
    assert bench.core._state.rejected["no_arena"] == 1
    peer.seq = peer.position = 0
    assert peer.send()
    assert (peer.sync().cumulative, peer.released) == (1, 1)


@pytest.mark.parametrize("offset", [MIB - 99, MIB, 1 << 62])
def test_a_group_outside_its_arena_is_refused_and_the_others_are_not(bench: ArenaBench, offset: int) -> None:
    peer = ArenaProducer(bench, nbytes=MIB)
    peer.lay()
    peer.send_refs([peer.next(nbytes=100)], [offset])
    assert bench.core._state.rejected["arena_range"] == 1
    ack = peer.sync()
    assert (ack.cumulative, ack.arena) == (1, True)
    other = ArenaProducer(bench, "q")
    assert other.lay()
    bench.consumer()
    batch, _ = taken(bench)
    assert len(read(batch)) == 2


def test_offsets_that_do_not_match_the_groups_are_refused(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    head = peer.next(nbytes=100)
    peer.send_refs([head], [0, 100])
    peer.send_refs([head], [0], frames=(b"",))
    assert bench.core._state.rejected["frames"] == 2
    assert peer.sync().cumulative == 0


def test_a_message_that_was_meant_for_another_arena_is_refused(bench: ArenaBench) -> None:
    """It lay in the pipe of a producer that has since registered anew."""
    peer = ArenaProducer(bench)
    peer.send_refs([peer.next(nbytes=100)], [0], arena=peer.arena.ref.ino + 1)
    assert bench.core._state.rejected["no_arena"] == 1
    assert peer.sync().cumulative == 0


def test_the_same_group_again_holds_nothing_twice(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    head = peer.next(nbytes=100)
    peer.send_refs([head], [0])
    peer.send_refs([head], [0])
    assert bench.core._state.rejected["duplicate"] == 1
    peer.lay()
    bench.consumer()
    bench.settle(taken(bench)[0])
    assert peer.released == 2


def test_an_arena_goes_when_its_session_is_over_and_nothing_of_it_is_held(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    peer.lay(2)
    bench.consumer()
    bench.ask(Goodbye(producer="p", session=peer.session, produced=2), Ok)
    bench.tick(2.0)
    assert len(bench.core._state.arenas) == 1
    batch, _ = taken(bench)
    assert len(read(batch)) == 2
    bench.settle(batch)
    bench.tick(2.0)
    assert len(bench.core._state.arenas) == 0
    with pytest.raises(SegmentGoneError):
        MappedArena(batch.arenas[0])


def test_a_producer_that_was_silent_has_its_arena_again(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    bench.tick(bench.settings.broker.silence_s + 2)
    assert len(bench.core._state.arenas) == 0
    assert peer.sync().arena
    names = peer.lay(2)
    bench.consumer()
    batch, _ = taken(bench)
    assert set(read(batch)) == set(names)


def test_a_producer_that_was_silent_for_too_long_is_told_when_its_arena_is_gone(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    bench.tick(bench.settings.broker.silence_s + 2)
    peer.arena.close()
    assert not peer.sync().arena


def test_a_group_that_comes_first_from_a_producer_that_was_silent_opens_its_arena_or_is_refused(
    bench: ArenaBench,
) -> None:
    back, gone = ArenaProducer(bench), ArenaProducer(bench, "q")
    bench.tick(bench.settings.broker.silence_s + 2)
    gone.arena.close()
    back.lay()
    gone.lay()
    assert (back.sync().cumulative, gone.sync().cumulative) == (1, 0)
    assert bench.core._state.rejected["no_arena"] == 1


def test_a_session_that_registers_again_may_bring_another_arena(bench: ArenaBench) -> None:
    first = ArenaProducer(bench)
    old = first.lay(2)
    second = ArenaProducer(bench, resume_session=first.session)
    second.seq, second.position = first.seq, first.position
    assert second.session == first.session
    assert second.registered.released == 2  # nothing of the new one is held
    new = second.lay(2)
    bench.consumer()
    batch, _ = taken(bench, sequences=16)
    assert set(read(batch)) == {*old, *new}
    assert len(batch.arenas) == 2
    bench.settle(batch)
    bench.tick(2.0)
    assert len(bench.core._state.arenas) == 1
    assert second.released == 4


def test_after_a_restart_nothing_is_held_and_bodies_come_as_frames() -> None:
    bench = ArenaBench(config(e={}))
    peer = ArenaProducer(bench)
    peer.lay(2)
    later = bench.reborn()
    again = later.ask(replace(peer.request, resume_session=peer.session), Registered).ack
    assert (again.session, again.cumulative, again.released) == (peer.session, 2, 2)
    later.consumer()
    batch, frames = taken(later)
    assert batch.arenas == ()
    assert frames == (content(1, 100), content(2, 100))


def test_a_reset_lets_go_of_everything(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    peer.lay(2)
    bench.ask(Reset(), Ok)
    bench.tick(2.0)
    assert len(bench.core._state.arenas) == 0
    assert ArenaProducer(bench).lay(2)


def test_the_newest_example_is_there_after_its_memory_is_used_again(bench: ArenaBench) -> None:
    peer = ArenaProducer(bench)
    peer.lay(2)
    bench.consumer()
    bench.settle(taken(bench)[0])
    for slot in peer.slots.values():
        peer.arena.memory[slot.offset : slot.offset + slot.nbytes] = bytes(100)
    (reply,) = bench.send(LatestExample(), (b"r",))
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, LatestExampleReply)
    assert reply.frames == (content(2, 100),)


def test_an_arena_takes_no_descriptor_that_sockets_need(
    bench: ArenaBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "_most_descriptors", lambda: 3)
    assert not ArenaProducer(bench).registered.arena
    assert bench.core._state.rejected["arena_descriptors"] == 1


class Place:
    """A segment to which a body is written."""

    number = 1

    def __init__(self) -> None:
        self.needed = 0

    def read(self, offset: int) -> tuple[bytes]:
        return (content(offset, 100),)

    def gained(self) -> None:
        self.needed += 1

    def lost(self) -> None:
        self.needed -= 1


class Journaled:
    """An arena whose bodies a journal writes."""

    def __init__(self, budget: int = 1 << 30) -> None:
        self.own = Arena(MIB)
        self.window = SequenceWindow()
        self.leaving: list[int] = []
        self.arena = arenas.ProducerArena(
            MappedArena(self.own.ref),
            self.window,
            lambda: None,
            lambda slot, _: self.leaving.append(slot.seq),
        )
        self.ram = BodyMemory(budget)
        self.place = Place()

    def body(self, seq: int) -> GroupBody:
        self.window.accept(seq, seq * 100, 100)
        self.own.memory[seq * 128 : seq * 128 + 100] = content(seq, 100)
        ((slot, frames),) = self.arena.take([header(seq, seq * 100)], [seq * 128], "e")
        return GroupBody(frames, 100, self.ram, slot)

    def write(self, body: GroupBody, seq: int) -> None:
        """Give a body its address before it is written, as the commit thread does."""
        body.place = self.place, seq


def test_what_the_journal_has_yet_to_write_is_not_released() -> None:
    journaled = Journaled()
    body = journaled.body(1)
    body.release()
    assert journaled.arena.released() == 0
    journaled.write(body, 1)
    body.release()
    assert journaled.arena.released() == 0  # it lies in the buffer of the journal, as a view
    body.settled_on_disk()
    assert journaled.arena.released() == 1
    assert journaled.leaving == [1]
    assert journaled.ram.used_bytes == 0
    journaled.arena.validate()


def test_a_trained_group_is_shed_once_it_is_on_disk() -> None:
    journaled = Journaled()
    early, late = journaled.body(1), journaled.body(2)
    journaled.write(early, 1)
    early.settled_on_disk()
    early.shed()
    early.leave_arena()
    assert journaled.arena.released() == 1
    late.shed()
    assert not late.leave_arena()
    assert journaled.arena.released() == 1
    journaled.write(late, 2)
    late.settled_on_disk()
    assert journaled.arena.released() == 2
    assert not late.in_memory
    assert late.load()
    assert late.frames == (content(2, 100),)


def test_a_group_that_shall_leave_its_arena_stays_while_a_consumer_reads_it_there() -> None:
    """A consumer with views trained on what the producer wrote there next."""
    journaled = Journaled()
    body = journaled.body(1)
    assert not body.leave_arena(), "the journal has yet to write it"
    body.shown = True
    journaled.write(body, 1)
    body.settled_on_disk()
    assert journaled.arena.released() == 0
    assert body.in_memory
    assert body.leave_arena(), "after its settlement"
    assert journaled.arena.released() == 1


def test_memory_that_is_short_spares_what_somebody_was_told_of() -> None:
    journaled = Journaled(budget=50)
    told, queued = journaled.body(1), journaled.body(2)
    told.shown = True
    for seq, body in ((1, told), (2, queued)):
        journaled.write(body, seq)
        body.settled_on_disk()
    assert (told.in_memory, queued.in_memory) == (True, False)
    assert journaled.arena.released() == 0
    told.shed()
    assert journaled.arena.released() == 2
