"""The environment's side of the bus: begin rollouts when there is room for them, and bring every group home.

A producer holds each group in a byte-bounded spool until the broker acks it, sends again what was lost, and finds the
broker again when it comes back. Two things are waited for, and both are credits of the broker: leave to begin another
rollout (`acquire`), and room for its group (`send`). All waiting ends by an event, and first come is first served.
Nothing here blocks the event loop but the disk at the end. One producer serves any number of tasks of one loop.

`where` is a run directory or the address of a broker's `serve`.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rolloutmq.bus.acklog import AckLog
from rolloutmq.bus.codec import group_bytes
from rolloutmq.bus.credit import Permit
from rolloutmq.bus.endpoint import Where
from rolloutmq.bus.gate import Gate
from rolloutmq.bus.saved import SpoolFile
from rolloutmq.bus.session import Session
from rolloutmq.bus.spool import Entry, Spool
from rolloutmq.bus.uplink import Uplink, cause
from rolloutmq.schemas.delivery import Durability, RegisterProducer, RunInfo, Wait
from rolloutmq.schemas.envelope import PolicyVersion, Split
from rolloutmq.schemas.errors import ClosedError, GroupTooLargeError, RolloutMQError
from rolloutmq.schemas.trajectory import Group

if TYPE_CHECKING:
    from rolloutmq.bus.blockingproducer import BlockingProducer

logger = logging.getLogger(__name__)

SPOOL_BYTES: Final = 64 << 20
"""Default bound of unacked groups in memory."""
DRAIN_S: Final = 10.0
"""Default time that leaving the block may take until everything is acked."""
GOODBYE_S: Final = 2.0
"""A broker that does not answer a goodbye for that long takes the silence for one."""


class Producer:
    """Sends the groups of one environment. Made by `Producer.open`, or by `Producer.blocking` for threads."""

    def __init__(
        self,
        where: Where,
        register: RegisterProducer,
        *,
        spool_bytes: int,
        ack_log: Path | None,
        save_to: Path | None,
        drain_s: float,
    ) -> None:
        self.accepted = 0
        """Groups that were acked."""
        self._session = Session(register, Spool(spool_bytes))
        self.as_frames: Mapping[str, int] = self._session.as_frames
        """Groups that were not laid into shared memory, by reason: they travel as frames."""
        self._gate = Gate(self._session)
        self._uplink = Uplink(where, self._session, self._on_accepted, lambda: self._gate.waiting)
        self._uplink.on_registered = self._on_registered
        self._drain_s = drain_s
        self._file = SpoolFile(save_to, self._session)
        self._log = AckLog(ack_log, register.env, register.split)
        self._registered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        where: Where,
        *,
        env: str,
        producer: str = "",
        run: str = "default",
        split: Split = Split.TRAIN,
        group_size: int = 1,
        slots: int = 1,
        weight: float = 1.0,
        min_share: float = 0.0,
        max_tokens: int = 0,
        ack_log: Path | None = None,
        save_to: Path | None = None,
        spool_bytes: int = SPOOL_BYTES,
        drain_s: float = DRAIN_S,
    ) -> AsyncIterator["Producer"]:
        """Register a producer; it is closed when the block is left.

        Waits for the broker as long as it takes, and, if an earlier life left groups in `save_to`, until those are
        acked. Leaving waits up to `drain_s` until all groups are acked; cancelling that goes straight to saving.

        Args:
            where: Run directory, or address of the broker's `serve` socket.
            env: Environment that the groups come from.
            producer: Name; a producer that opens under the name of another fences it. Default: env, host and pid.
            run: Name of the run.
            split: Whether the groups are for training or for evaluation.
            group_size: Sequences that a group usually has.
            slots: Rollouts that it would like to have under way at once.
            weight: Share of the batches, relative to other environments.
            min_share: Part of every batch that is kept for the environment, 0 to 1.
            max_tokens: Longest sequence that it produces, in tokens.
            ack_log: File that gets one `AckedGroup` line for each acked group.
            save_to: File for the groups that were not acked in time; needs a `producer` of your own choice.
            spool_bytes: Most bytes of unacked groups in memory; also the largest group.
            drain_s: Longest time that leaving may wait for acks, in seconds.

        Raises:
            RefusedError: The broker does not take this producer.
        """
        host = socket.gethostname()
        register = RegisterProducer(
            producer=producer or f"{env[:24]}-{host.partition('.')[0][:24]}-{os.getpid()}",
            run=run,
            env=env,
            split=split,
            slots=slots,
            group_size=group_size,
            weight=weight,
            min_share=min_share,
            max_tokens=max_tokens,
            pid=os.getpid(),
            host=host,
        )
        made = cls(
            where, register, spool_bytes=spool_bytes, ack_log=ack_log, save_to=save_to, drain_s=drain_s
        )
        try:
            await made._start()
            yield made
        finally:
            await made.close()

    @staticmethod
    def blocking(where: Where, **options: Any) -> "BlockingProducer":
        """Like `open`, with the same options, for code without an event loop: `with Producer.blocking(...) as p`."""
        from rolloutmq.bus.blockingproducer import BlockingProducer

        return BlockingProducer(lambda: Producer.open(where, **options), "rolloutmq producer")

    @property
    def draining(self) -> asyncio.Event:
        """Set when nothing new may be begun: the broker said so, or `start_draining`."""
        return self._gate.draining

    @property
    def info(self) -> RunInfo:
        """What the run is, as the broker knew it when the producer registered."""
        return self._uplink.info

    @property
    def session(self) -> int:
        """Number of the session."""
        return self._session.number

    @property
    def policy(self) -> PolicyVersion:
        """The trainer's present policy, as the broker last said."""
        return self._session.credit.policy

    @property
    def step(self) -> int:
        """Optimizer steps that the trainer has taken, as the broker last said."""
        return self.policy.step

    @property
    def durability(self) -> Durability:
        """What a group survives once it is acked, as the broker last said."""
        return self._session.credit.durability

    @property
    def wait(self) -> Wait:
        """What holds credit back now, as the broker last said."""
        return self._session.credit.wait

    @property
    def waits_s(self) -> float:
        """Seconds that calls of `acquire` and `send` have waited, over all tasks."""
        return self._gate.waits_s

    @property
    def unacked(self) -> int:
        """Groups in the spool."""
        return len(self._session.spool)

    @property
    def abandoned(self) -> int:
        """Rollouts of this session that came to nothing."""
        return self._session.credit.abandoned

    async def acquire(self) -> Permit:
        """Wait until another rollout may begin. Cancelled: the permit goes to the next who waits.

        The permit ends when its group is sent or it is abandoned; as a context manager it ends with the block.

        Raises:
            DrainingError: Nothing new may be begun.
            SessionFencedError, ClosedError: The producer can do nothing more.
        """
        return await self._gate.acquire()

    async def send(self, group: Group, permit: Permit | None = None) -> None:
        """Hand over a group; returns when it is in the spool, from where it arrives by itself.

        Waits while the spool is full or the broker gives no credit, and for a permit if none is given. Arrays of the
        group belong to the bus until it is acked: large ones are not copied. Cancelled: either the group was handed
        over and the permit has ended, or neither.

        Raises:
            GroupTooLargeError: It can never be sent; raised at once.
            InvalidGroupError: It holds what cannot travel.
            UsageError: The permit has ended.
            DrainingError: No permit was given, and none is given any more.
            SessionFencedError, ClosedError: The producer can do nothing more.
        """
        self._gate.require_open()
        laid = self._session.lay(group, self._limit_bytes)
        try:
            if not self._gate.admit(group, laid, permit):
                await self._gate.hand_over(group, laid, permit)
        except BaseException:
            laid.cancel()
            raise
        await self._uplink.pass_on(laid.encoded.nbytes)

    async def send_acked(self, group: Group, permit: Permit | None = None) -> "asyncio.Future[None]":
        """Like `send`; return what is done once the group is acked, and fails if this producer never hears of it.

        Cancelled in the very moment in which the group was handed over: what would have been returned is then the
        result of `handed_over`, which must be asked. It is None if the group was not.
        """
        ack = self._gate.expect(group.group_id)
        try:
            await self.send(group, permit)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._gate.handed_over(group.group_id)
            raise
        self._gate.handed_over(group.group_id)
        return ack

    def require_sendable(self, group: Group) -> None:
        """Raise GroupTooLargeError or InvalidGroupError if `send` would, for ever."""
        nbytes = group_bytes(group)
        if nbytes > self._limit_bytes:
            raise GroupTooLargeError(nbytes, self._limit_bytes)

    @property
    def _limit_bytes(self) -> int:
        return min(self._uplink.max_group_bytes, self._session.spool.capacity_bytes)

    def handed_over(self, group_id: str) -> "asyncio.Future[None] | None":
        """Tell what became of a group whose `send_acked` was cancelled. Once."""
        return self._gate.handed_over(group_id)

    def abandon(self, permit: Permit) -> None:
        """End a permit whose rollout came to nothing; the broker gives another in its place. May be repeated."""
        self._session.credit.abandon(permit)

    async def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every group is acked, and in the ack log if the disk takes it; False if that took longer.

        Raises:
            SessionFencedError, RefusedError: The producer can do nothing more.
        """
        self._gate.require_open()
        done = await self._gate.emptied(timeout_s)
        self._gate.require_open()
        return done

    def start_draining(self) -> None:
        """Begin nothing new: whoever waits in `acquire` gets DrainingError. What is in hand can still be sent."""
        self._session.draining = True
        self._gate.serve()

    async def _start(self) -> None:
        restored = self._file.load()
        if restored:
            self._gate.empty.clear()
        self._task = asyncio.create_task(self._run(), name=f"producer {self._session.register.producer}")
        await self._registration()
        if restored:
            await self.flush()
            self._file.remove()
            # New groups get a session of their own: if this process were killed, the next life of it would number
            # its groups from the file and use numbers again.
            self._registered.clear()
            self._uplink.renew()
            await self._registration()

    async def _registration(self) -> None:
        await self._registered.wait()
        self._gate.require_open()

    async def _run(self) -> None:
        try:
            await self._uplink.run()
        except Exception as error:
            # The boundary of the task: the error comes out of every call from now on.
            failure = cause(error)
            logger.error(
                "producer failed error=%s", failure, exc_info=not isinstance(failure, RolloutMQError)
            )
            self._gate.shut(failure)
            self._registered.set()

    def _on_registered(self) -> None:
        self._file.renew()
        self._registered.set()

    def _on_accepted(self, entries: list[Entry]) -> None:
        self._log.write(entries, self._session.number)
        self._gate.acked(entry.header.group_id for entry in entries)
        self.accepted += len(entries)
        if self._session.draining and not self.draining.is_set():
            logger.info("draining producer=%s", self._session.register.producer)
        self._gate.serve()
        self._uplink.send_soon()  # with what the tasks bring that have just got room

    async def close(self) -> None:
        """Wait up to `drain_s` for acks, save what is still unacked, say goodbye. May be called twice.

        Raises:
            OSError: What is unacked could not be saved, and is lost.
        """
        task, self._task = self._task, None
        alive = task is not None and self._gate.failure is None and self._registered.is_set()
        try:
            if alive:
                self._gate.shut(None)
                await self._gate.emptied(self._drain_s)
        finally:
            await self._end(task, alive)
            self._gate.fail_acks(ClosedError())

    async def _end(self, task: "asyncio.Task[None] | None", alive: bool) -> None:
        if task is not None:
            # From here no ack is taken in, so that none is logged whose group is saved.
            self._uplink.leaving = True
            task.cancel()
            await asyncio.wait({task})
        try:
            if alive:
                self._file.leave()
                await self._uplink.goodbye(GOODBYE_S)
            elif task is not None:
                self._file.set_aside()
        finally:
            await self._uplink.close()
            self._log.close()
