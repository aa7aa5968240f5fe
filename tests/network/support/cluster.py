"""The quickstart on two hosts: `rolloutmq up` on the head, and what joins it from the far host, with keys.

Everything is started as docs/clusters.md says. The far host reaches the head through a relay alone, which cuts, stalls
or forgets connections. Processes are found on a host by their command, and killed from outside.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.faults.support.processes import wait_until
from tests.network.support.hosts import ROOT, Host, Lab, Program
from tests.network.support.relay import Relay
from tests.network.support.site import PORTS, RUN

from benchmarks.end_to_end.scenario import steps_logged
from rolloutmq.bus.engine_registry import FIRST, engines_of
from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.files import RunLayout, StreamAddress
from rolloutmq.schemas.network.keys import Role

HEAD: Final = f"tcp://head:{PORTS['serve']}"
WEIGHTS_PORT: Final = 7764
ENGINE_PORT: Final = 7800
EXAMPLES: Final = ROOT / "examples"
MODULE: Final = b"rolloutmq.launch.service_process"
RUN_S: Final = 240.0
"""Longest wait for steps of a run, and for its end."""


class Cluster:
    """`up` on the host `head`, and the host `far`, which reaches it over a relay.

    Attributes:
        trained: Directory with the log of the trainer.
        joined: What has joined from the far host.
    """

    def __init__(self, lab: Lab, *assignments: str) -> None:
        self.head, self.far = lab.host("head", 1), lab.host("far", 2, "wan")
        self.way = Relay(lab, self.head, *PORTS.values(), WEIGHTS_PORT)
        self.layout = self.trained = RunLayout(self.head.tmp / "run")
        self.keys = KeyDirectory.create(self.head.tmp / "keys")
        self.joined: list[Program] = []
        sets = (f'broker.listen="tcp://0.0.0.0:{PORTS["serve"]}"', 'broker.keys="/tmp/keys"', *assignments)
        self._words = [word for one in sets for word in ("--set", one)]
        self.begin()

    def begin(self) -> None:
        """Start the run on the head; a directory with a run that has ended is moved aside."""
        quickstart = str(EXAMPLES / "quickstart.toml")
        words = ("up", quickstart, "--plain", "--run-dir", RUN, *self._words)
        self.up = self.head.start("up", "rolloutmq", *words)
        self.up.expect(lambda: read_endpoints(self.layout.root), "the broker")

    def join(self, name: str, *words: str, role: Role) -> Program:
        """Start a command on the far host with a key of a role."""
        key = self.far.tmp / f"{role.value}.key"
        if not key.exists():
            save_bundle(key, self.keys.new(role.value, role))
        way = ("--connect", HEAD, "--key", f"/tmp/{key.name}")
        self.joined.append(program := self.far.start(name, "rolloutmq", *words, *way))
        return program

    def await_engine(self) -> None:
        """Wait until the head knows the engine of the far host."""
        name = f"{FIRST}.{self.far.name}"
        self.up.expect(lambda: name in [one.name for one in engines_of(self.layout)], "the engine", RUN_S)

    def kill(self, host: Host, name: str, *words: str) -> None:
        """Kill the process of a run that has this command, once there is one."""
        pid = wait_until(lambda: pid_of(host, name, *words), f"a process {name} on {host.name}")
        os.kill(pid, signal.SIGKILL)

    def advance(self, steps: int = 5) -> None:
        """Wait until the trainer has taken so many more steps; fail if the run or a command ends first."""
        goal = steps_logged(self.trained) + steps

        def met() -> bool:
            for program in self.joined:
                assert program.living(), f"{program.log.name} ended: {program.text()[-3000:]}"
            return steps_logged(self.trained) >= goal

        self.up.expect(met, f"step {goal}", RUN_S)

    def end(self) -> dict[str, Any]:
        """Wait for the end of the run, and of what has joined with it; check the ledger, and return the summary."""
        assert self.up.wait(RUN_S) == 0, self.up.text()
        for program in self.joined:
            assert program.wait() == 0, program.text()
        assert "every group is accounted for" in self.head.call("rolloutmq", "ledger", "verify", RUN)
        summary: dict[str, Any] = msgspec.json.decode(self.layout.summary.read_bytes())
        assert not summary["groups_lost"]
        assert not summary["groups_trained_twice"]
        states = ("trained", "filtered", "expired", "dead", "discarded", "in_flight")
        assert summary["groups_accepted"] == sum(summary[f"groups_{state}"] for state in states)
        return summary


class EnginesApart(Cluster):
    """Broker and trainer on the head; relay, engine and workers on the far host."""

    def __init__(self, lab: Lab, *assignments: str) -> None:
        weights = ('weights.backend="stream"', f'weights.listen="tcp://0.0.0.0:{WEIGHTS_PORT}"')
        super().__init__(lab, *weights, "environment.sort3.min_workers=0", *assignments)
        self.relay = self.join("relay", "relay", role=Role.ENGINE)
        self.engine = self.join("engine", "engine", "--name", "far", role=Role.ENGINE)
        self.join_workers()
        self.await_engine()

    def begin(self) -> None:
        """Start the run on the head, without workers there."""
        super().begin()
        self.head.call("rolloutmq", "scale", "sort3", "0", "--run-dir", RUN)

    def join_workers(self) -> None:
        """Start the workers of the far host; the end of a run drains them."""
        words = ("worker", "sort3", "--name", "far", "--count", "2", "--code", str(EXAMPLES))
        self.worker = self.join("worker", *words, role=Role.WORKER)

    def address_of_weights(self) -> StreamAddress:
        """Return where the run serves its weights."""
        found = read_json(self.layout.stream, StreamAddress)
        assert found is not None
        return found


class EngineBeside(Cluster):
    """The whole run on the head, and one more engine with its relay on the far host, which the workers reach, too.

    Args:
        advertise: Address that the workers are told in place of the far host's.
    """

    def __init__(self, lab: Lab, *assignments: str, advertise: str = "") -> None:
        weights = ('weights.backend="stream"', f'weights.listen="tcp://0.0.0.0:{WEIGHTS_PORT}"')
        super().__init__(lab, *weights, *assignments)
        self.back = Relay(lab, self.far, ENGINE_PORT)
        self.relay = self.join("relay", "relay", "--name", "far", role=Role.ENGINE)
        self.join_engine("engine", *(("--advertise", advertise) if advertise else ()))
        self.await_engine()

    def join_engine(self, name: str, *words: str) -> Program:
        """Start the engine of the far host."""
        address = ("--host", self.far.address, "--port", str(ENGINE_PORT), "--insecure", *words)
        return self.join(name, "engine", "--name", "far", *address, role=Role.ENGINE)

    def engine_works(self) -> bool:
        """Return whether the far engine has something to do, or had in its last seconds."""
        name = f"{FIRST}.{self.far.name}"
        return any(one.in_hand or one.busy for one in engines_of(self.layout) if one.name == name)

    def why(self) -> str:
        """Return why somebody waits, as `status` says it."""
        told = self.head.call("rolloutmq", "status", RUN, "--json")
        return str(msgspec.json.decode(told)["why"])

    @contextlib.contextmanager
    def stuck_relay(self) -> Iterator[None]:
        """Stop the relay of the far host within the block."""
        pid = wait_until(lambda: pid_of(self.far, "relay"), "the relay")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


class TrainerApart(Cluster):
    """Broker and workers on the head; trainer and engine on the far host, which share the weights there.

    The workers reach the engine over a relay, too.
    """

    def __init__(self, lab: Lab, *assignments: str) -> None:
        super().__init__(lab, "trainer.enabled=false", *assignments)
        self.back = Relay(lab, self.far, ENGINE_PORT)
        self.trained = RunLayout(self.far.tmp / "joined")
        here = ("--run-dir", f"/tmp/{self.trained.root.name}")
        self.trainer = self.join("trainer", "trainer", *here, role=Role.TRAINER)
        address = ("--host", self.far.address, "--port", str(ENGINE_PORT))
        self.join("engine", "engine", "--name", "far", *here, *address, role=Role.ENGINE)
        self.await_engine()


def pid_of(host: Host, name: str, *words: str) -> int:
    """Return the process of a host that runs this program of a run with these words; 0 if there is none."""
    wanted = {MODULE, *(word.encode() for word in (name, *words))}
    space = Path(f"/proc/{host.pid}/ns/pid_for_children").readlink()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_here = entry.name.isdecimal() and (entry / "ns/pid").readlink() == space
            if is_here and wanted <= set((entry / "cmdline").read_bytes().split(b"\0")):
                return int(entry.name)
    return 0
