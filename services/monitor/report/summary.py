"""`summary.json`: the fate of every group, from a join of the logs that each side wrote.

The producers' ack logs name the accepted groups. The trainer's log names the trained groups. The broker's two lists
(`dropped.jsonl`, `saved.rmq`) name the groups it gave up or still held at the end. The join uses only ids, never a
counter: an accepted group that no list names is lost. In a running run the broker is read first: it still has what it
had then and no later list names, and what was accepted since.

The states add up by construction: an accepted group belongs to the first of trained, filtered, dead, expired,
discarded and in flight that names it, else it is lost.

A trainer of one's own writes no log here, and its producers may write none. Then the broker's log of settled batches
(`settled.jsonl`) has the steps, rewards and staleness, and its ledger the counts (`LedgerFigures`), so that they are
those of `rolloutmq ledger verify`.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, zip_longest
from math import inf
from typing import Any, Final

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import DroppedGroup, RunLayout
from rolloutmq.schemas.lives import Life, paused_s, pauses, seconds_of
from rolloutmq.services.monitor.report.evaluation import Evaluations, figures
from rolloutmq.services.monitor.report.figure_course import WINDOW_STEPS, FigureCourse
from rolloutmq.services.monitor.report.group_records import EnvRewards, GroupRecords, group_records
from rolloutmq.services.monitor.report.metrics import Metrics, bounds_in_force, read_metrics
from rolloutmq.services.monitor.report.settled_log import SettledIds, TrainerLog, mean, read_settled

TOLD_BY_TRAINER: Final = (
    *("groups_trained", "groups_filtered", "groups_lost"),
    *("groups_trained_twice", "groups_rewound"),
)
"""Figures that only the trainer's log or the ledger can supply."""

PLACES: Final = ("accepted", "trained", "filtered", "expired", "dead", "discarded", "in_flight")
"""Places of groups in the summary, by the names of `GroupCounts`; it names the lost ones after them."""

ReadIds = Callable[[RunLayout], Iterable[str]]
"""Reads the ids of the groups in a `saved.rmq`."""


@dataclass(frozen=True, slots=True)
class LedgerFigures:
    """The broker's ledger, for a run whose trainer wrote no log.

    Attributes:
        accepted: Number of accepted groups.
        counts: Number of groups by state, with the names of `GroupCounts`. They add up to `accepted`.
        rewound: Number of groups delivered again because the weights trained on them were lost.
        states: State of each group whose id is known; the others ended before the history begins.
        is_whole: The history names every group.
    """

    accepted: int
    counts: Mapping[str, int]
    rewound: int
    states: Mapping[str, str]
    is_whole: bool

    def part(self, has: Callable[[str], bool]) -> "LedgerFigures":
        """Return the figures with the states of some groups only."""
        return replace(self, states={name: state for name, state in self.states.items() if has(name)})

    def without(self, names: Container[str]) -> "LedgerFigures":
        """Return the figures without the named groups, as far as their state is known."""
        found = self.less(Counter(state for name, state in self.states.items() if name in names))
        return replace(
            found, states={name: state for name, state in self.states.items() if name not in names}
        )

    def less(self, gone: Counter[str]) -> "LedgerFigures":
        """Return the figures less a number of groups by state."""
        counts = {state: count - gone[state] for state, count in self.counts.items()}
        return replace(self, accepted=self.accepted - gone.total(), counts=counts)


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Every accepted group, by id, in exactly one state.

    A killed worker may have missed logging some acks, so a group named downstream counts as accepted.
    """

    accepted: frozenset[str]
    trained: frozenset[str]
    filtered: frozenset[str]
    dead: frozenset[str]
    expired: frozenset[str]
    discarded: frozenset[str]
    in_flight: frozenset[str]
    lost: frozenset[str]


def settle_accounts(
    acked: Iterable[str],
    settled: SettledIds,
    dropped: Sequence[DroppedGroup],
    saved: Iterable[str],
    ledger: LedgerFigures | None = None,
) -> GroupCounts:
    """Assign every group to one state; a requeued dead group to its later one. The ledger, if given, decides for the
    groups it names. Pure.
    """
    last = {group.group_id: group.state for group in dropped}
    given_up = {
        state: {name for name, found in last.items() if found == state}
        for state in ("dead", "expired", "discarded")
    }
    places = {
        "trained": set(settled.trained),
        "filtered": set(settled.filtered),
        "in_flight": set(saved),
        "expired": given_up["expired"],
        "discarded": given_up["discarded"],
        "dead": given_up["dead"] | settled.rejected,
    }
    if ledger is not None:
        for place, names in places.items():
            names.difference_update(ledger.states)
            names.update(name for name, state in ledger.states.items() if state == place)
    accepted = set(acked).union(settled.voided, *places.values())
    rest = set(accepted)
    found: dict[str, frozenset[str]] = {}
    for place, names in places.items():
        found[place] = frozenset(rest & names)
        rest -= names
    return GroupCounts(accepted=frozenset(accepted), lost=frozenset(rest), **found)


@dataclass(slots=True)
class Joined:
    """Sums over all groups of a run.

    Attributes:
        counts: Groups by the names of `GroupCounts`.
        trained_twice, rewound, acked_twice, evaluated: Groups, as `summarise` returns them.
        rewards: Scores by environment.
        gone: Groups for evaluation that the ledger names, by state.
    """

    counts: Counter[str] = field(default_factory=Counter)
    trained_twice: int = 0
    rewound: int = 0
    acked_twice: int = 0
    evaluated: int = 0
    rewards: EnvRewards = field(default_factory=EnvRewards)
    gone: Counter[str] = field(default_factory=Counter)


def join_groups(
    records: GroupRecords, saved: Collection[str], ledger: LedgerFigures | None = None, as_of: float = inf
) -> Joined:
    """Sum the records of all groups. Those for evaluation count as `evaluated` alone.

    Args:
        records: Of the run.
        saved: Ids of the groups the broker still has.
        ledger: The broker's ledger, if the trainer wrote no log.
        as_of: Time at which a running broker was read, wall-clock seconds.
    """
    found = Joined()
    for part in records:
        acks, ids = part.acks(as_of), part.ids()
        states = None if ledger is None else ledger.part(part.has)
        accounts = settle_accounts(
            acks.ids,
            ids,
            [one for one in part.dropped if one.group_id not in acks.evaluated],
            acks.since.union(name for name in saved if part.has(name) and name not in acks.evaluated),
            states and states.without(acks.evaluated),
        )
        found.counts.update({place: len(getattr(accounts, place)) for place in (*PLACES, "lost")})
        found.trained_twice += sum(1 for times in ids.trained.values() if times > 1)
        found.rewound += len(ids.voided & (accounts.trained | accounts.filtered))
        found.acked_twice += acks.repeated
        found.evaluated += len(acks.evaluated)
        found.rewards.add(part.settled, acks.env_of)
        if states is not None:
            found.gone.update(state for name, state in states.states.items() if name in acks.evaluated)
    return found


def summarise(
    layout: RunLayout,
    config: RunConfig,
    *,
    saved_ids: ReadIds,
    wall_s: float | None = None,
    lives: Sequence[Life] = (),
    ledger: LedgerFigures | None = None,
    as_of: float = inf,
    seen: Metrics | None = None,
    damaged_lines: int = 0,
) -> dict[str, Any]:
    """Join the logs of a run.

    Args:
        layout: Location of the logs; a missing one counts as empty.
        config: Configuration of the run; gives the staleness bounds that nobody changed.
        saved_ids: Reads the ids of the groups the broker still has.
        wall_s: Duration of the run in seconds, for one without lives. Default: the span of the recorded events.
        lives: Lives of the run, each with its end; none if nobody recorded them.
        ledger: The broker's ledger, if the trainer wrote no log; it then supplies the counts of groups.
        as_of: Time at which a running broker's records were read, wall-clock seconds: it has what was accepted since.
        seen: Series of `metrics.jsonl`. Default: they are read.
        damaged_lines: Lines of `metrics.jsonl` that do not decode.

    Returns:
        These figures; a mean over nothing is None.

        - reward_first, reward_last: mean raw score of the first and of the last quarter of the steps, at most 50
          of them; each step the mean over all groups pulled for it, filtered ones included.
        - environments: reward_first and reward_last of each environment, over the steps with its groups. The
          figures of all together mix scores of different scales.
        - steps: optimizer steps of the final policy.
        - wall_s: seconds of the lives of the run together; else as given.
        - lives, downtime_s: number of lives, and the seconds between them, which no other figure counts.
        - groups_accepted: groups named by an ack log or by any list downstream of one.
        - groups_trained: groups the final policy was trained on.
        - groups_filtered: groups pulled but not trained: equal rewards, or too stale for the loss.
        - groups_expired, groups_dead, groups_discarded: groups that left the queue untrained: too stale; undeliverable
          or rejected by the trainer; discarded on request.
        - groups_in_flight: groups the broker still has; `up --resume` trains them.
        - groups_lost: accepted groups without any record. Must be 0.
        - groups_settled: only with a trainer outside the run, which writes no log here: groups delivered to it. Then
          trained, filtered, lost, trained_twice and rewound are None, unless the ledger supplies them. It cannot
          supply trained_twice, nor lost if its history does not name every group.
        - groups_trained_twice: groups the final policy was trained on more than once. Must be 0.
        - groups_rewound: groups delivered again because the weights trained on them were lost.
        - groups_acked_twice: ids acked under two numbers. Must be 0.
        - batches, batches_without_signal: valid settled batches, and those of them without a step.
        - trainers: only if several trainers shared the groups, each with steps of its own: the last step of each.
          Then the figures above mix the steps of all.
        - trainer_resumes: number of resumes from a checkpoint.
        - staleness_max: largest staleness of a trained group, over the valid batches; None without a log of batches.
        - staleness_bound: largest `max_staleness` of the environments in force at the end.
        - staleness_bound_max: largest bound ever in force: at least `staleness_max`, unless stale groups are
          delivered.
        - workers_min, workers_max: fewest and most workers ready at once; in each life from the first time that
          `min_workers` were to its last step.
        - steps_per_s: steps over the time from the first to the last of them, without the time between lives. A step
          in which the clock was set back counts for nothing.
        - tokens: tokens of the trained and filtered groups in the recorded steps of the final policy, without rejected
          groups; too few if an event was dropped.
        - learning: each figure of learning that the trainer told, such as `loss`: its mean over the `first` and the
          `last` quarter of the settled steps with it, at most 50 of them.
        - late_members: sequences missing from groups closed at their deadline.
        - curriculum: only with curricula: the last recorded progress of each, by environment.
        - metrics_lines_damaged: only if there are any: lines of `metrics.jsonl` that do not decode, left out.
        - findings: names of all findings about rewards, as `environment.finding`.
        - groups_evaluated: groups accepted for evaluation, named by an ack log. No other figure of groups has them.
        - evaluation: see `evaluation.figures`; None if there was none.

    Raises:
        DamagedFileError: A log that names groups is damaged: a join over the rest would be silently wrong.
    """
    log = read_settled(layout)
    with group_records(layout, log) as records:
        joined = join_groups(records, list(saved_ids(layout)), ledger, as_of)
    ledger = ledger and ledger.less(joined.gone)
    seen = seen or read_metrics(layout.metrics)
    fewest = sum(env.min_workers for env in config.environment.values())
    ready = _ready(seen, log, lives, fewest)
    if lives:
        wall_s = seconds_of(lives, seen.last_t)
    return {
        **_progress(log, seen, wall_s, lives),
        **({"trainers": rivals} if (rivals := log.rivals()) else {}),
        "environments": {
            env: _course(own) for env, own in sorted(joined.rewards.courses(len(log.step_points())).items())
        },
        **_groups(joined, ledger, is_ours=config.trainer.enabled or bool(log.batches)),
        "groups_acked_twice": joined.acked_twice,
        **_staleness(log, bounds_in_force(config, seen.bounds)),
        **({"staleness_max": None} if ledger is not None and not log.batches else {}),
        "workers_min": min(ready, default=0),
        "workers_max": max(ready, default=0),
        "tokens": seen.steps.tokens,
        "learning": _learned(seen.figures, log),
        "late_members": seen.late_members,
        **({"curriculum": seen.curricula} if seen.curricula else {}),
        **({"metrics_lines_damaged": damaged_lines} if damaged_lines else {}),
        "findings": sorted(seen.findings),
        "groups_evaluated": joined.evaluated,
        "evaluation": figures(Evaluations.read(layout), wall_s),
    }


def _ready(seen: Metrics, log: TrainerLog, lives: Sequence[Life], fewest: int) -> list[int]:
    """Return the numbers of ready workers of all lives, without those of a start or an end."""
    if len(lives) < 2:
        return seen.ready.numbers(fewest, until=log.batches[-1].at if log.batches else None)
    settled_at = sorted(batch.at for batch in chain(log.batches, log.voided))
    counts: list[int] = []
    for life, following in zip_longest(lives, lives[1:]):
        end = bisect_left(settled_at, inf if following is None else following.began)
        if end and settled_at[end - 1] >= life.began:
            counts += seen.ready.numbers(fewest, until=settled_at[end - 1], since=life.began)
    # Nobody logged a batch: the workers of the ends count, too.
    return counts or seen.ready.numbers(fewest)


def _span(moments: Sequence[float], lives: Sequence[Life]) -> tuple[float, int]:
    """Return the seconds from the first moment to the last one, and how often the clock was set back meanwhile.

    Such a step back hides how long it took: it counts for nothing. The time between two lives does not count.
    """
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    passed_s = sum(gap for gap in gaps if gap > 0)
    paused = paused_s(lives, min(moments), max(moments)) if moments else 0.0
    return passed_s - paused, sum(gap < 0 for gap in gaps)


def _progress(log: TrainerLog, seen: Metrics, wall_s: float | None, lives: Sequence[Life]) -> dict[str, Any]:
    rewards = [reward for _, reward in log.step_points()]
    span_s, set_back = _span([batch.at for batch in log.batches], lives)
    steps = max((batch.version.step for batch in log.batches), default=0)
    return {
        **_course(rewards),
        "steps": steps,
        "wall_s": round(seen.span_s if wall_s is None else wall_s, 3),
        "lives": len(lives),
        "downtime_s": round(sum(begin - end for end, begin in pauses(lives)), 3),
        "steps_per_s": round((len(rewards) - 1 - set_back) / span_s, 3) if span_s > 0 and rewards else None,
        "trainer_resumes": len(log.resumed_at),
        "batches": len(log.batches),
        "batches_without_signal": sum(1 for batch in log.batches if not batch.trained),
    }


def _course(rewards: Sequence[float]) -> dict[str, float | None]:
    """Return the mean score of the first and of the last steps."""
    return {
        "reward_first": _ends(rewards)[0] if rewards else None,
        "reward_last": _ends(rewards)[1] if rewards else None,
    }


def _learned(figures: Mapping[str, FigureCourse], log: TrainerLog) -> dict[str, dict[str, float]]:
    """Return the means of each figure over the first and over the last steps.

    Figures of a step that no batch settled do not count: its lease was lost, or its trainer.
    """
    last = max((batch.version.step for batch in log.batches), default=inf)
    found = {name: course.ends(last) for name, course in figures.items()}
    return {name: {"first": ends[0], "last": ends[1]} for name, ends in found.items() if ends is not None}


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means over the first and over the last steps; there must be one."""
    steps = max(1, min(WINDOW_STEPS, len(values) // 4))
    return mean(values[:steps]), mean(values[-steps:])


def _groups(joined: Joined, ledger: LedgerFigures | None, *, is_ours: bool) -> dict[str, int | None]:
    lost = joined.counts["lost"]
    figures: dict[str, int | None] = {
        **{f"groups_{place}": joined.counts[place] for place in PLACES},
        "groups_lost": lost,
        "groups_trained_twice": joined.trained_twice,
        "groups_rewound": joined.rewound,
    }
    if not is_ours:
        figures |= dict.fromkeys(TOLD_BY_TRAINER)
        figures["groups_settled"] = lost
    if ledger is not None:
        figures |= _of_ledger(ledger, lost)
        if not is_ours:
            figures["groups_settled"] = ledger.counts["trained"] + ledger.counts["filtered"]
    return figures


def _of_ledger(ledger: LedgerFigures, unnamed: int) -> dict[str, int | None]:
    """Return the ledger's figures; `unnamed` groups were acked, and the ledger does not name them."""
    lost = unnamed if ledger.is_whole else None
    return {
        "groups_accepted": ledger.accepted + (lost or 0),
        **{f"groups_{state}": count for state, count in ledger.counts.items()},
        "groups_lost": lost,
        "groups_trained_twice": None,
        "groups_rewound": ledger.rewound,
    }


def _staleness(log: TrainerLog, bounds: Sequence[tuple[float, int]]) -> dict[str, int | None]:
    return {
        "staleness_max": max((most for batch in log.batches for most in batch.staleness), default=0),
        "staleness_bound": bounds[-1][1] if bounds else None,
        "staleness_bound_max": max((bound for _, bound in bounds), default=None),
    }
