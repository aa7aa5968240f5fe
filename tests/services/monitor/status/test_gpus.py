"""What the driver reports is shown in the units that a reader knows from `nvidia-smi`."""

from collections.abc import Collection
from pathlib import Path

import pytest
from tests.services.nvml.driver import GIB, Driver, Instance, Memory, gpu

from rolloutmq.schemas.wire.telemetry import GpuSample
from rolloutmq.services.monitor.status import gpus
from rolloutmq.services.telemetry.nvml import Nvml

UUID = "GPU-2f1ab7c4-90d3-4e0b-8f55-6d1c2a7be911"


def sampled(driver: Driver) -> GpuSample:
    with driver.installed():
        nvml = Nvml("h")
        return nvml.read(nvml.uuids()[0], 1, 0.0)


@pytest.mark.parametrize(
    ("lacks", "memory"),
    [([], "3.0/80.0 GiB"), (["nvmlDeviceGetMemoryInfo_v2"], "4.0/80.0 GiB")],
    ids=["v2", "v1"],
)
def test_percent_gibibytes_and_degrees(tmp_path: Path, lacks: Collection[str], memory: str) -> None:
    driver = Driver(tmp_path / "nvml", lacks)
    memories = Memory(total=80 * GIB, reserved=GIB, used=3 * GIB)
    driver.show(gpu(UUID, memory=memories, utilisation_percent=87, temperature_c=91))
    assert gpus.line(sampled(driver), None) == f"GPU-2f1ab7c4 H100 · 87 % · {memory} · 91 °C"


def test_a_divided_gpu_says_why_its_use_is_unknown(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "nvml")
    driver.show(gpu(UUID, mig=True, instances=(Instance("MIG-1", Memory(20 * GIB)),)))
    line = gpus.line(sampled(driver), None)
    assert line == "GPU-2f1ab7c4 H100 · use unknown · 0.0/80.0 GiB · 40 °C · divided (MIG)"
