"""Results of an ended run: `summary.json`, `report.png`, and a few lines on the terminal.

The survey compares produced with trained groups. The ack logs describe most groups. The journal describes the rest:
groups of a worker killed before it wrote, of a producer without a log, or of an earlier version. At durability
`memory` the rest stays unknown and is counted. A line that does not decode costs its group, not the comparison.
"""

import json
import logging
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.files import AckedGroup, DroppedGroup, RunLayout, SettledBatch
from rolloutmq.services.broker.journal.format.events import Accepted, GroupSnapshot
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.inspect.history import JournalHistory
from rolloutmq.services.broker.journal.inspect.ledger_model import remaining_ids
from rolloutmq.services.broker.snapshots.memory_snapshot import load
from rolloutmq.services.monitor.report.bias import Bias, Produced, described, find_bias, headed
from rolloutmq.services.monitor.report.bias_table import table, verdict_line
from rolloutmq.services.monitor.report.plot import bound_text, write_report
from rolloutmq.services.monitor.report.summary import read_trainer_log, settle_accounts, summarise
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


def survey(layout: RunLayout, saved: Iterable[str]) -> Survey:
    """Compare produced with trained groups of a run. Blocks on the disk.

    Args:
        layout: Of a running or ended run; a missing log counts as empty.
        saved: Ids of the groups the broker still queues.
    """
    unreadable: Counter[str] = Counter()
    acked: dict[str, Produced | None] = {}
    for path in sorted(layout.acks.glob("*.jsonl")):
        for line in read_whole_lines(path, AckedGroup, unreadable):
            acked[line.group_id] = described(line) or acked.get(line.group_id)
    log = read_trainer_log(read_whole_lines(layout.trained, SettledBatch, unreadable))
    dropped = list(read_whole_lines(layout.dropped, DroppedGroup, unreadable))
    accounts = settle_accounts(acked, log, dropped, saved)
    produced = {name: group for name, group in acked.items() if group is not None}
    history = JournalHistory(layout.journal)
    if unknown := accounts.accepted - produced.keys():
        produced.update(_journaled(history, unknown))
    return Survey(find_bias(produced, accounts), dict(unreadable), tuple(history.damage))


def unread(found: Survey) -> Iterable[str]:
    """Yield a line for each file with damage."""
    for name, count in found.unreadable_lines.items():
        yield f"not read: {count:,} line{'s' * (count != 1)} of {name}, damaged; their groups are missing above"
    for damage in found.journal_damage:
        yield f"not read: {damage}"


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


def conclude(config: RunConfig, layout: RunLayout, reason: str, wall_s: float | None) -> None:
    """Write summary and picture of an ended run, and print the result.

    Args:
        config: Configuration of the run.
        layout: Files of the run.
        reason: Why the run ended.
        wall_s: Seconds from the start of the command to the end of its last process; None if unknown.
    """
    if config.gateway.enabled and not config.trainer.enabled:
        _conclude_gateway(layout, reason, wall_s)
        return
    saved = _saved_ids(layout)
    found = survey(layout, saved)
    summary, picture = _write(config, layout, reason, wall_s, saved, found)
    lines = _lines(layout, summary, picture, config.trainer.steps, found)
    sys.stdout.write("\n".join(lines) + "\n")


def _conclude_gateway(layout: RunLayout, reason: str, wall_s: float | None) -> None:
    """Print how to continue. The trainer is not ours, and only it knows the learning result."""
    layout.summary.write_text(json.dumps({"ended": reason, "wall_s": wall_s}, indent=2) + "\n")
    sys.stdout.write(
        f"ended      {reason}\n"
        f"undelivered groups are kept: continue with `rolloutmq gateway --run-dir {layout.root}`\n"
        f"check every group with `rolloutmq ledger verify {layout.root}`\n"
    )


def rewrite_report(config: RunConfig, layout: RunLayout, *, as_json: bool) -> None:
    """Rewrite summary and picture, and print the result with the full comparison of produced and trained groups.

    Raises:
        DamagedFileError: A log is damaged. The comparison is printed nevertheless, and names the damage.
    """
    saved = _saved_ids(layout)
    found = survey(layout, saved)
    summary: dict[str, Any] | None = None
    lines: list[str] = []
    try:
        summary, picture = _write(config, layout, "see up.log", None, saved, found)
        lines = [*_lines(layout, summary, picture, config.trainer.steps, found), ""]
    finally:
        if as_json:
            text = json.dumps({"summary": summary, "bias": found.fields()}, indent=2)
        else:
            text = "\n".join([*lines, "produced against trained", *table(found.bias), *unread(found)])
        sys.stdout.write(text + "\n")


def _write(
    config: RunConfig,
    layout: RunLayout,
    reason: str,
    wall_s: float | None,
    saved: list[str],
    found: Survey,
) -> tuple[dict[str, Any], Path | None]:
    summary = summarise(layout, config, saved_ids=lambda _: saved, wall_s=wall_s)
    summary = {**summary, "bias": found.bias.short(), "ended": reason, "seed": config.run.seed}
    layout.summary.write_text(json.dumps(summary, indent=2) + "\n")
    return summary, _picture(config, layout, summary)


def _saved_ids(layout: RunLayout) -> list[str]:
    return remaining_ids(layout.journal) if layout.journal.is_dir() else load(layout.saved).ids


def _picture(config: RunConfig, layout: RunLayout, summary: dict[str, Any]) -> Path | None:
    try:
        write_report(layout, config, summary)
    except MissingError as error:
        logger.warning("picture not written reason=%s", error)
        return None
    return layout.report


def _lines(
    layout: RunLayout, summary: dict[str, Any], picture: Path | None, total: int, found: Survey
) -> Iterator[str]:
    yield f"ended      {summary['ended']}, after {summary['wall_s']:.1f} s"
    if summary["reward_first"] is not None:
        yield f"reward     {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} in {summary['steps']} steps"
    yield from _groups(layout, summary)
    yield f"staleness  at most {summary['staleness_max']}, bound {bound_text(summary)}"
    yield f"bias       {verdict_line(found.bias)}"
    yield f"workers    {summary['workers_min']} to {summary['workers_max']}"
    yield f"summary    {layout.summary}"
    if picture is not None:
        yield f"picture    {picture}"
    if summary["steps"] < total:
        yield f"continue with `rolloutmq up CONFIG --run-dir {layout.root} --resume`"


def _groups(layout: RunLayout, summary: dict[str, Any]) -> Iterator[str]:
    rest = (
        f"{summary['groups_expired']} expired, {summary['groups_dead']} dead, "
        f"{summary['groups_in_flight']} in flight"
    )
    if summary.get("groups_settled") is not None:
        yield f"groups     {summary['groups_accepted']} accepted: {summary['groups_settled']} to your trainer, {rest}"
        yield f"           `rolloutmq ledger verify {layout.root}` shows their states"
        return
    yield (
        f"groups     {summary['groups_accepted']} accepted: {summary['groups_trained']} trained, "
        f"{summary['groups_filtered']} filtered, {rest}"
    )
    yield f"           {summary['groups_lost']} lost, {summary['groups_trained_twice']} trained twice"
