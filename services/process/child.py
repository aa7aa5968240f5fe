"""Processes of a run: spawned, adopted, signalled and reaped, each under its own identity.

Each process leads its own session and group, reads no input, and appends its output to a file: a pipe to a killed
supervisor would kill it. A pidfd holds it: it turns readable at the end of the process, whoever the parent is, and all
signals go through it. A group is signalled only while its leader is verified, running or not yet reaped. The marker
finds processes that escaped from the group. Only `end_strays` waits, for a stated time.

PR_SET_PDEATHSIG is not used: it fires when the *thread* that spawned ends, and workers must outlive an orchestrator
that is about to restart.
"""

import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rolloutmq.bus.files import PRIVATE_DIRECTORY, private_file
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec
from rolloutmq.services.process.ending import VARIABLE, note_of
from rolloutmq.services.process.identity import (
    MARKER,
    exists,
    find_marked,
    identify,
    is_marked,
    marker_of,
    settled,
)

logger = logging.getLogger(__name__)

DEFAULTS: Final = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""Default variables of a process: one thread each, and unbuffered output, so that a kill loses none."""
KILL_WAIT_S: Final = 5.0
"""Time the kernel has to end a killed process; one in uninterruptible sleep takes longer."""


@dataclass(frozen=True, slots=True)
class Exit:
    """End of a process. `code` is its exit code, minus the signal, or None for an adopted one that noted none.

    `text` tells how it ended where no exit code can: its host was lost, or none was found for it.
    """

    code: int | None
    text: str = ""

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.code is None:
            return "ended, exit code unknown"
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


class Child(Protocol):
    """One supervised process, of this host or of another one. No method blocks.

    `fileno` is readable once the process has ended, and after each change of its identity until `poll` was called.
    """

    @property
    def identity(self) -> ProcessIdentity: ...
    def fileno(self) -> int: ...
    def poll(self) -> Exit | None: ...
    def send(self, number: signal.Signals) -> None: ...
    def send_group(self, number: signal.Signals) -> None: ...
    def close(self) -> None: ...


class Spawner(Protocol):
    """Where processes run: on this host (`LocalSpawner`), or where a cluster finds room for them."""

    def spawn(self, spec: ProcessSpec, token: str) -> Child: ...
    def adopt(self, identity: ProcessIdentity) -> Child | None: ...
    def end_marked(self, marker: str, /) -> int: ...


class Process:
    """One process that we started or adopted. Owns a pidfd; `close` releases it, not the process."""

    def __init__(self, identity: ProcessIdentity, pidfd: int, child: subprocess.Popen[bytes] | None) -> None:
        self.identity = identity
        self._pidfd = pidfd
        self._child = child

    def fileno(self) -> int:
        """Return the pidfd, readable once the process has ended."""
        return self._pidfd

    def poll(self) -> Exit | None:
        """Reap the process if it ended, together with the rest of its group and its marked strays.

        The group is killed before the leader is reaped: until then its id cannot be reused.
        """
        if not _is_readable(self._pidfd):
            return None
        self.send_group(signal.SIGKILL)
        code = None if self._child is None else self._child.poll()
        end_marked(self.identity.marker)
        return Exit(code)

    def send(self, number: signal.Signals) -> None:
        """Signal only this process; does nothing if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def send_group(self, number: signal.Signals) -> None:
        """Signal the whole group, if its leader is still our process."""
        if exists(self.identity):
            with suppress(ProcessLookupError):
                os.killpg(self.identity.pid, number)

    def close(self) -> None:
        """Stop watching the process. If it still runs it continues, and init reaps it."""
        if self._pidfd < 0:
            return
        os.close(self._pidfd)
        self._pidfd = -1
        if self._child is not None and self._child.returncode is None:
            # Popen warns about a child that it did not see end; this one is released on purpose.
            self._child.returncode = 0


def spawn(spec: ProcessSpec, token: str, output: int | None = None) -> Process:
    """Start a process in its own session, with SIGUSR1 blocked until its handler is installed.

    A foreign program would never unblock it.

    Args:
        spec: What to start.
        token: Run token, first half of its marker.
        output: Descriptor for its output, in place of the log of the spec.

    Raises:
        OSError: It cannot be started.
    """
    marker = marker_of(token, spec.name)
    log = Path(spec.log)
    note = {} if spec.foreign else {VARIABLE: str(note_of(log.absolute()))}
    environment = {**DEFAULTS, **os.environ, **spec.env, MARKER: marker, **note}
    log.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    with ExitStack() as stack:
        written = stack.enter_context(private_file(log, "ab")) if output is None else output
        stack.enter_context(nullcontext() if spec.foreign else _drain_signal_blocked())
        child = subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=spec.cwd or None,
            start_new_session=True,
            pass_fds=spec.fds,
        )
    # The child is reaped only by `poll`, so the pid is certainly its own here.
    try:
        pidfd = os.pidfd_open(child.pid)
    except OSError:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    return Process(identify(spec.name, spec.role, child.pid, marker), pidfd, child)


def adopt(identity: ProcessIdentity) -> Process | None:
    """Take over a running process started by another one; None if it is gone or has another identity.

    All checks follow the opening of the pidfd: from then on the pid cannot be reused.
    """
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    if settled(identity) and is_marked(identity.pid, identity.marker):
        return Process(identity, pidfd, None)
    os.close(pidfd)
    return None


def end_marked(marker: str) -> int:
    """Kill every process with the marker (`<token>/` for a whole run) and return their number.

    The caller and its ancestors are spared.
    """
    ended = 0
    for pid in find_marked(marker):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if is_marked(pid, marker):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                ended += 1
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)
    if ended:
        logger.warning("ended remaining processes marker=%s count=%d", marker, ended)
    return ended


class LocalSpawner:
    """Processes of this host."""

    def spawn(self, spec: ProcessSpec, token: str) -> Process:
        """Start a process; raises OSError if it cannot be started."""
        return spawn(spec, token)

    def adopt(self, identity: ProcessIdentity) -> Process | None:
        """Take over a running process; None if it is gone."""
        return adopt(identity)

    def end_marked(self, marker: str) -> int:
        """Kill every process with the marker; return their number."""
        return end_marked(marker)


def end_strays(identities: Iterable[ProcessIdentity], grace_s: float) -> int:
    """End the processes of an earlier life: SIGTERM, then SIGKILL after `grace_s`. Blocks that long.

    Only processes with a verified identity are signalled.

    Returns:
        Number of processes that were still running.
    """
    identities = list(identities)
    living = [process for identity in identities if (process := adopt(identity)) is not None]
    count = len(living)
    for process in living:
        logger.warning("ending remaining process name=%s pid=%d", process.identity.name, process.identity.pid)
        process.send_group(signal.SIGTERM)
        process.send_group(signal.SIGCONT)
    living = _outlive(living, grace_s)
    for process in living:
        process.send_group(signal.SIGKILL)
    for process in _outlive(living, KILL_WAIT_S):
        logger.error("survived SIGKILL name=%s pid=%d", process.identity.name, process.identity.pid)
        process.close()
    for identity in identities:
        end_marked(identity.marker)
    return count


def _outlive(living: list[Process], within_s: float) -> list[Process]:
    """Return the processes still running after `within_s`; the others are reaped and closed."""
    deadline = time.monotonic() + within_s
    while living and (left := deadline - time.monotonic()) > 0:
        living = _reap(living, left)
    return living


def _reap(living: list[Process], timeout_s: float) -> list[Process]:
    """Wait until one of them ends or time is up; return those still running."""
    poll = select.poll()
    for process in living:
        poll.register(process, select.POLLIN)
    poll.poll(timeout_s * 1000)
    ended = [process for process in living if process.poll() is not None]
    for process in ended:
        process.close()
    return [process for process in living if process not in ended]


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


@contextmanager
def _drain_signal_blocked() -> Iterator[None]:
    """Block SIGUSR1 in this thread, and so in its children; the handlers of a fork do not matter."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
