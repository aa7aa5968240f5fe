"""Workers that answer SkyRL's tasks over real sockets, and SkyRL's trainer in its own environment."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import nn

from rolloutmq import Group, Producer, TaskClient, TaskTaker
from rolloutmq.bus.tasks.taker import LeasedTask
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.tasks import TaskState
from rolloutmq.trainer.weights.disk import DiskShare

ROOT: Final = Path(__file__).parents[4]
PYTHON: Final = Path(os.environ.get("SKYRL_PYTHON", ROOT / ".venv-skyrl/bin/python"))
"""`make newest` sets another interpreter."""
PLAYER: Final = Path(__file__).with_name("player.py")
START: Final = (
    "import runpy, sys, typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict; "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)
"""On Python 3.11 SkyRL 0.3 needs the `TypedDict` of Python 3.12."""
ENDED_WITHIN_S: Final = 240.0
SIZE: Final = 4
"""Trajectories of a group."""
RISE: Final = 0.125
"""What a step of the player adds to its weight."""


def missing() -> str:
    """Return why SkyRL's trainer cannot run; empty if it can."""
    return "" if PYTHON.exists() else "needs SkyRL: make .venv-skyrl/.installed"


def environment() -> dict[str, str]:
    """Return the environment variables of a process with SkyRL."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    return os.environ | {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LOG_LEVEL": "WARNING",
    }


def config(changes: Mapping[str, Any] | None = None, **broker: Any) -> RunConfig:
    """A run whose groups are answered by the test; `changes` are those of its environment."""
    mine = {
        "entry": "mine.py:Mine", "group_size": SIZE, "pacing": False, "stale": "pass", "tasks": "submitted",
    }  # fmt: skip
    given: dict[str, Any] = {
        "environment": {"mine": mine | dict(changes or {})},
        "trainer": {"enabled": False},
        "inference": {"kind": "none"},
        "orchestrator": {"enabled": False},
        "broker": broker,
    }
    return RunConfig.model_validate(given)


def sequence(uid: str, place: int, step: int) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, mask and log-probabilities of a trajectory: two turns, with a tool's tokens between."""
    prompt = [int(uid) + 10]
    answer = [20 + place] * (1 + (int(uid) + place) % 3)
    tool, last = [7, 8], [30 + place, 1]
    mask = [0] * len(prompt) + [1] * len(answer) + [0] * len(tool) + [1] * len(last)
    served = -(1.0 + RISE * step)
    return prompt + answer + tool + last, mask, [served * one for one in mask]


def score(uid: str, place: int) -> float:
    return (int(uid) + place) % 5 / 4


@dataclass
class Stage:
    """Workers of one environment. `fates` says what becomes of an instance's task, by its uid.

    Fates: `dead` always fails; `lost` is taken by a worker that leaves; `late` is answered after its deadline; `short`
    lacks a sequence; `silent` is never answered; `flat` has the same score in all sequences; `cut` has sequences
    that reached their longest length.
    """

    run_dir: Path
    weights: Path
    fates: Mapping[str, str]
    answered: list[tuple[str, int]] = field(default_factory=list)
    """Task and policy step of each answer."""
    lost: set[str] = field(default_factory=set)
    _share: DiskShare | None = None

    def version(self) -> tuple[PolicyVersion, float]:
        """Return the published version, and the weight in it."""
        module = nn.Linear(1, 1, bias=False)
        if self._share is None:
            self._share = DiskShare.attach(module, self.weights)
            self._module = module
        with self._share.reading() as version:
            return version, float(self._module.weight)

    def group(self, task: LeasedTask, members: int) -> Group:
        uid = str(task.payload["uid"])
        version, weight = self.version()
        assert weight == RISE * version.step, "the weights of a version are those of its step"
        rows = [sequence(uid, place, version.step) for place in range(members)]
        self.answered.append((task.id, version.step))
        return Group.build(
            f"g-{task.id.replace('/', '.')}",
            tokens=[row[0] for row in rows],
            mask=[row[1] for row in rows],
            inference_logprobs=[row[2] for row in rows],
            scores=[score(uid, 0 if self.fates.get(uid) == "flat" else place) for place in range(members)],
            stop_reasons=["length" if self.fates.get(uid) == "cut" else "stop"] * members,
            oldest=version,
            newest=version,
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
            while True:
                for task in await taker.take(4):
                    answers.create_task(self._answer(task, producer, taker))

    async def _answer(self, task: LeasedTask, producer: Producer, taker: TaskTaker) -> None:
        uid = str(task.payload["uid"])
        fate = self.fates.get(uid, "")
        if fate == "dead":
            await taker.hand_back(task.id, "it always fails")
            return
        if fate == "silent":
            return
        if fate == "lost" and uid not in self.lost:
            self.lost.add(uid)
            await taker.hand_back(task.id, "its worker leaves", tried=False)
            return
        if fate == "late":
            async with TaskClient.open(self.run_dir) as tasks:
                [status] = await tasks.results([task.id])
                assert status.state in {TaskState.EXPIRED, TaskState.CANCELLED}
        await producer.send(self.group(task, SIZE - 1 if fate == "short" else SIZE))

    @property
    def trained_on(self) -> list[str]:
        """Uids of the answers for the training, in order."""
        return [name.rpartition("/")[2].partition("~")[0] for name, _ in self.answered if "/train/" in name]

    def close(self) -> None:
        if self._share is not None:
            self._share.close()


@asynccontextmanager
async def workers(stage: Stage, count: int = 2) -> AsyncIterator[None]:
    """Workers, until the block ends."""
    made = [asyncio.create_task(stage.work(f"w-{number}")) for number in range(count)]
    made.append(asyncio.create_task(stage.work("v", Split.EVAL)))
    try:
        yield
    finally:
        for one in made:
            one.cancel()
        await asyncio.gather(*made, return_exceptions=True)
        stage.close()


@dataclass
class Played:
    """What a player left."""

    code: int
    output: str
    lines: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line[kind] for line in self.lines if kind in line]


async def play(run_dir: Path, **plan: Any) -> Played:
    """Let SkyRL's trainer run to its end."""
    record = run_dir.parent / "record.jsonl"
    record.unlink(missing_ok=True)
    spec = {"run_dir": str(run_dir), "record": str(record), "size": SIZE, "kind": "sim", **plan}
    code, output = await run(PLAYER, spec)
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    return Played(code, output, lines)


async def run(script: Path, spec: dict[str, Any]) -> tuple[int, str]:
    """Run a script with SkyRL to its end; return its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        str(PYTHON), "-c", START, str(script), json.dumps(spec),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(ENDED_WITHIN_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode(errors="replace")


def verify(run_dir: Path) -> str:
    """Return the verdict of `rolloutmq ledger verify`; it must be clean."""
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
    return ended.stdout
