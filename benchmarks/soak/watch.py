"""What is watched while an act plays, and looked for behind it: invariants of `status`, memory, leftovers."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from benchmarks.soak.plan import HIGH_BYTES, HIGH_GROUPS, RAM_BYTES, RETAIN_BYTES
from rolloutmq.bus.shm.segment_file import PREFIX, SHM, SegmentFile, SegmentOwner
from rolloutmq.bus.transport.bindings import SOCKETS
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.control import GetStatus, LedgerCounts, StatusReply
from rolloutmq.services.process.identity import find_marked

STATUS_S: Final = 1.0
"""Longest wait for an answer of a broker that may be stopped just then."""
GROUP_BYTES: Final = 4096
"""Memory of the broker for one group beside its contents; the product's page names it."""
GRANTED_LIMIT: Final = 2 * HIGH_GROUPS
"""Most groups held and granted. A producer that was silent and comes back may start the rollouts it was granted before,
beyond the mark: each of the four at most a quarter of it. Its groups wait until there is room."""
SLACK_BYTES: Final = 96 << 20
MEMORY_BYTES: Final = HIGH_BYTES + RAM_BYTES + 2 * RETAIN_BYTES + SLACK_BYTES
"""What a broker may take above what it had when it became ready, beside `GROUP_BYTES` for each group it keeps."""


def status(endpoints: Endpoints) -> StatusReply | None:
    """Ask a broker for its status; None if it does not answer soon."""
    with BlockingClient(endpoints.serve) as client:
        try:
            reply = client.request(GetStatus(), STATUS_S, STATUS_S)
        except RolloutMQError:
            return None
    return reply if isinstance(reply, StatusReply) else None


def broken(found: StatusReply) -> Iterator[str]:
    """Yield the invariants a status breaks."""
    pressure, counts = found.pressure, found.pressure.ledger
    if counts.accepted != (total := sum(_states(counts))):
        yield f"status: accepted is {counts.accepted}, its states add up to {total}"
    held = pressure.queued_bytes + pressure.leased_bytes + pressure.granted_bytes
    if held > pressure.high_bytes:
        yield f"status: {held} bytes are held and granted, above the mark of {pressure.high_bytes}"
    kept = sum(lane.queued_groups + lane.leased_groups for lane in pressure.lanes)
    granted = sum(lane.granted for lane in pressure.lanes)
    if kept > HIGH_GROUPS:
        yield f"status: {kept} groups are held, above the mark of {HIGH_GROUPS}"
    if kept + granted > GRANTED_LIMIT:
        yield f"status: {kept} groups are held and {granted} granted, above {GRANTED_LIMIT}"
    if found.journal.quarantined:
        yield f"status: {found.journal.quarantined} records are in quarantine"


def _states(counts: LedgerCounts) -> Iterator[int]:
    yield from (counts.queued, counts.leased, counts.trained, counts.committed)
    yield from (counts.filtered, counts.expired, counts.dead, counts.discarded)


class MemoryWatch:
    """The memory of the broker, life by life, without files and memory it shares."""

    def __init__(self) -> None:
        self.peak = 0
        """Most bytes of any life above what it had first."""
        self._pid = 0
        self._first = 0

    def look(self, pid: int, groups: int) -> str:
        """Measure the broker; return what is wrong, or an empty string.

        Args:
            pid: Its process.
            groups: Groups it keeps.
        """
        try:
            info = psutil.Process(pid).memory_info()
        except psutil.Error:
            return ""
        own = info.rss - info.shared
        if pid != self._pid:
            self._pid, self._first = pid, own
        grown = own - self._first
        self.peak = max(self.peak, grown)
        limit = MEMORY_BYTES + GROUP_BYTES * groups
        if grown <= limit:
            return ""
        return f"memory: the broker grew by {grown >> 20} MiB, above {limit >> 20} MiB"


def leftovers(run_dir: Path, token: str, pids: set[int], patience_s: float = 5.0) -> list[str]:
    """Return processes, sockets and shared memory left behind; wait a little for what is about to go.

    Args:
        run_dir: The run directory; its broker has ended in order.
        token: Token in the environment of all processes of the act.
        pids: Every process of the act.
        patience_s: Longest wait.
    """
    until = time.monotonic() + patience_s
    while (found := list(_left(run_dir, token, pids))) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _left(run_dir: Path, token: str, pids: set[int]) -> Iterator[str]:
    for pid in find_marked(f"{token}/"):
        yield f"left behind: process {pid}"
    layout = RunLayout(run_dir)
    for path in (layout.endpoints, *(layout.sockets / name for name in SOCKETS)):
        if path.exists():
            yield f"left behind: {path.name} of the broker"
    born = SegmentOwner.current().start_ticks
    for path in SHM.glob(f"{PREFIX}*"):
        if (  # a process that died before the soak began may have had the same pid
            (owner := _owner(path)) is not None
            and owner.is_here()
            and owner.pid in pids
            and owner.start_ticks >= born
            and not owner.alive()
        ):
            yield f"left behind: shared memory {path}"


def _owner(path: Path) -> SegmentOwner | None:
    try:
        with path.open("rb") as file:
            return SegmentFile(path, "", file.fileno()).owner()
    except OSError:
        return None
