"""The lives of a run."""

from rolloutmq.schemas.lives import Life, paused_s, pauses, seconds_of

LIVES = (Life(10.0, 40.0), Life(100.0, 130.0), Life(131.0))


def test_a_run_lasts_as_long_as_its_lives_together() -> None:
    assert seconds_of(LIVES, 141.0) == 70.0
    assert seconds_of((), 141.0) == 0.0
    assert seconds_of([Life(10.0, 5.0)], 1.0) == 0.0, "a clock that was set back"


def test_the_time_between_two_lives_is_a_pause() -> None:
    assert pauses(LIVES) == [(40.0, 100.0), (130.0, 131.0)]
    assert pauses(LIVES[:1]) == pauses(()) == []
    assert pauses([Life(10.0), Life(20.0)]) == [], "nobody recorded the end of the first"


def test_only_the_part_of_a_pause_within_a_span_counts() -> None:
    assert paused_s(LIVES, 0.0, 200.0) == 61.0
    assert paused_s(LIVES, 50.0, 90.0) == 40.0
    assert paused_s(LIVES, 10.0, 40.0) == 0.0
