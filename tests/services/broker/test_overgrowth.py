"""The decision what to do about memory that nobody accounts for."""

import math

import pytest

from rolloutmq.services.broker.overgrowth import (
    LONGEST_S,
    SETTLE_S,
    SHORTEST_S,
    TRIM_AGAIN_S,
    Overgrowth,
    Remedy,
)

MIB = 1 << 20
ALLOWANCE = 100 * MIB
ACCOUNTED = 1000 * MIB
WITHIN = ACCOUNTED + ALLOWANCE
BEYOND = WITHIN + 1


def _cut(it: Overgrowth, now: float, held: int = BEYOND) -> None:
    assert it.look(now, held, ACCOUNTED) is Remedy.TRIM
    assert it.due == now
    assert it.look(now, held, ACCOUNTED) is Remedy.CUT


def test_what_is_accounted_for_and_the_allowance_are_left_alone() -> None:
    it = Overgrowth(ALLOWANCE)
    for now, held in enumerate((0, ACCOUNTED, WITHIN)):
        assert it.look(now, held, ACCOUNTED) is Remedy.NOTHING


@pytest.mark.parametrize(("room", "pause_s"), [
    (1 << 40, LONGEST_S),
    (256 * MIB, 1 / 16),
    (MIB, SHORTEST_S),
    (0, SHORTEST_S),
])  # fmt: skip
def test_the_less_room_the_sooner_the_next_look(room: int, pause_s: float) -> None:
    it = Overgrowth(1 << 41)
    it.look(7.0, (1 << 41) - room, 0)
    assert it.due == 7.0 + pause_s


def test_a_trim_that_was_enough_is_all() -> None:
    it = Overgrowth(ALLOWANCE)
    for now in range(3):
        assert it.look(now, BEYOND, ACCOUNTED) is Remedy.TRIM
        assert it.look(now, WITHIN, ACCOUNTED) is Remedy.NOTHING


def test_a_cut_that_helped_may_come_again_at_once() -> None:
    it = Overgrowth(ALLOWANCE)
    for round in range(3):
        _cut(it, round)
        assert it.look(it.due, ACCOUNTED, ACCOUNTED) is Remedy.NOTHING


def test_what_a_cut_frees_may_take_a_moment_and_a_trim() -> None:
    it = Overgrowth(ALLOWANCE)
    _cut(it, 0.0, 2 * BEYOND)
    assert it.due == SHORTEST_S
    assert it.look(it.due, 2 * BEYOND, ACCOUNTED) is Remedy.NOTHING
    while it.due < SETTLE_S:
        assert it.look(it.due, BEYOND, ACCOUNTED) is Remedy.NOTHING
    assert it.look(it.due, BEYOND, ACCOUNTED) is Remedy.TRIM
    assert it.look(it.due, ACCOUNTED, ACCOUNTED) is Remedy.NOTHING
    _cut(it, 1.0)


def test_what_a_cut_does_not_free_is_taken_as_it_is_until_as_much_again_has_come() -> None:
    it = Overgrowth(ALLOWANCE)
    level = ACCOUNTED + 3 * ALLOWANCE
    _cut(it, 0.0, level)
    assert it.look(it.due, level, ACCOUNTED) is Remedy.NOTHING
    remedies = set()
    now = 0.0
    while now < 300:
        now = it.due
        remedies.add(it.look(now, level + ALLOWANCE, ACCOUNTED))
    assert remedies == {Remedy.NOTHING, Remedy.TRIM}
    _cut(it, now + TRIM_AGAIN_S, level + ALLOWANCE + 1)


def test_trims_in_vain_become_rare() -> None:
    it = Overgrowth(ALLOWANCE)
    _cut(it, 0.0)
    trims = 0
    while it.due < 600:
        trims += it.look(it.due, BEYOND, ACCOUNTED) is Remedy.TRIM
    assert trims < 40


def test_who_shrank_to_the_accounts_has_the_old_limit_again() -> None:
    it = Overgrowth(ALLOWANCE)
    _cut(it, 0.0, ACCOUNTED + 3 * ALLOWANCE)
    it.look(1.0, ACCOUNTED + 3 * ALLOWANCE, ACCOUNTED)
    assert it.look(2.0, ACCOUNTED, ACCOUNTED) is Remedy.NOTHING
    _cut(it, 3.0)


def test_nothing_is_known_of_the_process() -> None:
    """Where the system does not tell, the process holds nothing, and nothing ever happens."""
    it = Overgrowth(ALLOWANCE)
    assert it.look(0.0, 0, ACCOUNTED) is Remedy.NOTHING
    assert math.isfinite(it.due)
