"""Who owns a run directory, and which run a command means.

The launcher locks `run.lock` for its life and says in `run.json` who it is. A directory that already holds a run is
moved aside, never mixed with a new run and never deleted, unless the new run goes on with it.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rolloutmq.bus.endpoint import bindings, claim
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.segments import sweep
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import MissingError, RolloutMQError, RunDirInUseError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.services.broker.journal.trimming import trim
from rolloutmq.services.inference.vllm import place
from rolloutmq.services.orchestrator.identity import alive, identify
from rolloutmq.services.orchestrator.processes import end_strays
from rolloutmq.trainer.weights import address

logger = logging.getLogger(__name__)

RUNS: Final = Path("runs")
"""Where a command looks for the run it means, if it is not told."""
STRAY_GRACE_S: Final = 5.0
"""Time that processes of a launcher that was killed get to end."""


@contextmanager
def claimed(root: Path, token: str, *, resume: bool) -> Iterator[RunLayout]:
    """Own a run directory as long as the block lasts.

    Processes that a killed launcher left in it are ended first.

    Args:
        root: The directory; made if it is not there.
        token: Run token, which marks every process of the run.
        resume: Go on with what is there, instead of moving it aside.

    Raises:
        RunDirInUseError: A living launcher owns it.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _lock(root)
    layout = RunLayout(root.resolve())
    try:
        end_strays(recorded(layout), STRAY_GRACE_S)
        give_back(layout)
        if layout.config.exists() and not resume:
            _move_aside(layout)
            os.close(lock)
            layout.root.mkdir(mode=0o700)
            lock = _lock(layout.root)
        layout.logs.mkdir(exist_ok=True)
        write_json(layout.owner, identify("up", Role.LAUNCHER, os.getpid(), token))
        try:
            yield layout
        finally:
            layout.owner.unlink(missing_ok=True)
    finally:
        os.close(lock)


@contextmanager
def idle(root: Path) -> Iterator[None]:
    """Keep a run directory free of launchers as long as the block lasts.

    Raises:
        RunDirInUseError: A living launcher owns it.
    """
    lock = _lock(root)
    try:
        yield
    finally:
        os.close(lock)


def give_back(layout: RunLayout) -> None:
    """Return to the disk what a killed broker had reserved for its journal; not if one lives."""
    if not layout.journal.is_dir():
        return
    with suppress(RolloutMQError), claim(layout):
        try:
            trim(layout.journal)
        except OSError as error:
            logger.warning("journal not trimmed directory=%s error=%s", layout.journal, error)


def clear(config: RunConfig, layout: RunLayout) -> None:
    """Remove what killed processes of a run left: shared memory, versions of the weights on disk, sockets, addresses.

    None of them may live any more.
    """
    sweep(layout.weights)
    address.sweep(layout.weights)
    place.clear(layout)
    with suppress(RolloutMQError), claim(layout), bindings(config.broker, layout):
        layout.endpoints.unlink(missing_ok=True)


def recorded(layout: RunLayout) -> list[ProcessIdentity]:
    """Return the identities of all processes of a run, whether they live or not."""
    known: list[ProcessIdentity] = []
    for file in (layout.processes, layout.workers, layout.engines):
        known += read_json(file, list[ProcessIdentity]) or []
    return known


def owner(layout: RunLayout) -> ProcessIdentity | None:
    """Return the launcher of a run if it lives."""
    found = read_json(layout.owner, ProcessIdentity)
    return found if found is not None and alive(found) else None


def in_use(root: Path, launcher: ProcessIdentity) -> RunDirInUseError:
    """Return the error that says who has a run directory, and since when."""
    since = RunLayout(root).owner.stat().st_mtime
    return RunDirInUseError(str(root), "rolloutmq up", launcher.pid, since)


def find_run(given: Path | None, *, living: bool = True) -> Path:
    """Return the run directory that a command means.

    Args:
        given: The one that was named, or None for the only one below `runs/`.
        living: If none was named, only a run whose launcher lives will do; else the newest.

    Raises:
        MissingError: There is none, or more than one lives.
    """
    if given is not None:
        if not RunLayout(given).config.exists():
            raise MissingError(f"a run in {given}", "start one with `rolloutmq up CONFIG`")
        return given
    layouts = [RunLayout(path.parent) for path in RUNS.glob("*/config.json")]
    alive_ones = [layout for layout in layouts if owner(layout) is not None]
    if len(alive_ones) > 1:
        names = ", ".join(sorted(str(layout.root) for layout in alive_ones))
        raise MissingError("the name of a run", f"several live, say which: {names}")
    if alive_ones:
        return alive_ones[0].root
    if layouts and not living:
        return max(layouts, key=lambda layout: layout.config.stat().st_mtime).root
    dead = [layout for layout in layouts if layout.owner.exists()]
    hint = "start one with `rolloutmq up CONFIG`"
    if dead:
        hint = (
            f"{dead[0].root} is dead, its launcher was killed: `rolloutmq down {dead[0].root}` puts it away"
        )
    raise MissingError(f"a living run below {RUNS}/", hint)


def _lock(root: Path) -> int:
    lock = os.open(root / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        found = owner(RunLayout(root))
        if found is None:
            raise RunDirInUseError(str(root), "another process") from None
        raise in_use(root, found) from None
    return lock


def _move_aside(layout: RunLayout) -> Path:
    """Rename the directory by the time its run was configured; returns the new name."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(layout.config.stat().st_mtime))
    aside = layout.root.with_name(f"{layout.root.name}.{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = layout.root.with_name(f"{layout.root.name}.{stamp}-{number}")
    layout.root.rename(aside)
    return aside
