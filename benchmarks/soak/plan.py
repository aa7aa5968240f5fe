"""The plan of a soak: its acts, and for each act the cast and the times of all faults. Pure; drawn from one seed.

An act is one run directory with one durability. The acts go through the durabilities and the numbers of ranks; sizes,
environments, checkpoints and faults are drawn. A fault happens when that many groups of the act have been settled, so a
plan does not depend on the speed of the machine. The moment within a message does: a seed repeats the plan, not the
interleaving.
"""

import random
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from benchmarks.soak.bodies import LARGEST, LARGEST_BYTES
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.envelope import Split

ACT_GROUPS: Final = 50_000
"""Most groups of an act; the journal and the books of one act stay small."""
DURABILITIES: Final = ("disk", "os", "memory")
RANKS: Final = (1, 2, 4)
SILENCE_S: Final = 2.0
"""Silence after which the broker treats a client as dead."""
LEASE_S: Final = 8.0
HIGH_BYTES: Final = 32 << 20
HIGH_GROUPS: Final = 4000
RETAIN_BYTES: Final = 16 << 20
RAM_BYTES: Final = 16 << 20
STOPS: Final = ((0.7, 0.05, 0.4), (0.9, 0.4, 1.5), (1.0, 1.1 * SILENCE_S, 1.5 * SILENCE_S))
"""Parts of all stops, cumulative, with the least and the longest seconds; the last part is beyond the silence."""
LONGEST_DOWN_S: Final = 0.5
"""Longest time before a killed process is started again."""
FEW_DELIVERIES: Final = 3
MANY_DELIVERIES: Final = 1_000_000


class Kind(StrEnum):
    """Kind of a fault."""

    KILL = "kill"
    """SIGKILL, and another life; at durability `memory` the broker is ended in order instead."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT later."""
    DRAIN = "drain"
    """The broker is asked to drain a producer, which then leaves in order."""
    LEAVE = "leave"
    """A producer leaves at once and saves its unacked groups, or a rank gives its batch back unsettled."""


class Fault(msgspec.Struct, frozen=True, order=True):
    """One fault.

    Attributes:
        at: Groups of the act settled before it.
        victim: `broker`, a producer, a trainer with all its ranks, or one rank: `t0/1`.
        lasts_s: Seconds until the victim goes on, or is started again.
    """

    at: int
    kind: Kind
    victim: str
    lasts_s: float


class ProducerPlan(msgspec.Struct, frozen=True):
    """A producer. With `frames` it cannot create shared memory."""

    name: str
    env: str
    split: Split
    frames: bool


class TrainerPlan(msgspec.Struct, frozen=True):
    """A trainer. One with `commits` writes checkpoints and resumes from them; another goes on unchanged."""

    name: str
    split: Split
    ranks: int
    sequences: int
    tokens: int
    commits: bool
    ahead: bool
    window: int = 0
    """Most leases of a rank that settles mixes of groups; 0 for steps."""

    @property
    def members(self) -> list[str]:
        """Names of its ranks."""
        return [f"{self.name}/{rank}" for rank in range(self.ranks)]


class EnvironmentPlan(msgspec.Struct, frozen=True):
    """An environment. Where stale groups are dropped, they may expire."""

    name: str
    split: Split
    pacing: bool
    stale: Literal["drop", "pass"]
    max_staleness: int


class Act(msgspec.Struct, frozen=True):
    """One act."""

    number: int
    groups: int
    durability: str
    transport: Literal["ipc", "tcp"]
    max_deliveries: int
    environments: tuple[EnvironmentPlan, ...]
    producers: tuple[ProducerPlan, ...]
    trainers: tuple[TrainerPlan, ...]
    faults: tuple[Fault, ...]

    @property
    def kills(self) -> int:
        """Number of kills, orderly ends of a broker at durability `memory` included."""
        return sum(fault.kind is Kind.KILL for fault in self.faults)

    @property
    def may_expire(self) -> bool:
        """Whether the product may report groups as expired."""
        return any(one.stale == "drop" for one in self.environments)

    @property
    def may_die(self) -> bool:
        """Whether the product may give groups up after several lost leases."""
        return self.max_deliveries < MANY_DELIVERIES

    def config(self, listen: str) -> RunConfig:
        """Return the configuration of the run; `listen` is the broker's address for TCP, or empty."""
        batch = max(one.sequences for one in self.trainers)
        trainer = {"batch_sequences": batch} if batch else {"batch_tokens": self.trainers[0].tokens}
        broker: dict[str, Any] = {
            "durability": self.durability,
            "listen": listen,
            "insecure": bool(listen),
            "silence_s": SILENCE_S,
            "lease_s": LEASE_S,
            "max_deliveries": self.max_deliveries,
            "high_bytes": HIGH_BYTES,
            "high_groups": HIGH_GROUPS,
            "max_group_bytes": 2 * LARGEST_BYTES,
            "retain_bytes": RETAIN_BYTES,
            "ram_bytes": RAM_BYTES,
            "segment_bytes": 16 << 20,
            "exact_wait_s": 0.2,
        }
        environments = {
            one.name: {
                "entry": "soak:Soak",
                "group_size": LARGEST,
                "split": one.split.name.lower(),
                "pacing": one.pacing,
                "stale": one.stale,
                "max_staleness": one.max_staleness,
            }
            for one in self.environments
        }
        sections = {"broker": broker, "environment": environments, "trainer": trainer}
        return RunConfig.model_validate({**sections, "orchestrator": {"enabled": False}})


def acts(groups: int, kills: int, seed: int) -> Iterator[Act]:
    """Yield the acts of a soak, together with that many groups and kills. There are at least three."""
    number = max(len(DURABILITIES), -(-groups // ACT_GROUPS))
    for which in range(number):
        yield _act(
            which,
            _part(groups, which, number),
            _part(kills, which, number),
            random.Random(f"{seed}/{which}"),
        )


def _part(total: int, which: int, number: int) -> int:
    return total * (which + 1) // number - total * which // number


def _act(number: int, groups: int, kills: int, rng: random.Random) -> Act:
    ranks = RANKS[(number + number // len(RANKS)) % len(RANKS)]
    by_tokens = rng.random() < 0.25
    trainers = [
        TrainerPlan(
            name="t0",
            split=Split.TRAIN,
            ranks=ranks,
            sequences=0 if by_tokens else rng.choice((64, 128, 256)),
            tokens=40_000 if by_tokens else 0,
            commits=rng.random() < 0.6,
            ahead=rng.random() < 0.5,
        ),
        TrainerPlan("e0", Split.EVAL, 1, 64, 0, commits=False, ahead=False),
    ]
    if ranks == 1 and not by_tokens and rng.random() < 0.7:
        trainers[0] = msgspec.structs.replace(trainers[0], window=rng.choice((2, 8, 64)), ahead=False)
    rivals = rng.random() < 0.3
    if rivals:
        trainers.append(TrainerPlan("t1", Split.TRAIN, 1, 64, 0, commits=False, ahead=rng.random() < 0.5))
    environments = (
        EnvironmentPlan("plain", Split.TRAIN, False, "pass", 4),
        # Two trainers have steps of their own: groups sampled for one may be too old for the other.
        EnvironmentPlan("aging", Split.TRAIN, rng.random() < 0.5, "pass" if rivals else "drop", 64),
        EnvironmentPlan("exam", Split.EVAL, False, "pass", 4),
    )
    envs = [environments[0], environments[1], environments[0], environments[2]]
    producers = tuple(
        ProducerPlan(f"p{which}", env.name, env.split, frames=which % 2 == 1)
        for which, env in enumerate(envs)
    )
    return Act(
        number=number,
        groups=groups,
        durability=DURABILITIES[number % len(DURABILITIES)],
        transport="tcp" if rng.random() < 0.15 else "ipc",
        max_deliveries=FEW_DELIVERIES if rng.random() < 0.3 else MANY_DELIVERIES,
        environments=environments,
        producers=producers,
        trainers=tuple(trainers),
        faults=tuple(sorted(_faults(groups, kills, producers, trainers, rng))),
    )


def _faults(
    groups: int,
    kills: int,
    producers: tuple[ProducerPlan, ...],
    trainers: list[TrainerPlan],
    rng: random.Random,
) -> Iterator[Fault]:
    members = [name for trainer in trainers for name in trainer.members]
    several = [trainer.name for trainer in trainers]
    makers = [producer.name for producer in producers]

    def victim() -> str:
        return rng.choice((["broker"], makers, members, several)[rng.choices(range(4), (35, 25, 25, 15))[0]])

    for at in _moments(groups, kills, rng):
        yield Fault(at, Kind.KILL, victim(), rng.random() * rng.random() * LONGEST_DOWN_S)
    for at in _moments(groups, -(-kills // 2), rng):
        yield Fault(at, Kind.STOP, victim(), _stop_s(rng))
    for at in _moments(groups, -(-kills // 4), rng):
        kind = rng.choice((Kind.DRAIN, Kind.LEAVE, Kind.LEAVE))
        yield Fault(at, kind, rng.choice(makers if kind is Kind.DRAIN else makers + members), 0.0)


def _moments(groups: int, number: int, rng: random.Random) -> Iterator[int]:
    """Yield moments spread over the act, each somewhere in a part of its own."""
    for which in range(number):
        yield int(groups * (which + rng.random()) / number)


def _stop_s(rng: random.Random) -> float:
    drawn = rng.random()
    return next(rng.uniform(least, most) for below, least, most in STOPS if drawn <= below)
