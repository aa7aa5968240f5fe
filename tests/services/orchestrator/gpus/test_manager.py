"""The steward carries out what the fleet says, and what it keeps on disk survives it, or is put aside."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.services.orchestrator.gpus.traces import GIB, lost, silent, using

from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import GpuBook, GpuRecord, RunLayout
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec, Role
from rolloutmq.schemas.wire.control import Pressure, WorkerStatus
from rolloutmq.schemas.wire.hardware import Cause, GpuOrder, GpuStanding
from rolloutmq.schemas.wire.telemetry import GpuAbsence, GpuSample
from rolloutmq.services.monitor.status.gpus import read_gpus
from rolloutmq.services.orchestrator.gpus.manager import GPUS_LIMIT, GpuLimit, GpuManager
from rolloutmq.services.orchestrator.supervision.core import Ladder, Phase, ProcessView, term_ladder
from rolloutmq.services.process.identity import identify
from rolloutmq.services.telemetry.probes import host_name

LADDER = term_ladder(1.0)
HEARD: dict[str, WorkerStatus] = {}


def config(**env: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"environment": {"env": {"entry": "m:C", "gpus": 1, **env}, "cpu": {"entry": "m:C"}}}
    )


def spec(name: str) -> ProcessSpec:
    return ProcessSpec(name=name, role=Role.WORKER, argv=("x",), log="x.log")


def here(sample: GpuSample) -> GpuSample:
    return replace(sample, host=host_name())


@dataclass
class FakeWorkers:
    """A supervisor that does nothing but note what it is told."""

    seen: dict[str, ProcessView] = field(default_factory=dict)
    identities: dict[str, ProcessIdentity] = field(default_factory=dict)
    told: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, name: str, phase: Phase) -> None:
        self.seen[name] = ProcessView(name, Role.WORKER, phase, 0.0, 0.0, 0, 0, "")
        if phase is Phase.RUNNING:
            self.identities[name] = identify(name, Role.WORKER, os.getpid(), "t")
        else:
            self.identities.pop(name, None)

    def views(self) -> Mapping[str, ProcessView]:
        return self.seen

    def identity(self, name: str) -> ProcessIdentity | None:
        return self.identities.get(name)

    def retire(self, name: str, ladder: Ladder, reason: str) -> None:
        assert ladder in {LADDER, ()}
        self.told.append(("retire", name, reason))

    def forget(self, name: str) -> None:
        self.told.append(("forget", name))

    def hold(self, name: str, held: bool) -> None:
        self.told.append(("hold" if held else "let", name))


@pytest.fixture
def layout(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return RunLayout(run_dir)


def standing(layout: RunLayout, uuid: str) -> GpuStanding:
    book = read_json(layout.gpus, GpuBook) or GpuBook()
    return next(record.standing for record in book.gpus if record.standing.uuid == uuid)


def test_a_worker_is_equipped_with_its_gpu_and_one_without_need_is_left_alone(layout: RunLayout) -> None:
    steward = GpuManager(config(), layout)
    steward.hear(here(using(0)))

    equipped = steward.equipped(spec("env-0"))
    assert equipped is not None
    assert equipped.env == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert steward.equipped(spec("env-1")) is None
    assert steward.equipped(spec("cpu-0")) == spec("cpu-0")


def test_the_limit_counts_what_can_be_placed_beside_what_there_is(layout: RunLayout) -> None:
    steward = GpuManager(config(), layout)
    steward.hear(GpuAbsence(host=host_name(), number=1, at=0.0, why="no driver"))
    assert steward.limit("env", 0, 2) == GpuLimit(0, "0 can be placed: no_gpu: no GPU reported (no driver)")
    steward.hear(here(using(0)))
    assert steward.limit("env", 2, 4) == GpuLimit(
        3, "3 can be placed: no_gpu: 0 of 1 wanted; 1 taken by other workers"
    )
    assert steward.limit("env", 2, 3) is None
    assert steward.limit("env", 4, 2) is None
    assert steward.limit("cpu", 0, 100) is None


def test_gpus_of_other_hosts_are_nobodys_here(layout: RunLayout) -> None:
    steward = GpuManager(config(), layout)
    steward.hear(replace(using(0), host="elsewhere"))
    steward.hear(GpuAbsence(host="elsewhere", number=1, at=0.0, why="no driver there"))
    assert steward.limit("env", 0, 1) == GpuLimit(0, "0 can be placed: no_gpu: no GPU reported")


def test_gpus_beyond_any_host_are_not_kept(layout: RunLayout) -> None:
    steward = GpuManager(config(), layout)
    for index in range(GPUS_LIMIT + 9):
        steward.hear(here(using(0, f"GPU-{index}")))
    assert steward.limit("env", 0, 2 * GPUS_LIMIT) == GpuLimit(
        GPUS_LIMIT, f"{GPUS_LIMIT} can be placed: no_gpu: 0 of 1 wanted; {GPUS_LIMIT} taken by other workers"
    )


def test_a_part_of_the_host_that_was_given_is_kept_to(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
    steward = GpuManager(config(), layout)
    for uuid in ("GPU-1", "GPU-2"):
        steward.hear(here(using(0, uuid)))
    equipped = steward.equipped(spec("env-0"))
    assert equipped is not None
    assert equipped.env["CUDA_VISIBLE_DEVICES"] == "GPU-2"
    assert steward.limit("env", 1, 2) == GpuLimit(
        1, "1 can be placed: no_gpu: 0 of 1 wanted; 1 not allowed, 1 taken by other workers"
    )


def test_workers_of_a_lost_gpu_are_retired_or_forgotten(layout: RunLayout) -> None:
    steward, workers = GpuManager(config(vram_bytes=GIB), layout), FakeWorkers()
    steward.hear(here(using(0)))
    for name, phase in (("env-0", Phase.RUNNING), ("env-1", Phase.FATAL), ("env-2", Phase.STOPPING)):
        assert steward.equipped(spec(name)) is not None
        workers.add(name, Phase.RUNNING)
        steward.attend(workers, HEARD, None, lambda _: LADDER)
        workers.add(name, phase)
    assert workers.told == []

    steward.hear(here(lost()))
    news = steward.attend(workers, HEARD, None, lambda _: LADDER)

    assert workers.told == [("retire", "env-0", "GPU-1: GPU is lost"), ("forget", "env-1")]
    assert [(one.causes, one.draining) for one in news] == [((Cause.LOST,), True)]
    assert standing(layout, "GPU-1").reason == "GPU is lost"


def test_a_worker_that_ended_waits_for_its_gpu_or_gives_it_up(layout: RunLayout) -> None:
    steward, workers = GpuManager(config(), layout), FakeWorkers()
    steward.hear(here(using(0)))
    steward.equipped(spec("env-0"))
    # It ended before anybody looked.
    workers.add("env-0", Phase.WAITING)
    steward.hold_back(workers)
    for _ in range(2):
        steward.hear(here(using(0)))
    steward.hold_back(workers)
    assert workers.told == [("hold", "env-0"), ("let", "env-0")]
    workers.told.clear()
    steward.attend(workers, HEARD, pressure(GpuOrder(number=1, cordoned=True)), lambda _: LADDER)
    assert workers.told == [("retire", "env-0", "no_gpu: GPU-1 is cordoned")]


def test_a_process_that_survived_its_killing_keeps_its_gpu(layout: RunLayout) -> None:
    steward, workers = GpuManager(config(), layout), FakeWorkers()
    steward.hear(here(using(0)))
    steward.equipped(spec("env-0"))
    workers.add("env-0", Phase.RUNNING)
    steward.attend(workers, HEARD, None, lambda _: LADDER)
    # Given up, and the identity, which is that of this test, still lives.
    workers.add("env-0", Phase.FATAL)
    for _ in range(5):
        steward.hear(here(using(0)))
        steward.attend(workers, HEARD, None, lambda _: LADDER)
    assert steward.limit("env", 0, 1) == GpuLimit(
        0, "0 can be placed: no_gpu: 0 of 1 wanted; 1 taken by other workers"
    )


def pressure(order: GpuOrder) -> Any:
    """Return as much of a pressure as the steward looks at."""

    class Told:
        gpu_orders: Mapping[str, GpuOrder] = {"GPU-1": order}

    assert "gpu_orders" in Pressure.__struct_fields__
    return Told()


def test_cordons_survive_a_restart_and_orders_are_carried_out_once(layout: RunLayout) -> None:
    first = GpuManager(config(), layout)
    first.hear(here(using(0)))
    first.attend(
        FakeWorkers(), HEARD, pressure(GpuOrder(number=5, cordoned=True, reason="fan")), lambda _: LADDER
    )

    second = GpuManager(config(), layout)
    second.hear(here(using(0)))
    assert second.equipped(spec("env-0")) is None
    second.attend(FakeWorkers(), HEARD, pressure(GpuOrder(number=4, cordoned=False)), lambda _: LADDER)
    assert second.equipped(spec("env-0")) is None
    second.attend(FakeWorkers(), HEARD, pressure(GpuOrder(number=6, cordoned=False)), lambda _: LADDER)
    assert second.equipped(spec("env-0")) is not None
    assert standing(layout, "GPU-1").order == 6


def test_a_cordon_of_another_host_is_not_taken_over(layout: RunLayout) -> None:
    other = GpuStanding(uuid="GPU-1", host="elsewhere", name="n", at=0.0)
    write_json(layout.gpus, GpuBook(gpus=(GpuRecord(standing=other, manual="fan"),)))
    steward = GpuManager(config(), layout)
    steward.hear(here(using(0)))
    assert steward.equipped(spec("env-0")) is not None


@pytest.mark.parametrize("damage", [b"{", b'{"gpus": [{"standing": 3}]}', b"\xff\x00"])
def test_a_damaged_file_is_put_aside_and_said(
    layout: RunLayout, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    layout.gpus.write_bytes(damage)

    steward = GpuManager(config(), layout)

    assert "gpu state lost" in caplog.text
    assert layout.gpus.with_suffix(".damaged").read_bytes() == damage
    # The operator's order is told again and holds again.
    steward.hear(here(using(0)))
    steward.attend(FakeWorkers(), HEARD, pressure(GpuOrder(number=5, cordoned=True)), lambda _: LADDER)
    assert standing(layout, "GPU-1").causes == (Cause.MANUAL,)


def test_standings_are_told_when_they_change_and_not_at_every_tick(layout: RunLayout) -> None:
    steward = GpuManager(config(), layout)
    assert steward.attend(FakeWorkers(), HEARD, None, lambda _: LADDER) == []
    assert not layout.gpus.exists()
    steward.limit("env", 0, 1)
    steward.limited("env", True)
    steward.attend(FakeWorkers(), HEARD, None, lambda _: LADDER)
    assert read_gpus(layout).limits == {"env": "0 can be placed: no_gpu: no GPU reported"}
    steward.hear(here(using(0)))
    assert len(steward.attend(FakeWorkers(), HEARD, None, lambda _: LADDER)) == 1
    steward.hear(here(using(GIB)))
    assert steward.attend(FakeWorkers(), HEARD, None, lambda _: LADDER) == []
    steward.hear(here(silent()))
    steward.hear(here(lost()))
    assert len(steward.attend(FakeWorkers(), HEARD, None, lambda _: LADDER)) == 1


def test_a_worker_that_was_given_up_keeps_no_gpu_from_its_replacement(layout: RunLayout) -> None:
    steward, workers = GpuManager(config(), layout), FakeWorkers()
    steward.hear(here(using(0)))
    steward.equipped(spec("env-0"))
    with subprocess.Popen(["sleep", "60"]) as process:
        workers.add("env-0", Phase.RUNNING)
        workers.identities["env-0"] = identify("env-0", Role.WORKER, process.pid, "t")
        steward.attend(workers, HEARD, None, lambda _: LADDER)
        process.kill()
    workers.add("env-0", Phase.FATAL)
    for _ in range(3):
        steward.hear(here(using(0)))
        steward.attend(workers, HEARD, None, lambda _: LADDER)
    assert steward.limit("env", 0, 1) is None
    assert steward.equipped(spec("env-1")) is not None
