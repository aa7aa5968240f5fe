"""Registrations at the gateway: the trainer and its run, the environments and their claims. Pure.

Environments never sign off: one that is silent for a while counts as gone, and as back at its next request. A
restarted one registers under a new number, so over a month there are many more registrations than environments. The
registry remembers the last `GONE_KEPT` that left; an earlier one gets no further request answered. Numbers are unique
within a run directory, so that late requests of an old environment are never attributed to a new one. `RegistryState`
is the persistent part.
"""

import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from rolloutmq.services.gateway.atropos_replies import EnvStatus
from rolloutmq.services.gateway.atropos_wire import LARGEST, RegisterEnv, Registration

LEAST_WEIGHT: Final = 0.01
"""Minimum weight reported to an environment, so that it does not stall."""
NAME_CHARS: Final = 48
GONE_KEPT: Final = 256
"""Environments that left and are remembered. The state is written at every batch: it is about 300 bytes for each."""
_NUMBER: Final = re.compile(r"[0-9]{1,15}")
_OTHER: Final = re.compile(r"[^A-Za-z0-9._-]+")


Number = Annotated[int, Meta(ge=0, le=LARGEST)]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """A registered environment.

    Attributes:
        env_id: Its number.
        wandb_name: Its assigned name for W&B.
        lane: Its name on the bus.
        min_share: Part of each batch reserved for it, or None.
        forgotten: The data were reset since: it counts again at its next request.
        worker: Worker of the run that is this program, or empty: its lane is that of its `[environment]` section.
    """

    env_id: Number
    desired_name: str
    wandb_name: str
    lane: str
    weight: float
    group_size: Annotated[int, Meta(ge=1, le=LARGEST)]
    max_tokens: Number
    min_share: float | None
    forgotten: bool = False
    worker: str = ""


class RegisterProgram(RegisterEnv, frozen=True, kw_only=True):
    """Registration of a worker that is a program: its claims are those of its section, whatever it asks for."""

    worker: str
    lane: str


class RegistryState(msgspec.Struct, kw_only=True):
    """Persistent state of the gateway."""

    trainer: Registration | None = None
    started: bool = False
    """Whether a trainer has asked for a batch."""
    step: Number = 0
    """Delivered batches, counted from the trainer's starting step."""
    environments: list[Environment] = []
    """Present ones, and the last that left, in the order of their numbers."""
    next_env_id: Number = 0


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
        book.next_env_id = max([book.next_env_id, *(env.env_id + 1 for env in book.environments)])
        self._known = {env.env_id: env for env in book.environments}
        # A worker of the run may have ended meanwhile, and registers anew after each start.
        self._presence = {
            env.env_id: EnvPresence(now, here=not (env.forgotten or env.worker)) for env in book.environments
        }

    def enrol(self, asked: RegisterEnv, now: float) -> Environment:
        """Register an environment under the next number."""
        env_id = self.book.next_env_id
        program = asked if isinstance(asked, RegisterProgram) else None
        if program is not None and (before := self.of_worker(program.worker)) is not None:
            self.leave(before)
        env = Environment(
            env_id=env_id,
            desired_name=asked.desired_name,
            wandb_name=f"{asked.desired_name}_{self._next_of_name(asked.desired_name)}",
            lane=program.lane if program is not None else lane_name(asked.desired_name, env_id),
            weight=asked.weight,
            group_size=max(1, asked.group_size),
            max_tokens=max(0, asked.max_token_length),
            min_share=asked.min_batch_allocation,
            worker=program.worker if program is not None else "",
        )
        self.book.next_env_id += 1
        self._known[env_id] = env
        self._presence[env_id] = EnvPresence(now)
        self._forget_oldest()
        self.book.environments = list(self._known.values())
        return env

    def _next_of_name(self, desired: str) -> int:
        """Return the number that tells an environment from the earlier ones of its name."""
        same = (env for env in self._known.values() if env.desired_name == desired and not env.forgotten)
        numbers = (env.wandb_name.rpartition("_")[2] for env in same)
        return max((int(number) for number in numbers if _NUMBER.fullmatch(number)), default=-1) + 1

    def _forget_oldest(self) -> None:
        """Forget those who left first, beyond the ones that stay remembered."""
        gone = [env_id for env_id, presence in self._presence.items() if not presence.here]
        gone.sort(key=lambda env_id: (self._presence[env_id].heard_at, env_id))
        for env_id in gone[:-GONE_KEPT]:
            del self._known[env_id], self._presence[env_id]

    def find(self, env_id: int) -> Environment | None:
        """Return the environment with that number."""
        return self._known.get(env_id)

    def crowded(self, free: int, used: Container[str]) -> bool:
        """Return whether there is no lane left for one more environment.

        Args:
            free: Lanes that the broker can still open.
            used: Lanes in use at the broker. The present environments without one of these will need one each.
        """
        return free <= sum(env.lane not in used for env in self.here())

    def of_worker(self, worker: str) -> Environment | None:
        """Return the newest registration of a worker."""
        return next((env for env in reversed(self.book.environments) if env.worker == worker), None)

    def hear(self, env: Environment, now: float) -> None:
        """Record a request of an environment."""
        if (presence := self._presence.get(env.env_id)) is not None:
            presence.heard_at, presence.here = now, True

    def saw(self, env: Environment, sequences: int) -> None:
        """Record the size of a group."""
        if (presence := self._presence.get(env.env_id)) is not None:
            presence.largest = max(presence.largest, sequences)

    def leave(self, env: Environment) -> None:
        """Mark an environment as gone until its next request."""
        if (presence := self._presence.get(env.env_id)) is not None:
            presence.here = False

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
        self._known = {
            env_id: msgspec.structs.replace(env, forgotten=True) for env_id, env in self._known.items()
        }
        book.environments = list(self._known.values())
        for presence in self._presence.values():
            presence.here = False

    def group_size(self, env: Environment) -> int:
        """Return its group size: as registered, or that of its largest group."""
        presence = self._presence.get(env.env_id)
        return max(env.group_size, presence.largest if presence is not None else 0)

    def standing(self, env: Environment, queued: Mapping[str, int], step: int, batch: int) -> EnvStatus:
        """Return the reply to `/status-env`, from the queued sequences by lane, the step and the batch size.

        The queue size is in groups of the environment's own size. It includes its own groups, and the groups of others
        beyond their minimum share: they will be trained before its next rollout.
        """
        here = self.here()
        weights = sum(one.max_tokens * max(0.0, one.weight) for one in here)
        part = env.max_tokens * max(0.0, env.weight) / weights if weights > 0.0 else 0.0
        sizes = [self.group_size(one) for one in self.book.environments if queued.get(one.lane)]
        largest, own = max(sizes, default=1), queued.get(env.lane, 0)
        kept = {one.lane: int(batch * _share(one)) for one in here}
        others = sum(
            max(0, math.ceil(sequences / largest) * largest - kept.get(lane, 0))
            for lane, sequences in queued.items()
            if sequences and lane != env.lane
        )
        size = self.group_size(env)
        return EnvStatus(
            current_step=step,
            queue_size=(own + others) // size,
            unallocated_fraction=1.0 - min(_shares(here), 1.0),
            self_queue_size=own // size,
            max_group_size=largest,
            env_weight=max(LEAST_WEIGHT, part),
        )

    def share(self, env: Environment) -> float:
        """Return the minimum share of an environment, scaled down if the total exceeds a batch."""
        return _share(env) / max(1.0, _shares(self.here()))


def lane_name(desired: str, env_id: int) -> str:
    """Return a valid and unique lane name."""
    plain = _OTHER.sub("-", desired).strip("-._")[:NAME_CHARS]
    return f"{plain or 'env'}-{env_id}"


def _share(env: Environment) -> float:
    return min(max(0.0, env.min_share or 0.0), 1.0)


def _shares(environments: Iterable[Environment]) -> float:
    return sum({env.lane: _share(env) for env in environments}.values())
