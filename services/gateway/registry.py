"""Registrations at the gateway: the trainer and its run, the environments and their claims. Pure.

Environments never sign off: one that is silent for a while counts as gone, and as back at its next request. Numbers are
unique within a run directory, so that late requests of an old environment are never attributed to a new one.
`RegistryState` is the persistent part.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from rolloutmq.services.gateway.atropos_wire import RegisterEnv, Registration

LEAST_WEIGHT: Final = 0.01
"""Minimum weight reported to an environment, so that it does not stall."""
NAME_CHARS: Final = 48
_OTHER: Final = re.compile(r"[^A-Za-z0-9._-]+")


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """A registered environment.

    Attributes:
        env_id: Its number.
        wandb_name: Its assigned name for W&B.
        lane: Its name on the bus.
        min_share: Part of each batch reserved for it, or None.
        forgotten: The data were reset since: it counts again at its next request.
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


class RegistryState(msgspec.Struct, kw_only=True):
    """Persistent state of the gateway."""

    trainer: Registration | None = None
    started: bool = False
    """Whether a trainer has asked for a batch."""
    step: int = 0
    """Delivered batches, counted from the trainer's starting step."""
    environments: list[Environment] = []


@dataclass(slots=True)
class EnvPresence:
    """Presence of an environment in this life of the gateway; times are monotonic."""

    heard_at: float
    here: bool = True
    largest: int = 0
    """Sequences of its largest group."""


class Registry:
    """Registrations and presence."""

    def __init__(self, book: RegistryState, absent_s: float, now: float) -> None:
        self.book = book
        self._absent_s = absent_s
        self._presence = {env.env_id: EnvPresence(now, here=not env.forgotten) for env in book.environments}

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
        self._presence[env_id] = EnvPresence(now)
        return env

    def find(self, env_id: int) -> Environment | None:
        """Return the environment with that number."""
        known = self.book.environments
        return known[env_id] if 0 <= env_id < len(known) else None

    def hear(self, env: Environment, now: float) -> None:
        """Record a request of an environment."""
        presence = self._presence[env.env_id]
        presence.heard_at, presence.here = now, True

    def saw(self, env: Environment, sequences: int) -> None:
        """Record the size of a group."""
        presence = self._presence[env.env_id]
        presence.largest = max(presence.largest, sequences)

    def leave(self, env: Environment) -> None:
        """Mark an environment as gone until its next request."""
        self._presence[env.env_id].here = False

    def vanished(self, now: float) -> list[Environment]:
        """Return the environments that left since the last call."""
        gone = []
        for env in self.here():
            if now - self._presence[env.env_id].heard_at > self._absent_s:
                self.leave(env)
                gone.append(env)
        return gone

    def here(self) -> list[Environment]:
        """Return the present environments."""
        return [env for env in self.book.environments if self._presence[env.env_id].here]

    def silent_s(self, env: Environment, now: float) -> float:
        """Return the time since the last request of an environment."""
        return now - self._presence[env.env_id].heard_at

    def forget(self) -> None:
        """Forget the run, and all environments until their next request."""
        book = self.book
        book.trainer, book.started, book.step = None, False, 0
        book.environments = [msgspec.structs.replace(env, forgotten=True) for env in book.environments]
        for presence in self._presence.values():
            presence.here = False

    def group_size(self, env: Environment) -> int:
        """Return its group size: as registered, or that of its largest group."""
        return max(env.group_size, self._presence[env.env_id].largest)

    def standing(self, env: Environment, queued: Mapping[str, int], step: int, batch: int) -> dict[str, Any]:
        """Return the reply to `/status-env`, from the queued sequences by lane, the step and the batch size.

        The queue size is in groups of the environment's own size. It includes its own groups, and the groups of others
        beyond their minimum share: they will be trained before its next rollout.
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
        """Return the minimum share of an environment, scaled down if the total exceeds a batch."""
        if env.min_share is None:
            return 0.0
        together = _shares(self.here())
        return min(max(0.0, env.min_share), 1.0) / max(1.0, together)


def lane_name(desired: str, env_id: int) -> str:
    """Return a valid and unique lane name."""
    plain = _OTHER.sub("-", desired).strip("-._")[:NAME_CHARS]
    return f"{plain or 'env'}-{env_id}"


def _shares(environments: Iterable[Environment]) -> float:
    return sum(min(max(0.0, env.min_share), 1.0) for env in environments if env.min_share is not None)
