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
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf
from pathlib import Path
from sys import intern
from typing import Any, Final

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import AckedGroup, DroppedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.lives import Life, paused_s, pauses, seconds_of
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.monitor.report.evaluation import Evaluations, figures
from rolloutmq.services.monitor.report.figure_course import WINDOW_STEPS, FigureCourse
from rolloutmq.services.monitor.report.metrics import Metrics, bounds_in_force, read_metrics
from rolloutmq.services.monitor.text.jsonl import read_lines

TOLD_BY_TRAINER: Final = (
    *("groups_trained", "groups_filtered", "groups_lost"),
    *("groups_trained_twice", "groups_rewound"),
)
"""Figures that only the trainer's log or the ledger can supply."""

ReadIds = Callable[[RunLayout], Iterable[str]]
"""Reads the ids of the groups in a `saved.rmq`."""


@dataclass(frozen=True, slots=True)
class TrainerLog:
    """Valid lines of `trained.jsonl`, or else of `settled.jsonl`: those no later `resumed` line voided.

    Attributes:
        batches: Valid batches, in order.
        voided: Void batches: the weights they led to are gone.
        resumed_at: Times at which a trainer resumed.
    """

    batches: tuple[SettledBatch, ...]
    voided: tuple[SettledBatch, ...]
    resumed_at: tuple[float, ...]

    def trained(self) -> Counter[str]:
        """Return how often each group was trained."""
        return Counter(name for batch in self.batches for name in batch.trained)

    def rivals(self) -> dict[str, int]:
        """Return the last step of each consumer, if several took the same step of one policy; else nothing."""
        takers: defaultdict[PolicyVersion, set[str]] = defaultdict(set)
        for batch in self.batches:
            if batch.trained and batch.consumer:
                takers[batch.version].add(batch.consumer)
        if not any(len(names) > 1 for names in takers.values()):
            return {}
        last: dict[str, int] = {}
        for version in sorted(takers):
            last |= dict.fromkeys(sorted(takers[version]), version.step)
        return last

    def filtered(self) -> set[str]:
        return {name for batch in self.batches for name in batch.filtered}

    def rejected(self) -> set[str]:
        return {name for batch in self.batches for name in batch.rejected}

    def voided_ids(self) -> set[str]:
        """Return every group of a voided batch."""
        return {name for batch in self.voided for name in (*batch.trained, *batch.filtered, *batch.rejected)}

    def step_points(self) -> list[tuple[float, float]]:
        """Return time and mean raw score of each step, over all groups pulled for it.

        A batch without a step (all its groups filtered) belongs to the next step.
        """
        return [(at, _mean([reward for _, reward in pulled])) for at, pulled in self._pulled()]

    def rewards_of(self, env_of: Mapping[str, str]) -> dict[str, list[float]]:
        """Return the mean raw score of each step by environment; steps without its groups are left out.

        Args:
            env_of: Environment of each group; groups that it does not name are left out.
        """
        found: defaultdict[str, list[float]] = defaultdict(list)
        for _, pulled in self._pulled():
            own: defaultdict[str, list[float]] = defaultdict(list)
            for name, reward in pulled:
                own[env_of.get(name, "")].append(reward)
            for env, rewards in own.items():
                found[env].append(_mean(rewards))
        found.pop("", None)
        return found

    def _pulled(self) -> Iterator[tuple[float, list[tuple[str, float]]]]:
        """Yield the time of each step, and id and score of every group pulled for it."""
        pulled: list[tuple[str, float]] = []
        taken = 0
        for batch in self.batches:
            pulled.extend(zip((*batch.trained, *batch.filtered), batch.rewards, strict=False))
            if batch.version.step <= taken:
                continue
            taken = batch.version.step
            yield batch.at, pulled
            pulled = []


Read = Callable[[Path, type[SettledBatch]], Iterable[SettledBatch]]
"""Reads the lines of a log."""


def read_settled(layout: RunLayout, read: Read = read_lines) -> TrainerLog:
    """Return the log of the trainer; if it wrote none, that of the broker."""
    return read_trainer_log(_settled_lines(layout, read))


def _settled_lines(layout: RunLayout, read: Read = read_lines) -> Iterator[SettledBatch]:
    """Yield the lines of the trainer's log; if it wrote none, those of the broker's."""
    own = iter(read(layout.trained, SettledBatch))
    first = next(own, None)
    if first is None:
        yield from read(layout.settled, SettledBatch)
    else:
        yield first
        yield from own


def read_trainer_log(lines: Iterable[SettledBatch]) -> TrainerLog:
    """Void the earlier lines with a higher step at each resume."""
    counted: list[SettledBatch] = []
    voided: list[SettledBatch] = []
    resumed_at: list[float] = []
    for line in lines:
        if line.resumed:
            resumed_at.append(line.at)
            voided += [batch for batch in counted if batch.version.step > line.version.step]
            counted = [batch for batch in counted if batch.version.step <= line.version.step]
            if not (line.trained or line.filtered or line.rejected):
                continue
        counted.append(line)
    return TrainerLog(tuple(counted), tuple(voided), tuple(resumed_at))


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

    def without(self, names: Container[str]) -> "LedgerFigures":
        """Return the figures without the named groups, as far as their state is known."""
        gone = Counter(state for name, state in self.states.items() if name in names)
        return replace(
            self,
            accepted=self.accepted - gone.total(),
            counts={state: count - gone[state] for state, count in self.counts.items()},
            states={name: state for name, state in self.states.items() if name not in names},
        )


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
    log: TrainerLog,
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
        "trained": set(log.trained()),
        "filtered": log.filtered(),
        "in_flight": set(saved),
        "expired": given_up["expired"],
        "discarded": given_up["discarded"],
        "dead": given_up["dead"] | log.rejected(),
    }
    if ledger is not None:
        for place, names in places.items():
            names.difference_update(ledger.states)
            names.update(name for name, state in ledger.states.items() if state == place)
    accepted = set(acked).union(log.voided_ids(), *places.values())
    rest = set(accepted)
    found: dict[str, frozenset[str]] = {}
    for place, names in places.items():
        found[place] = frozenset(rest & names)
        rest -= names
    return GroupCounts(accepted=frozenset(accepted), lost=frozenset(rest), **found)


@dataclass(slots=True)
class AckLog:
    """Ids of the groups that were acked to producers."""

    ids: set[str] = field(default_factory=set)
    evaluated: set[str] = field(default_factory=set)
    """Those of the groups for evaluation, which no trainer gets; `ids` does not have them."""
    since: set[str] = field(default_factory=set)
    """Those of `ids` that were acked after a running broker was read."""
    repeated: int = 0
    """Ids acked under two numbers: two groups of one name, or one group accepted twice."""
    env_of: dict[str, str] = field(default_factory=dict)
    """Environment of each group, without those of lines that name none."""


def read_acks(layout: RunLayout, as_of: float = inf) -> AckLog:
    """Read the ack logs of all producers; `as_of` is when a running broker was read, wall-clock seconds."""
    numbers: dict[str, tuple[str, int, int]] = {}
    log = AckLog()
    evaluated: set[str] = set()
    for path in sorted(layout.acks.glob("*.jsonl")):
        for line in read_lines(path, AckedGroup):
            number = (path.stem, line.session, line.seq)
            if numbers.setdefault(line.group_id, number) != number:
                log.repeated += 1
            if line.env:
                log.env_of[line.group_id] = intern(line.env)
            if line.split is Split.EVAL:
                evaluated.add(line.group_id)
            elif line.at >= as_of:
                log.since.add(line.group_id)
    log.ids, log.evaluated = numbers.keys() - evaluated, evaluated
    return log


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
        - steps_per_s: steps over the time from the first to the last of them, without the time between lives.
        - tokens: tokens of the recorded steps of the final policy; too few if an event was dropped.
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
    acks = read_acks(layout, as_of)
    dropped = [one for one in read_lines(layout.dropped, DroppedGroup) if one.group_id not in acks.evaluated]
    saved = [name for name in saved_ids(layout) if name not in acks.evaluated]
    ledger = ledger.without(acks.evaluated) if ledger is not None else None
    accounts = settle_accounts(acks.ids, log, dropped, acks.since.union(saved), ledger)
    seen = seen or read_metrics(layout.metrics)
    fewest = sum(env.min_workers for env in config.environment.values())
    ready = _ready(seen, log, lives, fewest)
    if lives:
        wall_s = seconds_of(lives, seen.last_t)
    return {
        **_progress(log, seen, wall_s, lives),
        **({"trainers": rivals} if (rivals := log.rivals()) else {}),
        "environments": {env: _course(own) for env, own in sorted(log.rewards_of(acks.env_of).items())},
        **_groups(accounts, log, ledger, is_ours=config.trainer.enabled or bool(log.batches)),
        "groups_acked_twice": acks.repeated,
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
        "groups_evaluated": len(acks.evaluated),
        "evaluation": figures(Evaluations.read(layout), wall_s),
    }


def _ready(seen: Metrics, log: TrainerLog, lives: Sequence[Life], fewest: int) -> list[int]:
    """Return the numbers of ready workers of all lives, without those of a start or an end."""
    if len(lives) < 2:
        return seen.ready.numbers(fewest, until=log.batches[-1].at if log.batches else None)
    settled_at = sorted(batch.at for batch in (*log.batches, *log.voided))
    counts: list[int] = []
    for life, following in zip_longest(lives, lives[1:]):
        end = bisect_left(settled_at, inf if following is None else following.began)
        if end and settled_at[end - 1] >= life.began:
            counts += seen.ready.numbers(fewest, until=settled_at[end - 1], since=life.began)
    # Nobody logged a batch: the workers of the ends count, too.
    return counts or seen.ready.numbers(fewest)


def _progress(log: TrainerLog, seen: Metrics, wall_s: float | None, lives: Sequence[Life]) -> dict[str, Any]:
    rewards = [reward for _, reward in log.step_points()]
    first_at, last_at = (log.batches[0].at, log.batches[-1].at) if log.batches else (0.0, 0.0)
    span_s = last_at - first_at - paused_s(lives, first_at, last_at)
    steps = max((batch.version.step for batch in log.batches), default=0)
    return {
        **_course(rewards),
        "steps": steps,
        "wall_s": round(seen.span_s if wall_s is None else wall_s, 3),
        "lives": len(lives),
        "downtime_s": round(sum(begin - end for end, begin in pauses(lives)), 3),
        "steps_per_s": round((len(rewards) - 1) / span_s, 3) if span_s > 0 and rewards else None,
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
    return _mean(values[:steps]), _mean(values[-steps:])


def _groups(
    accounts: GroupCounts, log: TrainerLog, ledger: LedgerFigures | None, *, is_ours: bool
) -> dict[str, int | None]:
    figures: dict[str, int | None] = {
        "groups_accepted": len(accounts.accepted),
        "groups_trained": len(accounts.trained),
        "groups_filtered": len(accounts.filtered),
        "groups_expired": len(accounts.expired),
        "groups_dead": len(accounts.dead),
        "groups_discarded": len(accounts.discarded),
        "groups_in_flight": len(accounts.in_flight),
        "groups_lost": len(accounts.lost),
        "groups_trained_twice": sum(1 for times in log.trained().values() if times > 1),
        "groups_rewound": len(log.voided_ids() & (accounts.trained | accounts.filtered)),
    }
    if not is_ours:
        figures |= dict.fromkeys(TOLD_BY_TRAINER)
        figures["groups_settled"] = len(accounts.lost)
    if ledger is not None:
        figures |= _of_ledger(ledger, len(accounts.lost))
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
