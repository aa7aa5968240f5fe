"""A worker whose host does not reach its engine: it gives its permits back, and says what it lacks."""

import asyncio
import itertools
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.services.worker.test_runtime import Stage, configured, living

from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.wire.control import WorkerState
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.worker.openai import engine_choice

if TYPE_CHECKING:
    from tests.services.worker.conftest import FakeServer


async def beat(layout: RunLayout, engine: InferenceAddress) -> None:
    """Tell of an engine as it does while it lives, whoever reaches it."""
    for number in itertools.count(1):
        write_json(layout.engine(engine.name), msgspec.structs.replace(engine, number=number))
        await asyncio.sleep(0.1)


async def test_a_worker_cut_off_from_its_engine_leaves_its_permits_to_others_until_it_reaches_it(
    run_dir: Path, tmp_path: Path, server: "FakeServer", monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept them for `rollout_timeout_s` again and again, and `status` said that it was rolling out."""
    monkeypatch.setattr(engine_choice, "GIVEN_UP_S", 0.3)
    monkeypatch.setattr(engine_choice, "PROBE_MAX_S", 0.2)
    config, layout = configured(tmp_path, pacing=True, max_staleness=0), RunLayout(run_dir)
    write_json(layout.config, config)
    with running_broker(config, layout) as broker, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        far = InferenceAddress(url=f"http://127.0.0.1:{port}", pid=1, name="inference.far")
        beating = asyncio.create_task(beat(layout, far))
        stage = Stage(run_dir, config, broker)
        async with living(worker := stage.worker(), stage.stop):
            status = await stage.heard(lambda it: bool(it.waits_for))
            assert status.waits_for == "no engine is within reach: inference.far"
            assert "Cannot connect to host 127.0.0.1" in status.engines_away["inference.far"]
            async with asyncio.timeout(15):
                while (await stage.pressure()).lanes[0].granted:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (worker.state, worker.beat().in_hand) == (WorkerState.READY, 0)
            async with Producer.open(run_dir, env="echo", producer="other", group_size=4) as other:
                with await other.acquire(timeout_s=15.0):
                    pass
            await server.stop()
            closed.close()
            await server.start(port)
            await stage.heard(lambda it: it.produced > 0 and not it.engines_away and not it.waits_for)
            stage.stop.request("SIGTERM")
        beating.cancel()
