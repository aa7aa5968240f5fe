"""A real run of real workers, followed by a trainer whose appetite is 1x, 4x, 1x.

    python -m benchmarks.elastic               the figures
    python -m benchmarks.elastic picture.png   and a picture of them

The run is `examples/elastic.toml`, started as a user starts it. The trainer is here: it takes a batch, sleeps for as
long as its appetite says, and settles. What it waited for is measured in it, not by the run. Workers are counted by the
processes that live, groups by the ids that this trainer saw and those that the workers' own logs say were acked.
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

from benchmarks.scenario import ScenarioError
from rolloutmq.bus.consumer import Consumer
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.records import AckedGroup
from rolloutmq.services.drawing import GREEN, ORANGE, QUIET, RED, blank, dress
from rolloutmq.services.orchestrator.identity import alive, find_marked

EXAMPLE: Final = Path(__file__).parent.parent / "examples" / "elastic.toml"
BATCH: Final = 32
USUAL: Final = 48.0
"""Sequences a second that the trainer eats at 1x; a worker makes 32."""
PHASES: Final = ((45.0, 1.0), (45.0, 4.0), (80.0, 1.0))
"""Seconds, and times the usual appetite. Workers go late, so the last is longer."""
MADE: Final = 32.0
SHORT_PART: Final = 0.5
"""Part of a second that a trainer waits when it starves."""
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
    """What was seen; `seconds` from the first pull on."""

    seconds: list[Second] = field(default_factory=list)
    began: dict[tuple[str, int], float] = field(default_factory=dict)
    """When each worker process was started, wall clock."""
    start_s: float = math.nan
    """Slowest start of a worker: from the process to the first pressure that has it as ready."""
    lost: int = 0
    orphans: int = 0
    exit_code: int = -1
    twice: int = 0

    def starved_s(self) -> int:
        """Return the longest time on end in which the trainer waited for most of each second."""
        longest = now = 0
        for second in self.seconds:
            now = now + 1 if second.waited_s > SHORT_PART else 0
            longest = max(longest, now)
        return longest

    def ends(self) -> Iterator[tuple[float, int]]:
        """Yield the appetite of each phase and the workers at its end, the median of the last five seconds."""
        at = 0.0
        for length_s, times in PHASES:
            at += length_s
            last = sorted(second.workers for second in self.seconds[int(at) - 6 : int(at) - 1])
            yield USUAL * times, last[len(last) // 2]


class Trainer:
    """Takes batches and sleeps over them, at the appetite of the phase."""

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
        """Return the seconds waited so far, a wait that lasts included."""
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
    """Play the whole of it. Blocks for about three minutes; ScenarioError if the run does not come up or ends early."""
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
    """The worker processes that live now, as the run itself keeps them."""
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
    """Return the longest time from the start of a process to the first pressure that has it as ready."""
    ready: dict[tuple[str, int], float] = {}
    for line in layout.metrics.read_text().splitlines():
        event = json.loads(line)
        for worker in event.get("workers", ()) if event.get("kind") == "pressure" else ():
            if worker["state"] == "ready":
                ready.setdefault((worker["worker"], worker["pid"]), event["t"])
    return max((at - began[who] for who, at in ready.items() if who in began), default=math.nan)


def _account(layout: RunLayout, trained: Sequence[str], out: Elastic) -> None:
    """Count what was acked and is neither trained nor still queued, and what was trained twice."""
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
    """Groups that lie in the queue or in a lease at the end, as the files say, or were dropped as too old."""
    counts = verified["counts"]
    return sum(counts[state] for state in ("queued", "leased", "expired"))


def draw(out: Elastic, path: Path) -> None:
    """Draw workers, appetite and waits over time."""
    figure = blank(8.0, 3.6, 120)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (3, 1), "hspace": 0.2})
    times = range(1, len(out.seconds) + 1)
    wanted = [second.appetite / MADE for second in out.seconds]
    top.plot(times, wanted, color=ORANGE, linewidth=1.2, drawstyle="steps-post")
    top.plot(times, [s.workers for s in out.seconds], color=GREEN, linewidth=1.8, drawstyle="steps-post")
    top.set_ylim(0, max(max(wanted), *(s.workers for s in out.seconds)) * 1.2)
    top.set_title("worker processes (green), appetite over what one makes (orange)", loc="left", fontsize=8)
    bottom.bar(times, [min(1.0, s.waited_s) for s in out.seconds], width=1.0, color=RED, alpha=0.7)
    bottom.set_ylim(0, 1)
    bottom.set_title("part of each second that the trainer waited", loc="left", fontsize=8)
    bottom.set_xlabel("seconds", fontsize=7, color=QUIET)
    for panel in (top, bottom):
        dress(panel)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(words: Sequence[str]) -> int:
    """Play it and print what was seen."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-elastic-") as directory:
        out = run(Path(directory))
    for appetite, workers in out.ends():
        print(f"{appetite:g} sequences a second: {workers} workers, {appetite / MADE:.1f} would do")
    print(f"slowest start {out.start_s:.1f} s, longest starving {out.starved_s()} s")
    print(f"lost {out.lost}, trained twice {out.twice}, orphans {out.orphans}, exit code {out.exit_code}")
    print(" ".join(f"{second.workers}{'!' * (second.waited_s > SHORT_PART)}" for second in out.seconds))
    if words:
        draw(out, Path(words[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
