"""Slots of an arena, compared with a model of every live byte."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutmq.bus.shm.arena_allocator import (
    ALIGNMENT_BYTES,
    LOOK,
    PAGE_BYTES,
    ArenaAllocator,
    ArenaBlock,
)

CAPACITY = 64 * 1024
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, CAPACITY // 4)),
        st.tuples(st.just("number"), st.integers(0, 7)),
        st.tuples(st.just("cancel"), st.integers(0, 7)),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("trim"), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_a_live_slot_is_nobody_elses_and_a_free_one_is_room_again(steps: list[tuple[str, int]]) -> None:
    slots = ArenaAllocator(CAPACITY)
    loose: list[ArenaBlock] = []  # allocated, in an order that has nothing to do with that of their numbers
    numbered: dict[int, ArenaBlock] = {}
    last = 0
    trimmed: list[tuple[int, int]] = []
    for what, number in steps:
        if what == "allocate":
            slot = slots.allocate(number)
            if slot is not None:
                assert slot.nbytes == number
                loose.append(slot)
            else:
                live = [*loose, *numbered.values()]
                assert not any(gap >= number + ALIGNMENT_BYTES for gap in _gaps(live))
        elif what == "number" and loose:
            last += 1
            numbered[last] = loose.pop(number % len(loose))
            numbered[last].number(last)
        elif what == "cancel" and loose:
            loose.pop(number % len(loose)).cancel()
        elif what == "release":
            slots.release(last - number)
            numbered = {seq: slot for seq, slot in numbered.items() if seq > last - number}
        elif what == "trim" and (unused := slots.trim()) is not None:
            trimmed.append(unused)
            assert all(slot.offset + slot.size <= unused[0] for slot in (*loose, *numbered.values()))
            assert all(edge % PAGE_BYTES == 0 for edge in unused)
        live = [*loose, *numbered.values()]
        assert sum(slot.size for slot in live) == slots.used_bytes
        assert min(_gaps(live)) >= 0
        slots.validate()
    slots.release(last)
    for slot in loose:
        slot.cancel()
    slots.validate()
    assert slots.used_bytes == 0
    whole = slots.allocate(CAPACITY)
    assert whole is not None
    assert whole.offset == 0


def _gaps(live: list[ArenaBlock]) -> list[int]:
    """Return the room before each live slot and behind the last, negative where two overlap."""
    gaps, end = [], 0
    for slot in sorted(live, key=lambda slot: slot.offset):
        assert slot.offset % ALIGNMENT_BYTES == 0
        gaps.append(slot.offset - end)
        end = slot.offset + slot.nbytes
    return [*gaps, CAPACITY - end]


def test_a_stream_of_which_little_is_unreleased_stays_at_the_beginning() -> None:
    slots = ArenaAllocator(1 << 30)
    highest = 0
    for seq in range(1, 1000):
        slot = slots.allocate(10_000)
        assert slot is not None
        slot.number(seq)
        highest = max(highest, slot.offset + slot.size)
        slots.release(seq - 5)
    assert highest <= 7 * 10_048


def test_what_was_used_at_a_peak_is_given_back_once() -> None:
    slots = ArenaAllocator(1 << 20)
    for seq in range(1, 101):
        slot = slots.allocate(10_000)
        assert slot is not None
        slot.number(seq)
    assert slots.trim() is None
    slots.release(100)
    assert slots.trim() is None  # it was in use since the last time
    assert slots.trim() == (0, -(-100 * 10_048 // PAGE_BYTES) * PAGE_BYTES)
    assert slots.trim() is None


def test_a_number_is_released_whatever_the_order_of_allocation() -> None:
    slots = ArenaAllocator(4096)
    first, second = slots.allocate(64), slots.allocate(64)
    assert first is not None
    assert second is not None
    second.number(1)
    first.number(2)
    slots.release(1)
    assert (first.size, second.size) == (64, 0)
    again = slots.allocate(64)
    assert again is not None
    assert again.offset == second.offset
    first.cancel()  # it has a number: only that frees it
    assert first.size == 64


def test_a_slot_that_was_cancelled_is_free_once() -> None:
    slots = ArenaAllocator(128)
    slot = slots.allocate(128)
    assert slot is not None
    assert slots.allocate(1) is None
    slot.cancel()
    slot.cancel()
    slots.validate()
    assert slots.allocate(128) is not None


def test_there_is_no_room_in_nothing() -> None:
    assert ArenaAllocator(0).allocate(1) is None
    assert ArenaAllocator(ALIGNMENT_BYTES - 1).allocate(1) is None


def test_behind_the_gaps_that_are_examined_the_last_one_is() -> None:
    slots = ArenaAllocator(4 * LOOK * ALIGNMENT_BYTES)
    live = [slots.allocate(1) for _ in range(3 * LOOK)]
    for slot in live[::2]:
        assert slot is not None
        slots.free(slot)
    slots.validate()
    found = slots.allocate(LOOK * ALIGNMENT_BYTES)
    assert found is not None
    assert found.offset == 3 * LOOK * ALIGNMENT_BYTES
    assert slots.allocate(2 * ALIGNMENT_BYTES) is None
    small = slots.allocate(ALIGNMENT_BYTES)
    assert small is not None
    assert small.offset == 0
    slots.validate()
