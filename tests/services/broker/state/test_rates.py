from rolloutmq.services.broker.state.rates import Rate


def test_a_young_rate_is_a_mean_over_its_life() -> None:
    rate = Rate()
    assert rate.per_s(1000.0) == 0.0
    rate.add(4, 1000.0)
    assert rate.per_s(1000.5) == 4.0
    rate.add(4, 1001.0)
    assert rate.per_s(1002.0) == 4.0


def test_what_is_older_than_the_window_is_forgotten() -> None:
    rate = Rate()
    for second in range(30):
        rate.add(10, 5000.0 + second)
    assert rate.per_s(5029.0) == 10.0
    assert rate.per_s(5034.0) == 5.0
    assert rate.per_s(5039.0) == 0.0
    assert rate.per_s(10**9) == 0.0
    rate.add(3, 10.0**9)
    assert rate.per_s(10**9) == 0.3
