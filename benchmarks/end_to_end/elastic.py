"""Autoscaling in a real run: worker processes follow a trainer with a demand of 1x, 4x, 1x.

    python -m benchmarks.end_to_end.elastic               the figures
    python -m benchmarks.end_to_end.elastic picture.png   and a plot of them

The run is `examples/elastic/elastic.toml`, started from the command line. The trainer is in this process: it pulls a
batch, sleeps according to its demand, and settles. It measures its waits itself, independently of the run. Workers are
counted as running processes, and groups by the ids this trainer received and those in the workers' ack logs.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from benchmarks.end_to_end.scenario import ScenarioError
from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import AckedGroup, RunLayout
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.services.plotting import GREEN, ORANGE, QUIET, RED, blank, dress
from rolloutmq.services.process.identity import alive, find_marked

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "elastic" / "elastic.toml"
BATCH: Final = 32
USUAL: Final = 48.0
"""The trainer's demand at 1x, in sequences per second; a worker produces 32."""
PHASES: Final = ((45.0, 1.0), (45.0, 4.0), (80.0, 1.0))
"""Seconds, and factor on the demand. Scale-down is slow, so the last phase is longer."""
MADE: Final = 32.0
SHORT_PART: Final = 0.5
"""Part of a second that a starving trainer waits."""
READY_S: Final = 60.0
LOOK_S: Final = 0.25


@dataclass(slots=True)
class Second:
    """One second of the run."""

    appetite: float
    waited_s: float
    eaten: int
    workers: int


@dataclass(slots=True)
class Elastic:
    """Measurements; `seconds` counts from the first pull."""

    seconds: list[Second] = field(default_factory=list)
    began: dict[tuple[str, int], float] = field(default_factory=dict)
    """Start time of each worker process, wall clock."""
    start_s: float = math.nan
    """Slowest start of a worker: from its process to the first pressure with it ready."""
    lost: int = 0
    orphans: int = 0
    exit_code: int = -1
    twice: int = 0

    def starved_s(self) -> int:
        """Return the longest continuous time in which the trainer waited for most of each second."""
        longest = now = 0
        for second in self.seconds:
            now = now + 1 if second.waited_s > SHORT_PART else 0
            longest = max(longest, now)
        return longest

    def ends(self) -> Iterator[tuple[float, int]]:
        """Yield the demand of each phase and the workers at its end, the median of the last five seconds."""
        at = 0.0
        for length_s, times in PHASES:
            at += length_s
            last = sorted(second.workers for second in self.seconds[int(at) - 6 : int(at) - 1])
            yield USUAL * times, last[len(last) // 2]


class Trainer:
    """Pulls batches and sleeps according to the demand of the phase."""

    def __init__(self, run_dir: Path) -> None:
        self.trained: list[str] = []
        self.waited_s = 0.0
        self.eaten = 0
        self.appetite = USUAL
        self.begun = threading.Event()
        self._waiting_since: float | None = None
        self._stop = threading.Event()
        self._run_dir = run_dir
        self._thread = threading.Thread(target=self._train, name="trainer")
        self.failure: RolloutMQError | None = None

    def __enter__(self) -> "Trainer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def waited_until(self, now: float) -> float:
        """Return the seconds waited so far, including a wait in progress."""
        since = self._waiting_since
        return self.waited_s + (now - since if since is not None else 0.0)

    def _train(self) -> None:
        try:
            with Consumer.blocking(self._run_dir, sequences=BATCH) as consumer:
                self.begun.set()
                while not self._stop.is_set():
                    self._step(consumer)
        except RolloutMQError as error:
            self.failure = error
            self.begun.set()

    def _step(self, consumer: Any) -> None:
        began = self._waiting_since = time.monotonic()
        version = consumer.version
        batch = consumer.pull(version.step, version, 1.0)
        self._waiting_since = None
        self.waited_s += time.monotonic() - began
        if batch is None:
            return
        sequences = sum(group.scores.size for group in batch.groups)
        time.sleep(sequences / self.appetite)
        batch.ack()
        self.trained += [group.group_id for group in batch.groups]
        self.eaten += sequences


def run(directory: Path) -> Elastic:
    """Run all phases. Blocks for about three minutes; ScenarioError if the run does not start or ends early."""
    layout = RunLayout(directory / "run")
    command = [sys.executable, "-m", "rolloutmq.launch.cli"]
    out = Elastic()
    with (directory / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [*command, "up", str(EXAMPLE), "--run-dir", str(layout.root), "--plain"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            _wait_ready(layout, up)
            with Trainer(layout.root) as trainer:
                trainer.begun.wait(READY_S)
                _watch(trainer, layout, up, out)
                if trainer.failure is not None:
                    raise ScenarioError(f"the trainer failed: {trainer.failure}")
            token = _workers(layout)[0].marker.partition("/")[0]
            subprocess.run([*command, "down", str(layout.root)], check=False, stdout=log, stderr=log)
            out.exit_code = up.wait(READY_S)
        finally:
            up.kill()
            up.wait()
    out.orphans = len(find_marked(f"{token}/"))
    out.start_s = _slowest_start(layout, out.began)
    _account(layout, trainer.trained, out)
    return out


def _wait_ready(layout: RunLayout, up: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while not layout.endpoints.exists():
        if up.poll() is not None or time.monotonic() > deadline:
            raise ScenarioError(f"the run did not come up, exit code {up.poll()}")
        time.sleep(LOOK_S)


def _watch(trainer: Trainer, layout: RunLayout, up: subprocess.Popen[bytes], out: Elastic) -> None:
    at, waited_s, eaten = time.monotonic(), trainer.waited_until(time.monotonic()), trainer.eaten
    for length_s, times in PHASES:
        trainer.appetite = USUAL * times
        for _ in range(int(length_s)):
            at += 1.0
            time.sleep(max(0.0, at - time.monotonic()))
            if up.poll() is not None or trainer.failure is not None:
                raise ScenarioError(f"the run ended early, {up.poll()}, {trainer.failure}")
            now_waited_s, now_eaten = trainer.waited_until(time.monotonic()), trainer.eaten
            living = _workers(layout)
            for one in living:
                if (one.name, one.pid) not in out.began:
                    out.began[one.name, one.pid] = _began(one)
            second = Second(trainer.appetite, now_waited_s - waited_s, now_eaten - eaten, len(living))
            out.seconds.append(second)
            waited_s, eaten = now_waited_s, now_eaten


def _workers(layout: RunLayout) -> list[ProcessIdentity]:
    """Return the running worker processes, from the run's own files."""
    if not layout.workers.exists():
        return []
    known = msgspec.json.decode(layout.workers.read_bytes(), type=list[ProcessIdentity])
    return [one for one in known if alive(one)]


def _began(one: ProcessIdentity) -> float:
    try:
        return float(psutil.Process(one.pid).create_time())
    except psutil.NoSuchProcess:
        return math.inf


def _slowest_start(layout: RunLayout, began: Mapping[tuple[str, int], float]) -> float:
    """Return the longest time from the start of a process to the first pressure with it ready."""
    ready: dict[tuple[str, int], float] = {}
    for line in layout.metrics.read_text().splitlines():
        event = json.loads(line)
        for worker in event.get("workers", ()) if event.get("kind") == "pressure" else ():
            if worker["state"] == "ready":
                ready.setdefault((worker["worker"], worker["pid"]), event["t"])
    return max((at - began[who] for who, at in ready.items() if who in began), default=math.nan)


def _account(layout: RunLayout, trained: Sequence[str], out: Elastic) -> None:
    """Count the acked groups neither trained nor queued, and those trained twice."""
    acked = {
        msgspec.json.decode(line, type=AckedGroup).group_id
        for file in layout.acks.glob("*.jsonl")
        for line in file.read_bytes().splitlines()
    }
    verified = subprocess.run(
        [sys.executable, "-m", "rolloutmq.launch.cli", "ledger", "verify", str(layout.root), "--json"],
        check=False,
        stdout=subprocess.PIPE,
    )
    found = json.loads(verified.stdout)
    out.twice = len(trained) - len(set(trained))
    out.lost = len(acked - set(trained)) - _waiting(found)


def _waiting(verified: dict[str, Any]) -> int:
    """Return the groups queued, leased or expired at the end, according to the files."""
    counts = verified["counts"]
    return sum(counts[state] for state in ("queued", "leased", "expired"))


def draw(out: Elastic, path: Path) -> None:
    """Plot workers, demand and waits over time."""
    figure = blank(8.0, 3.6, 120)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (3, 1), "hspace": 0.2})
    times = range(1, len(out.seconds) + 1)
    wanted = [second.appetite / MADE for second in out.seconds]
    top.plot(times, wanted, color=ORANGE, linewidth=1.2, drawstyle="steps-post")
    top.plot(times, [s.workers for s in out.seconds], color=GREEN, linewidth=1.8, drawstyle="steps-post")
    top.set_ylim(0, max(max(wanted), *(s.workers for s in out.seconds)) * 1.2)
    top.set_title("worker processes (green), demand over throughput of one (orange)", loc="left", fontsize=8)
    bottom.bar(times, [min(1.0, s.waited_s) for s in out.seconds], width=1.0, color=RED, alpha=0.7)
    bottom.set_ylim(0, 1)
    bottom.set_title("part of each second that the trainer waited", loc="left", fontsize=8)
    bottom.set_xlabel("seconds", fontsize=7, color=QUIET)
    for panel in (top, bottom):
        dress(panel)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(words: Sequence[str]) -> int:
    """Run all phases and print the measurements."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-elastic-") as directory:
        out = run(Path(directory))
    for appetite, workers in out.ends():
        print(f"{appetite:g} sequences a second: {workers} workers, {appetite / MADE:.1f} needed")
    print(f"slowest start {out.start_s:.1f} s, longest starving {out.starved_s()} s")
    print(f"lost {out.lost}, trained twice {out.twice}, orphans {out.orphans}, exit code {out.exit_code}")
    print(" ".join(f"{second.workers}{'!' * (second.waited_s > SHORT_PART)}" for second in out.seconds))
    if words:
        draw(out, Path(words[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
