"""`make soak GROUPS=... KILLS=...`: kill, stop and abandon everything, and check each group. Exit code 0 or 1.

    python -m benchmarks.soak --groups 1000000 --kills 1000
    python -m benchmarks.soak --groups 3000 --kills 30 --seed 7    the same plan again

Every few seconds a line tells how far it is. Violations are named with the act's directory, which is then kept. A
number that is no positive integer ends with 2.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.harness.scratch import RUNS
from benchmarks.soak import plan
from benchmarks.soak.plan import Act
from benchmarks.soak.stage import Performance, Tally

MIB: Final = 1 << 20


def main(words: Sequence[str]) -> int:
    """Play all acts, and stop behind the first with a violation; return the exit code."""
    asked = _parsed(words)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(
            number, signal.SIG_IGN
        )  # inherited: a player that is still starting must not die of one
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"soak groups={asked.groups} kills={asked.kills} seed={asked.seed}", flush=True)
    tally, began = Tally(), time.monotonic()
    root = Path(asked.dir) if asked.dir else RUNS
    root.mkdir(parents=True, exist_ok=True)
    for act in plan.acts(asked.groups, asked.kills, asked.seed):
        _announce(act)
        place = Path(tempfile.mkdtemp(prefix=f"soak-{act.number}-", dir=root))
        try:
            violations = Performance(act, place, tally, Reporter(tally, began, asked.seed)).play()
        except KeyboardInterrupt:
            shutil.rmtree(place)
            _conclude(tally, began, asked.seed, "INTERRUPTED")
            return 1
        if violations:
            print(f"VIOLATED in act {act.number}, seed {asked.seed}; its files stay in {place}", flush=True)
            print("\n".join(violations), flush=True)
            _conclude(tally, began, asked.seed, "FAILED")
            return 1
        shutil.rmtree(place)
    with suppress(OSError):
        root.rmdir()
    _conclude(tally, began, asked.seed, "nothing lost, nothing twice, nothing torn")
    return 0


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--groups", type=_positive, default=30_000, help="groups to settle (default 30000)")
    parser.add_argument("--kills", type=_positive, default=60, help="kills (default 60)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="repeats the plan of a run")
    parser.add_argument("--dir", default="", help="directory for the runs (default runs/)")
    return parser.parse_args(words)


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise ValueError
    return number


def _announce(act: Act) -> None:
    t0 = act.trainers[0]
    size = f"{t0.tokens} tokens" if t0.tokens else f"{t0.sequences} sequences"
    deaths = f"max_deliveries={act.max_deliveries}" if act.may_die else "no group may die"
    print(
        f"act {act.number}: {act.groups} groups, {act.kills} kills, {len(act.faults) - act.kills} other faults; "
        f"{act.durability}, {act.transport}, {len(act.trainers)} trainers, {t0.ranks} ranks of {size}, "
        f"{'checkpoints' if t0.commits else 'no checkpoints'}{', ahead' if t0.ahead else ''}, {deaths}",
        flush=True,
    )


class Reporter:
    """Prints how far a soak is.

    Args:
        tally: Of the acts before.
        began: Start of the soak, on the monotonic clock.
        seed: Seed of the soak.
    """

    def __init__(self, tally: Tally, began: float, seed: int) -> None:
        self._tally = tally
        self._began = began
        self._seed = seed
        self._last = time.monotonic(), 0

    def __call__(self, settled: int, waits: str) -> None:
        now, tally = time.monotonic(), self._tally
        rate = (settled - self._last[1]) / max(now - self._last[0], 1e-3)
        self._last = now, settled
        print(
            f"{now - self._began:6.0f} s  {tally.groups + settled} groups  {tally.kills} kills  {tally.stops} stops  "
            f"{rate:.0f} groups/s  seed {self._seed}  ({waits})",
            flush=True,
        )


def _conclude(tally: Tally, began: float, seed: int, result: str) -> None:
    seconds = time.monotonic() - began
    print(
        f"{result}: {tally.groups} groups settled, {tally.again} of them again after a resume, {tally.kills} kills, "
        f"{tally.stops} stops, {tally.asked} orderly leaves, {tally.lives} lives, "
        f"broker +{tally.peak_bytes / MIB:.0f} MiB at most, {seconds:.0f} s, seed {seed}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
