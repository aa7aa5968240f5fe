"""What a fleet of workers serves and depends on: a trainer with a pace, and inference servers of a capacity.

The orchestrator and its workers are those of `staff`. Run as a program, this module is an orchestrator whose engines
are those of `engine`:

    python -m tests.faults.support.fleet ANSWERS_PER_S orchestrator --run-dir DIR
"""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.faults.support import engine
from tests.faults.support.processes import LIMIT_S, wait_until

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.engine_registry import FIRST
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.orchestrator import server
from rolloutmq.services.orchestrator.autoscaling.decision_log import LoggedDecision, read
from rolloutmq.services.orchestrator.engines import pool

ENGINES: Final = ("-m", "tests.faults.support.fleet")
PULL_S: Final = 0.5


class PacedTrainer:
    """A trainer that takes a fixed time for each sequence, and pauses after each so many batches.

    Args:
        run_dir: The run directory.
        batch: Sequences of a batch.
        per_s: Sequences that it trains on in a second, without its waits.
        every: Batches after which it pauses; 0 for never.
        pause_s: Length of a pause.
    """

    def __init__(self, run_dir: Path, batch: int, per_s: float, every: int = 0, pause_s: float = 0.0) -> None:
        self._run_dir, self._batch, self._per_s = run_dir, batch, per_s
        self._every, self._pause_s = every, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train, name="trainer")
        self._failure: RolloutMQError | None = None
        self.pauses: list[tuple[float, float]] = []
        """Beginning and end of each pause that is over, on the clock of the decisions."""
        self.pulled = 0
        """Batches pulled."""
        self.groups: Counter[str] = Counter()
        """Groups settled, by environment."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)
        if self._failure is not None:
            raise self._failure

    def until_more(self, groups: int) -> Counter[str]:
        """Wait until so many more groups are settled, and return them by environment."""
        before = self.groups.copy()
        wait_until(lambda: self.groups.total() >= before.total() + groups, f"{groups} groups")
        return self.groups - before

    def _train(self) -> None:
        try:
            with Consumer.blocking(self._run_dir, sequences=self._batch) as consumer:
                while not self._stop.is_set():
                    self._step(consumer)
        except RolloutMQError as error:
            self._failure = error

    def _step(self, consumer: Any) -> None:
        version = consumer.version
        batch = consumer.pull(version.step, version, PULL_S)
        if batch is None:
            return
        self.pulled += 1
        self._stop.wait(sum(group.scores.size for group in batch.groups) / self._per_s)
        batch.ack()
        self.groups += Counter(one.env for one in batch.deliveries)
        if self._every and self.pulled % self._every == 0:
            began = time.monotonic()
            self._stop.wait(self._pause_s)
            self.pauses.append((began, time.monotonic()))


@contextmanager
def first_engine(run_dir: Path, answers_per_s: float) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the engine that the launcher starts, and wait until it serves."""
    process = subprocess.Popen(engine_command(run_dir, answers_per_s)(FIRST))
    try:
        wait_until(RunLayout(run_dir).inference.exists, "the first engine")
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)


def engine_command(run_dir: Path, answers_per_s: float) -> pool.Command:
    """Return the command that starts an engine of this capacity."""
    start = (sys.executable, "-S", engine.__file__)
    return lambda name: (*start, name, str(run_dir), str(answers_per_s))


def decisions(layout: RunLayout, env: str = "e") -> list[LoggedDecision]:
    """Return all decisions for an environment so far."""
    if not layout.decisions.exists():
        return []
    found = [one for one in read(layout.decisions) if isinstance(one, LoggedDecision)]
    return [one for one in found if one.env == env]


def last(layout: RunLayout, env: str = "e") -> LoggedDecision | None:
    """Return the last decision for an environment; None before the first."""
    found = decisions(layout, env)
    return found[-1] if found else None


def present(seen: LoggedDecision) -> int:
    """Return the workers with a process at a decision."""
    crew = seen.sample.crew
    return crew.ready + crew.starting + crew.draining


def peak(seen: Sequence[LoggedDecision]) -> int:
    """Return the most workers that were there, or asked for."""
    return max(max(present(one), one.decision.target) for one in seen)


def moves(seen: Sequence[LoggedDecision]) -> int:
    """Return how many workers were asked for or sent away."""
    targets = [one.decision.target for one in seen]
    return sum(abs(after - before) for before, after in pairwise(targets))


def main(answers_per_s: float, run_dir: Path) -> int:
    """Run an orchestrator whose engines have this capacity."""
    vars(pool)["engine_command"] = lambda run_dir: engine_command(run_dir, answers_per_s)
    return server.main(run_dir)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), Path(sys.argv[4])))
