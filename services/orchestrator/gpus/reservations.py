"""GPU memory reservations: from the start of a worker until its memory shows, and after its end until it is free. Pure.

Memory the driver reports as free may belong to a worker that still loads, so free memory alone would start two workers
where one fits. A reservation precedes the start of its worker, and has these stages:

    loading     its memory is reserved: no other reservation may use it
    held        the worker is ready and its memory shows as used, or `loading_s` have passed: it may need less
    settling    its process has ended; the driver frees memory late. Over when two samples agree within
                max(`settle_bytes`, `settle_part`) or after `settle_s`

A reservation counts against the GPU until it is over: the reservations of one GPU never exceed its memory, whatever is
used at the moment. A reservation without a size takes the whole GPU. Used memory above the level before the first
reservation, without a reservation left, for `ghost_s`, is a ghost: no worker of this run can own it.

Used memory is not attributed to processes (NVML sees no pids of other containers): new memory is credited to the ready
workers, oldest reservation first, and only once. A drop takes credit away and never gives any: the error is on the side
of reserving for too long.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from rolloutmq.schemas.config.orchestrator import HardwareConfig


class ReservationStage(StrEnum):
    """Stage of a reservation."""

    LOADING = "loading"
    HELD = "held"
    SETTLING = "settling"


@dataclass(slots=True)
class Reservation:
    """GPUs of one worker, and its memory on each; 0 for all of it.

    Attributes:
        settles: GPUs with memory not settled yet, with the used memory of the last sample since.
        adopted: Made by an earlier life: its memory may show already.
    """

    worker: str
    uuids: tuple[str, ...]
    vram_bytes: int
    since: float
    stage: ReservationStage = ReservationStage.LOADING
    ready_at: float | None = None
    gone_at: float | None = None
    waiting: bool = False
    """Its worker has ended and will restart on the same GPUs."""
    settles: dict[str, int | None] = field(default_factory=dict)
    adopted: bool = False


@dataclass(slots=True)
class _Memory:
    """Memory of one GPU, as sampled."""

    used: int | None = None
    total: int = 0
    shown: int = 0
    """Used memory credited to workers; anything above is newer and belongs to the loading ones."""
    empty: int | None = None
    """Used memory before the first reservation."""
    freed_at: float | None = None
    """End of the last reservation."""
    ghost: int = 0

    @property
    def risen(self) -> int:
        """Return the used memory credited to nobody yet."""
        return 0 if self.used is None else self.used - self.shown


class Reservations:
    """Reservations of all workers of a host."""

    def __init__(self, limits: HardwareConfig) -> None:
        self._limits = limits
        self._claims: dict[str, Reservation] = {}
        self._memory: dict[str, _Memory] = {}

    def claims(self, uuid: str) -> list[Reservation]:
        """Return the reservations on a GPU, oldest first."""
        return [claim for claim in self._claims.values() if uuid in claim.uuids]

    def of(self, worker: str) -> Reservation | None:
        """Return the reservation of a worker."""
        return self._claims.get(worker)

    def workers(self) -> Iterable[str]:
        """Return the workers with a reservation."""
        return tuple(self._claims)

    def promised_bytes(self, uuid: str, but: str = "") -> int:
        """Return the bytes reserved on a GPU for loading workers, except one if given."""
        loading = (claim for claim in self.claims(uuid) if claim.stage is ReservationStage.LOADING)
        return sum(claim.vram_bytes for claim in loading if claim.worker != but)

    def claimed_bytes(self, uuid: str, but: str = "") -> int:
        """Return the total of all reservations on a GPU, except one if given."""
        return sum(claim.vram_bytes for claim in self.claims(uuid) if claim.worker != but)

    def ghost_bytes(self, uuid: str) -> int:
        """Return the used memory of a GPU without an owner in this run."""
        memory = self._memory.get(uuid)
        return 0 if memory is None else memory.ghost

    def claim(
        self, worker: str, uuids: tuple[str, ...], vram_bytes: int, now: float, *, adopted: bool = False
    ) -> Reservation:
        """Reserve GPUs for a worker about to start, or started by an earlier life.

        Raises:
            ValueError: It has a reservation already.
        """
        if worker in self._claims:
            raise ValueError(f"worker {worker} already has GPUs")
        for uuid in uuids:
            memory = self._memory.setdefault(uuid, _Memory())
            claims = self.claims(uuid)
            if not claims and not memory.ghost and not adopted:
                memory.empty = memory.used
            if memory.used is not None and all(
                other.stage is not ReservationStage.LOADING for other in claims
            ):
                memory.shown = memory.used
            memory.freed_at = None
        self._claims[worker] = claim = Reservation(worker, uuids, vram_bytes, now, adopted=adopted)
        return claim

    def ready(self, worker: str, now: float) -> None:
        """Record that a worker is ready: its memory should show."""
        claim = self._claims[worker]
        if claim.ready_at is None and claim.stage is ReservationStage.LOADING:
            claim.ready_at = now

    def ended(self, worker: str, now: float, *, comes_back: bool) -> None:
        """Record that the process of a worker has ended; it may restart in its place."""
        claim = self._claims[worker]
        claim.waiting = comes_back
        if claim.stage is not ReservationStage.SETTLING:
            claim.stage = ReservationStage.SETTLING
            claim.gone_at = now
            claim.ready_at = None
            claim.settles = dict.fromkeys(claim.uuids)

    def again(self, worker: str, now: float) -> None:
        """Record that a worker was restarted on its GPUs."""
        claim = self._claims[worker]
        claim.stage, claim.since, claim.waiting = ReservationStage.LOADING, now, False
        claim.ready_at = claim.gone_at = None
        claim.adopted = False
        claim.settles.clear()

    def see(self, uuid: str, used: int, total: int, now: float) -> None:
        """Record the used memory of a GPU."""
        memory = self._memory.setdefault(uuid, _Memory())
        memory.shown = used if memory.used is None else min(memory.shown, used)
        memory.used, memory.total = used, total
        for claim in self.claims(uuid):
            if (
                claim.stage is ReservationStage.LOADING
                and claim.ready_at is not None
                and claim.ready_at < now
            ):
                self._show(claim)
            elif claim.stage is ReservationStage.SETTLING and uuid in claim.settles:
                last = claim.settles[uuid]
                claim.settles[uuid] = used
                if last is not None and abs(used - last) <= self.tolerance(total):
                    del claim.settles[uuid]
        self._watch_ghost(uuid, memory, now)

    def settle(self, now: float) -> list[Reservation]:
        """Advance expired stages, and return the reservations that are over."""
        over = []
        for claim in list(self._claims.values()):
            if claim.stage is ReservationStage.LOADING and claim.ready_at is not None:
                if now - claim.ready_at >= self._limits.loading_s:
                    claim.stage = ReservationStage.HELD
            elif claim.stage is ReservationStage.SETTLING and claim.gone_at is not None:
                if now - claim.gone_at >= self._limits.settle_s:
                    claim.settles.clear()
                if not claim.settles and not claim.waiting:
                    over.append(claim)
                    self._drop(claim, now)
        return over

    def settled(self, worker: str) -> bool:
        """Return whether the memory of a worker is free again, as far as known."""
        claim = self._claims[worker]
        return claim.stage is ReservationStage.SETTLING and not claim.settles

    def tolerance(self, total: int) -> int:
        """Return the difference between two amounts of memory that counts as equal."""
        return max(self._limits.settle_bytes, int(self._limits.settle_part * total))

    def _show(self, claim: Reservation) -> None:
        """Credit new memory to a ready worker, once it suffices on each of its GPUs."""
        if claim.adopted or not claim.vram_bytes:
            claim.stage = ReservationStage.HELD
            return
        memories = [self._memory[one] for one in claim.uuids]
        if all(memory.risen >= claim.vram_bytes - self.tolerance(memory.total) for memory in memories):
            claim.stage = ReservationStage.HELD
            for memory in memories:
                memory.shown += min(claim.vram_bytes, memory.risen)

    def _drop(self, claim: Reservation, now: float) -> None:
        del self._claims[claim.worker]
        for uuid in claim.uuids:
            if not self.claims(uuid):
                self._memory[uuid].freed_at = now

    def _watch_ghost(self, uuid: str, memory: _Memory, now: float) -> None:
        if memory.freed_at is None or memory.empty is None or memory.used is None or self.claims(uuid):
            return
        beyond = memory.used - memory.empty
        if beyond <= self.tolerance(memory.total):
            memory.ghost = 0
            memory.freed_at = None
        elif now - memory.freed_at >= self._limits.ghost_s:
            memory.ghost = beyond
