"""`rolloutmq compare RUN RUN...`: the figures of runs beside each other, and a picture that lays them over each other.

A run that cannot be read is named with its problem, and the others are compared.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rolloutmq.bus.rundir import read_run
from rolloutmq.launch.results import summary_now
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.printable import printable_lines
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.dashboard.record.damage import damaged_lines
from rolloutmq.services.monitor.compare.compared_run import ComparedRun, compared
from rolloutmq.services.monitor.compare.plot import draw
from rolloutmq.services.monitor.compare.table import Failed, comparison_json, lines
from rolloutmq.services.monitor.liveness import fate_of
from rolloutmq.services.monitor.text.exit_codes import FAILED, reader_may_leave


def compare(run_dirs: Sequence[Path], *, as_json: bool, output: Path | None = None) -> int:
    """Print the comparison of runs; return the exit code: FAILED if one of them cannot be read.

    Blocks on the disk: seconds for each long run.

    Args:
        run_dirs: Living or ended runs, or a mixture.
        as_json: Print JSON.
        output: File of the picture (.png), if any.

    Raises:
        MissingError: A picture is wanted, and matplotlib is not installed. The figures are printed nevertheless.
    """
    runs: list[ComparedRun] = []
    failed: list[Failed] = []
    for run_dir in run_dirs:
        try:
            runs.append(_compared(run_dir))
        except (RolloutMQError, OSError) as error:
            failed.append(Failed(str(run_dir), str(error)))
    with reader_may_leave():
        if as_json:
            text = msgspec.json.format(msgspec.json.encode(comparison_json(runs, failed)), indent=2).decode()
        else:
            text = "\n".join(lines(runs, failed))
        sys.stdout.write(printable_lines(text) + "\n")
    if output is not None and runs:
        draw(runs, output)
    return FAILED if failed else 0


def _compared(run_dir: Path) -> ComparedRun:
    """Read a run.

    Raises:
        RolloutMQError: It has no configuration, or another version wrote its records.
        OSError: Its files cannot be read.
    """
    config, layout = read_run(run_dir)
    require_own_records(layout)
    fate = fate_of(layout)
    try:
        summary, problem = summary_now(config, layout), ""
    except RolloutMQError as error:
        summary, problem = None, f"no summary: {error}"
    damaged = damaged_lines(layout.metrics)
    return compared(run_dir, config, fate, summary, problem, damaged_lines=damaged)
