"""Requests to an autoscaler that is played: recorded, slow, or failing."""

import logging
import threading
from collections.abc import Sequence

import pytest

from rolloutmq.services.orchestrator.cluster.capacity import request
from rolloutmq.services.orchestrator.cluster.capacity.request import AutoscalerRequests, Bundles, shapes

LIMIT_S = 20.0
ONE: Bundles = ({"CPU": 1.0},)


def test_requests_are_made_one_after_the_other_and_withdrawn() -> None:
    made: list[tuple[Bundles, Sequence[str]]] = []
    requests = AutoscalerRequests(lambda bundles, avoid: made.append((bundles, avoid)))
    for bundles in (ONE * 3, ONE, ()):
        requests.want(bundles, ["n"])
        assert requests.settle(LIMIT_S)
    assert made == [(ONE * 3, ["n"]), (ONE, ["n"]), ((), ["n"])]


def test_one_that_does_not_answer_holds_nobody_up_and_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "SLOW_S", 0.0)
    made: list[Bundles] = []
    asked, free = threading.Event(), threading.Event()

    def ask(bundles: Bundles, _: Sequence[str]) -> None:
        made.append(bundles)
        asked.set()
        assert free.wait(LIMIT_S)

    requests = AutoscalerRequests(ask)
    requests.want(ONE)
    assert asked.wait(LIMIT_S)
    requests.want(ONE * 2)
    requests.want(ONE * 3)
    assert not requests.settle(0.05)
    assert "has not been answered" in caplog.text
    free.set()
    assert requests.settle(LIMIT_S)
    assert made == [ONE, ONE * 3]  # only the newest counts


def test_a_failure_is_told_and_the_next_request_is_made(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made: list[Bundles] = []

    def ask(bundles: Bundles, _: Sequence[str]) -> None:
        if len(bundles) == 1:
            raise RuntimeError("no control service")
        made.append(bundles)

    requests = AutoscalerRequests(ask)
    requests.want(ONE)
    assert requests.settle(LIMIT_S)
    assert "autoscaler not asked error=RuntimeError: no control service" in caplog.messages
    requests.want(ONE * 2)
    assert requests.settle(LIMIT_S)
    assert made == [ONE * 2]
    assert "asked the autoscaler for=2 x 1 CPU" in caplog.messages


def test_shapes_are_counted() -> None:
    both = {"CPU": 0.5, "GPU": 1.0}
    assert shapes(({"CPU": 2.0}, both, both)) == "1 x 2 CPU, 2 x 0.5 CPU + 1 GPU"
    assert shapes(()) == "none"
