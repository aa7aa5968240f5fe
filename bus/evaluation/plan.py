"""The plan of a point: every task that it asks, in the order of submission. Pure.

Task `index` of an environment is the same task at every point: the worker draws it by a generator seeded with
`evaluation.seed`, the environment and the index. It is asked up to twice, once for a greedy answer and once for a group
of sampled ones. The environments take turns, so that a point that ends early has answers of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

GREEDY: Final = "greedy"
SAMPLED: Final = "sampled"


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """One submitted task of a point.

    Attributes:
        id: Id of the submitted task.
        env: Environment that answers it.
        index: Number of the task in the set, from 0.
        size: Answers asked for.
        greedy: They are asked for with temperature 0.
    """

    id: str
    env: str
    index: int
    size: int
    greedy: bool


def answering_producer(worker: str) -> str:
    """Return the name of the producer with which a worker answers the evaluation beside the training."""
    return f"{worker}.eval"


def plan(
    point: str, environments: Sequence[str], *, tasks: int, samples: int, greedy: bool
) -> list[PlannedTask]:
    """Return the tasks of one point.

    Args:
        point: Id of the point; the ids of its tasks begin with it.
        environments: Names of the environments.
        tasks: Tasks of each environment.
        samples: Sampled answers to each task; 0 asks for none.
        greedy: Ask for a greedy answer to each task, too.
    """
    kinds = [(GREEDY, 1)] * greedy + [(SAMPLED, samples)] * (samples > 0)
    return [
        PlannedTask(f"{point}/{env}/{index}/{kind}", env, index, size, kind == GREEDY)
        for index in range(tasks)
        for env in environments
        for kind, size in kinds
    ]
