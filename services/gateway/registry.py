"""Who is registered at the gateway: the trainer and its run, the environments, and what each may claim. Pure.

Environments never say goodbye: one that was not heard of for a while is taken for gone, and for back when it is heard
again. Numbers are never given twice in a run directory, so that what an old environment still sends cannot pass for a
new one's. What must outlive the gateway is in `Book`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from rolloutmq.services.gateway.contract import RegisterEnv, Registration

LEAST_WEIGHT: Final = 0.01
"""An environment is told at least that part of the weights, so that it does not stand still."""
NAME_CHARS: Final = 48
_OTHER: Final = re.compile(r"[^A-Za-z0-9._-]+")


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment as it registered.

    Attributes:
        env_id: Its number.
        wandb_name: What it is told to call itself.
        lane: Its name on the bus.
        min_share: Part of each batch that is kept for it, or None if it asked for none.
        forgotten: The data were reset since: it counts again when it is heard.
    """

    env_id: int
    desired_name: str
    wandb_name: str
    lane: str
    weight: float
    group_size: int
    max_tokens: int
    min_share: float | None
    forgotten: bool = False


class Book(msgspec.Struct, kw_only=True):
    """What outlives the gateway."""

    trainer: Registration | None = None
    started: bool = False
    """A trainer has asked for a batch."""
    step: int = 0
    """Batches that were handed out, from the step on at which the trainer began."""
    environments: list[Environment] = []


@dataclass(slots=True)
class Presence:
    """What is known of an environment in this life of the gateway; times are monotonic."""

    heard_at: float
    here: bool = True
    largest: int = 0
    """Sequences of the largest group that it sent."""


class Registry:
    """Registrations, and who is there."""

    def __init__(self, book: Book, absent_s: float, now: float) -> None:
        self.book = book
        self._absent_s = absent_s
        self._presence = {env.env_id: Presence(now, here=not env.forgotten) for env in book.environments}

    def enrol(self, asked: RegisterEnv, now: float) -> Environment:
        """Register an environment under the next number."""
        known = self.book.environments
        same = sum(env.desired_name == asked.desired_name and not env.forgotten for env in known)
        env_id = len(known)
        env = Environment(
            env_id=env_id,
            desired_name=asked.desired_name,
            wandb_name=f"{asked.desired_name}_{same}",
            lane=lane_name(asked.desired_name, env_id),
            weight=asked.weight,
            group_size=max(1, asked.group_size),
            max_tokens=max(0, asked.max_token_length),
            min_share=asked.min_batch_allocation,
        )
        known.append(env)
        self._presence[env_id] = Presence(now)
        return env

    def find(self, env_id: int) -> Environment | None:
        """Return the environment of that number."""
        known = self.book.environments
        return known[env_id] if 0 <= env_id < len(known) else None

    def hear(self, env: Environment, now: float) -> None:
        """Note that an environment lives."""
        presence = self._presence[env.env_id]
        presence.heard_at, presence.here = now, True

    def saw(self, env: Environment, sequences: int) -> None:
        """Note the size of a group."""
        presence = self._presence[env.env_id]
        presence.largest = max(presence.largest, sequences)

    def leave(self, env: Environment) -> None:
        """Note that an environment is gone, until it is heard again."""
        self._presence[env.env_id].here = False

    def vanished(self, now: float) -> list[Environment]:
        """Return those that are gone since the last call."""
        gone = []
        for env in self.here():
            if now - self._presence[env.env_id].heard_at > self._absent_s:
                self.leave(env)
                gone.append(env)
        return gone

    def here(self) -> list[Environment]:
        """Return the environments that are there."""
        return [env for env in self.book.environments if self._presence[env.env_id].here]

    def silent_s(self, env: Environment, now: float) -> float:
        """Return for how long nothing was heard of an environment."""
        return now - self._presence[env.env_id].heard_at

    def forget(self) -> None:
        """Forget the run and count no environment any more before it is heard again."""
        book = self.book
        book.trainer, book.started, book.step = None, False, 0
        book.environments = [msgspec.structs.replace(env, forgotten=True) for env in book.environments]
        for presence in self._presence.values():
            presence.here = False

    def group_size(self, env: Environment) -> int:
        """Return the size of its groups: as registered, or that of the largest it sent."""
        return max(env.group_size, self._presence[env.env_id].largest)

    def standing(self, env: Environment, queued: Mapping[str, int], step: int, batch: int) -> dict[str, Any]:
        """Return what `/status-env` tells, given the sequences that wait, by lane, the step and the size of a batch.

        The size of the queue is in groups of the environment's own size: its own, and what others have beyond their
        minimum share, for that much will be trained before what it would begin now.
        """
        here = self.here()
        weights = sum(one.max_tokens * max(0.0, one.weight) for one in here)
        part = env.max_tokens * max(0.0, env.weight) / weights if weights > 0.0 else 0.0
        sizes = [self.group_size(one) for one in self.book.environments if queued.get(one.lane)]
        largest, own = max(sizes, default=1), queued.get(env.lane, 0)
        kept = {one.lane: int(batch * (one.min_share or 0.0)) for one in here}
        others = sum(
            max(0, math.ceil(sequences / largest) * largest - kept.get(lane, 0))
            for lane, sequences in queued.items()
            if sequences and lane != env.lane
        )
        size = self.group_size(env)
        return {
            "current_step": step,
            "queue_size": (own + others) // size,
            "unallocated_fraction": 1.0 - min(_shares(here), 1.0),
            "self_queue_size": own // size,
            "max_group_size": largest,
            "env_weight": max(LEAST_WEIGHT, part),
        }

    def share(self, env: Environment) -> float:
        """Return the minimum share of an environment; where all together ask for more than there is, a part of it."""
        if env.min_share is None:
            return 0.0
        together = _shares(self.here())
        return min(max(0.0, env.min_share), 1.0) / max(1.0, together)


def lane_name(desired: str, env_id: int) -> str:
    """Return a name that the bus allows and that no other environment has."""
    plain = _OTHER.sub("-", desired).strip("-._")[:NAME_CHARS]
    return f"{plain or 'env'}-{env_id}"


def _shares(environments: Iterable[Environment]) -> float:
    return sum(min(max(0.0, env.min_share), 1.0) for env in environments if env.min_share is not None)
