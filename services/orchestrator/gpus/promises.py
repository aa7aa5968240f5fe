"""Memory of GPUs that workers were promised: from their start until it shows, and until it is back. Pure.

What a driver calls free is already promised to a worker that still loads, so free memory alone lets two workers start
where one fits. A claim is made before its worker is started, and goes this way:

    loading     its memory is kept: no other claim may count on it
    held        the worker is ready and its memory shows in what is in use, or `loading_s` have passed: it may need less
    settling    its process is really gone; the driver gives memory back late. Over when two samples agree within
                max(`settle_bytes`, `settle_part`) or after `settle_s`

A claim counts against the whole of the GPU until it is over: the claims of one GPU never exceed its memory, whatever
is in use at the moment. A claim without a size is for the whole GPU, alone. What is in use beyond what was before the
first claim, with no claim left, for `ghost_s`, is a ghost: no worker of this run can have it.

In-use memory is not told apart by process (NVML sees no pids of other containers): what shows is credited to those that
are ready, oldest claim first, and only once. A fall takes credit away and never gives any: the error is on the side of
keeping memory for too long.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from rolloutmq.schemas.orchestration import HardwareConfig


class Stage(StrEnum):
    """Where a claim is on its way."""

    LOADING = "loading"
    HELD = "held"
    SETTLING = "settling"


@dataclass(slots=True)
class Claim:
    """GPUs of one worker, and how much memory it was promised on each; 0 is all of it.

    Attributes:
        settles: GPUs whose memory has not settled yet, with what was in use in the last sample since.
        adopted: It was made by an earlier life: its memory may show already.
    """

    worker: str
    uuids: tuple[str, ...]
    vram_bytes: int
    since: float
    stage: Stage = Stage.LOADING
    ready_at: float | None = None
    gone_at: float | None = None
    waiting: bool = False
    """Its worker has ended and will be started again, on the same GPUs."""
    settles: dict[str, int | None] = field(default_factory=dict)
    adopted: bool = False


@dataclass(slots=True)
class _Memory:
    """What one GPU said of its memory."""

    used: int | None = None
    total: int = 0
    shown: int = 0
    """In use, as far as it is credited: what is above has come since and belongs to those that load."""
    empty: int | None = None
    """In use before the first claim."""
    freed_at: float | None = None
    """When the last claim was over."""
    ghost: int = 0

    @property
    def risen(self) -> int:
        """What has come into use and is credited to nobody."""
        return 0 if self.used is None else self.used - self.shown


class Promises:
    """The claims of all workers of a host."""

    def __init__(self, limits: HardwareConfig) -> None:
        self._limits = limits
        self._claims: dict[str, Claim] = {}
        self._memory: dict[str, _Memory] = {}

    def claims(self, uuid: str) -> list[Claim]:
        """Return the claims on a GPU, oldest first."""
        return [claim for claim in self._claims.values() if uuid in claim.uuids]

    def of(self, worker: str) -> Claim | None:
        """Return the claim of a worker."""
        return self._claims.get(worker)

    def workers(self) -> Iterable[str]:
        """Return the workers with a claim."""
        return tuple(self._claims)

    def promised_bytes(self, uuid: str, but: str = "") -> int:
        """Return what is kept on a GPU for workers that load, but for one of them."""
        loading = (claim for claim in self.claims(uuid) if claim.stage is Stage.LOADING)
        return sum(claim.vram_bytes for claim in loading if claim.worker != but)

    def claimed_bytes(self, uuid: str, but: str = "") -> int:
        """Return what all claims on a GPU come to, but for one of them."""
        return sum(claim.vram_bytes for claim in self.claims(uuid) if claim.worker != but)

    def ghost_bytes(self, uuid: str) -> int:
        """Return what is in use on a GPU although no worker of this run has it any more."""
        memory = self._memory.get(uuid)
        return 0 if memory is None else memory.ghost

    def claim(
        self, worker: str, uuids: tuple[str, ...], vram_bytes: int, now: float, *, adopted: bool = False
    ) -> Claim:
        """Promise GPUs to a worker that is about to be started, or that an earlier life started.

        Raises:
            ValueError: It has a claim already.
        """
        if worker in self._claims:
            raise ValueError(f"worker {worker} has GPUs already")
        for uuid in uuids:
            memory = self._memory.setdefault(uuid, _Memory())
            claims = self.claims(uuid)
            if not claims and not memory.ghost and not adopted:
                memory.empty = memory.used
            if memory.used is not None and all(other.stage is not Stage.LOADING for other in claims):
                memory.shown = memory.used
            memory.freed_at = None
        self._claims[worker] = claim = Claim(worker, uuids, vram_bytes, now, adopted=adopted)
        return claim

    def ready(self, worker: str, now: float) -> None:
        """Note that a worker is ready: its memory is expected to show."""
        claim = self._claims[worker]
        if claim.ready_at is None and claim.stage is Stage.LOADING:
            claim.ready_at = now

    def ended(self, worker: str, now: float, *, comes_back: bool) -> None:
        """Note that the process of a worker is gone; it may be started again in its place."""
        claim = self._claims[worker]
        claim.waiting = comes_back
        if claim.stage is not Stage.SETTLING:
            claim.stage = Stage.SETTLING
            claim.gone_at = now
            claim.ready_at = None
            claim.settles = dict.fromkeys(claim.uuids)

    def again(self, worker: str, now: float) -> None:
        """Note that a worker was started again, on the GPUs that it had."""
        claim = self._claims[worker]
        claim.stage, claim.since, claim.waiting = Stage.LOADING, now, False
        claim.ready_at = claim.gone_at = None
        claim.adopted = False
        claim.settles.clear()

    def see(self, uuid: str, used: int, total: int, now: float) -> None:
        """Take what is in use on a GPU."""
        memory = self._memory.setdefault(uuid, _Memory())
        memory.shown = used if memory.used is None else min(memory.shown, used)
        memory.used, memory.total = used, total
        for claim in self.claims(uuid):
            if claim.stage is Stage.LOADING and claim.ready_at is not None and claim.ready_at < now:
                self._show(claim)
            elif claim.stage is Stage.SETTLING and uuid in claim.settles:
                last = claim.settles[uuid]
                claim.settles[uuid] = used
                if last is not None and abs(used - last) <= self.tolerance(total):
                    del claim.settles[uuid]
        self._watch_ghost(uuid, memory, now)

    def settle(self, now: float) -> list[Claim]:
        """End what has lasted too long, and return the claims that are over."""
        over = []
        for claim in list(self._claims.values()):
            if claim.stage is Stage.LOADING and claim.ready_at is not None:
                if now - claim.ready_at >= self._limits.loading_s:
                    claim.stage = Stage.HELD
            elif claim.stage is Stage.SETTLING and claim.gone_at is not None:
                if now - claim.gone_at >= self._limits.settle_s:
                    claim.settles.clear()
                if not claim.settles and not claim.waiting:
                    over.append(claim)
                    self._drop(claim, now)
        return over

    def settled(self, worker: str) -> bool:
        """Say whether the memory that a worker had is back, as far as that can be known."""
        claim = self._claims[worker]
        return claim.stage is Stage.SETTLING and not claim.settles

    def tolerance(self, total: int) -> int:
        """Return by how much two amounts of memory may differ and still be the same."""
        return max(self._limits.settle_bytes, int(self._limits.settle_part * total))

    def _show(self, claim: Claim) -> None:
        """Credit what has come into use to a worker that is ready, once it is enough on each of its GPUs."""
        if claim.adopted or not claim.vram_bytes:
            claim.stage = Stage.HELD
            return
        memories = [self._memory[one] for one in claim.uuids]
        if all(memory.risen >= claim.vram_bytes - self.tolerance(memory.total) for memory in memories):
            claim.stage = Stage.HELD
            for memory in memories:
                memory.shown += min(claim.vram_bytes, memory.risen)

    def _drop(self, claim: Claim, now: float) -> None:
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
