"""`rolloutmq ledger verify`: audit of every accepted group of a run, from its files alone.

Exit codes: 0 every group is accounted for, or the run has no journal (durability `memory`, stated in the output);
1 problems found.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rolloutmq.bus.rundir import read_run
from rolloutmq.schemas.files import AckedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.printable import moment, printable, printable_lines
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.inspect import verify as books
from rolloutmq.services.broker.journal.inspect.verify import Verdict, Witness
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.monitor.report.summary import read_settled, read_trainer_log
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
    """Read the records of producers and trainer beside the journal; of a trainer without a log, those of the broker.

    Raises:
        DamagedFileError: A complete line does not decode.
    """
    acked = [line for path in sorted(layout.acks.glob("*.jsonl")) for line in read_lines(path, AckedGroup)]
    own = read_trainer_log(read_lines(layout.trained, SettledBatch))
    if own.batches or own.resumed_at:
        return Witness(acked, own.trained())
    # The broker's log may lack the line of a resume, if the broker was killed: it says what was trained, not how often.
    return Witness(acked, dict.fromkeys(read_settled(layout).trained(), 1))


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
