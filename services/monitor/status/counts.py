"""Counts of groups and sequences by split: the same words and numbers in `status`, `top` and `report`. Pure.

The ledger counts the groups of both splits. The counts of evaluation come from its lanes; the rest is of training. In
each split

    accepted = queued + leased + trained + untrained

`trained` has the committed groups; `untrained` are the filtered, expired, dead and discarded ones. `report` and
`summary.json` count training alone: `groups_in_flight` is queued + leased there, and `groups_evaluated` the accepted
groups of evaluation. Rollout pressure and queued sequences are of training; the rates of sequences are of both splits.
"""

from typing import Any, Final, NamedTuple

from rolloutmq.schemas.wire.control import Pressure
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.monitor.text import format

UNTRAINED: Final = ("filtered", "expired", "dead", "discarded")
"""States of groups that left the queue untrained."""


class SplitCounts(NamedTuple):
    """Accepted groups of one split by state, and its queued sequences."""

    accepted: int = 0
    queued: int = 0
    leased: int = 0
    trained: int = 0
    untrained: int = 0
    queued_sequences: int = 0

    def text(self) -> str:
        """Return the groups as an equation; empty states are left out."""
        states = {name: getattr(self, name) for name in ("queued", "leased", "trained", "untrained")}
        held = (f"{state} {count}" for state, count in states.items() if count)
        return f"accepted {self.accepted} = " + (" + ".join(held) or "0")


class GroupCounts(NamedTuple):
    """Counts of both splits."""

    train: SplitCounts
    eval: SplitCounts

    def plain(self) -> dict[str, Any]:
        """Return the counts as JSON objects, by split."""
        return {"train": self.train._asdict(), "eval": self.eval._asdict()}


def counted(pressure: Pressure) -> GroupCounts:
    """Return the counts by split. Lanes and ledger are of one message, so they agree."""
    ledger = pressure.ledger
    lanes = [lane for lane in pressure.lanes if lane.split is Split.EVAL]
    accepted = sum(lane.accepted_groups for lane in lanes)
    queued = sum(lane.queued_groups for lane in lanes)
    leased = sum(lane.leased_groups for lane in lanes)
    trained = sum(lane.trained_groups for lane in lanes)
    evaluated = SplitCounts(
        accepted,
        queued,
        leased,
        trained,
        max(0, accepted - queued - leased - trained),
        sum(lane.queued_sequences for lane in lanes),
    )
    untrained = sum(getattr(ledger, state) for state in UNTRAINED)
    train = SplitCounts(
        max(0, ledger.accepted - evaluated.accepted),
        max(0, ledger.queued - evaluated.queued),
        max(0, ledger.leased - evaluated.leased),
        max(0, ledger.trained + ledger.committed - evaluated.trained),
        max(0, untrained - evaluated.untrained),
        pressure.queued_sequences,
    )
    return GroupCounts(train, evaluated)


def lines(pressure: Pressure, *, short: bool = False) -> list[str]:
    """Return the accepted groups as text: the ledger of a run without evaluation, else an equation for each split.

    Args:
        pressure: State of the broker.
        short: Count committed groups as trained, without evaluation too.
    """
    both = counted(pressure)
    if both.eval.accepted:
        return [f"train: {both.train.text()}", f"eval: {both.eval.text()}"]
    return [format.accounts(pressure.ledger, short=short)]


def queued(pressure: Pressure) -> str:
    """Return the queued groups: those of training, and those of evaluation if there are any."""
    both = counted(pressure)
    text = f"{both.train.queued} groups"
    return f"{text} and {both.eval.queued} of evaluation" if both.eval.queued else text
