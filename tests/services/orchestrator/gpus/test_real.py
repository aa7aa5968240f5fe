"""On a machine with a GPU: it is sampled by its UUID, and a worker is placed on it."""

import pytest

from rolloutmq.schemas.config.orchestrator import HardwareConfig
from rolloutmq.schemas.wire.telemetry import GpuSample, GpuState
from rolloutmq.services.orchestrator.gpus.fleet import Fleet
from rolloutmq.services.orchestrator.gpus.placement import GpuRequest
from rolloutmq.services.telemetry.gpus import GpuProbe, NoGpuError
from rolloutmq.services.telemetry.nvml import Nvml


@pytest.fixture
def nvml() -> Nvml:
    """The driver of this machine; the test is skipped where there is none."""
    found = Nvml("here")
    try:
        found.uuids()
    except NoGpuError as error:
        pytest.skip(str(error))
    return found


@pytest.mark.gpu
async def test_a_real_gpu_is_sampled_and_placed_on_by_its_uuid(nvml: Nvml) -> None:
    samples = await GpuProbe(nvml, "here").sample(1, 0.0)
    assert isinstance(samples, tuple)
    fleet = Fleet(HardwareConfig(full_percent=100.0, busy_percent=101.0))
    for sample in samples:
        assert isinstance(sample, GpuSample)
        assert sample.state is GpuState.OK
        assert sample.uuid.startswith("GPU-")
        assert sample.memory_total_bytes is not None
        assert sample.memory_free_bytes is not None
        assert sample.memory_used_bytes is not None
        assert sample.memory_free_bytes <= sample.memory_total_bytes
        assert sample.temperature_c is not None
        assert sample.clock_event_reasons is not None
        fleet.see(sample, 0.0, 0.0)
    whole = [sample for sample in samples if not sample.mig and not fleet.cordons[sample.uuid].causes]
    roomiest = max(whole, key=lambda sample: sample.memory_free_bytes or 0)

    placed = fleet.place("w-0", GpuRequest(1, (roomiest.memory_free_bytes or 0) // 2), 0.0)

    assert placed == (roomiest.uuid,)
    assert fleet.room(GpuRequest(1), 99, 0.0).count <= len(whole) - 1
