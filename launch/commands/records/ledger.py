"""`rolloutmq ledger verify`: audit of every accepted group of a run, from its files alone.

Exit codes: 0 every group is accounted for, or the run has no journal (durability `memory`, stated in the output);
1 problems found.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rolloutmq.bus.rundir import read_run
from rolloutmq.schemas.files import AckedGroup, RunLayout
from rolloutmq.schemas.printable import moment, printable, printable_lines
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.inspect import verify as books
from rolloutmq.services.broker.journal.inspect.verify import Verdict, Witness
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.monitor.report.group_records import Settled, group_records
from rolloutmq.services.monitor.report.settled_log import TrainerLog, read_log, read_settled
from rolloutmq.services.monitor.text.exit_codes import FAILED, reader_may_leave
from rolloutmq.services.monitor.text.jsonl import read_lines


def verify(run_dir: Path, *, as_json: bool, quick: bool = False) -> int:
    """Recompute the ledger of a running or ended run and print the verdict; return the exit code.

    Args:
        run_dir: Its directory.
        as_json: Print JSON.
        quick: Skip reading and checksumming the groups.
    """
    verdict = check(RunLayout(run_dir), quick=quick)
    with reader_may_leave():
        text = _json(verdict) if as_json else "\n".join(map(printable, _lines(verdict)))
        sys.stdout.write(printable_lines(text) + "\n")
    return FAILED if verdict.problems else 0


def check(layout: RunLayout, *, quick: bool = False) -> Verdict:
    """Return the verdict on a run's files. Blocks on the disk: every group is read unless `quick`."""
    require_own_records(layout)
    if not recorded(layout):
        return Verdict(recorded=False)
    return books.verify(layout.journal, layout.dead, lambda: witness(layout), quick=quick)


def recorded(layout: RunLayout) -> bool:
    """Return whether the broker of a run keeps a journal."""
    config, _ = read_run(layout.root)
    return config.broker.durability is not Durability.MEMORY


def witness(layout: RunLayout) -> Witness:
    """Return the records of producers and trainer beside the journal; of a trainer without a log, those of the broker.

    They are those of now, and read when they are needed.

    Raises:
        DamagedFileError: A complete line of a log of batches does not decode; one of producers: as it is read.
    """
    acked = _Acked(layout)
    own = read_log(layout.trained)
    if own.batches or own.resumed_at:
        return Witness(acked, _Trained(layout, own))
    # The broker's log may lack the line of a resume, if the broker was killed: it says what was trained, not how often.
    return Witness(acked, _Trained(layout, read_settled(layout), once=True))


class _Acked:
    """Lines of the producers' ack logs, up to the present end of each."""

    def __init__(self, layout: RunLayout) -> None:
        self._sizes = {path: path.stat().st_size for path in sorted(layout.acks.glob("*.jsonl"))}

    def __iter__(self) -> Iterator[AckedGroup]:
        for path, size in self._sizes.items():
            yield from read_lines(path, AckedGroup, size)


class _Trained:
    """How often a log counts each group as trained, in parts that fit into memory.

    Args:
        layout: Of the run.
        log: Its settled batches.
        once: Each counts once.
    """

    def __init__(self, layout: RunLayout, log: TrainerLog, *, once: bool = False) -> None:
        self._layout = layout
        self._log = log
        self._once = once

    def __iter__(self) -> Iterator[Mapping[str, int]]:
        with group_records(self._layout, self._log, kinds={Settled}) as records:
            for part in records:
                trained = part.ids().trained
                yield dict.fromkeys(trained, 1) if self._once else trained


def _json(verdict: Verdict) -> str:
    if not verdict.recorded:
        return '{"recorded": false}'
    fields: dict[str, Any] = {"ok": not verdict.problems, **msgspec.to_builtins(verdict)}
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()


def _lines(verdict: Verdict) -> Iterator[str]:
    if not verdict.recorded:
        yield "not recorded: at durability `memory` the broker keeps no journal"
        return
    held = " + ".join(f"{count} {state}" for state, count in verdict.counts.items() if count)
    yield f"accepted  {verdict.accepted} = {held or 0}"
    for why, count in verdict.reasons.items():
        yield f"          {count} {why}"
    yield f"rewound   {verdict.rewound}"
    if verdict.since is not None:
        yield f"since     {moment(verdict.since)}; groups that ended earlier are counted without their ids"
    yield f"checked   {verdict.groups_checked} groups, {verdict.bytes_checked} bytes, {verdict.logs} logs"
    yield from (f"problem   {problem}" for problem in verdict.problems)
    yield "every group is accounted for" if not verdict.problems else f"{len(verdict.problems)} problems"
