"""Consumers: registrations, liveness, and the pulls that wait for a batch."""

import math
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import Pull, RegisterConsumer, TrainerPause
from rolloutmq.services.broker.actions import Route
from rolloutmq.services.broker.state.groups import Stream

CONSUMERS_LIMIT: Final = 1 << 16
"""Most remembered consumers; a step has at most as many ranks."""
LEADERS_LIMIT: Final = 8
"""Most trainers that are told apart."""
POLL_S: Final = 10.0
"""A consumer that polls, instead of waiting, counts as wanting a batch this long after an empty answer."""
GREEDY_S: Final = 0.25
"""A consumer that polls in vain this soon after a batch has that batch to train on: it asks for all that is there."""
SLEEP_S: Final = 2.0
"""A consumer that polls because it waits looks again this soon after a batch came."""


class Consumer(msgspec.Struct, eq=False):
    """One registered consumer; `heard_at` is its last sign of life."""

    name: str
    group: str
    rank: int
    world_size: int
    generation: int
    heard_at: float
    progress: int = 0
    key: str = ""
    """Attempt that made this registration."""
    trains: bool = False
    """It has pulled from the split `train`."""
    settled_step: int = -1
    """Last training step settled by all ranks with this one, in its present life; -1 before the first."""
    mismatch_since: float | None = None
    """Since when its pulls name a step that the other ranks have settled."""
    served_at: float = -math.inf
    """When it last got a batch."""
    has_left: bool = False
    """It has ended in order."""
    waits_s: dict[TrainerPause, float] = {}
    """Its waits outside of pulls, as it told them last."""
    waits_at: float = 0.0
    """When it told them last, or else when it registered."""

    def growth(
        self, waits_s: Mapping[TrainerPause, float], now: float
    ) -> Iterator[tuple[TrainerPause, float]]:
        """Take its waits, and yield how many seconds are new; no more than have passed since it told them last."""
        for reason, seconds in waits_s.items():
            known = self.waits_s.get(reason, 0.0)
            yield reason, min(seconds - known if seconds >= known else seconds, now - self.waits_at)
        self.waits_s, self.waits_at = dict(waits_s), now


class WaitingPull(msgspec.Struct, eq=False):
    """A pull that waits, with its present reason."""

    route: Route
    pull: Pull
    stream: Stream
    deadline: float
    counted_at: float
    wait: Wait = Wait.NO_BATCH


class VainPoll(msgspec.Struct, eq=False):
    """A poll of a trainer that got no batch and does not wait.

    Nobody knows what the trainer does until it polls again. If it waits, it soon finds a batch that came meanwhile.
    """

    pull: Pull
    at: float
    waits: bool
    """Whether it has no batch to train on."""
    ready_at: float = math.inf
    """When the queue held a batch of this size again."""
    counted_s: float = 0.0
    """Waiting time that was counted so far."""

    def waited_s(self, now: float, *, in_vain: bool = False) -> float:
        """Return the waiting time that was not counted yet; the next poll tells whether all of it was `in_vain`."""
        until = now if in_vain else min(self.ready_at + SLEEP_S, now)
        waited_s = max(0.0, until - self.at - self.counted_s) if self.waits else 0.0
        self.counted_s += waited_s
        return waited_s


class Consumers:
    """Registered consumers by name, and at most one waiting pull of each."""

    def __init__(self) -> None:
        self._consumers: dict[str, Consumer] = {}
        self.pulls: dict[str, WaitingPull] = {}
        """The waiting pull of each consumer, in the order of arrival."""
        self._polled: dict[str, VainPoll] = {}
        self._resumed: dict[str, tuple[PolicyVersion, set[str]]] = {}
        self._settled: dict[str, PolicyVersion] = {}
        self._last: Consumer | None = None
        """The first rank of a trainer that was heard last, of those that are not registered any more."""

    def find(self, name: str) -> Consumer | None:
        return self._consumers.get(name)

    def trains(self, name: str) -> bool:
        """Return whether a consumer is known that has asked for groups to train on."""
        consumer = self._consumers.get(name)
        return consumer is not None and consumer.trains

    def heard(self, name: str, now: float) -> Consumer | None:
        """Note a sign of life and return the consumer, if it is known."""
        consumer = self._consumers.get(name)
        if consumer is not None:
            consumer.heard_at = now
        return consumer

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._consumers.values())

    def trainers(self, moment: float) -> int:
        """Return how many consumers that train have shown life since `moment`."""
        return sum(one.trains and not one.has_left and one.heard_at > moment for one in self)

    def leaders(self, moment: float) -> list[Consumer]:
        """Return the first rank of each trainer that has shown life since `moment`, else of the last that did."""
        known = [one for one in self if one.trains and not one.rank]
        if alive := [one for one in known if not one.has_left and one.heard_at > moment]:
            return sorted(alive, key=lambda one: one.name)[:LEADERS_LIMIT]
        gone = known if self._last is None else [*known, self._last]
        return sorted(gone, key=lambda one: one.heard_at)[-1:]

    def left(self, name: str) -> None:
        """Note that a consumer has ended in order."""
        if (consumer := self._consumers.get(name)) is not None:
            consumer.has_left = True

    def full(self, name: str) -> bool:
        """Return whether the broker can remember no further consumer."""
        return name not in self._consumers and len(self._consumers) >= CONSUMERS_LIMIT

    def register(self, consumer: Consumer) -> None:
        """Add a registration of a consumer."""
        self._remember(consumer.name)
        consumer.waits_at = consumer.heard_at
        self._consumers[consumer.name] = consumer

    def _remember(self, name: str) -> None:
        """Keep what is known of a trainer whose registration ends."""
        gone = self._consumers.get(name)
        if gone is not None and gone.trains and not gone.rank:
            self._last = max(gone, self._last or gone, key=lambda one: one.heard_at)

    def goes_on(self, request: RegisterConsumer) -> bool:
        """Return whether a registration is that of a known process: the broker was away, or the request is repeated."""
        known = self._consumers.get(request.consumer)
        if known is None:
            return False
        place = known.group, known.rank, known.world_size
        if (request.group, request.rank, request.world_size) != place:
            return False
        return request.generation == known.generation or known.key == request.key != ""

    def fenced(self, name: str, generation: int) -> bool:
        """Return whether a later registration took the name over from the one of this generation; 0 never is."""
        known = self._consumers.get(name)
        return known is not None and 0 < generation < known.generation

    def resumes(self, request: RegisterConsumer, *, holds: bool) -> bool:
        """Return whether this registration rewinds the consumer group. A rank that joins a rewind does not.

        A repeated registration changes nothing, unless the rank `holds` a shard: then it has died since.
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
        """The last resume of each consumer group, and the ranks that joined it, until a batch is settled."""
        return self._resumed

    def settled(self, group: str, policy: PolicyVersion) -> None:
        """Note the policy of a trainer after a settled step, or of the checkpoint at which it resumes."""
        self._settled[group] = policy

    @property
    def settled_policies(self) -> dict[str, PolicyVersion]:
        """The policy that each consumer group has settled or resumed at."""
        return self._settled

    def ahead_of(self, pull: Pull, moment: float) -> Consumer | None:
        """Return a rank of the same group that has settled the pulled step, alive since `moment`.

        A rank that was restarted alone may pull a step of the past. A whole group that starts over may do so too: none
        of its ranks has settled a step in its present life.
        """
        me, policy = self._consumers.get(pull.consumer), self._settled.get(pull.group)
        if me is None or policy is None or pull.world_size == 1 or pull.version >= policy:
            return None
        others = (one for one in self if one.group == pull.group and one.heard_at > moment)
        return next((one for one in others if one.settled_step >= max(pull.step, me.settled_step + 1)), None)

    def settled_by(self, group: str) -> PolicyVersion | None:
        """Return the policy a trainer has settled or resumed at; None if it is not known in this life of the broker."""
        return self._settled.get(group)

    def moved_on(self, group: str) -> None:
        """Note that a batch was settled: any later resume of the group is a new one."""
        self._resumed.pop(group, None)

    def wait(self, waiting: WaitingPull) -> WaitingPull | None:
        """Let a pull wait; return the waiting pull of the same consumer it replaces."""
        previous = self.pulls.pop(waiting.pull.consumer, None)
        self.pulls[waiting.pull.consumer] = waiting
        return previous

    def waiting(self) -> Iterator[WaitingPull]:
        """Yield the waiting pulls in the order of arrival; each may end meanwhile."""
        return iter(list(self.pulls.values()))

    @property
    def any_polled(self) -> bool:
        """Whether a trainer polled in vain a moment ago."""
        return bool(self._polled)

    @property
    def any_unserved(self) -> bool:
        """Whether a trainer waits for a batch, or polled in vain a moment ago; a consumer of split `eval` is none."""
        return bool(self._polled) or any(one.pull.split is Split.TRAIN for one in self.pulls.values())

    def polled(self, pull: Pull, now: float) -> None:
        """Note that a trainer got no batch and does not wait."""
        consumer = self._consumers.get(pull.consumer)
        is_greedy = consumer is not None and now - consumer.served_at <= GREEDY_S
        waits = pull.consumer in self._polled or not is_greedy
        self._polled[pull.consumer] = VainPoll(pull, now, waits)

    def vain_poll(self, name: str) -> VainPoll | None:
        """Return the last poll of a consumer, if it got no batch and has got none since."""
        return self._polled.get(name)

    def vain_polls(self) -> Iterator[VainPoll]:
        """Yield the last poll of each trainer that got no batch and has got none since."""
        return iter(self._polled.values())

    def served(self, name: str, now: float) -> None:
        """Note that a consumer got a batch."""
        self.forget_poll(name)
        if (consumer := self._consumers.get(name)) is not None:
            consumer.served_at = now

    def forget_poll(self, name: str) -> None:
        """Note that a consumer wants no batch now."""
        self._polled.pop(name, None)

    def forget_polls(self, moment: float) -> None:
        """Forget consumers that polled in vain until `moment` and not since."""
        for name in [name for name, poll in self._polled.items() if poll.at <= moment]:
            del self._polled[name]

    def stop_waiting(self, consumer: str) -> WaitingPull | None:
        return self.pulls.pop(consumer, None)

    def silent_since(self, name: str, moment: float) -> bool:
        """Return whether a consumer gave no sign of life since `moment`, or is unknown."""
        consumer = self._consumers.get(name)
        return consumer is None or consumer.heard_at <= moment

    def sweep(self, moment: float, holders: set[str]) -> None:
        """Forget consumers that gave no sign since `moment` and neither wait nor hold a lease."""
        for name in [n for n, c in self._consumers.items() if c.heard_at <= moment]:
            if name not in holders and name not in self.pulls:
                self._remember(name)
                del self._consumers[name]
                self._polled.pop(name, None)

    def clear(self) -> None:
        """Forget all consumers; the caller has answered the waiting ones."""
        self._consumers.clear()
        self.pulls.clear()
        self._polled.clear()
        self._resumed.clear()
        self._settled.clear()
        self._last = None
