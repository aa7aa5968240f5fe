"""Results of an ended run: `summary.json`, `report.png`, and a few lines on the terminal.

The trainer's log says what became of the groups. A trainer of one's own writes none: then the broker's ledger and its
log of settled batches say it.

The survey compares produced with trained groups. The ack logs describe most groups. The journal describes the rest:
groups of a worker killed before it wrote, of a producer without a log, or of an earlier version. At durability
`memory` the rest stays unknown and is counted. A line that does not decode costs its group, not the comparison.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from heapq import nlargest
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.bus.files import write_private
from rolloutmq.bus.rundir import read_json, read_lives
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.launch.end_notice import failure_reports
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import MissingError, RolloutMQError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import printable_lines, shell_word
from rolloutmq.schemas.wire.control import GetStatus, StatusReply
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.broker.journal.format.events import Accepted, GroupSnapshot, GroupState
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.inspect.history import JournalHistory
from rolloutmq.services.broker.journal.inspect.ledger_model import SnapshotModel, remaining_ids
from rolloutmq.services.broker.journal.inspect.verify import recount
from rolloutmq.services.broker.snapshots.memory_snapshot import load
from rolloutmq.services.dashboard.record.damage import damaged_lines
from rolloutmq.services.monitor.liveness import UNENDED, RunLiveness, fate_of
from rolloutmq.services.monitor.report import evaluation
from rolloutmq.services.monitor.report.bias import Bias, GroupFigures, Produced, described, headed
from rolloutmq.services.monitor.report.bias_table import SHOWN, table, verdict_line
from rolloutmq.services.monitor.report.evaluation import Evaluations
from rolloutmq.services.monitor.report.group_records import (
    NO_LOG,
    Acked,
    GroupPart,
    Settled,
    group_records,
)
from rolloutmq.services.monitor.report.history import lives_at
from rolloutmq.services.monitor.report.metrics import Metrics, read_metrics
from rolloutmq.services.monitor.report.plot import bound_text, write_report
from rolloutmq.services.monitor.report.settled_log import TrainerLog, read_log, read_settled
from rolloutmq.services.monitor.report.summary import (
    LedgerFigures,
    settle_accounts,
    summarise,
)
from rolloutmq.services.monitor.text.jsonl import read_whole_lines


class Survey(msgspec.Struct, frozen=True):
    """The comparison, and the files it could not read: damaged lines by file, gaps in the journal."""

    bias: Bias
    unreadable_lines: dict[str, int]
    journal_damage: tuple[str, ...]

    def fields(self) -> dict[str, Any]:
        """Return the survey as JSON objects."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {**fields.pop("bias"), **fields}


STATES: Final[Mapping[GroupState, str]] = {
    GroupState.QUEUED: "in_flight",
    GroupState.LEASED: "in_flight",
    GroupState.TRAINED: "trained",
    GroupState.COMMITTED: "trained",
    GroupState.FILTERED: "filtered",
    GroupState.EXPIRED: "expired",
    GroupState.DEAD: "dead",
    GroupState.DISCARDED: "discarded",
}
"""Name of each ledger state in the summary."""


ANSWER_S: Final = 3.0
"""Longest wait for the reply of a running broker."""


def ledger_figures(layout: RunLayout, *, is_ours: bool) -> LedgerFigures | None:
    """Return the broker's ledger of a run whose trainer's log does not name what was trained; else None.

    The run's own trainer logs each batch. One of somebody else's may log none or some: its log counts only if it names
    as many groups as the ledger says were settled. Groups for evaluation, which no trainer gets, do not count.

    Blocks on the disk. At durability `memory` a broker that ended in order has left its ledger, and a running one is
    asked for its counts. A broker that was killed forgot what an earlier life of it had settled, and only its log of
    batches names that: then the logs count.
    """
    named = _logged(layout)
    if named and is_ours:
        return None
    figures = _ledger(layout)
    if figures is None:
        return None
    settled = _settled(figures, layout)
    if named:
        return figures if settled > named else None
    log = read_log(layout.settled, partial(read_whole_lines, damaged=Counter()))
    return figures if settled >= _named(layout, log, void=False) else None


def _settled(figures: LedgerFigures, layout: RunLayout) -> int:
    """Return the number of groups that a trainer has settled, at least."""
    evaluated = Counter[str]()
    with group_records(layout, NO_LOG, kinds={Acked}) as records:
        for part in records:
            for name in part.acks().evaluated:
                evaluated[figures.states.get(name, "")] += 1
    counts = figures.less(evaluated).counts
    # Those whose state is not known ended before the history begins, so they are among the counts.
    return counts["trained"] + counts["filtered"] - evaluated[""]


def _logged(layout: RunLayout) -> int:
    """Return the number of groups that the trainer's log names, also in void lines; damaged lines name none."""
    log = read_log(layout.trained, partial(read_whole_lines, damaged=Counter()))
    return _named(layout, log, void=True)


def _named(layout: RunLayout, log: TrainerLog, *, void: bool) -> int:
    """Return the number of trained and filtered groups that a log names; with `void` also those of void lines."""
    with group_records(layout, log, kinds={Settled}) as records:
        return sum(
            len(
                {
                    one.group_id
                    for one in part.settled
                    if one.outcome != "rejected" and (void or not one.is_void)
                }
            )
            for part in records
        )


def _ledger(layout: RunLayout) -> LedgerFigures | None:
    """Return the ledger that the broker left, or has; None if there is none."""
    model = SnapshotModel()
    if layout.journal.is_dir():
        model = recount(layout.journal)
    else:
        model.open(load(layout.saved).events)
    if not model.accepted:
        return None if layout.journal.is_dir() else _asked(layout)
    counts = Counter(dict.fromkeys(STATES.values(), 0))
    for state, count in model.counts().items():
        counts[STATES[state]] += count
    # A dead group that was queued again has a later order: its last state counts.
    states = {model.ids[order]: STATES[model.states[order]] for order in sorted(model.ids)}
    return LedgerFigures(model.accepted, counts, model.rewound, states, is_whole=not model.before.total())


def _asked(layout: RunLayout) -> LedgerFigures | None:
    """Ask a running broker for the counts of its ledger; None if there is none, or no reply."""
    status = _status(layout)
    if status is None:
        return None
    ledger = status.pressure.ledger
    counts = Counter(dict.fromkeys(STATES.values(), 0))
    for state, name in STATES.items():
        counts[name] += getattr(ledger, state.value)
    return LedgerFigures(ledger.accepted, counts, ledger.rewound, {}, is_whole=False)


def _status(layout: RunLayout) -> StatusReply | None:
    """Ask a running broker for its status; None if there is none, or no reply."""
    endpoints = endpoints_of(layout)
    if endpoints is None or not fate_of(layout).broker:
        return None
    try:
        with BlockingClient(endpoints.serve, keys=keys_of(endpoints)) as client:
            reply = client.request(GetStatus(), ANSWER_S)
    except RolloutMQError:
        return None
    return reply if isinstance(reply, StatusReply) else None


def _held(layout: RunLayout) -> list[str]:
    """Return ids of the groups that a running broker without a journal has, which tells only their number.

    The queue is nearly first in, first out: of the groups that no log names, the newest are taken.
    """
    status = _status(layout)
    if status is None:
        return []
    ledger, lanes = status.pressure.ledger, status.pressure.lanes
    evaluated = sum(lane.queued_groups + lane.leased_groups for lane in lanes if lane.split is Split.EVAL)
    count = max(0, ledger.queued + ledger.leased - evaluated)
    read = partial(read_whole_lines, damaged=Counter())
    log = read_settled(layout, read)
    unnamed: list[tuple[float, str]] = []
    with group_records(layout, log, read) as records:
        for part in records:
            acked = {
                one.group.group_id: one.group.at for one in part.acked if one.group.split is not Split.EVAL
            }
            lost = settle_accounts(acked, part.ids(), part.dropped, ()).lost
            unnamed = nlargest(count, [*unnamed, *((acked.get(name, 0.0), name) for name in lost)])
    return [name for _, name in unnamed]


def survey(
    layout: RunLayout, saved: Iterable[str], ledger: LedgerFigures | None = None, as_of: float = inf
) -> Survey:
    """Compare produced with trained groups of a run. Blocks on the disk.

    Args:
        layout: Of a running or ended run; a missing log counts as empty.
        saved: Ids of the groups the broker still has.
        ledger: The broker's ledger, if the trainer wrote no log.
        as_of: Time at which a running broker's records were read, wall-clock seconds: it has what was accepted since.
    """
    unreadable, of_batches = Counter[str](), Counter[str]()
    log = read_settled(layout, partial(read_whole_lines, damaged=of_batches))
    read = partial(read_whole_lines, damaged=unreadable)
    figures, held, damage = GroupFigures(), tuple(saved), dict[str, None]()
    with group_records(layout, log, read) as records:
        for part in records:
            acked = _described(part)
            names = {one.group.group_id for one in part.acked if one.group.at >= as_of}.union(
                filter(part.has, held)
            )
            states = None if ledger is None else ledger.part(part.has)
            accounts = settle_accounts(acked, part.ids(), part.dropped, names, states)
            produced = {name: group for name, group in acked.items() if group is not None}
            if unknown := accounts.accepted - produced.keys():
                history = JournalHistory(layout.journal)
                produced.update(_journaled(history, unknown))
                damage |= dict.fromkeys(history.damage)
            figures.add(produced, accounts)
    of_dropped = Counter({layout.dropped.name: unreadable.pop(layout.dropped.name, 0)})
    return Survey(figures.bias(), dict(unreadable + of_batches + of_dropped), tuple(damage))


def _described(part: GroupPart) -> dict[str, Produced | None]:
    """Return what the ack logs say of each group; None if an earlier version wrote its line."""
    acked: dict[str, Produced | None] = {}
    for one in part.acked:
        acked[one.group.group_id] = described(one.group) or acked.get(one.group.group_id)
    return acked


class Records(NamedTuple):
    """What the broker left, or has, and what was recorded of the run.

    Attributes:
        saved: Ids of the groups it still holds.
        ledger: Its ledger, if the trainer wrote no log.
        seen: Series of `metrics.jsonl`.
        damaged_lines: Lines of it that do not decode.
        as_of: Time before these were read if it runs, wall-clock seconds: it accepts more meanwhile.
    """

    saved: list[str]
    ledger: LedgerFigures | None
    seen: Metrics
    damaged_lines: int
    as_of: float = inf


def unread(found: Survey) -> Iterable[str]:
    """Yield a line for each file with damage."""
    for name, count in found.unreadable_lines.items():
        yield f"not read: {_damaged_lines(name, count)}; their groups are missing above"
    for damage in found.journal_damage:
        yield f"not read: {damage}"


def _damaged_lines(name: str, count: int) -> str:
    return f"{count:,} line{'s' * (count != 1)} of {name}, damaged"


def _journaled(history: JournalHistory, wanted: Collection[str]) -> Iterable[tuple[str, Produced]]:
    for log in history.logs():
        yield from _of(log.snapshot, wanted)
        for commit in log.commits:
            yield from _of(commit.events, wanted)


def _of(events: Iterable[AnyEvent], wanted: Collection[str]) -> Iterable[tuple[str, Produced]]:
    for event in events:
        accepted = event.accepted if isinstance(event, GroupSnapshot) else event
        if isinstance(accepted, Accepted) and accepted.header.group_id in wanted:
            yield accepted.header.group_id, headed(accepted.env, accepted.split, accepted.header)


logger = logging.getLogger(__name__)


def conclude(
    config: RunConfig, layout: RunLayout, reason: str, *, picture: bool = True, as_json: bool = False
) -> None:
    """Write summary and picture of an ended run, and print the result.

    Args:
        config: Configuration of the run.
        layout: Files of the run.
        reason: Why the run ended.
        picture: Draw the picture.
        as_json: Print one line of JSON: `event`, which is "end", and the summary.
    """
    records = _read(layout, is_ours=config.trainer.enabled)
    found = survey(layout, records.saved, records.ledger, records.as_of)
    summary = _summary(config, layout, reason, None, records, found)
    write_private(layout.summary, json.dumps(summary, indent=2).encode() + b"\n")
    drawn = _picture(config, layout, summary, records.seen) if picture else None
    if as_json:
        sys.stdout.write(json.dumps({"event": "end", "summary": summary}) + "\n")
        return
    lines = _lines(config, layout, summary, drawn, found)
    sys.stdout.write("\n".join(lines) + "\n")


def _command(config: RunConfig, layout: RunLayout) -> str:
    """Return the command that continues a run."""
    root = shell_word(layout.root)
    if config.gateway.enabled and not config.trainer.enabled:
        return "up CONFIG --resume" if config.environment else f"gateway --run-dir {root}"
    if not layout.log("up").exists():
        return f"broker --run-dir {root}"
    return f"up CONFIG --run-dir {root} --resume"


def _end(layout: RunLayout) -> tuple[str, float | None]:
    """Return why a run ended, and its duration if the summary has it.

    The launcher recorded the reason in the summary. Nobody does so for a broker started by hand.
    """
    fate = fate_of(layout)
    if fate.life is not RunLiveness.ENDED or fate.by_hand:
        return fate.told, None
    wall_s = _recorded_summary(layout).get("wall_s")
    return fate.told, float(wall_s) if isinstance(wall_s, int | float) else None


def _recorded_summary(layout: RunLayout) -> dict[str, Any]:
    try:
        return read_json(layout.summary, dict[str, Any]) or {}
    except msgspec.DecodeError:
        return {}


def print_report(config: RunConfig, layout: RunLayout, *, as_json: bool, picture: Path | None = None) -> None:
    """Print the result of a run as its files have it now, and the full comparison of produced and trained groups.

    Nothing in the run directory changes: its summary keeps what the launcher recorded at the end.

    Args:
        config: Configuration of the run.
        layout: Files of the run.
        as_json: Print JSON.
        picture: File to draw the picture to (.png), if any.

    Raises:
        DamagedFileError: A log that names groups is damaged. The comparison is printed nevertheless, and names it.
        MissingError: A picture is wanted, and matplotlib is not installed.
    """
    records = _read(layout, is_ours=config.trainer.enabled)
    found = survey(layout, records.saved, records.ledger, records.as_of)
    summary: dict[str, Any] | None = None
    lines: list[str] = []
    try:
        summary = _summary(config, layout, *_end(layout), records, found)
        if picture is not None:
            write_report(layout, config, summary, picture, records.seen)
        drawn = picture or (layout.report if layout.report.exists() else None)
        lines = [*_lines(config, layout, summary, drawn, found), ""]
        for report in failure_reports(layout, _began(layout)):
            lines += [*report.splitlines(), ""]
    finally:
        if as_json:
            text = json.dumps({"summary": summary, "bias": found.fields()}, indent=2)
        else:
            text = "\n".join([*lines, "produced against trained", *table(found.bias), *unread(found)])
        sys.stdout.write(printable_lines(text) + "\n")


def summary_now(config: RunConfig, layout: RunLayout) -> dict[str, Any]:
    """Return the summary of a run: that of its end, or else as its files have it now, without the comparison of groups.

    Blocks on the disk.

    Raises:
        DamagedFileError: A log that names groups, of a run without a recorded summary is damaged.
    """
    reason, wall_s = _end(layout)
    recorded = _recorded_summary(layout)
    if reason == recorded.get("ended") and "steps" in recorded:
        return recorded
    records = _read(layout, is_ours=config.trainer.enabled)
    summary = summarise(
        layout,
        config,
        saved_ids=lambda _: records.saved,
        wall_s=wall_s,
        lives=lives_at(layout, time.time()),
        ledger=records.ledger,
        as_of=records.as_of,
        seen=records.seen,
        damaged_lines=records.damaged_lines,
    )
    return {**summary, "ended": reason}


def _began(layout: RunLayout) -> float:
    """Return the start of the last life of a run, wall-clock seconds; 0 without lives."""
    lives = read_lives(layout)
    return lives[-1].began if lives else 0.0


def _summary(
    config: RunConfig,
    layout: RunLayout,
    reason: str,
    wall_s: float | None,
    records: Records,
    found: Survey,
) -> dict[str, Any]:
    """Return the summary."""
    summary = summarise(
        layout,
        config,
        saved_ids=lambda _: records.saved,
        wall_s=wall_s,
        lives=lives_at(layout, time.time()),
        ledger=records.ledger,
        as_of=records.as_of,
        seen=records.seen,
        damaged_lines=records.damaged_lines,
    )
    return {**summary, "bias": found.bias.short(), "ended": reason, "seed": config.run.seed}


def _read(layout: RunLayout, *, is_ours: bool) -> Records:
    as_of = time.time() if fate_of(layout).broker else inf
    if layout.journal.is_dir():
        saved = remaining_ids(layout.journal)
    else:
        saved = load(layout.saved).ids if as_of == inf else _held(layout)
    ledger = ledger_figures(layout, is_ours=is_ours)
    return Records(saved, ledger, read_metrics(layout.metrics), damaged_lines(layout.metrics), as_of)


def _picture(config: RunConfig, layout: RunLayout, summary: dict[str, Any], seen: Metrics) -> Path | None:
    try:
        write_report(layout, config, summary, layout.report, seen)
    except MissingError as error:
        logger.warning("picture not written reason=%s", error)
        return None
    return layout.report


def _lines(
    config: RunConfig, layout: RunLayout, summary: dict[str, Any], picture: Path | None, found: Survey
) -> Iterator[str]:
    after = f", after {summary['wall_s']:.1f} s" if summary["wall_s"] else ""
    if summary["lives"] > 1:
        after += f" in {summary['lives']} lives, {summary['downtime_s']:.1f} s apart"
    yield f"ended      {summary['ended']}{after}"
    if summary["reward_first"] is not None:
        yield from _rewards(summary)
    for number, line in enumerate(evaluation.lines(Evaluations.read(layout), summary["wall_s"])):
        yield f"{'' if number else 'evaluation':<11}{line}"
    yield from _learning(summary["learning"])
    if rivals := summary.get("trainers"):
        each = ", ".join(f"{name} to step {step}" for name, step in rivals.items())
        yield f"trainers   {len(rivals)} shared the groups, each with steps of its own: {each}"
    yield from _groups(layout, summary)
    if summary["staleness_max"] is not None and summary["staleness_bound"] is not None:
        yield f"staleness  at most {summary['staleness_max']}, bound {bound_text(summary)}"
    for number, name in enumerate(summary["findings"]):
        yield f"{'' if number else 'health':<11}{name}"
    yield f"bias       {verdict_line(found.bias)}"
    yield f"workers    {summary['workers_min']} to {summary['workers_max']}"
    if count := summary.get("metrics_lines_damaged"):
        yield f"not read   {_damaged_lines(layout.metrics.name, count)}"
    if summary["ended"] != UNENDED and layout.summary.exists():
        yield f"summary    {layout.summary}"
    if picture is not None:
        yield f"picture    {picture}"
    evaluated = summary["evaluation"]["last"]["step"] if summary["evaluation"] else 0
    wanted = config.trainer.steps or inf
    if max(summary["steps"], evaluated) < wanted and summary["ended"] != UNENDED:
        yield f"continue with `rolloutmq {_command(config, layout)}`"


def _rewards(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the course of the scores; of several environments, whose scales may differ, also of each."""
    several = summary["environments"] if len(summary["environments"]) > 1 else {}
    together = ", all environments together" if several else ""
    yield f"reward     {_course(summary)} in {summary['steps']} steps{together}"
    yield from (f"           {env}: {_course(own)}" for env, own in islice(several.items(), SHOWN))
    if len(several) > SHOWN:
        yield f"           and {len(several) - SHOWN:,} more environments; `--json` has all"


def _learning(figures: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield the first and last means of the figures of learning."""
    for number, (name, own) in enumerate(figures.items()):
        yield f"{'' if number else 'learning':<11}{name} {own['first']:.4g} -> {own['last']:.4g}"


def _course(figures: dict[str, Any]) -> str:
    return f"{figures['reward_first']:.3f} -> {figures['reward_last']:.3f}"


def _groups(layout: RunLayout, summary: dict[str, Any]) -> Iterator[str]:
    rest = (
        f"{summary['groups_expired']} expired, {summary['groups_dead']} dead, "
        f"{summary['groups_in_flight']} in flight"
    )
    if summary["groups_trained"] is None:
        yield f"groups     {summary['groups_accepted']} accepted: {summary['groups_settled']} to your trainer, {rest}"
        if layout.journal.is_dir():
            yield f"           `rolloutmq ledger verify {shell_word(layout.root)}` shows their states"
        return
    yield (
        f"groups     {summary['groups_accepted']} accepted: {summary['groups_trained']} trained, "
        f"{summary['groups_filtered']} filtered, {rest}"
    )
    if summary["groups_evaluated"]:
        yield f"           and {summary['groups_evaluated']} for evaluation"
    if summary["groups_trained_twice"] is None:
        verify = f"; `rolloutmq ledger verify {shell_word(layout.root)}` checks it"
        yield "           of the broker's ledger" + (verify if layout.journal.is_dir() else "")
        return
    yield f"           {summary['groups_lost']} lost, {summary['groups_trained_twice']} trained twice"
