"""A trainer of a soak that holds a window: it pulls groups as they come, and settles random mixes of them.

In its book each settled group is a lease of its own, since groups of several leases are settled together.
"""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from benchmarks.soak import players
from benchmarks.soak.board import Board
from benchmarks.soak.bodies import is_whole
from benchmarks.soak.books import Asked, Began, Book, Got, Told
from benchmarks.soak.players import RankSpec
from benchmarks.soak.training import ABANDONED, CHECKPOINTS, FILTERED, REJECTED, THINK_S, WAIT_S, save
from rolloutmq import GroupConsumer, HeldGroup
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected, Wait

GROUPS: Final = 12
"""Most groups of a lease."""
MIX: Final = 24
"""Most groups of a settlement."""
NUMBERS: Final = 1024
"""Numbers of groups within one lease."""


async def mix(spec: RankSpec) -> None:
    """Train until the board says to leave; what is given back is followed by another registration."""
    book = Book(spec.books / f"{spec.plan.name}.{spec.rank}.{spec.life}")
    with Board(spec.board) as board:
        mixer = Mixer(spec, board, book)
        players.on_signal(signal.SIGUSR1, mixer.abandon)
        while not board.leave:
            async with mixer.registered() as consumer:
                await mixer.train(consumer)
    book.close()


class Mixer:
    """A rank with a window, over its registrations."""

    def __init__(self, spec: RankSpec, board: Board, book: Book) -> None:
        self._spec = spec
        self._board = board
        self._book = book
        self._resume = spec.resume
        self._abandons = False
        self._random = random.Random(f"{spec.plan.name}/{spec.rank}/{spec.life}")

    def abandon(self) -> None:
        """Give what is held back."""
        self._abandons = True

    @asynccontextmanager
    async def registered(self) -> AsyncIterator[GroupConsumer]:
        """Register; go back to the checkpoint the first time, if there is one."""
        spec, plan = self._spec, self._spec.plan
        resume = PolicyVersion(*self._resume) if self._resume else None
        async with GroupConsumer.open(
            spec.where,
            batch_sequences=plan.sequences,
            window=plan.window,
            groups=GROUPS,
            consumer=f"{plan.name}-{spec.rank}",
            group=plan.name,
            split=plan.split,
            resume=resume,
        ) as consumer:
            self._book.note(Began(time.monotonic(), spec.incarnation, resume.step if resume else None))
            self._resume = None
            yield consumer

    async def train(self, consumer: GroupConsumer) -> None:
        """Settle random mixes until it is time to leave, or to register again."""
        held: list[HeldGroup] = []
        while not self._board.leave:
            got = await consumer.get(WAIT_S if not held else 0.0)
            if got is not None:
                held.append(got)
            stuck = got is None and (self._spec.lone or consumer.wait is Wait.UNSETTLED)
            if not held or not (stuck or self._random.random() < 1 / MIX):
                await asyncio.sleep(0)
                continue
            if self._abandons or self._random.random() < ABANDONED:
                self._abandons = False
                return
            self._random.shuffle(held)
            mix, held = held[:MIX], held[MIX:]
            await self._settle(consumer, mix)

    async def _settle(self, consumer: GroupConsumer, mix: list[HeldGroup]) -> None:
        await asyncio.sleep(self._random.random() * self._random.random() * THINK_S)
        lists: dict[str, list[HeldGroup]] = {"trained": [], "filtered": [], "rejected": []}
        for held in mix:
            drawn = self._random.random()
            fate = (
                "rejected" if drawn < REJECTED else "filtered" if drawn < REJECTED + FILTERED else "trained"
            )
            lists[fate].append(held)
        version = PolicyVersion(self._spec.incarnation, consumer.version.step + bool(lists["trained"]))
        numbers = {held.group_id: held.lease * NUMBERS + held.place for held in mix}
        for fate, groups in lists.items():
            for held in groups:
                self._note(held, numbers[held.group_id], version, fate)
        settled = await consumer.settle(
            lists["trained"],
            filtered=lists["filtered"],
            rejected=[Rejected(group_id=held.group_id, reason="drawn") for held in lists["rejected"]],
            version=version,
        )
        done = [held for held in mix if held.group_id not in settled.lost]
        for held in done:
            self._book.note(Told(time.monotonic(), numbers[held.group_id], held.generation, "settled"))
        self._board.settled(self._spec.cell, len(done))
        plan = self._spec.plan
        if plan.commits and self._random.random() < CHECKPOINTS:
            await save(self._spec, self._book, consumer, version)

    def _note(self, held: HeldGroup, number: int, version: PolicyVersion, fate: str) -> None:
        ids, now = (held.group_id,), time.monotonic()
        torn = () if is_whole(held.group) else ids
        incarnation, generation = version.incarnation, held.generation
        self._book.note(
            Got(now, number, generation, incarnation, version.step, 1, ids, torn, rewound=held.rewound)
        )
        lists = {"filtered": (), "rejected": (), fate: ids}
        self._book.note(
            Asked(now, number, generation, filtered=lists["filtered"], rejected=lists["rejected"])
        )
