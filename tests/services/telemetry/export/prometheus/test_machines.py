"""Samples of machines as metrics, until they are stale."""

from tests.services.telemetry.export.events import machines
from tests.services.telemetry.export.prometheus.pages import key, metrics_of, read

from rolloutmq.schemas.wire.telemetry import GpuSample, GpuState, ProcessSample
from rolloutmq.services.telemetry.export.prometheus.bounds import PROCESSES
from rolloutmq.services.telemetry.export.prometheus.run_metrics import STALE_S


def test_samples_have_base_units() -> None:
    page = read(metrics_of(machines()))
    assert page[key("host_cpu_ratio", host="h")] == 0.5
    assert page[key("gpu_utilization_ratio", gpu="GPU-1")] == 0.25
    assert page[key("gpu_info", gpu="GPU-1", host="h", name="H100", index="0")] == 1
    assert page[key("gpu_up", gpu="GPU-1")] == 1
    assert page[key("gpu_cordoned", gpu="GPU-1")] == 1
    assert page[key("gpu_workers", gpu="GPU-1")] == 1
    assert page[key("process_cpu_cores", process="broker")] == 1.5
    assert page[key("engine_busy_ratio", engine="inference")] == 0.5
    assert page[key("engines_target")] == 2


def test_what_a_device_does_not_report_is_left_out() -> None:
    lost = GpuSample(uuid="GPU-1", number=1, at=0.0, name="", state=GpuState.LOST, why="gone")
    page = read(metrics_of([lost]))
    assert page[key("gpu_up", gpu="GPU-1")] == 0
    assert key("gpu_temperature_celsius", gpu="GPU-1") not in page


def test_a_silent_source_is_no_longer_told() -> None:
    metrics = metrics_of(machines())
    assert key("host_cpus", host="h") in read(metrics, STALE_S)
    page = read(metrics, STALE_S + 1)
    assert not [name for name, _ in page if name.startswith(("host_", "gpu_", "process_", "engine_"))]


def test_processes_are_bounded() -> None:
    samples = [
        ProcessSample(name=f"p{at}", pid=1, number=1, at=0.0, cpu_percent=1.0, rss_bytes=1)
        for at in range(1000)
    ]
    page = read(metrics_of(samples))
    assert sum(name == "process_cpu_cores" for name, _ in page) == PROCESSES
    assert page[key("telemetry_merged_names", label="process")] == PROCESSES  # counted up to the limit
