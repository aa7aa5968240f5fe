"""One rank of a trainer of a soak: it pulls, checks each group, settles, and writes down each of these."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.soak import players
from benchmarks.soak.board import Board
from benchmarks.soak.bodies import is_whole
from benchmarks.soak.books import Asked, Began, Book, Got, Saved, Told
from benchmarks.soak.players import RankSpec
from rolloutmq import Consumer, GroupConsumer
from rolloutmq.bus.consumer.client import LeasedBatch
from rolloutmq.schemas.errors import LeaseLostError, RefusedError
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected

WAIT_S: Final = 0.5
THINK_S: Final = 0.01
"""Longest time a step takes."""
FILTERED: Final = 0.03
REJECTED: Final = 0.002
ABANDONED: Final = 0.002
"""Part of all batches that a rank gives back by leaving its consumer."""
CHECKPOINTS: Final = 0.1
"""Part of all steps with a checkpoint."""


class Checkpoint(msgspec.Struct, frozen=True):
    """The file of a trainer's last checkpoint."""

    incarnation: int
    step: int


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Return the last checkpoint; None before the first."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Checkpoint)
    except FileNotFoundError:
        return None


async def train(spec: RankSpec) -> None:
    """Train until the board says to leave; a batch given back is followed by another registration."""
    book = Book(spec.books / f"{spec.plan.name}.{spec.rank}.{spec.life}")
    with Board(spec.board) as board:
        rank = Rank(spec, board, book)
        players.on_signal(signal.SIGUSR1, rank.abandon)
        while not board.leave:
            async with rank.registered() as consumer:
                await rank.train(consumer)
    book.close()


async def save(
    spec: RankSpec, book: Book, consumer: Consumer | GroupConsumer, version: PolicyVersion
) -> None:
    """Write a checkpoint, then commit it."""
    book.note(Saved(time.monotonic(), version.incarnation, version.step))
    written = spec.checkpoint.with_suffix(".tmp")
    written.write_bytes(msgspec.json.encode(Checkpoint(version.incarnation, version.step)))
    written.replace(spec.checkpoint)
    await consumer.commit(version)


class Rank:
    """One rank, over its registrations."""

    def __init__(self, spec: RankSpec, board: Board, book: Book) -> None:
        self._spec = spec
        self._board = board
        self._book = book
        self._resume = spec.resume
        self._abandons = False
        self._random = random.Random(f"{spec.plan.name}/{spec.rank}/{spec.life}")

    def abandon(self) -> None:
        """Give the next batch back."""
        self._abandons = True

    @asynccontextmanager
    async def registered(self) -> AsyncIterator[Consumer]:
        """Register; go back to the checkpoint the first time, if there is one."""
        spec, plan = self._spec, self._spec.plan
        resume = PolicyVersion(*self._resume) if self._resume else None
        async with Consumer.open(
            spec.where,
            sequences=1 if spec.lone else plan.sequences,
            tokens=0 if spec.lone else plan.tokens,
            consumer=f"{plan.name}-{spec.rank}",
            group=plan.name,
            rank=spec.rank,
            world_size=1 if spec.lone else plan.ranks,
            split=plan.split,
            resume=resume,
            ahead=plan.ahead,
        ) as consumer:
            self._book.note(Began(time.monotonic(), spec.incarnation, resume.step if resume else None))
            self._resume = None
            yield consumer

    async def train(self, consumer: Consumer) -> None:
        """Train until it is time to leave, or to register again."""
        while not self._board.leave:
            try:
                batch = await self._pull(consumer)
            except LeaseLostError:  # a settlement of before was provisional
                continue
            except RefusedError as error:
                if error.code is not ErrorCode.CONFLICT:
                    raise
                return
            if batch is None:
                continue
            if self._abandons or self._random.random() < ABANDONED:
                self._abandons = False
                return
            await self._settle(consumer, batch)

    async def _pull(self, consumer: Consumer) -> LeasedBatch | None:
        # The others may have gone back to a checkpoint of an earlier incarnation without this rank.
        version = msgspec.structs.replace(consumer.version, incarnation=self._spec.incarnation)
        batch = await consumer.pull(version.step + 1, version, WAIT_S)
        if batch is None:
            return None
        undecodable = [one.group_id for one in batch.rejected]
        self._book.note(
            Got(
                time.monotonic(),
                batch.lease,
                batch.generation,
                version.incarnation,
                batch.step,
                1 if self._spec.lone else self._spec.plan.ranks,
                (*(group.group_id for group in batch.groups), *undecodable),
                (*(group.group_id for group in batch.groups if not is_whole(group)), *undecodable),
                batch.rewound,
            )
        )
        # Only now all ranks have settled the step before.
        if self._spec.plan.commits and self._spec.rank == 0 and self._random.random() < CHECKPOINTS:
            await save(self._spec, self._book, consumer, version)
        return batch

    async def _settle(self, consumer: Consumer, batch: LeasedBatch) -> None:
        await asyncio.sleep(self._random.random() * self._random.random() * THINK_S)
        filtered, rejected = [], []
        for group in batch.groups:
            drawn = self._random.random()
            if drawn < REJECTED:
                rejected.append(group.group_id)
            elif drawn < REJECTED + FILTERED:
                filtered.append(group.group_id)
        self._book.note(
            Asked(time.monotonic(), batch.lease, batch.generation, tuple(filtered), tuple(rejected))
        )
        try:
            await consumer.settle(
                batch,
                version=PolicyVersion(self._spec.incarnation, batch.step),
                filtered=filtered,
                rejected=[Rejected(group_id=name, reason="drawn") for name in rejected],
            )
        except LeaseLostError:
            self._book.note(Told(time.monotonic(), batch.lease, batch.generation, "lost"))
        else:
            self._book.note(Told(time.monotonic(), batch.lease, batch.generation, "settled"))
            self._board.settled(self._spec.cell, len(batch.groups))
