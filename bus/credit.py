"""How many rollouts a session may begin, and which it has in hand. Pure: no socket, no clock.

A permit is one rollout. It is taken against `start_limit`, an absolute count of the rollouts that the session may
have begun, and ends once: it arrived (its group is spooled), or it was abandoned. A permit that was never used may be
put back, as if it had not been taken. The broker counts as used what it accepted and what was abandoned, so that the
sum of both and of what is in hand or spooled is always `begun`.
"""

from types import TracebackType
from typing import Self

from rolloutmq.schemas.delivery import Ack, Durability, Wait
from rolloutmq.schemas.envelope import PolicyVersion


class Permit:
    """Leave to make one rollout. As a context manager it is abandoned at the end, unless its group was sent."""

    __slots__ = ("_credit", "is_open", "policy")

    def __init__(self, credit: "Credit") -> None:
        self._credit = credit
        self.policy = credit.policy
        """The trainer's policy when the rollout began, as the broker had said."""
        self.is_open = True
        """Neither arrived nor abandoned yet."""

    @property
    def step(self) -> int:
        """Optimizer steps that the trainer had taken when the rollout began, as the broker had said."""
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
        """Rollouts of this session that were begun, abandoned ones included."""
        self.in_hand = 0
        """Permits that are open."""
        self.abandoned = 0
        self.policy = PolicyVersion()
        """The trainer's policy, as the broker last said."""
        self.wait = Wait.NONE
        """What holds credit back, as the broker last said."""
        self.durability = Durability.MEMORY
        """What the acceptance of a group survives, as the broker last said."""

    def grant(self, ack: Ack) -> None:
        """Take over the limits of an ack. They are state: the last one counts, also if it is lower."""
        self.start_limit = ack.start_limit
        self.byte_limit = ack.byte_limit
        self.policy = ack.policy
        self.wait = ack.wait
        self.durability = ack.durability

    @property
    def may_begin(self) -> bool:
        """Whether there is a permit now."""
        return self.begun < self.start_limit

    def begin(self) -> Permit | None:
        """Take a permit, or None if there is none now."""
        if not self.may_begin:
            return None
        self.begun += 1
        self.in_hand += 1
        return Permit(self)

    def spend(self) -> None:
        """Count a rollout whose group is spooled already. The caller has asked `may_begin`."""
        self.begun += 1

    def put_back(self, permit: Permit) -> None:
        """Undo `begin`: nobody saw the permit."""
        if self._end(permit):
            self.begun -= 1

    def arrive(self, permit: Permit) -> bool:
        """End a permit whose group is spooled; False if it had ended before."""
        return self._end(permit)

    def abandon(self, permit: Permit) -> bool:
        """End a permit that came to nothing; False if it had ended before."""
        ended = self._end(permit)
        self.abandoned += ended
        return ended

    def _end(self, permit: Permit) -> bool:
        was_open, permit.is_open = permit.is_open, False
        self.in_hand -= was_open
        return was_open

    def restart(self, spooled: int) -> None:
        """Begin a new session, to which what is in hand and the `spooled` groups go over."""
        self.begun = self.in_hand + spooled
        self.abandoned = 0

    def restore(self, produced: int, abandoned: int) -> None:
        """Go on with the session of an earlier process, which has nothing in hand any more."""
        self.begun = produced + abandoned
        self.abandoned = abandoned
