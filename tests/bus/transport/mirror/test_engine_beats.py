"""Heartbeats of an engine of another host: what it lacks is told."""

import asyncio
from pathlib import Path

import pytest

from rolloutmq.bus.transport.mirror import beats, engine_beats
from rolloutmq.bus.transport.mirror.engine_beats import EngineBeats
from rolloutmq.bus.transport.mirror.mirror import Mirror
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Connection, RunLayout

BROKER = "tcp://127.0.0.1:7760"


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("posix_shm", "with weights.backend=posix_shm an engine runs on the host of the trainer"),
        ("stream", "start `rolloutmq relay` on this host"),
    ],
)
async def test_an_engine_without_weights_says_what_is_missing(
    run_dir: Path, backend: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_beats, "WEIGHTS_S", 0.1)
    monkeypatch.setattr(beats, "BEAT_S", 0.02)
    config = RunConfig.model_validate({"weights": {"backend": backend}})
    monkeypatch.setattr(Mirror, "config", config)
    mirror = Mirror(Connection(addresses=(BROKER,)), lambda _data, _layout: RunConfig(), run_dir)
    beating = asyncio.create_task(
        EngineBeats("inference.far", lambda own, _: own).run(mirror, RunLayout(run_dir)), name="beats"
    )
    async with asyncio.timeout(60):
        while said not in caplog.text:  # noqa: ASYNC110 - a log line has no event
            await asyncio.sleep(0.01)
    beating.cancel()
    await asyncio.wait({beating})
