"""A GPU is named by its UUID or its beginning; what is asked for is kept, and confirmed by who carries it out."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.launch.commands import gpus
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, UsageError
from rolloutmq.schemas.files import GpuBook, GpuRecord, RunLayout
from rolloutmq.schemas.wire.control import GetStatus, StatusReply
from rolloutmq.schemas.wire.hardware import Cause, GpuOrder, GpuStanding
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.monitor.text.exit_codes import UNCONFIRMED

UUIDS = ("GPU-1a2b-1", "GPU-1a2c-2", "GPU-9")


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Broker]:
    """The broker of a run whose orchestrator has heard of three GPUs."""
    config, layout = RunConfig(), RunLayout(run_dir)
    write_json(layout.config, config)
    write_json(layout.gpus, GpuBook(gpus=tuple(record(uuid) for uuid in UUIDS)))
    with running_broker(config, layout) as broker:
        yield broker


def record(uuid: str, order: int = 0, causes: tuple[Cause, ...] = (), reason: str = "") -> GpuRecord:
    standing = GpuStanding(
        uuid=uuid, host="h", name="n", at=0.0, order=order, causes=causes, reason=reason, holders=("w-0",)
    )
    return GpuRecord(standing=standing)


def orders(broker: Broker) -> dict[str, GpuOrder]:
    with BlockingClient(broker.endpoints.serve) as client:
        reply = client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply.pressure.gpu_orders


@contextmanager
def orchestrator(broker: Broker, layout: RunLayout) -> Iterator[None]:
    """Carry out what is ordered, as the orchestrator would."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.02):
            found = []
            for uuid in UUIDS:
                order = orders(broker).get(uuid)
                causes = (Cause.MANUAL,) if order is not None and order.cordoned else ()
                reason = f"by hand: {order.reason}" if order is not None and causes else ""
                found.append(record(uuid, 0 if order is None else order.number, causes, reason))
            write_json(layout.gpus, GpuBook(gpus=tuple(found)))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_gpu_is_cordoned_and_used_again(
    broker: Broker, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with orchestrator(broker, RunLayout(run_dir)):
        assert gpus.cordon(run_dir, "9", "new fan") == 0
        assert capsys.readouterr().out == "GPU-9: cordoned, by hand: new fan; running workers stay: w-0\n"
        assert orders(broker)["GPU-9"].reason == "new fan"
        assert gpus.uncordon(run_dir, "GPU-9") == 0
        assert capsys.readouterr().out == "GPU-9: in use\n"
    assert not orders(broker)["GPU-9"].cordoned


def test_an_order_that_nobody_carries_out_is_kept_and_said(
    broker: Broker, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "CONFIRM_S", 0.1)
    assert gpus.cordon(run_dir, "GPU-9", "r") == UNCONFIRMED
    assert capsys.readouterr().err == "error: GPU-9: kept, but not confirmed: no orchestrator runs\n"
    assert orders(broker)["GPU-9"].cordoned


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("GPU-7", "GPU-7: no such GPU; this run has: GPU-1a2b-1, GPU-1a2c-2, GPU-9"),
        ("GPU-1a2", r"GPU-1a2: ambiguous GPU prefix \(matches GPU-1a2b-1, GPU-1a2c-2\)"),
        ("1a2", "ambiguous GPU prefix"),
        ("", "GPU: no such GPU"),
        ("0", "0: no such GPU"),
    ],
)
def test_a_gpu_that_is_not_meant_by_one_name_is_refused(
    broker: Broker, run_dir: Path, given: str, says: str
) -> None:
    kind = ConfigError if "ambiguous" in says else UsageError  # wrong by itself, or on this run
    with pytest.raises(kind, match=says):
        gpus.cordon(run_dir, given, "r")
    with pytest.raises(kind, match=says):
        gpus.uncordon(run_dir, given)
    assert orders(broker) == {}


def test_a_run_without_gpus_says_so(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="its orchestrator has reported no GPU"):
        gpus.cordon(run_dir, "GPU-1", "r")
    with pytest.raises(ConfigError, match="reason: too long; use at most 200 characters"):
        gpus.cordon(run_dir, "GPU-1", "r" * 201)


def test_a_beginning_that_is_a_whole_uuid_is_that_one() -> None:
    records = [record("GPU-1"), record("GPU-12")]
    assert gpus.resolve("GPU-1", records) == "GPU-1"
    assert gpus.resolve("GPU-12", records) == gpus.resolve("12", records) == "GPU-12"
