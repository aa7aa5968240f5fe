"""An orchestrator process beside a broker of its own, with real workers.

`Staff` starts it as the launcher does, kills it, and reads its files. Its workers are real; their environment makes
them light, deaf or mortal.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.faults.support.processes import LIMIT_S, ROOT, acked, status, wait_until

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout, Supervision
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.wire.control import SetWorkers
from rolloutmq.services.monitor.status.worker_view import WorkerRow, joined, supervision_of
from rolloutmq.services.process.child import end_marked
from rolloutmq.services.process.identity import MARKER, alive, find_marked

Staffed = Callable[..., Any]
"""The fixture `staffed`: takes the arguments of `config`, and the program of the orchestrator."""
GROUP: Final = 2
PROGRAM: Final = ("-m", "rolloutmq.launch.cli")
ENVIRONMENTS: Final = '''
import asyncio, json, os, pathlib, signal, subprocess, sys, time
from rolloutmq.services.worker.trajectory import Trajectory

HERE = pathlib.Path(__file__).parent
SLEEPER = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


class Light:
    """A group a few times a second, without a policy."""

    async def rollout(self, policy, size, rng):
        await asyncio.sleep(0.02)
        return [self.made(rng) for _ in range(size)]

    def made(self, rng):
        tokens = [rng.randrange(100) for _ in range(8)]
        return Trajectory(token_ids=tokens, mask=[True] * 8, logprobs=[-1.0] * 8, score=rng.random())


class Held(Light):
    """Rollouts that end when the test says so."""

    async def rollout(self, policy, size, rng):
        while not (HERE / "go").exists():
            await asyncio.sleep(0.01)
        return await super().rollout(policy, size, rng)


class Parent(Light):
    """Starts a child that leaves the process group."""

    def __init__(self):
        child = subprocess.Popen(SLEEPER, start_new_session=True)
        (HERE / f"child-{os.getpid()}").write_text(str(child.pid))


class Slow(Light):
    """Rollouts of a given length, after a start of a given length."""

    def __init__(self, own_s=0.5, start_s=0.0):
        time.sleep(start_s)
        self.own_s = own_s

    async def rollout(self, policy, size, rng):
        await asyncio.sleep(self.own_s * rng.uniform(0.8, 1.2))
        return [self.made(rng) for _ in range(size)]


class Served(Slow):
    """Rollouts that take a time of their own, then wait for their turn at an inference server of the run.

    An answer that a server broke off is asked of another.
    """

    async def rollout(self, policy, size, rng):
        made = await super().rollout(policy, size, rng)
        while not await self.answer(rng):
            await asyncio.sleep(0.05)
        return made

    async def answer(self, rng):
        try:
            found = [json.loads(path.read_bytes()) for path in (HERE / "run").glob("inference*.json")]
            ports = [int(one["url"].rpartition(":")[2]) for one in found if not one["draining"]]
            reader, writer = await asyncio.open_connection("127.0.0.1", rng.choice(ports))
        except (OSError, ValueError, IndexError):
            return b""
        try:
            if line := await reader.readline():
                return line
        except OSError:
            pass
        finally:
            writer.close()
        print("broken off", flush=True)
        return b""


class Deaf(Parent):
    """Holds the loop for ever: hears no message and no signal but SIGKILL."""

    async def rollout(self, policy, size, rng):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: print("not listening", flush=True))
        await asyncio.sleep(0.2)
        while True:
            time.sleep(60)


class Mortal(Light):
    """The worker whose name the test writes down dies of its first rollout, whenever it is started."""

    async def rollout(self, policy, size, rng):
        if (HERE / "mortal").read_text() in sys.argv:
            print("line one", flush=True)
            print("the reason is here", flush=True)
            os._exit(9)
        return await super().rollout(policy, size, rng)
'''
SITE: Final = """
import os, time

_file, _true, _true_ns = os.environ["ROLLOUTMQ_FAULTS_CLOCK"], time.time, time.time_ns


def _offset():
    try:
        with open(_file) as told:
            return float(told.read() or 0.0)
    except FileNotFoundError:
        return 0.0


time.time = lambda: _true() + _offset()
time.time_ns = lambda: _true_ns() + int(_offset() * 1e9)
"""
"""Moves the wall clock of a process, and of all it starts, by the seconds a file tells."""


def config(
    base_dir: Path,
    *,
    orchestrator: dict[str, Any] | None = None,
    broker: dict[str, Any] | None = None,
    inference: dict[str, Any] | None = None,
    batch: int = 4 * GROUP,
    **environments: Any,
) -> RunConfig:
    """Return a run with these environments and a quick orchestrator; no trainer, no policy."""
    (base_dir / "envs.py").write_text(ENVIRONMENTS)
    usual = {"group_size": GROUP, "concurrency": 2, "pacing": False, "stale": "pass"}
    quick = {"tick_s": 0.1, "backoff_s": 0.05, "crash_limit": 3}
    return RunConfig.model_validate(
        {
            "run": {"dir": str(base_dir / "run"), "log_bytes": 1 << 20},
            "environment": {name: usual | section for name, section in environments.items()},
            "broker": broker or {},
            "inference": inference or {"kind": "external", "url": "http://127.0.0.1:9/v1"},
            "orchestrator": quick | (orchestrator or {}),
            "trainer": {"batch_sequences": batch},
            "base_dir": str(base_dir),
        }
    )


class Staff:
    """The orchestrator of a run directory, and its workers. All of them end with the block.

    Args:
        run_dir: The run directory.
        program: Arguments of Python before those of the orchestrator.
    """

    def __init__(self, run_dir: Path, program: Sequence[str] = PROGRAM) -> None:
        self.program = tuple(program)
        self.layout = RunLayout(run_dir)
        self.token = f"staff-{os.getpid()}-{time.monotonic_ns()}"
        self.log = run_dir.with_name("orchestrator.log")
        self.process = self._started()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.kill()
        end_marked(f"{self.token}/")
        wait_until(lambda: not find_marked(f"{self.token}/"), "the end of all workers")

    def _started(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=log, env=self.variables, cwd=ROOT)

    @property
    def command(self) -> list[str]:
        """Command line of the orchestrator."""
        return [sys.executable, *self.program, "orchestrator", "--run-dir", str(self.layout.root)]

    @property
    def variables(self) -> dict[str, str]:
        """Environment of the orchestrator, as the launcher sets it."""
        return {**os.environ, MARKER: f"{self.token}/orchestrator"}

    def start(self) -> None:
        """Start another life."""
        self.process = self._started()

    def kill(self) -> None:
        """Kill the orchestrator, and none of its workers."""
        self.process.kill()
        self.process.wait(LIMIT_S)

    def end(self) -> int:
        """End the orchestrator in order and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def living(self) -> dict[str, ProcessIdentity]:
        """Return the live workers, from the orchestrator's state file."""
        known = read_json(self.layout.workers, list[ProcessIdentity]) or []
        return {one.name: one for one in known if alive(one)}

    def marked(self) -> dict[int, str]:
        """Return every process of a worker of this run and its identity, known to the orchestrator or not."""
        found = {}
        for pid in find_marked(f"{self.token}/"):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            mine = next((one for one in variables if one.startswith(MARKER.encode())), b"/")
            name = mine.decode().rpartition("/")[2]
            if name != "orchestrator":
                found[pid] = name
        return found

    def rows(self) -> dict[str, WorkerRow]:
        """Return the rows of `rolloutmq workers`, by worker."""
        heard = status(self.layout.root).pressure.workers
        return {row.worker: row for row in joined(supervision_of(self.layout), heard, time.monotonic())}

    def until_ready(self, count: int) -> dict[str, ProcessIdentity]:
        """Wait until so many workers are ready, and return the live ones."""

        def ready() -> bool:
            assert self.process.poll() is None, "the orchestrator ended"
            known = supervision_of(self.layout)
            if known is None or known.orchestrator.pid != self.process.pid or not known.targets:
                return False  # what an earlier life left, or this one has not decided yet
            # The broker still shows a worker as ready for a while after its end; the orchestrator does not.
            ours = {record.worker for record in known.workers}
            rows = [row for row in self.rows().values() if row.worker in ours]
            return sum(row.state == "ready" and row.pid > 0 for row in rows) == count

        wait_until(ready, f"{count} ready workers")
        return self.living()

    def until_ended(self, worker: str) -> str:
        """Wait until the end of a worker's life is in the log, and return how it ended."""
        line = wait_until(lambda: self.log_lines(f"ended name={worker} "), f"the end of {worker}")[-1]
        return line.partition("how=")[2]

    def until_more(self, workers: Iterable[str]) -> None:
        """Wait until each of the workers has delivered new groups."""
        before = {worker: len(self.acked(worker)) for worker in workers}
        wait_until(
            lambda: all(len(self.acked(worker)) > count for worker, count in before.items()), "more groups"
        )

    def scale(self, env: str, number: int | None) -> None:
        """Ask for a number of workers, as an operator does."""
        with BlockingClient(resolve_blocking(self.layout.root, LIMIT_S).serve) as client:
            client.request(SetWorkers(env=env, count=number), LIMIT_S)

    def cli_json(self, command: str) -> Any:
        """Return the JSON output of a `rolloutmq` command."""
        return json.loads(self.cli(command, str(self.layout.root), "--json"))

    def cli(self, *arguments: str) -> str:
        """Run a `rolloutmq` command and return its output; it must not fail."""
        command = [sys.executable, *PROGRAM, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def supervision(self) -> Supervision:
        """Return the supervision part of the orchestrator's status."""
        found = read_json(self.layout.supervision, Supervision)
        assert found is not None
        return found

    def acked(self, worker: str) -> list[str]:
        """Return the ids of the acked groups of a worker."""
        return [group.group_id for group in acked(self.layout.ack_log(worker))]

    def log_lines(self, *words: str) -> list[str]:
        """Return the lines of the orchestrator's log with all these words."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if all(word in line for word in words)]

    def steps(self, worker: str) -> list[str]:
        """Return the rungs of the stop ladder taken with a worker."""
        return [line.split(" step=")[1].split()[0] for line in self.log_lines("ending", f"name={worker} ")]

    def tail(self) -> str:
        """Return the end of the orchestrator's log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


@contextmanager
def sleeping(count: int) -> Iterator[Sequence["subprocess.Popen[bytes]"]]:
    """Yield processes outside any run; each must live to the end, and ends with the block."""
    command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    variables = {name: value for name, value in os.environ.items() if name != MARKER}
    strangers = [subprocess.Popen(command, start_new_session=True, env=variables) for _ in range(count)]
    try:
        yield strangers
        for stranger in strangers:
            # A signal that came earlier would have ended it, with a code of its own.
            assert stranger.poll() is None
            stranger.terminate()
            assert stranger.wait(LIMIT_S) == -signal.SIGTERM
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()
