"""Permits and limits of one producer session. Pure: no socket, no clock.

A permit is the right to make one rollout. `start_limit` is the absolute number of rollouts that the session may have
started. A permit ends once: its group is in the spool, or it is abandoned. An unused permit can be put back, as if it
had not been taken. Accepted, abandoned, spooled and open rollouts always add up to `begun`.
"""

from types import TracebackType
from typing import Self

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Ack, Durability, Wait


class Permit:
    """The right to make one rollout, from `Producer.acquire`.

    As a context manager it is abandoned when the block ends, unless its group was sent.
    """

    __slots__ = ("_credit", "is_open", "policy")

    def __init__(self, credit: "Credit") -> None:
        self._credit = credit
        self.policy = credit.policy
        """Policy of the trainer when the rollout started, from the last ack before it."""
        self.is_open = True
        """Neither sent nor abandoned yet."""

    @property
    def step(self) -> int:
        """Optimizer step of the trainer when the rollout started."""
        return self.policy.step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._credit.abandon(self)


class Credit:
    """Permits and limits of one session."""

    def __init__(self) -> None:
        self.start_limit = 0
        self.byte_limit = 0
        self.begun = 0
        """Started rollouts of this session, abandoned ones included."""
        self.in_hand = 0
        """Number of open permits."""
        self.abandoned = 0
        self.paused = False
        """No rollout may start; the broker gives the unused permits to others."""
        self.policy = PolicyVersion()
        """Current policy of the trainer, from the last ack."""
        self.wait = Wait.NONE
        """Reason that limits the credit, from the last ack."""
        self.durability = Durability.MEMORY
        """What an acked group survives, from the last ack."""

    def grant(self, ack: Ack) -> None:
        """Adopt the limits of an ack. They are absolute: the last ack counts, even if it is lower."""
        self.start_limit = ack.start_limit
        self.byte_limit = ack.byte_limit
        self.policy = ack.policy
        self.wait = ack.wait
        self.durability = ack.durability

    @property
    def may_begin(self) -> bool:
        """Whether a permit is available now."""
        return self.begun < self.start_limit and not self.paused

    def may_begin_all(self, rollouts: int) -> bool:
        """Whether so many permits are available now."""
        return self.begun + rollouts <= self.start_limit and not self.paused

    def pause(self, *, paused: bool) -> None:
        """Start no rollouts, or go on once an ack grants some: an earlier limit does not count any more."""
        self.paused = paused
        self.start_limit = min(self.start_limit, self.begun)

    def begin(self) -> Permit | None:
        """Take a permit; None if none is available now."""
        if not self.may_begin:
            return None
        self.begun += 1
        self.in_hand += 1
        return Permit(self)

    def spend(self) -> None:
        """Count a rollout whose group is already in the spool. The caller has checked `may_begin`."""
        self.begun += 1

    def put_back(self, permit: Permit) -> None:
        """Undo `begin` for an unused permit."""
        if self._end(permit):
            self.begun -= 1

    def arrive(self, permit: Permit) -> bool:
        """End a permit whose group is in the spool; False if it had ended before."""
        return self._end(permit)

    def abandon(self, permit: Permit) -> bool:
        """End the permit of a failed rollout; False if it had ended before."""
        ended = self._end(permit)
        self.abandoned += ended
        return ended

    def _end(self, permit: Permit) -> bool:
        was_open, permit.is_open = permit.is_open, False
        self.in_hand -= was_open
        return was_open

    def restart(self, spooled: int) -> None:
        """Begin a new session that takes over the open permits and the `spooled` groups."""
        self.begun = self.in_hand + spooled
        self.abandoned = 0

    def restore(self, produced: int, abandoned: int) -> None:
        """Continue the session of an earlier process, which has no open permits."""
        self.begun = produced + abandoned
        self.abandoned = abandoned
