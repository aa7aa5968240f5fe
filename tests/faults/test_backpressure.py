"""A trainer stopped while producers push as hard as they can: the broker's memory stays at its cap."""

import signal
from pathlib import Path
from typing import Final

import pytest
from tests.faults.support.processes import BrokerProcess, Trainer, Worker, acked, config, status, wait_until

MIB: Final = 1 << 20
HIGH_BYTES: Final = 48 * MIB
GROUP_BYTES: Final = 1 * MIB
GROUPS: Final = 64
"""Of each producer: together more than twice the mark."""
PRODUCERS: Final = ("p0", "p1")
OVERHEAD_BYTES: Final = 32 * MIB
"""Messages inside the socket library, and memory of the allocator: independent of the mark."""
PUSHING_S: Final = 2.0
"""How long the producers have waited in all when the memory is measured."""


def resident(pid: int, what: str = "VmHWM") -> int:
    """Return the peak of a process's resident memory in bytes, or its present value: `VmRSS`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == what:
            return int(value.split()[0]) << 10
    raise AssertionError(f"process {pid} has no {what}")


@pytest.mark.parametrize("durability", [pytest.param("memory", marks=pytest.mark.extended), "disk"])
def test_a_stopped_trainer_holds_the_memory_of_the_broker_at_its_cap(run_dir: Path, durability: str) -> None:
    settings = config(
        high_bytes=HIGH_BYTES,
        max_group_bytes=4 * MIB,
        ram_bytes=HIGH_BYTES,
        retain_bytes=4 * MIB,
        durability=durability,
        silence_s=60.0,
    )
    logs = [run_dir.with_name(f"{name}.jsonl") for name in PRODUCERS]
    with BrokerProcess(run_dir, settings) as broker, Trainer(run_dir, nbytes=GROUP_BYTES) as trainer:
        baseline = resident(broker.child.pid, "VmRSS")
        workers = [
            Worker(run_dir, name, log, count=GROUPS, nbytes=GROUP_BYTES)
            for name, log in zip(PRODUCERS, logs, strict=True)
        ]
        try:
            first = trainer.pull(1, (0, 0))
            trainer.signal(signal.SIGSTOP)
            wait_until(lambda: sum(status(run_dir).pressure.producer_waits_s.values()) > PUSHING_S, "a wait")
            pressure = status(run_dir).pressure
            held = pressure.queued_bytes + pressure.leased_bytes
            grown = resident(broker.child.pid) - baseline
            assert pressure.lanes[0].wait in {"global_full", "no_credit"}
            assert HIGH_BYTES // 2 < held + pressure.granted_bytes <= HIGH_BYTES
            assert grown <= HIGH_BYTES * 1.10 + OVERHEAD_BYTES, f"{grown / MIB:.0f} MiB"

            trainer.signal(signal.SIGCONT)
            assert trainer.settle((0, 1)).what == "settled"
            trained = [*first.ids]
            for step in range(2, len(PRODUCERS) * GROUPS // len(first.ids) + 1):
                trained += trainer.train(step).ids
            assert sorted(trained) == sorted(
                f"{name}-{number}" for name in PRODUCERS for number in range(GROUPS)
            )
            assert [worker.wait() for worker in workers] == [0, 0]
        finally:
            for worker in workers:
                worker.kill()
        assert {line.group_id for log in logs for line in acked(log)} == set(trained)
        assert status(run_dir).pressure.ledger.lost_before_accept == 0
