"""Probes answer on any machine, and take no stranger for a process of the run."""

import os
from pathlib import Path

import msgspec

from rolloutmq.schemas.process import Role
from rolloutmq.services.process.identity import identify
from rolloutmq.services.telemetry.probes import HostProbe, ProcessProbe


def test_host_sample_is_plausible(tmp_path: Path) -> None:
    probe = HostProbe(tmp_path)
    sample = probe.sample(7, 12.5, probe.disks())

    assert (sample.number, sample.at) == (7, 12.5)
    assert sample.cpus >= 1
    assert 0 < sample.memory_used_bytes < sample.memory_total_bytes
    assert sample.disk_free_bytes > 0
    assert 0.0 <= sample.cpu_percent <= 100.0


def test_process_is_sampled_and_a_stranger_of_its_pid_is_not() -> None:
    myself = identify("me", Role.WORKER, os.getpid(), "token/me")
    stranger = msgspec.structs.replace(myself, name="other", start_ticks=myself.start_ticks + 1)
    probe = ProcessProbe()

    samples = probe.sample([myself, stranger], 1, 0.0)

    assert [(one.name, one.pid) for one in samples] == [("me", os.getpid())]
    assert samples[0].rss_bytes > 1 << 20
    assert probe.sample([], 2, 1.0) == []


def test_cpu_of_a_process_is_measured_from_one_sample_to_the_next() -> None:
    myself = identify("me", Role.WORKER, os.getpid(), "token/me")
    probe = ProcessProbe()
    first = probe.sample([myself], 1, 0.0)[0]

    sum(range(2_000_000))
    second = probe.sample([myself], 2, 1.0)[0]

    assert first.cpu_percent == 0.0
    assert second.cpu_percent > 0.0
