"""Meters of the tokens within rollouts, with workers that complete a turn each second."""

import pytest

from rolloutmq.services.orchestrator.autoscaling.servers.progress import (
    FURTHER,
    GROUPS,
    ProgressMeter,
    Sampled,
    reach,
    unslowed,
)

SEQUENCES, TOKENS = 8, 10
"""Sequences that a worker rolls out at once, and tokens of a completion of each."""
LONG: int = 3 * GROUPS
"""Seconds in which one worker tells its pace."""


class Fleet:
    """Workers that complete a turn of each sequence in a second if nothing slows them."""

    def __init__(self) -> None:
        self.meter = ProgressMeter()
        self.seen = Sampled(0, SEQUENCES, SEQUENCES)

    def run(self, workers: int, *, seconds: int = LONG, pace: float = 1.0, confirms: bool = True) -> int:
        """Let so many workers run, and return how many may be tried."""
        for _ in range(seconds):
            completions = round(workers * SEQUENCES * pace)
            self.seen = Sampled(
                workers,
                SEQUENCES,
                SEQUENCES,
                self.seen.running_s + workers,
                self.seen.completions + completions,
                self.seen.tokens + TOKENS * completions,
            )
            self.meter = self.meter.looked(self.seen, confirms=confirms)
        return reach({"a": self.meter}, "a")


def test_workers_as_fast_as_the_first_are_confirmed() -> None:
    fleet = Fleet()
    assert fleet.run(4) == 4 * FURTHER
    assert fleet.run(7) == int(7 * FURTHER)
    assert fleet.meter.base == pytest.approx(SEQUENCES * TOKENS)


def test_a_measurement_begins_when_each_sequence_has_had_a_completion() -> None:
    fleet = Fleet()
    fleet.run(4)
    assert fleet.run(8, seconds=2) == 4 * FURTHER, "it begins"
    assert fleet.run(8, seconds=GROUPS // 8 - 1) == 4 * FURTHER, "too few completions"
    assert fleet.run(8, seconds=1) == 8 * FURTHER


def test_slower_workers_are_not_confirmed_however_long_they_run() -> None:
    fleet = Fleet()
    fleet.run(4)
    assert fleet.run(8, seconds=4 * LONG, pace=0.5) == 0
    assert fleet.meter.confirmed == 4
    assert fleet.run(8) == 8 * FURTHER, "the server became faster"


def test_workers_that_wait_for_credit_are_not_slow() -> None:
    fleet = Fleet()
    fleet.run(4)
    for _ in range(4 * LONG):
        seen = fleet.seen
        fleet.seen = Sampled(
            8, SEQUENCES, SEQUENCES, seen.running_s + 4.0, seen.completions + 32, seen.tokens + 32 * TOKENS
        )
        fleet.meter = fleet.meter.looked(fleet.seen, confirms=True)
    assert reach({"a": fleet.meter}, "a") == 8 * FURTHER


def test_without_completions_nothing_is_confirmed() -> None:
    fleet = Fleet()
    assert fleet.run(4, pace=0.0) == 0
    assert fleet.meter.pace == 0.0


def test_nothing_is_confirmed_before_groups_tell_how_many_are_wanted() -> None:
    fleet = Fleet()
    assert fleet.run(4, confirms=False) == 0
    assert fleet.run(4) == 4 * FURTHER


def test_groups_have_the_final_word_on_the_base() -> None:
    """Their sequences became longer, and a token takes longer in them."""
    fleet = Fleet()
    fleet.run(4)
    fleet.run(8, pace=0.75)
    fleet.meter = fleet.meter.proven()
    assert fleet.run(8, pace=0.75) == 8 * FURTHER


def test_a_slow_environment_stops_the_others_since_servers_are_shared() -> None:
    fast, slow = Fleet(), Fleet()
    fast.run(4)
    slow.run(4)
    slow.run(8, pace=0.5)
    assert reach({"a": fast.meter}, "a") == 4 * FURTHER
    assert reach({"a": fast.meter, "b": slow.meter}, "a") == 0


def test_the_pace_of_slowed_workers_is_told_as_if_nothing_slowed_them() -> None:
    fleet = Fleet()
    fleet.run(4)
    assert unslowed({"a": fleet.meter}, "a", 0.3) == 0.3
    fleet.run(8, pace=0.5)
    assert unslowed({"a": fleet.meter}, "a", 0.3) == pytest.approx(0.6)
    assert unslowed({}, "a", 0.3) == 0.3
