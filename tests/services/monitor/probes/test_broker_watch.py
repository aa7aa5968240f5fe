"""Whether a broker answers: one that reads its journal hangs not, one that is stopped does."""

import asyncio
import os
from pathlib import Path

from msgspec.structs import replace
from tests.services.orchestrator.fake_broker import until

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.monitor.probes.broker_watch import HUNG_S, BrokerWatch, keep_asking


def test_silence_counts_once_the_broker_serves() -> None:
    watch = BrokerWatch()
    for second in range(1000):
        watch.note(serves=False, answered=False, now=float(second))
    assert not watch.hangs(1000.0)
    watch.note(serves=True, answered=False, now=1000.0)
    assert not watch.hangs(1000.0 + HUNG_S)
    assert watch.hangs(1001.0 + HUNG_S)


def test_an_answer_ends_the_silence() -> None:
    watch = BrokerWatch()
    watch.note(serves=True, answered=False, now=0.0)
    watch.note(serves=True, answered=True, now=100.0)
    assert watch.answers
    assert not watch.hangs(200.0)


def test_another_process_of_the_broker_ends_the_silence() -> None:
    watch = BrokerWatch()
    watch.note(serves=True, answered=False, now=0.0)
    watch.note(serves=False, answered=False, now=100.0)
    watch.note(serves=True, answered=False, now=101.0)
    assert not watch.hangs(102.0)


async def test_a_broker_is_asked_and_its_silence_noted(run_dir: Path) -> None:
    layout, watch = RunLayout(run_dir), BrokerWatch()
    config = RunConfig.model_validate({"environment": {"env": {"entry": "m:C"}}})
    asking = asyncio.create_task(keep_asking(watch, layout, os.getpid))
    try:
        with running_broker(config, layout):
            await until(lambda: watch.answers)
            endpoints = read_endpoints(run_dir)
            assert endpoints is not None
        write_json(layout.endpoints, replace(endpoints, pid=os.getpid()))
        await until(lambda: watch.hangs(1e12))
        assert not watch.answers
        layout.endpoints.write_text("{")
        await until(lambda: not watch.hangs(1e12))
    finally:
        asking.cancel()
        await asyncio.wait({asking})
