"""Whether a run lives, as its directory tells: a launcher that was killed cannot say so itself."""

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.services.orchestrator.identity import alive, boot_id
from rolloutmq.services.telemetry.feed import endpoints_of


class Life(StrEnum):
    """Where a run is in its life."""

    LIVING = "living"
    """Its launcher lives; or a broker, where the processes were started by hand."""
    ENDED = "ended"
    """It was put away in order."""
    DEAD = "dead"
    """Its launcher was killed, and nobody has put away what it left."""
    ABSENT = "absent"
    """Nothing runs, and nothing says that anything did."""


@dataclass(frozen=True, slots=True)
class Fate:
    """The life of a run, and what is left of it.

    Attributes:
        launcher: Process of the launcher that was killed; 0 if that is not how it is.
        left: Processes of the run that live though it is dead.
        broker: Whether a broker may live; False only where it is known that none does.
        elsewhere: The launcher is of another boot, or of another machine: which of them cannot be told from here.
        reason: Why it ended, if it did in order.
    """

    life: Life
    launcher: int = 0
    left: int = 0
    broker: bool = False
    elsewhere: bool = False
    reason: str = ""

    def say(self, layout: RunLayout) -> str:
        """Return one line for a person."""
        match self.life:
            case Life.LIVING:
                return f"the run in {layout.root} lives"
            case Life.ENDED:
                return f"the run in {layout.root} has ended: {self.reason}"
            case Life.DEAD:
                left = f"; {self.left} of its processes still live" if self.left else ""
                how = "was of another boot or machine" if self.elsewhere else "was killed"
                return (
                    f"the run in {layout.root} is dead: its launcher, process {self.launcher}, {how}{left}; "
                    f"`rolloutmq down {layout.root}` puts away what is left"
                )
            case Life.ABSENT:
                return f"no broker runs in {layout.root}"


def fate_of(layout: RunLayout) -> Fate:
    """Look at a run directory, which may be in any state."""
    broker = _broker_lives(layout)
    launcher = _read(layout.owner, ProcessIdentity)
    if launcher is not None:
        if alive(launcher):
            return Fate(Life.LIVING, broker=broker)
        if launcher.boot_id != boot_id():
            return Fate(Life.DEAD, launcher.pid, 0, endpoints_of(layout) is not None, elsewhere=True)
        return Fate(Life.DEAD, launcher.pid, sum(map(alive, _recorded(layout))), broker)
    if broker:
        return Fate(Life.LIVING, broker=True)
    summary = _read(layout.summary, dict[str, Any])
    if summary is not None:
        return Fate(Life.ENDED, reason=str(summary.get("ended", "see summary.json")))
    return Fate(Life.ABSENT)


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
    """Read a file of the run; None if it is not there, or of another version."""
    try:
        return read_json(path, kind)
    except (msgspec.DecodeError, NotADirectoryError):
        return None
