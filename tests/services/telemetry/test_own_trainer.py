"""The step event of the guide for own trainers is heard, and the health of the rewards follows it."""

import re
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.encoding import codec
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.launch.settings import load
from rolloutmq.schemas.config.rewards import HealthConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import StepDone
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.rewards.health_monitor import HealthMonitor

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "own-trainer.md"
WITHIN_S = 60.0


def snippet(run_dir: Path) -> dict[str, Any]:
    """Run the block of the guide for a run directory, and return its names."""
    (code,) = re.findall(r"<!-- test: events -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code.replace("runs/mine", str(run_dir)), "own-trainer.md", "exec"), names)
    return names


async def test_the_event_of_a_trainer_of_ones_own_gives_findings(run_dir: Path) -> None:
    with running_broker(load(None, environ={}), RunLayout(run_dir)):
        names = snippet(run_dir)
        try:
            async with EventFeed(RunLayout(run_dir), [b"step"]) as feed:
                found = await heard(run_dir, names, feed)
        finally:
            names["events"].close()
    (lane,) = found.scores
    assert (lane.env, lane.groups, lane.flat, lane.sequences) == ("mine", 1, 1, 2)
    assert (found.step, found.staleness_max, found.extra) == (1, 3, {"clipped": 0.25})
    monitor = HealthMonitor(HealthConfig(window_steps=2))
    assert monitor.feed(found, 0.0) == []
    (finding,) = monitor.feed(replace(found, step=2), 0.0)
    assert (finding.env, finding.finding) == ("mine", "collapse")


async def heard(run_dir: Path, names: dict[str, Any], feed: EventFeed) -> StepDone:
    """Pull a batch and publish its step until it is heard: a socket that has just connected drops events."""
    group = Group.build("g", tokens=[[1, 2], [1, 3]], mask=[[0, 1], [0, 1]], scores=[0.5, 0.5])
    async with (
        Producer.open(run_dir, env="mine", producer="p", group_size=2) as producer,
        Consumer.open(run_dir, sequences=2) as consumer,
    ):
        await producer.send(group)
        batch = await consumer.pull(1, consumer.version, WITHIN_S)
        assert batch is not None
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            names["publish"](names["events"], batch, 1, [3], clipped=0.25)
            if (event := await feed.next(0.2)) is not None:
                done = codec.decode_event(event[1])
                assert isinstance(done, StepDone)
                await consumer.settle(batch)
                return done
    raise AssertionError("nothing was heard")
