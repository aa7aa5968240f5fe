from rolloutmq.bus.log_throttle import LogThrottle


def test_it_is_said_when_it_changes_and_again_after_a_while() -> None:
    throttle = LogThrottle(every_s=30.0)
    texts = [(0, "a"), (1, "a"), (2, "b"), (3, "b"), (31, "b"), (32, "b"), (62, "b"), (63, ""), (64, "b")]
    assert [now for now, text in texts if throttle.is_due(text, now)] == [0, 2, 32, 62, 64]
