"""What happened to a submitted task before the group that answers it: the first part of that group's story."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolloutmq.services.broker.journal.history import History
from rolloutmq.services.broker.journal.packing import AnyFact
from rolloutmq.services.broker.journal.taskfacts import (
    TaskEnded,
    TaskItem,
    TaskReturned,
    TaskSubmitted,
    TaskTaken,
)

Told = tuple[float, str, dict[str, Any]]
"""When it was written down, in wall-clock seconds; what happened; details."""


def task_story(journal: Path, task_id: str) -> list[Told]:
    """Return what the journal tells of a task; nothing if none of that id was submitted. Blocks on the disk."""
    return [(at, event, details) for at, fact in History(journal) for event, details in _heard(fact, task_id)]


def _heard(fact: AnyFact, task_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    match fact:
        case TaskItem() if fact.submitted.id == task_id:
            details = {"state": fact.state.value, "worker": fact.worker, "deliveries": fact.deliveries}
            yield "task known", details
        case TaskSubmitted() if fact.id == task_id:
            yield "task submitted", {"env": fact.env, "size": fact.size, "priority": fact.priority}
        case TaskTaken() if fact.id == task_id:
            yield "task taken", {"worker": fact.worker, "session": fact.session}
        case TaskReturned() if fact.id == task_id:
            yield "task failed" if fact.failed else "task came back", {"reason": fact.reason}
        case TaskEnded() if fact.id == task_id:
            yield f"task {fact.state.value}", {"reason": fact.reason}
