"""A producer of a soak: it sends as fast as it may, and writes down each group before and after."""

import asyncio
import signal
from contextlib import suppress
from functools import partial
from typing import Final

from benchmarks.soak import players
from benchmarks.soak.bodies import LARGEST, made
from benchmarks.soak.books import Book
from benchmarks.soak.players import ProducerSpec
from rolloutmq import Producer
from rolloutmq.schemas.errors import DrainingError
from rolloutmq.schemas.files import RunLayout

SLOTS: Final = 64
DRAIN_S: Final = 0.2
"""Longest wait for acks of a producer that leaves at once; the rest is saved."""
SPOOL_BYTES: Final = 16 << 20


async def produce(spec: ProducerSpec) -> None:
    """Send until asked to leave, or drained. Groups an earlier life saved are acked before the first."""
    leave, finish = asyncio.Event(), asyncio.Event()
    players.on_signal(signal.SIGUSR1, leave.set)
    players.on_signal(signal.SIGUSR2, finish.set)
    name, layout = spec.plan.name, RunLayout(spec.run_dir)
    book = Book(spec.books / f"{name}.{spec.life}")
    layout.spools.mkdir(exist_ok=True)
    async with Producer.open(
        spec.where,
        env=spec.plan.env,
        producer=name,
        split=spec.plan.split,
        group_size=LARGEST,
        slots=SLOTS,
        ack_log=layout.ack_log(name),
        save_to=layout.spools / f"{name}.rmq",
        spool_bytes=SPOOL_BYTES,
        drain_s=DRAIN_S,
    ) as producer:
        book.line(b"t")
        sending = asyncio.create_task(_send_for_ever(producer, book, f"{name}.{spec.life}"))
        waits = [asyncio.create_task(event.wait()) for event in (leave, finish, producer.draining)]
        await asyncio.wait({sending, *waits}, return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, *waits):
            task.cancel()
        with suppress(asyncio.CancelledError, DrainingError):
            await sending
        if not leave.is_set():
            await producer.flush()
    book.line(b"l")
    book.close()


async def _send_for_ever(producer: Producer, book: Book, life: str) -> None:
    number = 0
    while True:
        group = made(f"{life}-{number}")
        book.line(b"b%d" % number)
        ack: asyncio.Future[None] | None = None
        try:
            ack = await producer.send_acked(group)
            book.line(b"s%d" % number)
        finally:
            if ack is None:
                ack = producer.handed_over(group.group_id)
            if ack is not None:
                ack.add_done_callback(partial(_note, book, number))
        number += 1


def _note(book: Book, number: int, ack: "asyncio.Future[None]") -> None:
    if not ack.cancelled() and ack.exception() is None:
        book.line(b"a%d" % number)
