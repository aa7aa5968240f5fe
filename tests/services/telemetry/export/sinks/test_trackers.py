"""The trackers themselves, in the processes of their sinks: `make test-export`.

Every test runs telemetry on a bus, publishes, ends it, and reads what the tracker kept with the tracker's own reader.
"""

import asyncio
import importlib.util
import json
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.services.telemetry.bus import OneGpu, forwarding, recorded
from tests.services.telemetry.export.events import latency, pressure, row, settled, step

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.schemas.config.run import RunConfig, RunSection, TelemetryConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.telemetry.export.sinks import points
from rolloutmq.services.telemetry.export.sinks.outlet import FINISH_S
from rolloutmq.services.telemetry.server import Telemetry

PACKAGES = ("wandb", "tensorboard", "mlflow")
pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in PACKAGES),
        reason="the trackers are in an environment of their own: make test-export",
    ),
]
DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every event as its own sample, and nothing of this user's trackers."""
    monkeypatch.setattr(points, "SAMPLE_S", 0.0)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def configured(layout: RunLayout, **telemetry: Any) -> RunConfig:
    config = RunConfig(
        run=RunSection(name="sums", tracking_project="demo", tracking_group="night"),
        telemetry=TelemetryConfig(interval_s=0.1, **telemetry),
    )
    write_json(layout.config, config.model_dump(mode="json"))
    return config


async def lived(config: RunConfig, layout: RunLayout, batches: Mapping[int, float]) -> float:
    """Run telemetry while batches with these rewards by step are settled; return the seconds of its end."""
    stop = Stop()
    service = asyncio.create_task(Telemetry(config, layout, OneGpu()).run(stop))
    seen = 0
    with forwarding(layout), Publisher(f"ipc://{layout.root}/publish") as publisher:
        async with asyncio.timeout(DEADLINE_S):
            while not recorded(layout)["host_sample"][seen:]:  # it listens
                assert not service.done()
                await asyncio.sleep(0.05)
            before = len(recorded(layout)["batch_settled"])
            for number, reward in batches.items():
                publisher.publish(topics.telemetry("settled", "run"), settled(number, reward=reward))
                publisher.publish(topics.STEP, step(number))
                publisher.publish(topics.PRESSURE, pressure())
                sample = latency(row(Hop.QUEUE, [0.5], env="math"))
                publisher.publish(topics.telemetry("latency", "broker"), sample)
            while len(recorded(layout)["batch_settled"]) < before + len(batches):
                assert not service.done()
                await asyncio.sleep(0.05)
        began = time.monotonic()
        stop.request("test")
        await asyncio.wait_for(service, DEADLINE_S)
    layout.metrics.unlink()
    return time.monotonic() - began


REWARDS = {1: 0.25, 2: 0.5}
LATER = {3: 0.75}


async def test_tensorboard_keeps_both_lives(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    layout = RunLayout(run_dir)
    config = configured(layout, sinks=("tensorboard",))
    for batches in (REWARDS, LATER):
        await lived(config, layout, batches)
    found = EventAccumulator(str(layout.trackers / "tensorboard" / "sums"))
    found.Reload()

    def scalars(name: str) -> dict[int, float]:
        return {one.step: one.tensor_proto.float_val[0] for one in found.Tensors(name)}

    assert scalars("train/reward") == scalars("reward/math") == REWARDS | LATER
    assert scalars("train/loss") == dict.fromkeys(REWARDS | LATER, 0.25)
    assert "train/staleness_max" in found.Tags()["tensors"]


async def test_mlflow_resumes_its_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    layout = RunLayout(run_dir)
    config = configured(layout, sinks=("mlflow",))
    for batches in (REWARDS, LATER):
        await lived(config, layout, batches)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((layout.trackers / "mlflow").resolve().as_uri())
    experiment = client.get_experiment_by_name("demo")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert {metric.step: metric.value for metric in history} == REWARDS | LATER
    assert run.info.status == "FINISHED"
    assert (run.info.run_name, run.data.tags["rolloutmq.group"]) == ("sums", "night")
    assert run.data.params["run.name"] == "sums"


def records_of(path: Path) -> Iterator[Any]:
    """Yield the records of a file of W&B, in the format of LevelDB's log: blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, body = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        body += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # a whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(body)
            body = b""


def history_of(path: Path) -> list[dict[str, Any]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records_of(path)
        if record.WhichOneof("record_type") == "history"
    ]


async def test_wandb_has_one_run_in_both_lives(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    config = configured(layout, sinks=("wandb",), wandb_mode="offline")
    for batches in (REWARDS, LATER):
        await lived(config, layout, batches)
    files = sorted((layout.trackers / "wandb").rglob("*.wandb"))
    assert len(files) == 2  # `wandb sync` joins them, since their id is the same
    assert len({file.name for file in files}) == 1
    runs = [record.run for record in records_of(files[0]) if record.WhichOneof("record_type") == "run"]
    assert {(run.project, run.run_group, run.display_name) for run in runs} == {("demo", "night", "sums")}
    rows = [row for file in files for row in history_of(file)]
    assert {
        row["policy_step"]: row["train/reward"] for row in rows if "train/reward" in row
    } == REWARDS | LATER
    assert {row["train/loss"] for row in rows if "train/loss" in row} == {0.25}


async def test_all_sinks_at_once_and_the_percentiles(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points.Points.__init__, "__defaults__", (0.0,))  # sample at each event
    layout = RunLayout(run_dir)
    config = configured(layout, sinks=PACKAGES, wandb_mode="offline")
    await lived(config, layout, REWARDS)
    (file,) = (layout.trackers / "wandb").rglob("*.wandb")
    names = {name for row in history_of(file) for name in row}
    assert {"latency/queue/math/p99_s", "queue/rollout_pressure", "wait/trainer/no_batch_s"} <= names
    assert {path.name for path in layout.trackers.iterdir()} == {
        "wandb",
        "tensorboard",
        "mlflow",
        "wandb.json",
        "mlflow.json",
    }


async def test_a_server_that_is_away_costs_its_points_only(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens on port 9 of this machine, so both give up at once, or wait; telemetry ends in time."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    layout = RunLayout(run_dir)
    config = configured(layout, sinks=PACKAGES, mlflow_uri="http://127.0.0.1:9")
    took_s = await lived(config, layout, REWARDS)
    assert took_s < FINISH_S + 30.0  # on a busy machine, too
    assert "sink=tensorboard" not in caplog.text
    assert list((layout.trackers / "tensorboard").rglob("events*"))
    assert "sink troubled sink=mlflow" in caplog.text


async def test_wandb_without_a_login_is_told(
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    layout = RunLayout(run_dir)
    await lived(configured(layout, sinks=("wandb",)), layout, REWARDS)
    assert "sink troubled sink=wandb reason=its process ended with exit code 1" in caplog.text
    assert "sink failed sink=wandb error=UsageError: No API key configured." in capfd.readouterr().err
