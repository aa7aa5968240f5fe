"""A broker with keys, its trainer, and processes of remote producers: start, load, kills, and the ledger at the end.

All processes are on this host and speak CURVE over loopback, with a key for each process of producers. The broker has
durability `os`.
"""

import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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
WITHIN_S: Final = 300.0


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
