"""A GPU is sampled by its UUID, and a worker is placed on it: the scripted driver and a real one say the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.services.nvml.driver import GIB, Driver, Gpu, gpu

from rolloutmq.schemas.config.orchestrator import HardwareConfig
from rolloutmq.schemas.wire.hardware import Cause
from rolloutmq.schemas.wire.telemetry import GpuSample, GpuState
from rolloutmq.services.orchestrator.gpus.fleet import Fleet
from rolloutmq.services.orchestrator.gpus.health import ACTIONS
from rolloutmq.services.orchestrator.gpus.placement import GpuRequest
from rolloutmq.services.telemetry.gpus import GpuProbe, NoGpuError
from rolloutmq.services.telemetry.nvml import Nvml

SCRIPTED: dict[str, tuple[Gpu, ...]] = {
    "one": (gpu("GPU-1", used=GIB),),
    "worn": (gpu("GPU-1", ecc=(3, 40), remapped=(0, 3, 0, 0)), gpu("GPU-2", used=GIB)),
    "consumer": (gpu("GPU-1", ecc=None, remapped=None, recovery=None, mig=None, margin_c=None),),
}
"""Machines that the scripted driver plays: of one GPU, with errors of earlier runs, and without ECC."""


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.gpu), *SCRIPTED])
def nvml(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nvml]:
    """A driver; the test is skipped for the real one where there is none."""
    found = Nvml("here")
    if request.param == "real":
        try:
            found.uuids()
        except NoGpuError as error:
            pytest.skip(str(error))
        yield found
        found.close()
        return
    driver = Driver(tmp_path / "nvml")
    driver.show(*SCRIPTED[request.param])
    with driver.installed():
        yield found


async def test_a_gpu_is_sampled_and_placed_on_by_its_uuid(nvml: Nvml) -> None:
    samples = await GpuProbe(nvml, "here").sample(1, 0.0)
    assert isinstance(samples, tuple)
    fleet = Fleet(HardwareConfig(full_percent=100.0, busy_percent=101.0))
    for sample in samples:
        check(sample)
        fleet.see(sample, 0.0, 0.0)
        # Memory errors and Xids of earlier runs are not this one's.
        assert not {Cause.ECC, Cause.XID} & set(fleet.cordons[sample.uuid].causes)
    whole = [sample for sample in samples if not sample.mig and not fleet.cordons[sample.uuid].causes]
    roomiest = max(whole, key=lambda sample: sample.memory_free_bytes or 0)

    placed = fleet.place("w-0", GpuRequest(1, (roomiest.memory_free_bytes or 0) // 2), 0.0)

    assert placed == (roomiest.uuid,)
    assert fleet.room(GpuRequest(1), 99, 0.0).count <= len(whole) - 1


async def test_a_new_session_finds_the_same_gpus(nvml: Nvml) -> None:
    first = nvml.uuids()
    assert all(nvml.read(uuid, 1, 0.0).state is GpuState.OK for uuid in first)
    nvml.close()
    assert nvml.read(first[0], 2, 0.0).state is GpuState.SILENT
    assert nvml.uuids() == first
    assert all(nvml.read(uuid, 3, 0.0).state is GpuState.OK for uuid in first)


def check(sample: GpuSample) -> None:
    """Check the units and ranges of all that a working GPU reports."""
    assert (sample.state, sample.why, sample.xids) == (GpuState.OK, "", ())
    assert sample.uuid.startswith("GPU-")
    assert sample.name
    assert sample.memory_total_bytes is not None
    assert sample.memory_free_bytes is not None
    assert sample.memory_used_bytes is not None
    assert GIB <= sample.memory_total_bytes < 1 << 41
    taken = sample.memory_used_bytes + (sample.memory_reserved_bytes or 0)
    assert sample.memory_free_bytes + taken <= sample.memory_total_bytes
    assert sample.temperature_c is not None
    assert 0.0 < sample.temperature_c < 120.0
    assert sample.margin_c is None or -20.0 < sample.margin_c < 120.0
    assert sample.clock_event_reasons is not None
    assert (sample.utilisation_percent is None) == sample.mig
    assert sample.mig or 0.0 <= (sample.utilisation_percent or 0.0) <= 100.0
    assert sample.recovery_action in {None, 0, *ACTIONS}
