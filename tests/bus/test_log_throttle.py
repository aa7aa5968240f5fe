from rolloutmq.bus.log_throttle import LogThrottle, WaitLog


def test_it_is_said_when_it_changes_and_again_after_a_while() -> None:
    throttle = LogThrottle(every_s=30.0)
    texts = [(0, "a"), (1, "a"), (2, "b"), (3, "b"), (31, "b"), (32, "b"), (62, "b"), (63, ""), (64, "b")]
    assert [now for now, text in texts if throttle.is_due(text, now)] == [0, 2, 32, 62, 64]


def test_a_wait_is_said_once_it_has_lasted_and_not_for_each_of_many() -> None:
    log = WaitLog(after_s=2.0, every_s=30.0)
    said = []
    for now, reason in [(0, "a"), (1.9, "a"), (2, "a"), (3, "b"), (4, "b"), (33, "b")]:
        said += [now] * log.is_due(reason, now)
    assert said == [2, 3, 33]
    assert log.waited_s(34) == 34
    log.over()
    assert log.waited_s(35) == 0
    log.begin(40)
    assert not log.is_due("b", 41)
    assert not log.is_due("b", 45)  # the same reason as before, within its interval
    assert log.is_due("b", 63)
