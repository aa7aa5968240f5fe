"""Workers that answer the tasks of verl's prompts over real sockets, and verl's trainers in their own environment."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from tests.trainer.integrations.verl.played import SIZE, columns

from rolloutmq import Group, Producer, TaskClient, TaskTaker
from rolloutmq.bus.tasks.taker import LeasedTask
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.tasks import TaskState

ROOT: Final = Path(__file__).parents[4]
PYTHON: Final = Path(os.environ.get("VERL_PYTHON", ROOT / ".venv-verl/bin/python"))
"""`make newest` sets another interpreter."""
PLAYER: Final = Path(__file__).with_name("player.py")
ENDED_WITHIN_S: Final = 400.0


def missing() -> str:
    """Return why verl cannot run; empty if it can."""
    return "" if (PYTHON.parents[1] / ".installed").exists() else "needs verl: make .venv-verl/.installed"


def config(**broker: Any) -> RunConfig:
    """A run whose groups are answered by the test."""
    mine = {
        "entry": "mine.py:Mine", "group_size": SIZE, "pacing": False, "stale": "pass", "tasks": "submitted",
    }  # fmt: skip
    given: dict[str, Any] = {
        "environment": {"mine": mine},
        "trainer": {"enabled": False},
        "inference": {"kind": "none"},
        "orchestrator": {"enabled": False},
        "broker": broker,
    }
    return RunConfig.model_validate(given)


def row_of(task: LeasedTask) -> int:
    """Return the row of the data set that a task is about."""
    return int(task.payload["extra_info"]["index"])


@dataclass
class Stage:
    """Workers of one environment. `fates` says what becomes of the task of a row.

    Fates: `dead` always fails; `lost` is taken by a worker that leaves; `late` is answered after its deadline; `short`
    lacks a sequence; `flat` has the same score in all sequences; `warm` was sampled at another temperature; `silent` is
    never answered.
    """

    run_dir: Path
    fates: Mapping[int, str] = field(default_factory=dict)
    version: PolicyVersion = PolicyVersion()
    answered: list[int] = field(default_factory=list)
    """Row of each answer for the training."""
    met: set[str] = field(default_factory=set)
    """Tasks that had their fate."""
    joined: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Is released by each worker that the broker knows."""

    def group(self, task: LeasedTask, members: int) -> Group:
        given = columns(row_of(task), members)
        if self.fates.get(row_of(task)) == "flat":
            given["scores"] = [0.5] * members
        if self.fates.get(row_of(task)) == "warm":
            given["temperatures"] = [[0.7] * len(tokens) for tokens in given["tokens"]]
        return Group.build(
            f"g-{task.id.replace('/', '.')}",
            **given,
            oldest=self.version,
            newest=self.version,
            task=task.id,
        )

    async def work(self, name: str, split: Split = Split.TRAIN) -> None:
        """Answer tasks until cancelled."""
        opening = Producer.open(
            self.run_dir, env="mine", producer=name, split=split, group_size=SIZE, slots=16
        )
        async with (
            opening as producer,
            TaskTaker.open(self.run_dir, name, lambda: producer.session) as taker,
            asyncio.TaskGroup() as answers,
        ):
            self.joined.release()
            while True:
                for task in await taker.take(4):
                    answers.create_task(self._answer(task, producer, taker))

    async def _answer(self, task: LeasedTask, producer: Producer, taker: TaskTaker) -> None:
        fate = self.fates.get(row_of(task), "")
        if fate == "dead":
            await taker.hand_back(task.id, "it always fails")
            return
        if fate == "silent":
            return
        if fate == "lost" and task.id not in self.met:
            self.met.add(task.id)
            await taker.hand_back(task.id, "its worker leaves", tried=False)
            return
        if fate == "late":
            async with TaskClient.open(self.run_dir) as tasks:
                [status] = await tasks.results([task.id])
                assert status.state in {TaskState.EXPIRED, TaskState.CANCELLED}
        if "/train/" in task.id:
            self.answered.append(row_of(task))
        await producer.send(self.group(task, SIZE - 1 if fate == "short" else task.size or SIZE))


@asynccontextmanager
async def workers(stage: Stage, count: int = 2) -> AsyncIterator[None]:
    """Workers, until the block ends."""
    made = [asyncio.create_task(stage.work(f"w-{number}")) for number in range(count)]
    made.append(asyncio.create_task(stage.work("v", Split.EVAL)))
    try:
        async with asyncio.timeout(60):
            for _ in made:
                await stage.joined.acquire()
        yield
    finally:
        for one in made:
            one.cancel()
        await asyncio.gather(*made, return_exceptions=True)


@dataclass
class Played:
    """What a player left."""

    code: int
    output: str
    lines: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line[kind] for line in self.lines if kind in line]


def read(record: Path) -> list[dict[str, Any]]:
    """Return the lines of a player."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def command(run_dir: Path, record: Path, **plan: Any) -> list[str]:
    """Return the command line of a player."""
    spec = {"run_dir": str(run_dir), "record": str(record), "size": SIZE, **plan}
    return [str(PYTHON), str(PLAYER), json.dumps(spec)]


def environment() -> dict[str, str]:
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    return os.environ | {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else its processes starve on a loaded machine
        "VERL_LOGGING_LEVEL": "WARNING",
    }


def end(family: list[psutil.Process]) -> None:
    """End what a player has started: Ray's processes outlive one that was killed, for a moment."""
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(family, 30)
    assert not alive, f"still there: {alive}"


@contextmanager
def ray_files() -> Iterator[str]:
    """A folder for Ray, whose sockets want a short path."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder


async def play(run_dir: Path, **plan: Any) -> Played:
    """Let a trainer of verl run to its end, and end Ray's processes."""
    with ray_files() as folder:
        return await _play(run_dir, ray=folder, **plan)


async def _play(run_dir: Path, **plan: Any) -> Played:
    record = run_dir.parent / "record.jsonl"
    record.unlink(missing_ok=True)
    code, output = await run(command(run_dir, record, **plan), run_dir.parent / "player.log", environment())
    return Played(code, output, read(record))


async def run(words: list[str], log: Path, env: dict[str, str]) -> tuple[int, str]:
    """Run a program that starts Ray; return its exit code and its output, when all its processes have ended."""
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *words, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    family: list[psutil.Process] = []
    try:
        async with asyncio.timeout(ENDED_WITHIN_S):
            while process.returncode is None:
                family = family_of(process.pid) or family
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 0.5)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await asyncio.to_thread(end, family)
    return process.returncode, log.read_text(errors="replace")


def family_of(pid: int) -> list[psutil.Process]:
    """Return the processes below a process."""
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return found
    except psutil.NoSuchProcess:
        return []


def verify(run_dir: Path) -> None:
    """Check that `rolloutmq ledger verify` finds every group accounted for."""
    ended = subprocess.run(
        [sys.executable, "-m", "rolloutmq.launch.cli", "ledger", "verify", str(run_dir)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "every group is accounted for" in ended.stdout
