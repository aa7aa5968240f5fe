"""The learnability curriculum against uniform sampling: whole runs of the example `sort_mix`, paired by their seeds.

Both arms have the same task space, policy, trainer and evaluation set; only the sampler differs. Most tasks of the
space are easy, as in many data sets; the evaluation set has as many tasks of each length. Two figures:

- the share of pulled groups that are filtered because they teach nothing, over the whole run
- groups the trainer pulls until the policy has the score 0.9 on the evaluation set

The goal of each is a maximum of the median ratio. For the second, the upper end of the 95 % interval of the paired
bootstrap of that median must be below 0.9 too.
"""

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.harness.row import Row
from benchmarks.rewards import learning
from benchmarks.rewards.learning import Course

SEEDS: Final = (0, 1, 2, 3, 4)
SCORE: Final = 0.9
HALF: Final = 0.5
GROUPS: Final = 0.75
UPPER: Final = 0.9
RESAMPLES: Final = 10_000
ARMS: Final = {
    "learnability": ('curriculum.sort.sampler="learnability"',),
    "uniform": ('curriculum.sort.sampler="uniform"', "curriculum.sort.options={}"),
}
PAYLOAD: Final = "sort-2 to sort-5 as 10:4:1:1, 5 paired seeds"


@dataclass(frozen=True)
class Pair:
    """The two runs of one seed."""

    seed: int
    ours: Course
    control: Course

    @property
    def filtered(self) -> float:
        """Ratio of the filtered shares."""
        return self.ours.filtered_share / self.control.filtered_share

    @property
    def groups(self) -> float:
        """Ratio of the groups until the score; infinite if ours never has it.

        A control without the score needs more groups than its whole run has: that number is a lower bound.
        """
        return self.ours.groups_to(SCORE) / self.control_groups

    @property
    def control_groups(self) -> float:
        """Groups of the control until the score, at most those of its whole run."""
        return min(self.control.groups_to(SCORE), float(self.control.groups))

    def line(self) -> str:
        return (
            f"seed {self.seed}: filtered {self.ours.filtered_share:.1%} against {self.control.filtered_share:.1%}; "
            f"{SCORE} after {self.ours.groups_to(SCORE):g} groups against {self.control.groups_to(SCORE):g}, "
            f"ratio {self.groups:.2f}; last score {self.ours.points[-1].score:.3f} against "
            f"{self.control.points[-1].score:.3f}"
        )


def rows(seeds: Sequence[int] = SEEDS, steps: int = 0) -> Iterator[Row]:
    """Run both arms for each seed, in turns."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-curriculum-") as directory:
        found = []
        for seed in seeds:
            found.append(pair(Path(directory), seed, steps))
            print(found[-1].line(), flush=True)
        yield from judged(found)


def pair(directory: Path, seed: int, steps: int = 0) -> Pair:
    """Run both arms of one seed, one after another; the order changes with the seed."""
    more = (f"trainer.steps={steps}",) if steps else ()
    courses = {}
    for arm in sorted(ARMS, reverse=bool(seed % 2)):
        layout = learning.run(directory / f"{arm}-{seed}", seed, (*ARMS[arm], *more))
        courses[arm] = learning.course(layout)
    return Pair(seed, courses["learnability"], courses["uniform"])


def judged(pairs: Sequence[Pair]) -> Iterator[Row]:
    """Return the rows of some pairs."""
    yield _row(
        "groups filtered because they teach nothing, share",
        [one.ours.filtered_share for one in pairs],
        [one.control.filtered_share for one in pairs],
        median(one.filtered for one in pairs),
        HALF,
    )
    ratios = [one.groups for one in pairs]
    yield _row(
        f"groups until the score {SCORE} on the evaluation set",
        [one.ours.groups_to(SCORE) for one in pairs],
        [one.control_groups for one in pairs],
        median(ratios),
        GROUPS,
    )
    yield _row(
        f"groups until the score {SCORE}: upper end of the ratio's 95 % interval",
        [one.ours.groups_to(SCORE) for one in pairs],
        [one.control_groups for one in pairs],
        upper_end(ratios),
        UPPER,
    )


def _row(figure: str, ours: Sequence[float], control: Sequence[float], ratio: float, goal: float) -> Row:
    return Row(
        figure,
        PAYLOAD,
        round(median(ours), 3),
        round(median(control), 3),
        "uniform sampling in the same bench",
        round(ratio, 3),
        goal,
        ratio <= goal,
        "ratio, at most",
    )


def upper_end(ratios: Sequence[float], resamples: int = RESAMPLES) -> float:
    """Return the upper end of the 95 % interval of the median ratio, by the percentile bootstrap over the pairs.

    Source: Efron and Tibshirani 1993, section 13.3.
    """
    rng = random.Random(0)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[min(resamples - 1, int(0.975 * resamples))]
