"""An ensemble with an adversary among three raters: whole runs of `sort_raters.toml`, and what their policies learned.

Two raters are honest. The adversary gives the honest score times -3, or 10 for the digits in the wrong order. The arms
combine the three by the median, by the mean with the outlier down-weighted, and by the plain mean. A control has the
first honest rater alone. Each policy is judged by that rater's score on one fixed set of tasks, answered greedily.

    python -m benchmarks.rewards.raters [SEED...]    the score of each arm
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.harness import scratch
from benchmarks.harness.row import Row
from benchmarks.rewards import learning, sort_raters

CONFIG: Final = Path(__file__).with_name("sort_raters.toml")
SEEDS: Final = (0, 1, 2, 3, 4)
STEPS: Final = 300
LEARNED: Final = 0.9
SECTION: Final = "environment.sort.rewards"
ADVERSARIES: Final = {
    "thrice_against": "score times -3",
    "wrong_order": "10 for the wrong order",
}
COMBINATIONS: Final = {
    "median": (f'{SECTION}.combine="median"',),
    "down-weighting": (f'{SECTION}.agreement.act="down_weight"',),
    "mean": (),
}


@dataclass(frozen=True)
class Arm:
    """How one policy is scored: the adversary, or none; and how its rating is combined with those of the others."""

    adversary: str = ""
    combination: str = "mean"

    def assignments(self) -> Iterator[str]:
        """Yield what differs from the configuration."""
        if self.adversary:
            yield f'{SECTION}.raters.adversary.rater="sort_raters.py:{self.adversary}"'
            yield from COMBINATIONS[self.combination]
        else:
            yield f"{SECTION}.raters.noisy.weight=0.0"  # one honest rater alone: no ensemble


CONTROL: Final = Arm()
HARMLESS: Final = Arm("against")
"""The mean with the score times -1: two honest raters outweigh it."""
ARMS: Final = (CONTROL, *(Arm(one, how) for one in ADVERSARIES for how in COMBINATIONS), HARMLESS)


def learned(directory: Path, arm: Arm, seed: int, steps: int = STEPS) -> float:
    """Run one arm to its end; return the honest score of its policy. Blocks for about a minute."""
    more = (f"trainer.steps={steps}", f"trainer.checkpoint_interval={steps}")
    layout = learning.run(directory, seed, (*arm.assignments(), *more), CONFIG)
    tasks = learning.held_out((3,))
    points = dict(learning.evaluated(layout, sort_raters.SortRated(), tasks, sort_raters.right))
    return points[steps]


def scores(seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> Iterator[tuple[Arm, int, float]]:
    """Run all arms of each seed."""
    with scratch.directory() as directory:
        for seed in seeds:
            for number, arm in enumerate(ARMS):
                yield arm, seed, learned(directory / f"{number}-{seed}", arm, seed, steps)


def rows(seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> Iterator[Row]:
    """Return a row for each arm with an adversary."""
    found: dict[Arm, list[float]] = {}
    for arm, seed, score in scores(seeds, steps):
        print(_line(arm, seed, score), flush=True)
        found.setdefault(arm, []).append(score)
    control = found.pop(CONTROL)
    for arm, ours in found.items():
        yield judged(arm, ours, control)


def judged(arm: Arm, ours: Sequence[float], control: Sequence[float]) -> Row:
    """Return the row of an arm: a plain mean learns nothing from a strong adversary, and all other arms learn."""
    score, honest = median(ours), median(control)
    fooled = arm.combination == "mean" and arm != HARMLESS
    return Row(
        f"score with one adversarial rater of three, {arm.combination}",
        f"sort-3, {ADVERSARIES.get(arm.adversary, 'score times -1')}, {len(ours)} seeds",
        round(score, 3),
        round(honest, 3),
        "one honest rater alone",
        round(score / honest, 3),
        LEARNED,
        score < LEARNED <= honest if fooled else score >= LEARNED,
        "ours, below" if fooled else "ours, at least",
    )


def _line(arm: Arm, seed: int, score: float) -> str:
    return f"seed {seed}  {arm.adversary or 'no ensemble':15} {arm.combination:15} {score:.3f}"


def main(words: Sequence[str]) -> int:
    """Print the scores of every arm."""
    for arm, seed, score in scores([int(word) for word in words] or SEEDS):
        print(_line(arm, seed, score), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
