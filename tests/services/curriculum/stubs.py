"""A curriculum of a small space, and statuses of its tasks."""

from typing import Any

from rolloutmq.schemas.wire.envelope import RewardSummary
from rolloutmq.schemas.wire.tasks import TaskState, TaskStatus
from rolloutmq.services.curriculum.core import Curriculum, Identity
from rolloutmq.services.curriculum.samplers.learnability import learnability
from rolloutmq.services.curriculum.samplers.sampler import Sampler, TaskSpace

SPACE = TaskSpace(100, 4, seed="s")


def identity(**changes: Any) -> Identity:
    fields: dict[str, Any] = {
        "env": "e",
        "environment": "a:B {}",
        "run_seed": 0,
        "task_count": SPACE.count,
        "levels": SPACE.levels,
        "sampler": "learnability",
        "options": {},
        "seed": SPACE.seed,
        "scores": (0.0, 1.0),
    }
    return Identity(**(fields | changes))


def curriculum(ahead: int = 4, sampler: Sampler | None = None, **changes: Any) -> Curriculum:
    return Curriculum(SPACE, sampler or learnability(SPACE, {}), identity(**changes), ahead)


def done(name: str, *scores: float) -> TaskStatus:
    """Return the status of a task that a group with these scores answered."""
    mean = sum(scores) / len(scores)
    m2 = sum((score - mean) ** 2 for score in scores)
    rewards = RewardSummary(mean, min(scores), max(scores), m2)
    return TaskStatus(id=name, state=TaskState.DONE, sequences=len(scores), rewards=rewards)


def step(one: Curriculum, life: str = "l") -> list[str]:
    """Draw what is missing; return the ids of the open tasks."""
    if (drawn := one.refill(life)) is not None:
        one.apply(drawn)
    return list(one.open)
