"""Workers on GPUs, end to end: real services and workers, a broker, NVIDIA's bindings, and a driver that does what a
test says."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tests.services.nvml.driver import GIB, Driver, Gpu, Instance, Memory, gpu
from tests.services.orchestrator import children
from tests.services.orchestrator.children import DRAINABLE

from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.launch.commands import gpus as operator
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.wire.control import SetWorkers
from rolloutmq.schemas.wire.hardware import Cause, GpuStanding
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.monitor.status.gpus import read_gpus
from rolloutmq.services.process.child import end_marked
from rolloutmq.services.process.identity import MARKER, alive, variable_of

TOKEN = f"gpu-workers-{os.getpid()}"
PATIENCE_S = 90.0
"""Longest wait: three processes start, and a busy machine has other things to do."""
ORCHESTRATOR = """
import sys
from pathlib import Path
from rolloutmq.services.orchestrator import server
run_dir, code = Path(sys.argv[1]), sys.argv[2]
server.worker_command = lambda run_dir: lambda name: (sys.executable, "-S", "-c", code, name)
sys.exit(server.main(run_dir))
"""
TELEMETRY = "import sys; from rolloutmq.launch.cli import app; app()"


def wait_for(condition: Callable[[], bool]) -> None:
    children.wait_for(condition, PATIENCE_S)


class Host:
    """A run on a host whose GPUs do what the test says."""

    def __init__(self, layout: RunLayout, broker: Broker, stack: ExitStack) -> None:
        self.layout = layout
        self._broker = broker
        self._stack = stack
        self.driver = Driver(layout.root / "nvml")
        self.services: dict[str, subprocess.Popen[str]] = {}

    def telemetry(self) -> None:
        """Start the service."""
        self.services["telemetry"] = self._start(
            "-c", TELEMETRY, "telemetry", "--run-dir", str(self.layout.root)
        )

    def orchestrator(self) -> "subprocess.Popen[str]":
        """Start the service."""
        return self._start("-c", ORCHESTRATOR, str(self.layout.root), DRAINABLE)

    def scale(self, count: int) -> None:
        """Ask for so many workers."""
        with BlockingClient(self._broker.endpoints.serve) as client:
            client.request(SetWorkers(env="env", count=count))

    def workers(self) -> dict[str, str]:
        """Return the GPUs of each living worker, as its process has them."""
        found = {}
        for one in read_json(self.layout.workers, list[ProcessIdentity]) or []:
            if alive(one) and (given := variable_of(one.pid, "CUDA_VISIBLE_DEVICES")) is not None:
                found[one.name] = given
        return found

    def pids(self) -> dict[str, int]:
        """Return the pids of the workers."""
        return {one.name: one.pid for one in read_json(self.layout.workers, list[ProcessIdentity]) or []}

    def standing(self, uuid: str) -> GpuStanding | None:
        """Return how the orchestrator treats a GPU, as it last wrote."""
        return next((one.standing for one in read_gpus(self.layout).gpus if one.standing.uuid == uuid), None)

    def causes(self, uuid: str) -> tuple[Cause, ...]:
        """Return why a GPU is cordoned."""
        standing = self.standing(uuid)
        return () if standing is None else standing.causes

    def xids(self, uuid: str) -> tuple[int, ...]:
        """Return the driver's errors, as the orchestrator last heard them."""
        samples = [one.sample for one in read_gpus(self.layout).gpus]
        return next((one.xids for one in samples if one is not None and one.uuid == uuid), ())

    def samples(self, uuid: str) -> int:
        """Return how many samples of a GPU were recorded."""
        return self.layout.metrics.read_text().count(f'"telemetry.gpu.{uuid}"')

    def decided(self, words: str) -> bool:
        """Whether a decision was recorded with these words in its reason."""
        if not self.layout.metrics.exists():
            return False
        lines = (json.loads(line) for line in self.layout.metrics.read_bytes().splitlines(keepends=True)[:-1])
        return any(line["kind"] == "scale_decision" and words in line["reason"] for line in lines)

    def _start(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            **self.driver.environment,
            MARKER: f"{TOKEN}/service",
        }
        process = subprocess.Popen([sys.executable, *arguments], env=environment, text=True)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


@contextmanager
def host(run_dir: Path, *gpus: Gpu, hardware: dict[str, Any], **env: Any) -> Iterator[Host]:
    quick = {"tick_s": 0.02, "backoff_s": 0.05, "drain_deadline_s": 5.0}
    config = RunConfig.model_validate(
        {
            "environment": {"env": {"entry": "m:C", "min_workers": 1, "max_workers": 4, "gpus": 1, **env}},
            "orchestrator": quick,
            "telemetry": {"interval_s": 0.05},
            "hardware": hardware,
        }
    )
    layout = RunLayout(run_dir)
    write_json(layout.config, config)
    with running_broker(config, layout) as broker, ExitStack() as stack:
        stack.callback(end_marked, f"{TOKEN}/")
        found = Host(layout, broker, stack)
        found.driver.show(*gpus)
        yield found


@pytest.fixture
def start(run_dir: Path) -> Iterator[Callable[..., Host]]:
    """Start a host; it ends with the test."""
    with ExitStack() as stack:

        def begin(*gpus: Gpu, hardware: dict[str, Any] | None = None, **env: Any) -> Host:
            found = stack.enter_context(host(run_dir, *gpus, hardware=hardware or {}, **env))
            found.telemetry()
            return found

        yield begin


def settled_at(found: Host, wanted: Sequence[str]) -> Callable[[], bool]:
    return lambda: sorted(found.workers().values()) == sorted(wanted)


def test_workers_are_started_with_gpus_of_their_own_and_no_more_than_there_are(
    start: Callable[..., Host],
) -> None:
    found = start(gpu("GPU-1"), gpu("GPU-2"))
    found.orchestrator()
    found.scale(3)

    wait_for(settled_at(found, ["GPU-1", "GPU-2"]))
    wait_for(lambda: found.decided("pinned to 3; 2 can be placed: no_gpu: 0 of 1 wanted; 2 taken"))
    assert sorted(found.workers().values()) == ["GPU-1", "GPU-2"]
    # A third GPU, and it is placed: nothing was forgotten and nothing has to be asked for again.
    found.driver.show(gpu("GPU-3"), gpu("GPU-1"), gpu("GPU-2"))
    wait_for(settled_at(found, ["GPU-1", "GPU-2", "GPU-3"]))


def test_the_memory_of_those_that_load_is_kept_for_them(start: Callable[..., Host]) -> None:
    found = start(gpu("GPU-1"), gpu("GPU-2", used=60 * GIB), vram_bytes=30 * GIB)
    found.orchestrator()
    found.scale(4)

    # Nothing of it is in use, and the driver still calls all of it free.
    wait_for(lambda: found.decided("2 can be placed: no_gpu: 0 of 1 wanted; 2 without enough memory"))
    assert sorted(found.workers().values()) == ["GPU-1", "GPU-1"]
    standing = found.standing("GPU-1")
    assert standing is not None
    assert standing.promised_bytes == 60 * GIB


def test_a_cordoned_gpu_is_passed_over_also_by_the_next_orchestrator(start: Callable[..., Host]) -> None:
    found = start(gpu("GPU-1"), gpu("GPU-2", used=GIB), gpu("GPU-3", used=2 * GIB), min_workers=1)
    found.scale(1)
    first = found.orchestrator()
    wait_for(settled_at(found, ["GPU-1"]))
    assert operator.cordon(found.layout.root, "GPU-1", "new fan") == 0
    assert operator.cordon(found.layout.root, "GPU-2", "new fan") == 0
    before = found.pids()
    first.kill()
    first.wait()

    found.orchestrator()
    found.scale(2)
    wait_for(settled_at(found, ["GPU-1", "GPU-3"]))
    # The one on the cordoned GPU stayed, and is known to be there.
    assert found.pids()["env-0"] == before["env-0"]
    assert found.causes("GPU-2") == (Cause.MANUAL,)
    wait_for(lambda: (one := found.standing("GPU-1")) is not None and one.holders == ("env-0",))

    assert operator.uncordon(found.layout.root, "GPU-2") == 0
    found.scale(3)
    wait_for(settled_at(found, ["GPU-1", "GPU-2", "GPU-3"]))


def test_a_lost_gpu_drains_its_worker_which_goes_on_elsewhere(start: Callable[..., Host]) -> None:
    found = start(gpu("GPU-1"), gpu("GPU-2", used=GIB))
    found.scale(1)
    found.orchestrator()
    wait_for(settled_at(found, ["GPU-1"]))

    found.driver.change("GPU-1", lost=True)

    wait_for(lambda: found.workers() == {"env-1": "GPU-2"})
    assert found.causes("GPU-1") == (Cause.LOST,)
    assert "GPU is lost" in getattr(found.standing("GPU-1"), "reason", "")


def test_a_gpu_that_was_lost_is_used_again_after_a_clean_time(start: Callable[..., Host]) -> None:
    found = start(gpu("GPU-1"), gpu("GPU-2", used=GIB), hardware={"clean_s": 1.0}, min_workers=0)
    found.scale(0)
    found.orchestrator()
    wait_for(lambda: found.standing("GPU-2") is not None)
    found.driver.change("GPU-1", lost=True)
    wait_for(lambda: found.causes("GPU-1") == (Cause.LOST,))
    found.scale(2)
    wait_for(settled_at(found, ["GPU-2"]))

    # A reset may change the order of the GPUs.
    found.driver.show(gpu("GPU-2", used=GIB), gpu("GPU-1"))
    wait_for(settled_at(found, ["GPU-1", "GPU-2"]))
    assert found.causes("GPU-1") == ()


def test_memory_errors_cordon_only_if_they_grow_and_a_restart_forgets_no_growth(
    start: Callable[..., Host],
) -> None:
    found = start(gpu("GPU-1", ecc=(3, 40)), gpu("GPU-2", used=GIB, ecc=(5, 50)))
    found.scale(2)
    first = found.orchestrator()
    # Errors of an earlier run, and rows that were replaced for them.
    wait_for(settled_at(found, ["GPU-1", "GPU-2"]))
    assert found.causes("GPU-1") == found.causes("GPU-2") == ()

    found.driver.change("GPU-1", ecc=(4, 41))
    wait_for(lambda: settled_at(found, ["GPU-2"])() and found.causes("GPU-1") == (Cause.ECC,))
    assert getattr(found.standing("GPU-1"), "reason", "") == "1 new uncorrected memory error"
    first.kill()
    first.wait()
    found.driver.change("GPU-2", ecc=(6, 51))  # while nobody looks

    found.orchestrator()
    wait_for(lambda: found.causes("GPU-2") == (Cause.ECC,))
    until = found.samples("GPU-1") + 20
    wait_for(lambda: found.samples("GPU-1") >= until)
    assert found.causes("GPU-1") == (Cause.ECC,)
    wait_for(settled_at(found, []))


def test_an_error_of_an_application_drains_nobody_and_one_of_the_gpu_does(start: Callable[..., Host]) -> None:
    found = start(gpu("GPU-1"), gpu("GPU-2", used=GIB), hardware={"clean_s": 0.5})
    found.scale(1)
    found.orchestrator()
    wait_for(settled_at(found, ["GPU-1"]))
    found.driver.change("GPU-1", xids=(13, 31, 63), remapped=(0, 1, 1, 0))
    wait_for(lambda: found.xids("GPU-1") == (13, 31, 63))
    assert found.causes("GPU-1") == ()

    found.driver.change("GPU-1", xids=(13, 31, 63, 79))
    wait_for(settled_at(found, ["GPU-2"]))
    found.services["telemetry"].kill()
    found.services["telemetry"].wait()
    found.telemetry()
    wait_for(lambda: found.xids("GPU-1") == ())
    until = found.samples("GPU-1") + 40
    wait_for(lambda: found.samples("GPU-1") >= until)
    assert found.causes("GPU-1") == (Cause.XID,)
    found.driver.change("GPU-2", remapped=(0, 9, 0, 1), recovery=pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
    wait_for(lambda: found.causes("GPU-2") == (Cause.RECOVERY, Cause.REMAP))


def test_a_divided_gpu_takes_no_worker(start: Callable[..., Host]) -> None:
    instances = Instance("MIG-1", Memory(20 * GIB)), Instance("MIG-2", Memory(20 * GIB))
    found = start(gpu("GPU-1", mig=True, instances=instances), gpu("GPU-2", used=GIB))
    found.scale(2)
    found.orchestrator()
    wait_for(settled_at(found, ["GPU-2"]))
    wait_for(lambda: found.decided("1 can be placed: no_gpu: 0 of 1 wanted; 1 divided, 1 taken"))


def test_a_gpu_whose_driver_hangs_is_left_alone_and_the_others_are_used(start: Callable[..., Host]) -> None:
    found = start(gpu("GPU-1"), gpu("GPU-2", used=GIB), hardware={"stale_s": 1.0})
    found.scale(1)
    found.orchestrator()
    wait_for(settled_at(found, ["GPU-1"]))
    before = found.pids()

    found.driver.change("GPU-1", hangs=("*",))
    wait_for(lambda: "no reply from the driver" in getattr(found.standing("GPU-1"), "reason", ""))
    found.scale(3)
    wait_for(settled_at(found, ["GPU-1", "GPU-2"]))
    wait_for(
        lambda: found.decided("2 can be placed: no_gpu: 0 of 1 wanted; 1 without a recent sample, 1 taken")
    )

    # Silence is no fault: the worker on it stays, and nothing is cordoned.
    assert found.causes("GPU-1") == ()
    assert found.pids()["env-0"] == before["env-0"]


def test_heat_that_lasts_keeps_new_workers_off_and_the_end_of_it_lets_them_on(
    start: Callable[..., Host],
) -> None:
    found = start(gpu("GPU-1"), gpu("GPU-2", used=GIB), hardware={"clean_s": 1.0}, min_workers=0)
    found.scale(0)
    found.orchestrator()
    found.driver.change("GPU-1", temperature_c=91, reasons=0x48, margin_c=1)
    wait_for(lambda: found.causes("GPU-1") == (Cause.HEAT,))
    found.scale(1)
    wait_for(settled_at(found, ["GPU-2"]))

    found.driver.change("GPU-1", temperature_c=60, reasons=1, margin_c=20)
    wait_for(lambda: found.causes("GPU-1") == ())
    found.scale(2)
    wait_for(settled_at(found, ["GPU-1", "GPU-2"]))


def test_a_killed_worker_does_not_come_back_before_its_memory_has(start: Callable[..., Host]) -> None:
    found = start(gpu("GPU-1"), vram_bytes=50 * GIB)
    found.scale(1)
    found.orchestrator()
    wait_for(settled_at(found, ["GPU-1"]))
    (pid,) = found.pids().values()
    found.driver.change("GPU-1", memory=Memory(used=50 * GIB))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: found.workers() == {})

    # By its back-off alone it would be back at once.
    wait_for(lambda: found.decided("0 can be placed: no_gpu: 0 of 1 wanted; 1 without enough memory"))
    until = found.samples("GPU-1") + 20
    while found.samples("GPU-1") < until:
        assert found.workers() == {}
    found.driver.change("GPU-1", memory=Memory())
    wait_for(settled_at(found, ["GPU-1"]))


def test_without_a_driver_nobody_is_started_and_the_reason_is_told(start: Callable[..., Host]) -> None:
    found = start(min_workers=2)
    found.driver.fail(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    found.scale(2)
    found.orchestrator()
    wait_for(lambda: found.decided("0 can be placed: no_gpu: no GPU reported (Driver Not Loaded)"))
    assert found.pids() == {}

    found.driver.show(gpu("GPU-1"), gpu("GPU-2"))
    wait_for(settled_at(found, ["GPU-1", "GPU-2"]))


def test_a_run_without_need_of_gpus_gives_none_and_hides_none(start: Callable[..., Host]) -> None:
    found = start(gpu("GPU-1", reasons=0x48), gpus=0)
    found.scale(2)
    found.orchestrator()
    wait_for(lambda: len(found.pids()) == 2)
    wait_for(lambda: found.standing("GPU-1") is not None)
    assert found.workers() == {}
