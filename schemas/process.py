"""The processes of a run: their specification before the start, and their identity after it."""

from enum import StrEnum
from typing import Final

import msgspec

PERMANENT_FAILURE: Final = 3
"""Exit code of a process that every restart would fail again, for example because its environment always raises."""

MISSED_FELLOW: Final = 5
"""Exit code of a process that waited `crew_patience_s` in vain for another of its crew."""


def python_command(python: str, module: str, *words: str) -> tuple[str, ...]:
    """Return the command that runs a module of this package.

    With `-P` the working directory is no place of modules: a `json.py` or `types.py` of the user's there would replace
    the module of that name in the process. `PYTHONPATH` counts as before.

    Args:
        python: The interpreter.
        module: Name of the module.
        words: Its arguments.
    """
    return (python, "-P", "-m", module, *words)


class Role(StrEnum):
    """Role of a process; the launcher ends roles in a fixed order."""

    BROKER = "broker"
    ORCHESTRATOR = "orchestrator"
    TELEMETRY = "telemetry"
    INFERENCE = "inference"
    WORKER = "worker"
    TRAINER = "trainer"
    GATEWAY = "gateway"
    TEACHER = "teacher"
    CURRICULUM = "curriculum"
    DASHBOARD = "dashboard"
    RELAY = "relay"
    CLUSTER = "cluster"
    LAUNCHER = "launcher"


class Restart(StrEnum):
    """Reaction to a process that ends by itself."""

    NEVER = "never"
    ON_FAILURE = "on_failure"
    """Exit code 0 ends its work; any other code restarts it."""
    ALWAYS = "always"
    """Every end restarts it, exit code 0 as well."""


class Step(StrEnum):
    """A step of the end of a process, from the mildest to the hardest."""

    DRAIN = "drain"
    USR1 = "SIGUSR1"
    TERM = "SIGTERM"
    KILL = "SIGKILL"


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Specification of one process.

    Attributes:
        name: Unique in the run; its log is `logs/<name>.log`.
        argv: Program and arguments.
        env: Variables added to the environment.
        cwd: Working directory; empty for that of the parent.
        log: File for standard output and error; a file, because a pipe could break.
        hopeless: Exit codes after which a restart cannot help, unless its kind is proven; 2 is a wrong configuration.
        fds: Descriptors that it inherits from its parent under the same numbers.
        crew: Name shared by processes that work and end together, such as ranks; empty if it has none.
        foreign: A program of somebody else's. It gets no SIGUSR1, which would kill it.
        crew_patience_s: Longest wait for another of the crew; then it ends with MISSED_FELLOW.
        kind: Name shared by processes that run the same program and whose readiness is reported to their supervisor. A
            kind is proven once one of them has done work. Empty if the readiness is not reported.
        spare: Others work on without it. Killed (SIGKILL), such as for want of memory, it is restarted without limit.
        observer: It only watches the run. However often it crashes, it is restarted, in the end once a minute.
    """

    name: str
    role: Role
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str = ""
    log: str
    restart: Restart = Restart.ON_FAILURE
    hopeless: tuple[int, ...] = (2, PERMANENT_FAILURE)
    fds: tuple[int, ...] = ()
    crew: str = ""
    crew_patience_s: float = 0.0
    foreign: bool = False
    kind: str = ""
    spare: bool = False
    observer: bool = False


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a process: pids are reused, start ticks of one boot are not.

    Attributes:
        pid: Process id; also its process group, because each process of a run leads its own session.
        start_ticks: Field 22 of /proc/<pid>/stat.
        boot_id: /proc/sys/kernel/random/boot_id at the start.
        marker: Value of ROLLOUTMQ_PROCESS in its environment, which its children inherit.
        life: Name of its life on a cluster, which may begin before a host is found: until then `pid` is 0. Empty for a
            process of this host.
        host: Name of the host of such a life, once it is found.
    """

    name: str
    role: Role
    pid: int
    start_ticks: int
    boot_id: str
    marker: str
    life: str = ""
    host: str = ""
