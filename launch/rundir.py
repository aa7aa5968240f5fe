"""Run directories: ownership by a launcher, and the run that a command means.

The launcher locks `run.lock` while it runs and identifies itself in `run.json`. A directory with an earlier run is
moved aside, never mixed with a new run and never deleted, unless the new run resumes it.

The journal's readers are imported by the functions that need them: each command that names a run imports this module,
and they would take a tenth of the CPU until `top` shows it.
"""

import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.engine_registry import forget_engines
from rolloutmq.bus.files import PRIVATE_DIRECTORY, private_fd, require_private
from rolloutmq.bus.producer.spool_file import require_own_spools
from rolloutmq.bus.rundir import read_json, usable, write_json
from rolloutmq.bus.shm.segment_file import sweep
from rolloutmq.bus.transport.bindings import bindings, claim
from rolloutmq.schemas.errors import MissingError, RolloutMQError, RunDirInUseError
from rolloutmq.schemas.files import EndNotice, RunLayout, ServiceCrash
from rolloutmq.schemas.printable import shell_word
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.services.inference.vllm import socket_dir
from rolloutmq.services.monitor.liveness import RunLiveness, fate_of
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView
from rolloutmq.services.process.child import end_strays
from rolloutmq.services.process.identity import alive, identify
from rolloutmq.trainer.weights import address

logger = logging.getLogger(__name__)

RUNS: Final = Path("runs")
"""Directory that commands search for a run by default."""
END_SIGNAL: Final = signal.SIGUSR1
"""Asks the launcher for an orderly end, any number of times: it never counts as the second signal, which kills."""
REASON_CHARS: Final = 1000
"""Longest reason of a crash: the last line of a log may be longer."""
STRAY_GRACE_S: Final = 5.0
"""Time the processes of a killed launcher have to end."""


@contextmanager
def claimed(root: Path, token: str, *, resume: bool) -> Iterator[RunLayout]:
    """Own a run directory within the block, and end the processes of a killed launcher first.

    Args:
        root: The directory; created if missing.
        token: Run token, a marker in every process of the run.
        resume: Keep the run in the directory, instead of moving it aside.

    Raises:
        RunDirInUseError: A running launcher owns it.
        NotPrivateError: It belongs to another user, or others may write in it.
        UnusablePathError: It cannot be read or written.
        RecordVersionError: Another version wrote the run to resume; nothing of it was touched.
    """
    with ExitStack() as stack:
        with usable(root):
            layout = _claim(root, token, stack, resume=resume)
        yield layout


def _claim(root: Path, token: str, stack: ExitStack, *, resume: bool) -> RunLayout:
    found = RunLayout(root)
    if root.exists():
        require_private(root)
    if resume:
        from rolloutmq.services.broker.journal.read.versions import require_own_records

        # Before the lock, so that nothing at all is written beside the files of another version.
        require_own_records(found)
        require_own_spools(found.spools)
    root.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    lock = stack.enter_context(_locked(root))
    layout = RunLayout(root.resolve())
    end_strays(recorded(layout), STRAY_GRACE_S)
    if resume:
        _forget_servers(layout)
    trim_journal(layout)
    if not resume and _has_run(layout):
        _move_aside(layout)
        lock.close()
        layout.root.mkdir(mode=PRIVATE_DIRECTORY)
        stack.enter_context(_locked(layout.root))
    layout.logs.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    layout.ending.unlink(missing_ok=True)
    layout.crashes.unlink(missing_ok=True)
    write_json(layout.owner, identify("up", Role.LAUNCHER, os.getpid(), token))
    stack.callback(layout.owner.unlink, missing_ok=True)
    return layout


def _forget_servers(layout: RunLayout) -> None:
    """Remove the addresses of an earlier life's servers: workers wait for those of this life before they roll out."""
    forget_engines(layout)
    layout.teacher.unlink(missing_ok=True)


def require_run(root: Path) -> None:
    """Require a run to resume in a directory.

    Raises:
        MissingError: There is none.
    """
    if not _has_run(RunLayout(root)):
        remedy = "name the directory of a run (run.dir or --run-dir), or start a new run without --resume"
        raise MissingError(f"run directory {root}", remedy, "has no run to resume")


def _has_run(layout: RunLayout) -> bool:
    return any(path.exists() for path in (layout.config, layout.journal, layout.saved))


@contextmanager
def idle(root: Path) -> Iterator[None]:
    """Keep launchers out of a run directory within the block.

    Raises:
        RunDirInUseError: A running launcher owns it.
        NotPrivateError: It belongs to another user, or others may write in it.
    """
    with ExitStack() as stack:
        with usable(root):
            require_private(root)
            stack.enter_context(_locked(root))
        yield


def trim_journal(layout: RunLayout) -> None:
    """Free the disk space a killed broker had reserved for its journal; skip it while a broker runs."""
    if not layout.journal.is_dir():
        return
    from rolloutmq.services.broker.journal.disk import Disk
    from rolloutmq.services.broker.journal.read.trim import trim
    from rolloutmq.services.broker.journal.read.versions import require_version_of

    with suppress(RolloutMQError):
        try:
            require_version_of(layout.journal, Disk())  # before the claim writes its lock
            with claim(layout):
                trim(layout.journal)
        except OSError as error:
            logger.warning("journal not trimmed directory=%s error=%s", layout.journal, error)


def clear(layout: RunLayout) -> None:
    """Remove the leftovers of killed processes: shared memory, weight versions on disk, sockets, addresses.

    All processes of the run must have ended.
    """
    layout.ending.unlink(missing_ok=True)
    layout.crashes.unlink(missing_ok=True)
    sweep(layout.weights)
    address.sweep(layout.weights)
    socket_dir.clear(layout)
    with suppress(RolloutMQError), claim(layout), bindings(layout):
        layout.endpoints.unlink(missing_ok=True)


class CrashNotes:
    """The crashes of the launcher's services, in a file for the views: they know only processes that live.

    Args:
        layout: The run directory.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._path = layout.crashes
        self._known: dict[str, ServiceCrash] = {}

    def take(self, view: ProcessView, wall: float) -> None:
        """Take a changed view of a service at this wall clock. On a full disk nothing is told, and the run goes on."""
        if view.crashes and view.phase is Phase.WAITING:
            self._known[view.name] = ServiceCrash(view.name, view.crashes, wall, view.reason[:REASON_CHARS])
        elif view.crashes or self._known.pop(view.name, None) is None:
            return
        with suppress(OSError):
            write_json(self._path, [*self._known.values()])


def end_waits(layout: RunLayout) -> str:
    """Return what the end of a run waits for, as its launcher says; empty if it says nothing."""
    with suppress(msgspec.DecodeError, OSError):
        found = read_json(layout.ending, EndNotice)
        return found.text if found is not None else ""
    return ""


def recorded(layout: RunLayout) -> list[ProcessIdentity]:
    """Return the identities of all processes of a run, running or not."""
    known: list[ProcessIdentity] = []
    for file in (layout.processes, layout.workers, layout.engines):
        known += read_json(file, list[ProcessIdentity]) or []
    return known


def owner(layout: RunLayout) -> ProcessIdentity | None:
    """Return the launcher of a run if it is running."""
    found = read_json(layout.owner, ProcessIdentity)
    return found if found is not None and alive(found) else None


def in_use(root: Path, launcher: ProcessIdentity) -> RunDirInUseError:
    """Return the error that names the owner of a run directory and its start time."""
    since = RunLayout(root).owner.stat().st_mtime
    return RunDirInUseError(str(root), "rolloutmq up", launcher.pid, since)


def find_run(given: Path | None, *, living: bool = True) -> Path:
    """Return the run directory that a command means.

    Args:
        given: The named directory, or None for the only active run under `runs/`.
        living: Without a name, accept only a run with a running launcher, or with a running broker that was started
            by hand; else take the newest run, or the only dead one whose broker still answers.

    Raises:
        MissingError: There is no such run, or several are active.
        UnusablePathError: The named directory cannot be read.
    """
    if given is not None:
        with usable(given):
            found = RunLayout(given).config.exists()
        if not found:
            raise MissingError(f"{given}", "start one with `rolloutmq up CONFIG`", "has no run")
        return given
    layouts = [RunLayout(path.parent) for path in RUNS.glob("*/config.json")]
    alive_ones = [layout for layout in layouts if fate_of(layout).life is RunLiveness.LIVING]
    if len(alive_ones) > 1:
        names = ", ".join(sorted(str(layout.root) for layout in alive_ones))
        raise MissingError(f"{RUNS}/", f"name one of {names}", "has several active runs")
    if alive_ones:
        return alive_ones[0].root
    if layouts and not living:
        serving = [one for one in layouts if (fate := fate_of(one)).life is RunLiveness.DEAD and fate.broker]
        return (
            serving[0].root
            if len(serving) == 1
            else max(layouts, key=lambda layout: layout.config.stat().st_mtime).root
        )
    dead = [layout for layout in layouts if layout.owner.exists()]
    hint = "start one with `rolloutmq up CONFIG`"
    if dead:
        root = dead[0].root
        hint = f"{root} is dead, its launcher was killed: clean up with `rolloutmq down {shell_word(root)}`"
    elif layouts:
        latest = max(layouts, key=lambda layout: layout.config.stat().st_mtime).root
        hint += f", or name a run directory (latest: {latest})"
    raise MissingError(f"{RUNS}/", hint, "has no active run")


def require_active(run_dir: Path, *, nothing: str = "there is nothing to change") -> Path:
    """Return a run directory whose broker may be asked, to change the run.

    Args:
        run_dir: The directory.
        nothing: What follows from the end of the run for the caller, for people.

    Raises:
        MissingError: The run has ended, or is dead and its broker with it.
    """
    layout = RunLayout(run_dir)
    fate = fate_of(layout)
    if fate.life is RunLiveness.ENDED:
        again = (
            f"rolloutmq broker --run-dir {shell_word(run_dir)}"
            if fate.by_hand
            else "rolloutmq up CONFIG --resume"
        )
        raise MissingError(f"{run_dir}", f"`{again}` continues it", f"has ended ({fate.told}), so {nothing}")
    if fate.life is RunLiveness.DEAD and not fate.broker:
        remedy = f"clean up with `rolloutmq down {shell_word(run_dir)}`"
        raise MissingError(f"{run_dir}", remedy, f"is dead ({fate.told}), so {nothing}")
    return run_dir


@contextmanager
def _locked(root: Path) -> Iterator[ExitStack]:
    """Lock `run.lock` within the block, or until the yielded stack is closed."""
    with ExitStack() as stack:
        lock = private_fd(root / "run.lock", os.O_RDWR | os.O_CREAT)
        stack.callback(os.close, lock)
        free = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        found = None
        with suppress(msgspec.DecodeError):  # damaged: the lock alone decides
            found = owner(RunLayout(root))
        if found is not None:  # without the lock: somebody deleted the file that it locked
            raise in_use(root, found)
        if not free:
            raise RunDirInUseError(str(root), "another process")
        yield stack


def _move_aside(layout: RunLayout) -> Path:
    """Rename the directory after the time its run was configured, or last changed; return the new path."""
    dated = layout.config if layout.config.exists() else layout.root
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(dated.stat().st_mtime))
    aside = layout.root.with_name(f"{layout.root.name}.{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = layout.root.with_name(f"{layout.root.name}.{stamp}-{number}")
    layout.root.rename(aside)
    return aside
