"""Consumers: who they are, whether they live, and the pulls that wait for a batch."""

from collections.abc import Iterator
from typing import Final

import msgspec

from rolloutmq.schemas.delivery import Pull, RegisterConsumer, Wait
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.services.broker.actions import Route
from rolloutmq.services.broker.groups import Stream

CONSUMERS_LIMIT: Final = 1 << 16
"""Consumers that are remembered; a step has at most as many ranks."""
POLL_S: Final = 10.0
"""So long one that asked and got nothing is taken to want a batch still: it polls rather than to wait."""


class Consumer(msgspec.Struct, eq=False):
    """One registered consumer; `heard_at` is its last sign of life."""

    name: str
    group: str
    rank: int
    world_size: int
    generation: int
    heard_at: float
    progress: int = 0
    trains: bool = False
    """It has pulled what is for training."""


class Waiting(msgspec.Struct, eq=False):
    """A pull that waits, with the reason that holds it now."""

    route: Route
    pull: Pull
    stream: Stream
    deadline: float
    counted_at: float
    wait: Wait = Wait.NO_BATCH


class Consumers:
    """Registered consumers by name, and at most one waiting pull of each."""

    def __init__(self) -> None:
        self._consumers: dict[str, Consumer] = {}
        self._waiting: dict[str, Waiting] = {}
        self._polled: dict[str, float] = {}
        self._resumed: dict[str, tuple[PolicyVersion, set[str]]] = {}

    def find(self, name: str) -> Consumer | None:
        return self._consumers.get(name)

    def heard(self, name: str, now: float) -> Consumer | None:
        """Note a sign of life and return the consumer, if it is known."""
        consumer = self._consumers.get(name)
        if consumer is not None:
            consumer.heard_at = now
        return consumer

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._consumers.values())

    def trainers(self, moment: float) -> int:
        """Return how many that train gave a sign of life since `moment`."""
        return sum(one.trains and one.heard_at > moment for one in self._consumers.values())

    def full(self, name: str) -> bool:
        """Whether there is no place for one more."""
        return name not in self._consumers and len(self._consumers) >= CONSUMERS_LIMIT

    def register(self, consumer: Consumer) -> None:
        """Note a new life of a consumer."""
        self._consumers[consumer.name] = consumer

    def goes_on(self, request: RegisterConsumer) -> bool:
        """Whether a registration is that of a process which is known: it was only the broker that was away."""
        known = self._consumers.get(request.consumer)
        if known is None or not request.generation:
            return False
        told = request.generation, request.group, request.rank, request.world_size
        return told == (known.generation, known.group, known.rank, known.world_size)

    def resumes(self, request: RegisterConsumer, *, holds: bool) -> bool:
        """Whether this registration rewinds, or joins another rank that has done so already.

        The same again changes nothing, unless the rank `holds` a part: then it has died since.
        """
        if request.resume is None:
            return False
        version, joined = self._resumed.get(request.group, (None, set[str]()))
        if version == request.resume and not (holds and request.consumer in joined):
            joined.add(request.consumer)
            return False
        self._resumed[request.group] = (request.resume, {request.consumer})
        return True

    @property
    def resumptions(self) -> dict[str, tuple[PolicyVersion, set[str]]]:
        """The last resume of each consumer group, and the ranks that joined in it, until it moves on."""
        return self._resumed

    def moved_on(self, group: str) -> None:
        """Note that a batch was settled: from now on, any resume of the group is a new one."""
        self._resumed.pop(group, None)

    def wait(self, waiting: Waiting) -> Waiting | None:
        """Let a pull wait; return the one of the same consumer that it takes the place of."""
        former = self._waiting.pop(waiting.pull.consumer, None)
        self._waiting[waiting.pull.consumer] = waiting
        return former

    def waiting(self) -> Iterator[Waiting]:
        """Yield the pulls that wait, the first to come first."""
        return iter(list(self._waiting.values()))

    @property
    def any_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def any_hungry(self) -> bool:
        """Whether one waits for a batch, or asked for one in vain a moment ago."""
        return bool(self._waiting or self._polled)

    def polled(self, name: str, now: float) -> None:
        """Note that a consumer got nothing and does not wait."""
        self._polled[name] = now

    def hungry_since(self, name: str) -> float | None:
        """Return when a consumer that does not wait asked in vain, or None if it has got something since."""
        return self._polled.get(name)

    def content(self, name: str) -> None:
        """Note that a consumer got a batch, or gives back what it has."""
        self._polled.pop(name, None)

    def forget_polls(self, moment: float) -> None:
        """Forget who asked in vain until `moment` and has not asked again."""
        for name in [name for name, at in self._polled.items() if at <= moment]:
            del self._polled[name]

    def stop_waiting(self, consumer: str) -> Waiting | None:
        """Forget the waiting pull of a consumer and return it."""
        return self._waiting.pop(consumer, None)

    def silent_since(self, name: str, moment: float) -> bool:
        """Whether a consumer gave no sign of life since `moment`, or is not known."""
        consumer = self._consumers.get(name)
        return consumer is None or consumer.heard_at <= moment

    def sweep(self, moment: float, holders: set[str]) -> None:
        """Forget consumers that gave no sign since `moment` and neither wait nor hold anything."""
        for name in [n for n, c in self._consumers.items() if c.heard_at <= moment]:
            if name not in holders and name not in self._waiting:
                del self._consumers[name]
                self._polled.pop(name, None)

    def clear(self) -> None:
        """Forget all; the caller has answered those that waited."""
        self._consumers.clear()
        self._waiting.clear()
        self._polled.clear()
        self._resumed.clear()
