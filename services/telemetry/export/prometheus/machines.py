"""Metrics of hosts, GPUs, processes and engines: the newest sample of each, until it falls silent. Pure."""

from rolloutmq.schemas.wire.hardware import GpuStanding
from rolloutmq.schemas.wire.telemetry import (
    EngineSample,
    GpuAbsence,
    GpuSample,
    GpuState,
    HostSample,
    ProcessSample,
)
from rolloutmq.services.telemetry.export.prometheus.bounds import Bounds
from rolloutmq.services.telemetry.export.prometheus.families import Families
from rolloutmq.services.telemetry.export.prometheus.latest import Latest

MachineEvent = HostSample | GpuSample | GpuAbsence | ProcessSample | EngineSample | GpuStanding


class MachineMetrics:
    """Metrics of samples.

    Args:
        bounds: Bounds of the labels.
        stale_s: Silence after which a sample is no longer told.
    """

    def __init__(self, bounds: Bounds, stale_s: float) -> None:
        self._hosts = Latest[HostSample](bounds.host, stale_s)
        self._gpus = Latest[GpuSample](bounds.gpu, stale_s)
        self._standings = Latest[GpuStanding](bounds.gpu, stale_s)
        self._processes = Latest[ProcessSample](bounds.process, stale_s)
        self._engines = Latest[EngineSample](bounds.engine, stale_s)

    def feed(self, event: MachineEvent, now: float) -> None:
        """Take a sample."""
        match event:
            case HostSample():
                self._hosts.put(event.host, event, now)
            case GpuSample():
                self._gpus.put(event.uuid, event, now)
            case GpuStanding():
                self._standings.put(event.uuid, event, now)
            case ProcessSample():
                self._processes.put(event.name, event, now)
            case EngineSample():
                self._engines.put(event.name, event, now)
            case GpuAbsence():
                pass

    def tell(self, families: Families, now: float) -> None:
        """Add the metrics."""
        for host, sample in self._hosts.items(now):
            _tell_host(families, host, sample)
        for uuid, gpu in self._gpus.items(now):
            _tell_gpu(families, uuid, gpu)
        for uuid, standing in self._standings.items(now):
            families.add("gpu_cordoned", float(standing.cordoned), uuid)
            families.add("gpu_draining", float(standing.draining), uuid)
            families.add("gpu_workers", len(standing.holders), uuid)
            families.add("gpu_promised_bytes", standing.promised_bytes, uuid)
            families.add("gpu_ghost_bytes", standing.ghost_bytes, uuid)
        for name, process in self._processes.items(now):
            families.add("process_cpu_cores", process.cpu_percent / 100, name)
            families.add("process_resident_memory_bytes", process.rss_bytes, name)
        for name, engine in self._engines.items(now):
            families.add("engine_requests", engine.in_hand, name)
            families.add("engine_busy_ratio", engine.busy, name)
            families.add("engine_draining", float(engine.draining), name)


def _tell_host(families: Families, host: str, sample: HostSample) -> None:
    families.add("host_cpus", sample.cpus, host)
    families.add("host_cpu_ratio", sample.cpu_percent / 100, host)
    families.add("host_load1", sample.load_1m, host)
    families.add("host_memory_used_bytes", sample.memory_used_bytes, host)
    families.add("host_memory_total_bytes", sample.memory_total_bytes, host)
    families.add("host_shm_free_bytes", sample.shm_free_bytes, host)
    families.add("host_disk_free_bytes", sample.disk_free_bytes, host)


def _tell_gpu(families: Families, uuid: str, gpu: GpuSample) -> None:
    families.add("gpu_info", 1, uuid, gpu.host, gpu.name, str(gpu.index))
    families.add("gpu_up", float(gpu.state is GpuState.OK), uuid)
    if gpu.utilisation_percent is not None:
        families.add("gpu_utilization_ratio", gpu.utilisation_percent / 100, uuid)
    families.add("gpu_memory_used_bytes", gpu.memory_used_bytes, uuid)
    families.add("gpu_memory_total_bytes", gpu.memory_total_bytes, uuid)
    families.add("gpu_temperature_celsius", gpu.temperature_c, uuid)
    families.add("gpu_margin_celsius", gpu.margin_c, uuid)
    families.add("gpu_ecc_uncorrected_errors_total", gpu.ecc_uncorrected, uuid)
    families.add("gpu_xids", len(gpu.xids), uuid)
