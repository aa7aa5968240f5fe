"""The quickstart on two hosts: `rolloutmq up` on the head, and what joins it from the far host, with keys.

Everything is started as docs/clusters.md says. The far host reaches the head through a relay alone, which cuts, stalls
or forgets connections. Processes are found on a host by their command, and killed from outside.
"""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.faults.support.processes import wait_until
from tests.network.support.hosts import ROOT, Host, Lab, Program
from tests.network.support.relay import Relay
from tests.network.support.site import PORTS, RUN

from benchmarks.end_to_end.scenario import steps_logged
from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.files import RunLayout, StreamAddress
from rolloutmq.schemas.network.keys import Role

HEAD: Final = f"tcp://head:{PORTS['serve']}"
WEIGHTS_PORT: Final = 7764
EXAMPLES: Final = ROOT / "examples"
MODULE: Final = b"rolloutmq.launch.service_process"
RUN_S: Final = 240.0
"""Longest wait for steps of a run, and for its end."""


class Cluster:
    """A run on the host `head`, and the host `far`, which reaches it over a relay."""

    def __init__(self, lab: Lab) -> None:
        self.head, self.far = lab.host("head", 1), lab.host("far", 2, "wan")
        self.way = Relay(lab, self.head, *PORTS.values(), WEIGHTS_PORT)
        self.layout = RunLayout(self.head.tmp / "run")
        self.keys = KeyDirectory.create(self.head.tmp / "keys")
        self.assignments = (
            f'broker.listen="tcp://0.0.0.0:{PORTS["serve"]}"',
            'broker.keys="/tmp/keys"',
            'weights.backend="stream"',
            f'weights.listen="tcp://0.0.0.0:{WEIGHTS_PORT}"',
        )

    def join(self, name: str, *words: str, role: Role) -> Program:
        """Start a command on the far host with a key of a role."""
        key = self.far.tmp / f"{role.value}.key"
        if not key.exists():
            save_bundle(key, self.keys.new(role.value, role))
        return self.far.start(name, "rolloutmq", *words, "--connect", HEAD, "--key", f"/tmp/{key.name}")

    def kill(self, host: Host, name: str, *words: str) -> None:
        """Kill the process of a run that has this command, once there is one."""
        pid = wait_until(lambda: pid_of(host, name, *words), f"a process {name} on {host.name}")
        os.kill(pid, signal.SIGKILL)

    def steps(self) -> int:
        """Return the last step that the trainer has settled."""
        return steps_logged(self.layout)


class EnginesApart(Cluster):
    """`up` on the head; relay, engine and workers on the far host."""

    def __init__(self, lab: Lab, *assignments: str) -> None:
        super().__init__(lab)
        sets = (*self.assignments, "environment.sort3.min_workers=0", *assignments)
        self._words = [word for one in sets for word in ("--set", one)]
        self.begin()
        self.relay = self.join("relay", "relay", role=Role.ENGINE)
        self.engine = self.join("engine", "engine", "--name", "far", role=Role.ENGINE)
        self.join_workers()
        self.engine.expect(
            lambda: "inference.far" in [one.name for one in engines_of(self.layout)], "the engine"
        )

    def join_workers(self) -> None:
        """Start the workers of the far host; the end of a run drains them."""
        joined = ("worker", "sort3", "--name", "far", "--count", "2", "--code", str(EXAMPLES))
        self.worker = self.join("worker", *joined, role=Role.WORKER)

    def begin(self) -> None:
        """Start the run on the head; a directory with a run that has ended is moved aside."""
        quickstart = str(EXAMPLES / "quickstart.toml")
        words = ("up", quickstart, "--plain", "--run-dir", RUN, *self._words)
        self.up = self.head.start("up", "rolloutmq", *words)
        self.up.expect(lambda: read_endpoints(self.layout.root), "the broker")
        self.head.call("rolloutmq", "scale", "sort3", "0", "--run-dir", RUN)

    def advance(self, steps: int = 5) -> None:
        """Wait until the trainer has taken so many more steps; fail if the run or a command ends first."""
        goal = self.steps() + steps

        def met() -> bool:
            for program in (self.relay, self.engine, self.worker):
                assert program.living(), f"{program.log.name} ended: {program.text()[-3000:]}"
            return self.steps() >= goal

        self.up.expect(met, f"step {goal}", RUN_S)

    def address_of_weights(self) -> StreamAddress:
        """Return where the run serves its weights."""
        found = read_json(self.layout.stream, StreamAddress)
        assert found is not None
        return found

    def end(self) -> dict[str, Any]:
        """Wait for the end of the run and of what has joined, check the ledger, and return the summary."""
        assert self.up.wait(RUN_S) == 0, self.up.text()
        assert self.worker.wait() == 0, self.worker.text()  # drained by the run
        for program in (self.engine, self.relay):  # they wait for the run's next life
            assert program.end() == 0, program.text()
        assert "every group is accounted for" in self.head.call("rolloutmq", "ledger", "verify", RUN)
        summary: dict[str, Any] = msgspec.json.decode(self.layout.summary.read_bytes())
        assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
        states = ("trained", "filtered", "expired", "dead", "discarded", "in_flight")
        assert summary["groups_accepted"] == sum(summary[f"groups_{state}"] for state in states)
        assert not list(self.layout.logs.glob("sort3-*.log")), "a worker of the head"
        return summary


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
