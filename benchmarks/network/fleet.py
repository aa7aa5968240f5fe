"""Many remote producers on one keyed broker: start, steady load, a killed broker, and killed processes.

All processes are on this host and speak CURVE over loopback, with a key for each process of producers. The broker has
durability `os`. At the end the ledger is checked against the logs of the producers and the trainer.

    python -m benchmarks.network.fleet PROCESSES PRODUCERS    one round, its figures as JSON; PRODUCERS in each process
"""

import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.harness import cpu, stage
from benchmarks.harness.listening import free_listen
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.files import AckedGroup, RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify

CLIENTS: Final = "network.fleet_clients"
RATE: Final = 400.0
"""Groups a second in total."""
STEADY_S: Final = 10.0
KILLED: Final = 2
"""Processes that are killed and replaced, one after the other."""
WITHIN_S: Final = 300.0
END_S: Final = 10.0


@dataclass
class Round:
    """Figures of one round."""

    open_s: float = 0.0
    """From the first connection until each producer had an ack."""
    open_cpu_s: float = 0.0
    """CPU of the broker in that time."""
    rate: float = 0.0
    """Groups a second under the steady load."""
    cpu_us: float = 0.0
    """CPU of the broker for a group under the steady load, in microseconds."""
    clients_cpu: float = 0.0
    """CPU of the producers under that load, in cores."""
    idle_cpu: float = 0.0
    """CPU of the broker without groups, in cores."""
    back_s: float = 0.0
    """From the kill of the broker until each producer had an ack of the next one."""
    back_cpu_s: float = 0.0
    replaced_s: list[float] = field(default_factory=list)
    """From the kill of a process until each producer of the next one had an ack."""
    others_s: list[float] = field(default_factory=list)
    """Longest wait of another producer for an ack meanwhile."""
    rss_mb: float = 0.0
    descriptors: int = 0
    rss_back_mb: float = 0.0
    descriptors_back: int = 0
    accepted: int = 0
    problems: int = 0


class Fleet:
    """A broker, its trainer, and processes of producers."""

    def __init__(self, root: Path, processes: int, each: int, stack: contextlib.ExitStack) -> None:
        self._root = root
        self._each = each
        self._stack = stack
        self._keys = KeyDirectory.create(root / "keys")
        self._address = free_listen()
        self.layout = RunLayout(root / "run")
        self.layout.root.mkdir(mode=0o700)
        listens = {"listen": self._address, "keys": str(self._keys.path), "durability": "os"}
        write_json(self.layout.config, stage.config(**listens))
        self._broker = contextlib.ExitStack()
        stack.callback(lambda: self._broker.close())
        self.start_broker()
        self.trainer = self._player("trainer", "trainer", Role.TRAINER)
        self.trainer.wait_ready()
        self.trainer.begin()
        assert self.trainer.line() == "opened"
        self._lives = [0] * processes
        self._held = [contextlib.ExitStack() for _ in range(processes)]
        for held in self._held:
            stack.callback(held.close)
        self.processes = [self._producers(place) for place in range(processes)]

    def start_broker(self) -> None:
        """Start a broker, once the one before is dead."""
        self.layout.endpoints.unlink(missing_ok=True)
        process = self._broker.enter_context(stage.broker(self.layout))
        self.pid = process.pid
        stage.bound(self.layout, process)

    def kill_broker(self) -> None:
        self._broker.close()
        self._broker = contextlib.ExitStack()

    def _key(self, name: str, role: Role) -> Path:
        path = self._root / f"{name}.key"
        if not path.exists():
            save_bundle(path, self._keys.new(name, role))
        return path

    def _player(self, what: str, name: str, role: Role, *words: object) -> stage.Player:
        call = what, self._address, self._key(name, role), self._root, *words
        return self._stack.enter_context(stage.player(CLIENTS, *call))

    def _producers(self, place: int) -> stage.Player:
        call = "producers", self._address, self._key(f"host-{place}", Role.WORKER), self._root
        more = f"host-{place}", self._each, self._lives[place]
        one = self._held[place].enter_context(stage.player(CLIENTS, *call, *more))
        one.wait_ready(WITHIN_S)
        one.begin()
        return one

    def replace(self, place: int) -> float:
        """Kill a process, start the next one, and return the seconds until each of its producers had an ack."""
        began = time.monotonic()
        self._held[place].close()
        self._lives[place] += 1
        self.processes[place] = self._producers(place)
        self.processes[place].begin("open")
        return self._last([self.processes[place]])[0] - began

    def ask(self, what: str) -> tuple[float, float]:
        """Let all processes open or probe; return when the last one had done it, and the longest wait."""
        for one in self.processes:
            one.begin(what)
        return self._last(self.processes)

    def _last(self, processes: list[stage.Player]) -> tuple[float, float]:
        found = [tuple(map(float, one.line(WITHIN_S).split())) for one in processes]
        return max(at for at, _ in found), max(took for _, took in found)

    def load(self, rate: float) -> None:
        """Send so many groups a second in total from now on."""
        for one in self.processes:
            one.begin(f"load {rate / len(self.processes)}")
        for one in self.processes:
            assert one.line() == "loaded"

    def acked(self) -> int:
        for one in self.processes:
            one.begin("count")
        return sum(int(one.line()) for one in self.processes)

    def clients_cpu_s(self) -> float:
        return sum(cpu.spent_s(one.pid) for one in self.processes)

    def rss_mb(self) -> float:
        pages = int((Path("/proc") / str(self.pid) / "statm").read_text().split()[1])
        return pages * 4096 / 1e6

    def descriptors(self) -> int:
        return len(list((Path("/proc") / str(self.pid) / "fd").iterdir()))

    def end(self) -> tuple[int, int]:
        """End all, and return the accepted groups and the problems of the ledger."""
        for one in self.processes:
            one.begin("end")
        for one in self.processes:
            with contextlib.suppress(stage.StageError):
                one.line(WITHIN_S)  # none comes: its end
        time.sleep(1.0)
        self.trainer.begin("end")
        with contextlib.suppress(stage.StageError):
            self.trainer.line(WITHIN_S)
        self._broker.close()
        acked = [
            msgspec.json.decode(line, type=AckedGroup)
            for log in self._root.glob("host-*.jsonl")
            for line in log.read_bytes().split(b"\n")[:-1]
        ]
        trained = Counter((self._root / "trained").read_text().split())
        assert len({line.group_id for line in acked}) == len(acked), "a group was acked twice"
        assert set(trained.values()) <= {1}, "a group was trained twice"
        witness = Witness(acked=tuple(acked), trained=(trained,))
        verdict = verify(self.layout.journal, self.layout.dead, lambda: witness)
        for problem in verdict.problems[:5]:
            print(problem, file=sys.stderr)
        return verdict.accepted, len(verdict.problems)


@contextlib.contextmanager
def fleet(processes: int, each: int) -> Iterator[Fleet]:
    """Yield a fleet whose processes are ready to open their producers."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as text, contextlib.ExitStack() as stack:
        yield Fleet(Path(text), processes, each, stack)


def measured(processes: int, each: int) -> Round:
    """Run one round."""
    found = Round()

    def note(what: str) -> None:
        print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)

    with fleet(processes, each) as site:
        began, before = time.monotonic(), cpu.spent_s(site.pid)
        found.open_s = site.ask("open")[0] - began
        found.open_cpu_s = cpu.spent_s(site.pid) - before
        note(f"open {found.open_s:.1f} cpu {found.open_cpu_s:.1f}")
        found.rss_mb, found.descriptors = site.rss_mb(), site.descriptors()
        time.sleep(3.0)
        before, began = cpu.spent_s(site.pid), time.monotonic()
        time.sleep(STEADY_S / 2)
        found.idle_cpu = (cpu.spent_s(site.pid) - before) / (time.monotonic() - began)
        note(f"idle {found.idle_cpu}")
        site.load(RATE)
        time.sleep(3.0)
        acked, before, began = site.acked(), cpu.spent_s(site.pid), time.monotonic()
        clients = site.clients_cpu_s()
        time.sleep(STEADY_S)
        spent, took = cpu.spent_s(site.pid) - before, time.monotonic() - began
        found.clients_cpu = (site.clients_cpu_s() - clients) / took
        groups = site.acked() - acked
        found.rate, found.cpu_us = groups / took, spent / groups * 1e6
        note(f"steady {found.rate:.0f}/s cpu {found.cpu_us:.0f} us clients {found.clients_cpu:.2f}")
        began = time.monotonic()
        site.kill_broker()
        site.start_broker()
        note(f"started again after {time.monotonic() - began:.1f}")
        found.back_s = site.ask("probe")[0] - began
        found.back_cpu_s = cpu.spent_s(site.pid)
        note(f"back {found.back_s:.1f} cpu {found.back_cpu_s:.1f}")
        for place in range(min(KILLED, processes)):
            found.replaced_s.append(site.replace(place))
            note(f"replaced {found.replaced_s}")
            found.others_s.append(site.ask("probe")[1])
        found.rss_back_mb, found.descriptors_back = site.rss_mb(), site.descriptors()
        found.accepted, found.problems = site.end()
    return found


if __name__ == "__main__":
    print(json.dumps(asdict(measured(int(sys.argv[1]), int(sys.argv[2]))), indent=1))
