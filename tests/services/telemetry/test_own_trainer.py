"""The guide's trainer runs as it is printed, and what the bus tells of a trainer of one's own gives findings."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from string import Template

import pytest
from msgspec.structs import replace

from rolloutmq import Consumer, Group, PolicyVersion, Producer
from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.pubsub import BlockingSubscriber
from rolloutmq.launch import templates
from rolloutmq.launch.settings import load, validate
from rolloutmq.schemas.config.rewards import HealthConfig
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.monitor.text.jsonl import read_lines
from rolloutmq.services.rewards.health_monitor import HealthMonitor

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "own-trainer.md"
WITHIN_S = 60.0
SMALL = {"hidden_size": 16, "layers": 1, "mlp_size": 16}


def groups(first: int, count: int) -> list[Group]:
    """Return groups of 32 sequences, half of them right."""
    rows = [[1, 5 + number % 2, 2] for number in range(32)]
    scores = [float(number % 2) for number in range(32)]
    mask, logprobs = [[0, 1, 1]] * 32, [[0.0, -0.7, -0.7]] * 32
    return [
        Group.build(f"g{first + number}", tokens=rows, mask=mask, scores=scores, inference_logprobs=logprobs)
        for number in range(count)
    ]


def test_the_loop_of_the_guide_runs_twice_by_public_names(run_dir: Path) -> None:
    code = guide()
    assert not re.findall(r"(?:from|import) rolloutmq\.", code), "its names are public"
    code = code.replace("runs/mine", str(run_dir)).replace("% 20", "% 2")
    layout = RunLayout(run_dir)
    for life, steps in enumerate((3, 5)):
        own = {"enabled": False, "steps": steps}
        config = validate({"run": {"dir": str(run_dir)}, "model": SMALL, "trainer": own})
        write_json(layout.config, config)
        with running_broker(config, layout):
            with Producer.blocking(run_dir, env="mine", producer="p", group_size=32, slots=8) as producer:
                for group in groups(10 * life, 6):
                    producer.send(group, timeout_s=WITHIN_S)
            subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=300, check=True)
    lines = list(read_lines(layout.settled, SettledBatch))
    # Step 3 came after the checkpoint of step 2: it is taken again, on the same groups.
    assert [(line.version, line.resumed) for line in lines] == [
        *((PolicyVersion(0, step), False) for step in (1, 2, 3)),
        (PolicyVersion(1, 2), True),
        *((PolicyVersion(1, step), False) for step in (3, 4, 5)),
    ]
    assert lines[2].trained == lines[4].trained
    assert not layout.weights.exists(), "an orderly end removes the shared weights"


def guide() -> str:
    found = re.search(r"<!-- test: loop -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def template() -> str:
    text = files(templates).joinpath("trainer.py.tmpl").read_text()
    return Template(text).substitute(name="mine").replace("SEQUENCES = 256", "SEQUENCES = 64")


@contextmanager
def started(code: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-W", "error", "-c", code])
    try:
        yield process
    finally:
        process.kill()
        process.wait(WITHIN_S)


def settled(layout: RunLayout) -> list[SettledBatch]:
    return list(read_lines(layout.settled, SettledBatch))


def wait_for_batches(layout: RunLayout, count: int, trainer: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 300.0
    while len(settled(layout)) < count:
        assert time.monotonic() < deadline, "no step"
        assert trainer.poll() is None, "the trainer has ended"
        time.sleep(0.05)


@pytest.mark.extended
@pytest.mark.parametrize("written", [guide, template])
def test_a_second_start_is_refused_and_does_not_touch_the_first(
    run_dir: Path, written: Callable[[], str]
) -> None:
    """It took the batches of the first over, and ended both."""
    code = written().replace("runs/mine", str(run_dir))
    own = {"enabled": False, "steps": 3}
    config = validate({"run": {"dir": str(run_dir)}, "model": SMALL, "trainer": own})
    layout = RunLayout(run_dir)
    write_json(layout.config, config)
    with (
        running_broker(config, layout),
        Producer.blocking(run_dir, env="mine", producer="p", group_size=32, slots=8) as producer,
    ):
        first_two, others = groups(0, 2), groups(2, 6)
        for group in first_two:
            producer.send(group, timeout_s=WITHIN_S)
        with started(code) as first:
            wait_for_batches(layout, 1, first)
            second = subprocess.run(
                [sys.executable, "-W", "error", "-c", code], timeout=300, capture_output=True, text=True
            )
            assert second.returncode == 1
            assert f"in use by process {first.pid}; end that process first" in second.stderr
            for group in others[:2]:
                producer.send(group, timeout_s=WITHIN_S)
            wait_for_batches(layout, 2, first)
        assert [(line.version, line.resumed) for line in settled(layout)] == [
            (PolicyVersion(0, 1), False),
            (PolicyVersion(0, 2), False),
        ]
        # The first was killed: the next start takes the weights over at once, and goes on from the checkpoint.
        for group in others[2:]:
            producer.send(group, timeout_s=WITHIN_S)
        subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=300, check=True)
    assert settled(layout)[-1].version == PolicyVersion(1, 3)


def test_reports_of_the_broker_give_findings(run_dir: Path) -> None:
    monitor = HealthMonitor(HealthConfig(window_steps=2))
    found = []
    with running_broker(load(None, environ={}), RunLayout(run_dir)) as broker:
        wanted = [topics.PRESSURE, topics.TELEMETRY]
        with BlockingSubscriber(broker.endpoints.events, wanted) as feed:
            assert feed.poll(WITHIN_S) is not None  # the subscription is known
            with (
                Producer.blocking(run_dir, env="mine", producer="p", group_size=2, slots=4) as producer,
                Consumer.blocking(run_dir, sequences=2) as consumer,
            ):
                flat = Group.build("g", tokens=[[1, 2], [1, 3]], mask=[[0, 1], [0, 1]], scores=[0.5, 0.5])
                for number in range(2):
                    producer.send(replaced(flat, f"g{number}"), timeout_s=WITHIN_S)
                for _, batch in zip(range(2), consumer, strict=False):
                    consumer.log(batch.step, clipped=1.0)
                    batch.ack()
            seen: list[object] = []
            deadline = time.monotonic() + WITHIN_S
            while len(seen) < 4 and time.monotonic() < deadline:
                event = codec.decode_event(known[1]) if (known := feed.poll(1.0)) is not None else None
                if isinstance(event, StepFigures):
                    monitor.take_figures(event)
                    seen.append(event)
                elif isinstance(event, BatchSettled):
                    found += monitor.feed(event, 0.0)
                    seen.append(event)
        last = next(event for event in reversed(seen) if isinstance(event, BatchSettled))
        found += monitor.feed(replace(last, step=3), 0.0)
    assert {(one.env, one.finding) for one in found} == {("mine", "collapse"), ("trainer", "clipping")}


def replaced(group: Group, name: str) -> Group:
    return Group.build(name, tokens=group["tokens"], mask=group["mask"], scores=group.scores)
