"""The quickstart's task without one in ten prompts, which are held out to measure generalisation."""

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the quickstart's task is beside this folder

from sort_digits import SortDigits


def is_held_out(task: str) -> bool:
    """Return whether a prompt is held out from training: one in ten is."""
    return sum(map(int, task)) % 10 == 3


class DistilledDigits(SortDigits):
    def task(self, rng: random.Random) -> str:
        while is_held_out(task := super().task(rng)):
            pass
        return task
