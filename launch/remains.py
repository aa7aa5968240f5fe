"""`rolloutmq doctor --sweep`: what dead processes left behind, removed; what belongs to anybody alive stays.

Looked at are shared memory of this user, and in run directories the address of the weights, their versions on disk, the
broker's sockets and its address. Each has its own proof that its owner is dead, and none goes without it: shared memory
names its owner (pid, start time, pid namespace) and is locked by all who map it; an address names its segment by a
nonce; versions and sockets belong to locks that a trainer and a broker hold for their lives. A run whose launcher lives
is left alone altogether, and so is the shared memory that its address names: its trainer may be on its way back. That
holds for the runs that are named and for those below `runs/`; of others nothing is known, and there a trainer that is
back finds its segment gone and makes a new one, to which the servers attach anew.
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from rolloutmq.bus import segments
from rolloutmq.bus.endpoint import SOCKETS
from rolloutmq.bus.rundir import load_run
from rolloutmq.launch import rundir
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.inference.vllm import place

logger = logging.getLogger(__name__)


def sweep(run_dirs: Iterable[Path]) -> list[Path]:
    """Remove what the dead left in shared memory and in these run directories; return what was removed."""
    roots = list(run_dirs)
    removed = segments.sweep(spared=set(_named_by_the_living([*roots, *_below_runs()])))
    for root in roots:
        removed += sweep_run(root)
    return removed


def _named_by_the_living(run_dirs: Iterable[Path]) -> Iterator[Path]:
    for layout in map(RunLayout, run_dirs):
        with suppress(msgspec.DecodeError):
            address = segments.read_address(layout.weights)
            if address is not None and rundir.owner(layout) is not None:
                yield Path(address.path)


def sweep_run(root: Path) -> list[Path]:
    """Remove what the dead left in one run directory; return what was removed."""
    layout = RunLayout(root)
    try:
        config, _ = load_run(root)
        with rundir.idle(root):
            before = [path for path in _handles(layout) if path.exists()]
            rundir.clear(config, layout)
    except RolloutMQError as error:
        logger.info("left alone run=%s reason=%s", root, error)
        return []
    return [path for path in before if not path.exists()]


def _handles(layout: RunLayout) -> list[Path]:
    sockets = [layout.sockets / name for name in SOCKETS]
    return [layout.weights, layout.versions, layout.endpoints, *sockets, *place.left(layout)]


def _below_runs() -> list[Path]:
    return sorted(path.parent for path in rundir.RUNS.glob("*/config.json"))


def report(run_dir: Path | None) -> int:
    """Sweep one run directory, or all below `runs/`, and print what was removed; returns the exit code."""
    removed = sweep([run_dir] if run_dir is not None else _below_runs())
    sys.stdout.writelines(f"removed {path}\n" for path in removed)
    if not removed:
        sys.stdout.write("nothing was left behind\n")
    return 0
