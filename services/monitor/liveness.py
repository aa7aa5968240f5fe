"""Liveness of a run, read from its directory: a killed launcher cannot report its own death."""

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import shell_word
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.services.process.identity import alive, boot_id

UNENDED: Final = "not yet"
"""Reason in the summary of a run that is still active."""
BY_HAND: Final = "its broker, which was started by hand, has ended"


class RunLiveness(StrEnum):
    """Life-cycle state of a run."""

    LIVING = "living"
    """Its launcher runs; or a broker does, if the processes were started by hand."""
    ENDED = "ended"
    """It ended in order."""
    DEAD = "dead"
    """Its launcher was killed, and its remains are not cleaned up yet."""
    ABSENT = "absent"
    """No process runs, and no file shows that one did."""


@dataclass(frozen=True, slots=True)
class Fate:
    """Liveness of a run, and its remaining processes.

    Attributes:
        launcher: Process id of the killed launcher; 0 if it was not killed.
        left: Number of processes that survived their launcher.
        broker: Whether a broker may be running; False only if there is certainly none.
        elsewhere: The launcher belongs to another boot or another machine; indistinguishable from here.
        reason: Reason of an orderly end.
        by_hand: Nobody recorded the end: the run had a broker and no launcher. Its broker may be started again.
    """

    life: RunLiveness
    launcher: int = 0
    left: int = 0
    broker: bool = False
    elsewhere: bool = False
    reason: str = ""
    by_hand: bool = False

    def say(self, layout: RunLayout) -> str:
        """Return the fate as one line."""
        match self.life:
            case RunLiveness.LIVING:
                if endpoints_of(layout) is None:  # a broker that ends in order removes them
                    return f"the run in {layout.root} starts or ends: its launcher runs, and no broker does; try again"
                return f"the run in {layout.root} is active"
            case RunLiveness.ENDED:
                return f"the run in {layout.root} has ended: {self.reason}"
            case RunLiveness.DEAD:
                left = f"; {self.left} of its processes still run" if self.left else ""
                how = "was of another boot or machine" if self.elsewhere else "was killed"
                return (
                    f"the run in {layout.root} is dead: its launcher, process {self.launcher}, {how}{left}; "
                    f"clean up with `rolloutmq down {shell_word(layout.root)}`"
                )
            case RunLiveness.ABSENT:
                killed = endpoints_of(layout)  # a broker that ends in order removes them
                if killed is None:
                    return f"no broker runs in {layout.root}"
                return (
                    f"no broker runs in {layout.root}: its process {killed.pid} has ended, or is of another machine "
                    f"or container; continue with `rolloutmq broker --run-dir {shell_word(layout.root)}`"
                )

    @property
    def told(self) -> str:
        """Return why the run ended; `UNENDED` if it has not."""
        match self.life:
            case RunLiveness.LIVING:
                return UNENDED
            case RunLiveness.DEAD:
                return "its launcher " + (
                    "was of another boot or machine" if self.elsewhere else "was killed"
                )
            case RunLiveness.ENDED:
                return self.reason
            case RunLiveness.ABSENT:
                return "no broker runs"


def fate_of(layout: RunLayout) -> Fate:
    """Inspect a run directory in any state. A run of another host counts as active: only its broker can tell more."""
    if layout.connection.exists():
        return Fate(RunLiveness.LIVING, broker=endpoints_of(layout) is not None)
    broker = _broker_lives(layout)
    launcher = _read(layout.owner, ProcessIdentity)
    if launcher is not None:
        if alive(launcher):
            return Fate(RunLiveness.LIVING, broker=broker)
        if launcher.boot_id != boot_id():
            return Fate(RunLiveness.DEAD, launcher.pid, 0, endpoints_of(layout) is not None, elsewhere=True)
        return Fate(RunLiveness.DEAD, launcher.pid, sum(map(alive, _recorded(layout))), broker)
    if broker:
        return Fate(RunLiveness.LIVING, broker=True)
    summary = _read(layout.summary, dict[str, Any])
    if summary is not None and (reason := str(summary.get("ended", "see summary.json"))) not in {"", UNENDED}:
        return Fate(RunLiveness.ENDED, reason=reason)
    if layout.log("up").exists():
        return Fate(RunLiveness.ENDED, reason=f"see {layout.log('up')}")
    if endpoints_of(layout) is None and any(trace.exists() for trace in _traces(layout)):
        return Fate(RunLiveness.ENDED, reason=BY_HAND, by_hand=True)
    return Fate(RunLiveness.ABSENT)


def _traces(layout: RunLayout) -> tuple[Path, ...]:
    """Return what only a broker and those that it answered leave. A producer opens its ack log before any answer."""
    acked = (log for log in layout.acks.glob("*.jsonl") if log.stat().st_size)
    return (layout.journal, layout.saved, layout.settled, layout.trained, *acked)


def _broker_lives(layout: RunLayout) -> bool:
    for identity in _read(layout.processes, list[ProcessIdentity]) or []:
        if identity.role is Role.BROKER and alive(identity):
            return True
    endpoints = endpoints_of(layout)
    return endpoints is not None and _runs(endpoints.pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _recorded(layout: RunLayout) -> list[ProcessIdentity]:
    return [
        one
        for file in (layout.processes, layout.workers, layout.engines)
        for one in _read(file, list[ProcessIdentity]) or []
    ]


def _read(path: Any, kind: Any) -> Any:
    """Read a file of the run; None if it is missing or of another version."""
    try:
        return read_json(path, kind)
    except (msgspec.DecodeError, NotADirectoryError):
        return None
