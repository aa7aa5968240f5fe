"""What a process of a run is, before it is started, and how it is known again afterwards."""

from enum import StrEnum
from typing import Final

import msgspec

PERMANENT_FAILURE: Final = 3
"""Exit code of a process that can never work, however often it is started: its environment always raises, say."""

MISSED_FELLOW: Final = 5
"""Exit code of a process that has waited as long as it may for another of its crew."""


class Role(StrEnum):
    """What a process does; the launcher ends roles in a fixed order."""

    BROKER = "broker"
    ORCHESTRATOR = "orchestrator"
    TELEMETRY = "telemetry"
    INFERENCE = "inference"
    WORKER = "worker"
    TRAINER = "trainer"
    GATEWAY = "gateway"
    TEACHER = "teacher"
    LAUNCHER = "launcher"


class Restart(StrEnum):
    """What follows when a process ends by itself."""

    NEVER = "never"
    ON_FAILURE = "on_failure"
    """Exit 0 is the end of its work; anything else starts it again."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one process.

    Attributes:
        name: Unique in the run; its log is `logs/<name>.log`.
        argv: Program and arguments.
        env: Variables added to the environment.
        log: Path that standard output and error are appended to: a file, never a pipe that could break.
        hopeless: Exit codes after which starting it again cannot help; 2 is a wrong configuration.
        fds: Descriptors of its parent that it gets under the same numbers.
        crew: What those have in common that work together and end together, if any.
        crew_patience_s: How long one of them waits for another until it ends with MISSED_FELLOW.
    """

    name: str
    role: Role
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    log: str
    restart: Restart = Restart.ON_FAILURE
    hopeless: tuple[int, ...] = (2, PERMANENT_FAILURE)
    fds: tuple[int, ...] = ()
    crew: str = ""
    crew_patience_s: float = 0.0


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process that cannot be mistaken for another: pids are used again, start ticks of one boot are not.

    Attributes:
        pid: Process id; also its process group, since each process of a run leads its own session.
        start_ticks: Field 22 of /proc/<pid>/stat.
        boot_id: /proc/sys/kernel/random/boot_id at the start.
        marker: Value of ROLLOUTMQ_PROCESS in its environment, which its children inherit.
    """

    name: str
    role: Role
    pid: int
    start_ticks: int
    boot_id: str
    marker: str
