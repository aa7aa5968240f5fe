"""`rolloutmq doctor --sweep`: remove the leftovers of dead processes, and nothing of a running one.

The sweep covers the shared memory of this user and, in run directories, the address of the weights, their versions on
disk, the broker's sockets and its address. Each is removed only with proof that its owner is dead:

* shared memory names its owner (pid, start time, pid namespace), and every process that maps it holds a lock;
* the address of the weights names its segment by a nonce;
* versions and sockets belong to locks that trainer and broker hold while they run.

A run with a running launcher is skipped, together with the shared memory its address names: its trainer may be
restarting. This protects the named runs and those under `runs/`. The trainer of any other run finds its segment gone
after a restart, creates a new one, and the inference servers attach again.
"""

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from rolloutmq.bus.rundir import load_run
from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.transport.bindings import SOCKETS
from rolloutmq.launch import rundir
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.inference.vllm import socket_dir

logger = logging.getLogger(__name__)


def sweep(run_dirs: Iterable[Path]) -> list[Path]:
    """Remove leftovers from shared memory and from these run directories; return the removed paths."""
    roots = list(run_dirs)
    removed = segment_file.sweep(spared=set(_named_by_the_living([*roots, *_below_runs()])))
    for root in roots:
        removed += sweep_run(root)
    return removed


def _named_by_the_living(run_dirs: Iterable[Path]) -> Iterator[Path]:
    for layout in map(RunLayout, run_dirs):
        with suppress(msgspec.DecodeError):
            address = segment_file.read_address(layout.weights)
            if address is not None and rundir.owner(layout) is not None:
                yield Path(address.path)


def sweep_run(root: Path) -> list[Path]:
    """Remove the leftovers of one run directory; return the removed paths."""
    layout = RunLayout(root)
    try:
        load_run(root)
        with rundir.idle(root):
            before = [path for path in _handles(layout) if path.exists()]
            rundir.clear(layout)
    except RolloutMQError as error:
        logger.info("run skipped run=%s reason=%s", root, error)
        return []
    return [path for path in before if not path.exists()]


def _handles(layout: RunLayout) -> list[Path]:
    sockets = [layout.sockets / name for name in SOCKETS]
    return [layout.weights, layout.versions, layout.endpoints, *sockets, *socket_dir.left(layout)]


def _below_runs() -> list[Path]:
    return sorted(path.parent for path in rundir.RUNS.glob("*/config.json"))


def report(run_dir: Path | None, *, as_json: bool = False) -> int:
    """Sweep one run directory, or all under `runs/`, and print the removed paths; return the exit code."""
    removed = sweep([run_dir] if run_dir is not None else _below_runs())
    if as_json:
        sys.stdout.write(json.dumps({"removed": list(map(str, removed))}) + "\n")
        return 0
    sys.stdout.writelines(f"removed {path}\n" for path in removed)
    if not removed:
        sys.stdout.write("nothing to remove\n")
    return 0
