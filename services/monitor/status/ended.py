"""How a run ended: the recorded reason, and a few figures of the summary that its launcher left.

Nothing is computed; `report` joins the logs. A run whose broker was started by hand has no summary.
"""

import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import printable_lines, shell_word
from rolloutmq.services.monitor.liveness import Fate
from rolloutmq.services.monitor.text import format
from rolloutmq.services.monitor.text.exit_codes import reader_may_leave

LABEL_CHARS: Final = 9
"""Width of the labels of a status."""


def show_ended(layout: RunLayout, fate: Fate, as_json: bool) -> int:
    """Print how a run ended, with the summary that its launcher left; return the exit code 0."""
    summary = read_summary(layout)
    if as_json:
        plain = {"life": fate.life, "ended": fate.told, "summary": summary}
        text = msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()
    else:
        text = ended_text(layout, fate, summary)
    with reader_may_leave():
        sys.stdout.write(printable_lines(text) + "\n")
    return 0


class EndedFigures(msgspec.Struct, frozen=True):
    """The figures of a summary that `status` shows; None where there is none."""

    wall_s: float | None = None
    steps: int | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    groups_accepted: int | None = None
    groups_trained: int | None = None
    groups_filtered: int | None = None
    groups_expired: int | None = None
    groups_dead: int | None = None
    groups_discarded: int | None = None
    groups_in_flight: int | None = None
    groups_lost: int | None = None
    findings: tuple[str, ...] = ()

    @classmethod
    def of(cls, summary: Mapping[str, Any] | None) -> "EndedFigures":
        """Take the figures of a summary; none of one that is damaged."""
        try:
            return msgspec.convert(summary or {}, cls)
        except msgspec.ValidationError:
            return cls()


def ended_text(layout: RunLayout, fate: Fate, summary: Mapping[str, Any] | None) -> str:
    """Return how a run ended as text: a few lines, with the figures of its summary."""
    seen = EndedFigures.of(summary)
    after = "" if seen.wall_s is None else f", after {format.clock(seen.wall_s)}"
    rows = [("run", f"{layout.root} has ended{after}"), ("ended", fate.told)]
    if seen.steps is not None:
        rows.append(("step", str(seen.steps)))
    if seen.reward_first is not None and seen.reward_last is not None:
        rows.append(("reward", f"{seen.reward_first:.3f} -> {seen.reward_last:.3f}"))
    if seen.groups_accepted is not None:
        rows.append(("groups", f"accepted {seen.groups_accepted} = {_by_state(seen)}"))
    rows += [("health", name) for name in seen.findings]
    rows.append(("more", f"rolloutmq report {shell_word(layout.root)}"))
    return "\n".join(f"{label:<{LABEL_CHARS}}{text}" for label, text in rows)


def _by_state(seen: EndedFigures) -> str:
    counts = {
        "trained": seen.groups_trained,
        "filtered": seen.groups_filtered,
        "expired": seen.groups_expired,
        "dead": seen.groups_dead,
        "discarded": seen.groups_discarded,
        "in flight": seen.groups_in_flight,
        "lost": seen.groups_lost,
    }
    return " + ".join(f"{state} {count}" for state, count in counts.items() if count) or "0"


def read_summary(layout: RunLayout) -> dict[str, Any] | None:
    """Return the summary that the launcher left; None if there is none, or it cannot be read."""
    try:
        return read_json(layout.summary, dict[str, Any])
    except msgspec.DecodeError:
        return None
