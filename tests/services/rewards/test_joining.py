"""Ensembles in a run: windows in its directory, findings on its bus, over a real broker."""

import asyncio
import logging
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutmq import Ensemble
from rolloutmq.bus.encoding import codec
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.launch.settings import load
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.rewards.joining import FindingOutlet, ensembles_of, joined

HEARD_S = 60.0


def agree(_task: Any, answer: Any) -> float:
    return float(answer)


def oppose(_task: Any, answer: Any) -> float:
    return -float(answer)


def ensemble() -> Ensemble:
    return Ensemble({"a": agree, "b": oppose}, agreement={"min_items": 8, "low": 0.5}, window=64)


class Rubric:
    rewards = ensemble()
    name = "other attributes stay as they are"

    def __init__(self) -> None:
        self.style = ensemble()


def test_ensembles_of_the_class_and_of_the_object_are_found() -> None:
    rubric = Rubric()
    assert ensembles_of(rubric) == {"rewards": Rubric.rewards, "style": rubric.style}
    assert ensembles_of(object()) == {}
    rubric.rewards = ensemble()  # that of the object stands before that of its class
    assert ensembles_of(rubric)["rewards"] is not Rubric.rewards


async def heard(feed: EventFeed, outlet: FindingOutlet | None = None) -> HealthFinding:
    """Return the next finding on the bus. With an outlet it is told again until a connection stands."""
    deadline = time.monotonic() + HEARD_S
    while time.monotonic() < deadline:
        if outlet is not None:
            outlet.tell(HealthFinding(env="math", at=1.0, finding="hello", problem="are you there"))
        event = await feed.next(0.2 if outlet is not None else HEARD_S)
        if event is not None:
            topic, payload = event
            assert topic == b"telemetry.health.math"
            found = codec.decode_event(payload)
            assert isinstance(found, HealthFinding)
            if outlet is not None or found.finding != "hello":
                return found
    raise AssertionError("nothing was heard")


async def rated(of: Ensemble, count: int = 16) -> None:
    await of.rate(None, np.random.default_rng(1).random(count).tolist())


async def test_findings_reach_the_bus_and_windows_the_run_directory(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir(mode=0o700)
    rubric = Rubric()
    with running_broker(load(None, environ={}), layout):
        async with EventFeed(layout, [b"telemetry.health."]) as feed:
            outlet = FindingOutlet(layout)
            try:
                assert (await heard(feed, outlet)).problem == "are you there"
            finally:
                outlet.close()
            with joined(rubric, "math", "math-0", layout):
                told = rubric.style._on_finding
                await heard(feed, told.__self__)  # type: ignore[attr-defined]
                await rated(rubric.style)
                found = await heard(feed)
    assert (found.finding, found.env, found.source, found.ended) == ("low_agreement", "math", "math-0", False)
    assert found.numbers["alpha"] < 0.5
    assert found.remedy
    assert stat.S_IMODE(layout.ratings.stat().st_mode) == 0o700
    assert [path.name for path in layout.ratings.iterdir()] == ["math.style.window"]


def test_without_a_broker_findings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = RunLayout(tmp_path)
    rubric = Rubric()
    with caplog.at_level(logging.INFO), joined(rubric, "math", "math-0", layout):
        asyncio.run(rated(rubric.rewards))
    counts = "failed=0 timed_out=0 invalid=0 refused=0 rated=16 missing=0"
    assert f"rater ended ensemble=rewards rater=b calls=16 retries=0 {counts}" in caplog.text
    assert "last_error=none" in caplog.text
    assert "finding=low_agreement" in caplog.text
    assert (layout.ratings / "math.rewards.window").is_file()


@pytest.mark.parametrize(("ended", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_the_end_of_a_finding_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ended: bool, level: int
) -> None:
    problem = "" if ended else "half of the groups"
    with caplog.at_level(logging.INFO):
        finding = HealthFinding(env="math", at=1.0, finding="collapse", problem=problem, ended=ended)
        FindingOutlet(RunLayout(tmp_path)).tell(finding)
    (record,) = caplog.records
    assert record.levelno == level
    assert ("has ended env=math finding=collapse" in record.getMessage()) is ended
    assert "problem=;" not in record.getMessage()


def test_an_environment_without_ensembles_takes_no_part(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    with joined(object(), "math", "math-0", layout):
        assert not layout.ratings.exists()
