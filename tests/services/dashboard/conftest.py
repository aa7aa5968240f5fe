"""Runs to look at: one that ended, and one whose broker runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.services.dashboard.browser import Browser
from tests.services.dashboard.record import lines
from tests.services.dashboard.serving import opened

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.services.broker.server import Broker, running_broker


@pytest.fixture
def ended(run_dir: Path) -> RunLayout:
    """A run that ended in order after five steps."""
    layout = RunLayout(run_dir)
    config = validate(
        {"environment": {"sort3": {"entry": "a:B"}}, "run": {"dir": str(run_dir), "name": "sort"}}
    )
    write_json(layout.config, config)
    layout.summary.write_text('{"ended": "the trainer is done", "wall_s": 2.5, "steps": 5}')
    layout.logs.mkdir()
    layout.log("up").touch()
    record = [
        lines.line(lines.pressure(1, (lines.worker(0),)), 0.0, b"pressure"),
        *(lines.line(lines.settled(step, step / 10), step, b"telemetry.settled.run") for step in range(1, 6)),
        lines.line(lines.decision(2, "want 1.9"), 1.0, b"telemetry.scale.sort3"),
        lines.line(lines.latencies(Hop.QUEUE, 0.5), 2.0, b"telemetry.latency.broker"),
        lines.line(lines.host(), 2.0, b"telemetry.host.here"),
        lines.line(lines.process("broker"), 2.0, b"telemetry.process.broker"),
        lines.line(lines.process("sort3-0"), 2.0, b"telemetry.process.sort3-0"),
    ]
    layout.metrics.write_bytes(b"\n".join(record) + b"\n")
    return layout


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Broker]:
    """The broker of a run with one environment, and no orchestrator."""
    config = validate(
        {
            "environment": {"sort3": {"entry": "a:B"}},
            "trainer": {"enabled": False},
            "run": {"dir": str(run_dir), "name": "sort"},
            "broker": {"durability": "os", "segment_bytes": 1 << 24},
        }
    )
    layout = RunLayout(run_dir)
    write_json(layout.config, config)
    with running_broker(config, layout) as broker:
        yield broker


@pytest.fixture
def at_ended(ended: RunLayout) -> Iterator[Browser]:
    """A browser at the page of the run that ended."""
    with opened(ended.root) as browser:
        yield browser


@pytest.fixture
def at_living(broker: Broker, run_dir: Path) -> Iterator[Browser]:
    """A browser at the page of the run whose broker runs."""
    assert broker
    with opened(run_dir) as browser:
        yield browser
