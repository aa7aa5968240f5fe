"""What limits a run, and what to change: from the waits of its trainer and its rollout slots. Pure.

Trainer and rollouts form a pipeline: whoever waits least limits it. A trainer that starves while nothing holds rollouts
back wants more of them; slots that wait for credit while the trainer is fed want a faster trainer, or are too many.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import TrainerPause
from rolloutmq.services.monitor.profile.usage import Usage

NOTICED: Final = 0.1
"""Part of the time from which a wait is worth a change."""
SPARE: Final = 0.5
"""Part of a worker from which one less is nearer to the share that is too much than none."""
LINES: Final = 3
"""Most lines."""
FULL: Final = 0.9
"""Part of the time from which an inference server is busy all the time: it waits a little between two requests."""


class Advice(NamedTuple):
    """One line.

    Attributes:
        share: Part of the time that it is about, 0 to 1.
        where: Where the time goes.
        change: What to change.
    """

    share: float
    where: str
    change: str


def advice(usage: Usage, fewest: int = 0) -> list[Advice]:
    """Return at most three lines, the largest share first; a run without a noticeable wait has one that says so.

    `fewest` is the least number of workers that the configuration allows, `min_workers` of all environments.
    """
    slots, queue = _slots(usage, fewest), _queue(usage, fewest)
    noticed = _trainer(usage), slots, queue, _inference(usage), _evaluation(usage)
    found = sorted(filter(None, noticed), reverse=True)[:LINES]
    if found:
        return found
    if usage.is_unrecorded:
        return [Advice(0.0, "no event of the broker was recorded", RECORD)]
    if not usage.trainer_s:
        return [
            Advice(0.0, "no trainer has settled a batch and gone on", "`rolloutmq status` says what waits")
        ]
    if not usage.knows_slots:
        where = f"the trainer waits {usage.starved:.0%} of its time for a batch; of the rollout slots nothing is known"
        return [Advice(usage.starved, where, "`rolloutmq status` says what workers wait for")]
    rest = max(usage.starved, usage.blocked)
    return [
        Advice(
            rest, f"nobody waits for more than {rest:.0%} of the time", "trainer and rollouts are balanced"
        )
    ]


def _trainer(usage: Usage) -> Advice | None:
    share = usage.starved
    if share < NOTICED:
        return None
    reason = _main(usage.starving_s)
    where = f"the trainer waits {share:.0%} of its time for a batch ({reason})"
    return Advice(share, where, TRAINER.get(reason) or _more_rollouts(usage))


def _more_rollouts(usage: Usage) -> str:
    """Return what brings more groups to a trainer that starves."""
    if 2 * usage.workerless_s > usage.starved_s:
        return "no worker is ready most of that time: `rolloutmq workers` says why"
    held_back = _main(usage.producer_waits_s)
    if usage.blocked >= NOTICED and held_back in ROOM:
        return ROOM[held_back]
    if usage.inference_bound or (usage.busy or 0.0) >= FULL:
        return MORE_INFERENCE
    if not usage.knows_slots:
        return "more workers, unless `rolloutmq status` says that they wait"
    return "more workers: raise `max_workers` of the environment, or `orchestrator.max_processes`"


def _slots(usage: Usage, fewest: int) -> Advice | None:
    share, disk = usage.blocked, _disk(usage)
    if share < NOTICED or usage.starved - disk >= NOTICED or disk > 1.0 - usage.starved:
        return None
    reason = _main(usage.producer_waits_s)
    where = f"rollout slots wait {share:.0%} of their time" + (f" ({reason})" if reason else "")
    if reason == Wait.NO_TASKS and usage.workers == 1:
        return Advice(share, where, MORE_TASKS)
    return Advice(share, where, SLOTS.get(reason) or _fewer_rollouts(usage, share, fewest))


def _disk(usage: Usage) -> float:
    """Return the part of the trainer's time in which it waits for the disk: no group is missing then.

    A faster trainer helps as long as its own work takes longer than that.
    """
    seconds = usage.trainer_waits_s.get(Wait.JOURNAL_SLOW, 0.0)
    return min(1.0, seconds / usage.trainer_s) if usage.trainer_s else 0.0


def _fewer_rollouts(usage: Usage, share: float, fewest: int) -> str:
    """Return what fits rollouts to the trainer; a run of few workers has none to spare."""
    if usage.workers and (usage.workers == 1 or share * usage.workers < SPARE):
        return "a faster trainer"
    too_few = usage.workers and round((1.0 - share) * usage.workers) < fewest
    return f"a faster trainer, or {share:.0%} fewer workers" + (": lower `min_workers`" if too_few else "")


def _queue(usage: Usage, fewest: int) -> Advice | None:
    """Name a queue that grows before it is full: until then nobody waits."""
    share = usage.queued
    if share < NOTICED or usage.starved >= NOTICED or usage.blocked >= NOTICED:
        return None
    where = f"the queue grows by {share:.0%} of the sequences that rollouts make"
    return Advice(share, where, _fewer_rollouts(usage, share, fewest))


def _inference(usage: Usage) -> Advice | None:
    """Name a full server where nothing else is noticed of it: rollouts take as long as it needs."""
    if usage.starved >= NOTICED or usage.blocked >= NOTICED or not usage.inference_bound:
        return None
    names = ", ".join(sorted(usage.inference_bound))
    where = f"inference servers are full, and hold back the workers of {names}"
    return Advice(usage.busy or 0.0, where, MORE_INFERENCE)


def _evaluation(usage: Usage) -> Advice | None:
    seconds = usage.trainer_waits_s.get(TrainerPause.EVALUATION, 0.0)
    share = min(1.0, seconds / usage.trainer_s) if usage.trainer_s else 0.0
    if share < NOTICED:
        return None
    where = f"the trainer waits {share:.0%} of its time for the evaluation at an end of the run"
    return Advice(share, where, "a smaller evaluation: lower `evaluation.tasks` or `evaluation.samples`")


def _main(waits_s: Mapping[str, float]) -> str:
    """Return the reason with the longest waits; empty without one."""
    return max(waits_s, key=lambda reason: waits_s[reason]) if any(waits_s.values()) else ""


RECORD: Final = "`rolloutmq telemetry -r RUN` records them; `rolloutmq up` starts it by itself"
MORE_INFERENCE: Final = "more inference: raise `inference.max_engines`, or use faster servers"
LARGER_MARK: Final = "a larger mark: raise `broker.high_bytes` or `broker.high_groups`"
SMALLER_GROUPS: Final = "smaller groups: lower `group_size`, or make the batch a multiple of it"
MORE_TASKS: Final = "more tasks"
FASTER_DISK: Final = 'a faster disk, room on a full one, or `broker.durability = "os"`'

TRAINER: Final[Mapping[str, str]] = {
    Wait.NO_EXACT_FIT: SMALLER_GROUPS,
    Wait.TOO_FEW_GROUPS: SMALLER_GROUPS,
    Wait.BATCH_EXCEEDS_CAP: LARGER_MARK,
    Wait.JOURNAL_SLOW: FASTER_DISK,
    Wait.MIN_SHARE: "more workers for the environment below its `min_share`, or a smaller one",
    Wait.LEASED_ELSEWHERE: "a faster slowest rank; settle before the next pull; or restart a rank that is away",
}
"""What to change where the trainer waits for a reason that more groups do not end."""
ROOM: Final[Mapping[str, str]] = {
    Wait.GLOBAL_FULL: LARGER_MARK,
    Wait.NO_CREDIT: LARGER_MARK,
    Wait.LANE_FULL: "a larger mark: raise `high_bytes` of the environment",
    Wait.JOURNAL_SLOW: FASTER_DISK,
    Wait.STALE_GUARD: "a larger `max_staleness`: rollouts for the next step wait until this one is trained",
    Wait.NO_TASKS: "submit tasks sooner: workers wait for them",
}
"""What gives room to rollouts that the broker holds back although the trainer starves."""
SLOTS: Final[Mapping[str, str]] = {
    Wait.NO_TASKS: f"fewer workers, or {MORE_TASKS}",
    Wait.JOURNAL_SLOW: FASTER_DISK,
}
"""What to change where slots wait for another reason than a trainer that takes less than they make."""
