"""What a run produced against what it trained: the logs and, for what they leave open, the journal, read and joined.

The ack logs describe the groups. The journal is asked only for those that no line describes: of a worker that was
killed before it wrote, of a producer without a log, of an earlier version. At durability `memory` these stay unknown,
and are counted. So is a line that does not decode: here it costs a group, not the answer.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import AckedGroup, DroppedGroup, SettledBatch
from rolloutmq.services.broker.journal.facts import Accepted, GroupItem
from rolloutmq.services.broker.journal.history import History
from rolloutmq.services.broker.journal.packing import AnyFact
from rolloutmq.services.monitor.bias import Bias, Produced, described, find_bias, headed
from rolloutmq.services.monitor.lines import read_whole_lines
from rolloutmq.services.monitor.summary import read_trainer_log, settle_accounts


class Survey(msgspec.Struct, frozen=True):
    """The comparison, and what could not be read for it: lines by file, gaps of the journal."""

    bias: Bias
    unreadable_lines: dict[str, int]
    journal_damage: tuple[str, ...]

    def fields(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {**fields.pop("bias"), **fields}


def survey(layout: RunLayout, saved: Iterable[str]) -> Survey:
    """Compare what a run produced with what it trained. Blocks on the disk.

    Args:
        layout: Of a run that lives or has ended; a missing log is an empty one.
        saved: Ids of the groups that the broker still has.
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
    history = History(layout.journal)
    if unknown := accounts.accepted - produced.keys():
        produced.update(_journaled(history, unknown))
    return Survey(find_bias(produced, accounts), dict(unreadable), tuple(history.damage))


def unread(found: Survey) -> Iterable[str]:
    """Yield a line for each thing that could not be read."""
    for name, count in found.unreadable_lines.items():
        yield f"not read: {count:,} line{'s' * (count != 1)} of {name}, damaged; what they say is missing above"
    for damage in found.journal_damage:
        yield f"not read: {damage}"


def _journaled(history: History, wanted: Collection[str]) -> Iterable[tuple[str, Produced]]:
    for chapter in history.chapters():
        yield from _of(chapter.snapshot, wanted)
        for commit in chapter.commits:
            yield from _of(commit.facts, wanted)


def _of(facts: Iterable[AnyFact], wanted: Collection[str]) -> Iterable[tuple[str, Produced]]:
    for fact in facts:
        accepted = fact.accepted if isinstance(fact, GroupItem) else fact
        if isinstance(accepted, Accepted) and accepted.header.group_id in wanted:
            yield accepted.header.group_id, headed(accepted.env, accepted.split, accepted.header)
