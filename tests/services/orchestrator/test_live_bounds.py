"""Live bounds of workers."""

from rolloutmq.launch.settings import validate
from rolloutmq.services.orchestrator.live_bounds import LiveBounds

CONFIGURED = {"environment": {"a": {"entry": "m:C", "max_workers": 4}}}


def test_bounds_that_the_broker_no_longer_has_are_taken_back() -> None:
    bounds = LiveBounds(validate(CONFIGURED))
    assert not bounds.apply({})
    assert bounds.apply({"environment.a.max_workers": 16})
    assert bounds.config.environment["a"].max_workers == 16
    assert not bounds.apply({"environment.a.max_workers": 16})
    assert bounds.apply({})
    assert bounds.config.environment["a"].max_workers == 4


def test_refused_bounds_change_nothing_and_are_refused_once() -> None:
    bounds = LiveBounds(validate(CONFIGURED))
    refused = {"environment.a.min_workers": 5}
    assert not bounds.apply(refused)
    assert not bounds.apply(refused)
    assert bounds.config.environment["a"].min_workers == 1
