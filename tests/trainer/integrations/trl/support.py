"""A broker with groups of known contents, and trainers of TRL in their own environment."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from rolloutmq import Group, Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.monitor.text.jsonl import read_lines

ROOT: Final = Path(__file__).parents[4]
PYTHON: Final = Path(os.environ.get("TRL_PYTHON", ROOT / ".venv-trl/bin/python"))
"""`make newest` sets another interpreter."""
PLAYER: Final = Path(__file__).with_name("player.py")
ENDED_WITHIN_S: Final = 500.0
SIZE: Final = 4
"""Sequences of a group."""
VOCABULARY: Final = 14


def missing() -> str:
    """Return why TRL's own trainer cannot run; empty if it can."""
    return "" if PYTHON.exists() else "needs TRL: make bench-rivals"


def config(**sections: Any) -> RunConfig:
    """A run without engines, whose groups are pushed by the test."""
    mine = {"entry": "mine.py:Mine", "group_size": SIZE, "pacing": False, "stale": "pass"}
    given: dict[str, Any] = {
        "run": {"name": "trl"},
        "environment": {"mine": mine},
        "trainer": {"enabled": False},
        "inference": {"kind": "none"},
        "model": {"hidden_size": 16, "layers": 1, "mlp_size": 16},
        "orchestrator": {"enabled": False},
    }
    return RunConfig.model_validate(given | sections)


@contextmanager
def broker(run_dir: Path, run: RunConfig | None = None) -> Iterator[RunLayout]:
    """A broker in this process, with the configuration in its run directory."""
    layout = RunLayout(run_dir)
    made = run or config()
    write_json(layout.config, made)
    with running_broker(made, layout):
        yield layout


def group(number: int, *, size: int = SIZE, seed: int = 0, **changes: Any) -> Group:
    """Group `number`: prompts and completions of several lengths, the second sequence with a tool's tokens inside."""
    rng = np.random.default_rng([number, seed])
    prompt = rng.integers(3, VOCABULARY, 2 + number % 3).tolist()
    tokens, mask, logprobs, scores = [], [], [], []
    for row in range(size):
        answer = rng.integers(3, VOCABULARY, 2 + (number + row) % 4).tolist()
        chosen = [1] * len(answer)
        if row == 1:
            answer, chosen = [5, 6, 7, 8, 9], [1, 0, 0, 1, 1]
        tokens.append(prompt + answer)
        mask.append([0] * len(prompt) + chosen)
        logprobs.append([0.0] * len(prompt) + [-float(rng.random()) - 1.0 for _ in answer])
        scores.append(float(rng.random()))
    given: dict[str, Any] = {
        "tokens": tokens,
        "mask": mask,
        "scores": scores,
        "inference_logprobs": logprobs,
        **changes,
    }
    return Group.build(f"g{number}", **{name: value for name, value in given.items() if value is not None})


def push(run_dir: Path, groups: Sequence[Group]) -> None:
    """Push groups and wait until all are acked."""
    with Producer.blocking(
        run_dir, env="mine", producer=f"p-{groups[0].group_id}", group_size=SIZE, slots=64, timeout_s=30
    ) as producer:
        for one in groups:
            producer.send(one, timeout_s=30)


class Played:
    """What a player left."""

    def __init__(self, code: int, output: str, record: Path) -> None:
        self.code = code
        self.output = output
        self.lines: list[dict[str, Any]] = []
        if record.exists():
            self.lines = [json.loads(line) for line in record.read_text().splitlines()]

    @property
    def told(self) -> dict[str, Any]:
        """Its last word."""
        assert self.code == 0, self.output
        found: dict[str, Any] = json.loads(self.output.splitlines()[-1])
        return found

    def of(self, kind: str, rank: int = 0) -> list[Any]:
        """Return the lines of a kind that one rank wrote."""
        return [line for line in self.lines if kind in line and line["rank"] == rank]

    @property
    def losses(self) -> list[float]:
        return [line["log"]["loss"] for line in self.of("log") if "loss" in line["log"]]


def command(run_dir: Path, record: Path, ranks: int = 1, **plan: Any) -> list[str]:
    """Return the command line of a player, or of several ranks under torchrun."""
    spec = json.dumps({"run_dir": str(run_dir), "record": str(record), **plan})
    start = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    return [str(PYTHON), *start, str(PLAYER), spec]


def environment() -> dict[str, str]:
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def play(run_dir: Path, steps: int, *, ranks: int = 1, record: str = "record.jsonl", **plan: Any) -> Played:
    """Let a trainer of TRL run to its end."""
    file = run_dir.parent / record
    ended = subprocess.run(
        command(run_dir, file, ranks, steps=steps, **plan),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=ENDED_WITHIN_S,
        check=False,
    )
    return Played(ended.returncode, ended.stdout, file)


class Stage:
    """One player process for several trainers, one after another."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [str(PYTHON), str(PLAYER)],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def play(self, run_dir: Path, steps: int, *, record: str = "record.jsonl", **plan: Any) -> Played:
        """Let a trainer run to its end."""
        process, file, start = self._process, run_dir.parent / record, self._log.stat().st_size
        assert process.stdin is not None
        assert process.stdout is not None
        spec = {"run_dir": str(run_dir), "record": str(file), "steps": steps, **plan}
        process.stdin.write(json.dumps(spec) + "\n")
        process.stdin.flush()
        with deadline(process):
            answer = process.stdout.readline()
        output = self._log.read_bytes()[start:].decode(errors="replace")
        assert answer, output
        error = json.loads(answer).get("error", "")
        return Played(1 if error else 0, output + (error or answer), file)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@contextmanager
def deadline(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process that is not done in time, so that a read of its output ends."""
    timer = threading.Timer(ENDED_WITHIN_S, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def settled(layout: RunLayout) -> list[SettledBatch]:
    """Return the lines of the trainer's log."""
    return list(read_lines(layout.trained, SettledBatch))


def wait_until(what: str, condition: Any, within_s: float = 60.0) -> None:
    """Block until the condition holds."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"no {what} in time"
        time.sleep(0.05)


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
